"""What the tests share: flags, what is skipped and why, golden figures, and the tools of a machine."""
import json
import os
from pathlib import Path

import pytest

# Workers share the cores among them; NumPy reads this when it is imported first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from schedules.lowering.toolkit import ToolkitError, driver_version, find_toolkit, preload  # noqa: E402

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("golden")
#: Files that take longest: workers begin with them, so that none is left with one at the end.
LONGEST = ("test_random", "test_rules", "test_wgmma", "test_wgmma_backward", "test_mma", "test_scripts", "test_simt", "test_tune_cli",
           "test_masks", "test_fused_backward")


def pytest_addoption(parser):
    group = parser.getgroup("flashtir")
    group.addoption("--gpu", action="store_true", help="a GPU must be there: tests that need one fail without it, instead of being skipped")
    group.addoption("--case", type=int, default=None, help="of the random calls in tests/conformance, make only the one of this number")
    group.addoption("--update-golden", action="store_true", help="write the figures in tests/golden anew instead of comparing with them")
    group.addoption("--update-nests", action="store_true", help="write the loop nests in the docstrings of stages anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(key=lambda item: item.path.stem not in LONGEST)
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    if driver_version() is None and not config.getoption("--gpu"):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and its driver"))


def _group(item):
    """The tests that one worker takes together, since they share what it builds: those of a file, or in a folder those of an engine."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    family, whole = params.get("engine", (None, None))
    return item.path.stem if family is None else f"{item.path.parent.name}-{family.NAME}-{whole}"


@pytest.fixture(scope="session")
def toolkit(tmp_path_factory):
    """The CUDA compiler, with TVM's CUDA runtime loaded (over a stub driver where there is none), so that TVM makes device code."""
    try:
        found = find_toolkit(os.environ)
    except ToolkitError as error:
        pytest.skip(str(error))
    preload(found, tmp_path_factory.mktemp("stub"))
    return found


@pytest.fixture
def figures(request, toolkit):
    """Function (name, dict): compares a kernel's resources with its entry in tests/golden/resources.json, or sets it under --update-golden.

    Another compiler allocates other registers: the comparison is skipped where nvcc is not the one that the table names.
    """
    path, version = GOLDEN / "resources.json", ".".join(map(str, toolkit.version))

    def compare(name, found):
        table = json.loads(path.read_text()) if path.is_file() else {"nvcc": version}
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({**table, "nvcc": version, name: found}, indent=1, sort_keys=True) + "\n")
        elif table["nvcc"] != version:
            pytest.skip(f"figures are those of nvcc {table['nvcc']}, found nvcc {version}")
        else:
            assert table.get(name) == found
    return compare
