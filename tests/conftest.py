"""What the tests share: flags, what is skipped and why, golden figures, and the tools of a machine."""
import hashlib
import json
import os
from pathlib import Path

import pytest

# Workers share the cores among them; NumPy reads this when it is imported first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tvm  # noqa: E402
import tvm_ffi  # noqa: E402

from schedules.arch import arch_of_capability, cuda_arch  # noqa: E402
from schedules.lowering.toolkit import ToolkitError, driver_version, find_toolkit, preload  # noqa: E402

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("golden")
#: Files that take longest, those that take most first: workers begin with them, so that none is left with one at the end.
LONGEST = ("test_random", "test_rules", "test_fused_backward", "test_wgmma", "test_wgmma_backward", "test_scripts", "test_simt",
           "test_tune_cli", "test_examples", "test_suite", "test_mma", "test_fleet", "test_masks", "test_tune_backward",
           "test_simt_backward", "test_tuning")


def pytest_addoption(parser):
    group = parser.getgroup("flashtir")
    group.addoption("--gpu", action="store_true", help="a GPU must be there: tests that need one fail without it, instead of being skipped")
    group.addoption("--case", type=int, default=None, help="of the random calls in tests/conformance, make only the one of this number")
    group.addoption("--artefacts", type=Path, default=None,
                    help="folder in which GPU tests keep what they build, and find it as long as no source has changed")
    group.addoption("--build-for", default=None, help="of GPU tests build what they keep for an architecture, such as sm_90a, and run none")
    group.addoption("--update-golden", action="store_true", help="write the figures in tests/golden anew instead of comparing with them")
    group.addoption("--update-nests", action="store_true", help="write the loop nests in the docstrings of stages anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if "TVM_USE_RUNTIME_LIB" in os.environ:
        raise pytest.UsageError("processes that tests start want TVM with its compiler, found TVM_USE_RUNTIME_LIB set, as importing "
                                "scripts.run does: import that by tests.commands.imported")
    if config.pluginmanager.hasplugin("xdist"):
        rank = {name: n for n, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
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
def gpu_arch(request, toolkit):
    """The Arch of this machine's GPU, or of --build-for."""
    wanted = request.config.getoption("--build-for")
    return cuda_arch(wanted) if wanted else arch_of_capability(*map(int, str(tvm.cuda(0).compute_version).split(".")))


@pytest.fixture(scope="session")
def kept(request, tmp_path_factory):
    """Function (name, build) -> module of an artefact that `build(path)` has written, kept under --artefacts by name and sources."""
    config = request.config
    folder, sources = config.getoption("--artefacts"), hashlib.sha256()
    if folder is None:
        folder = tmp_path_factory.mktemp("artefacts")
    else:
        for source in sorted(path for each in ("te_defs", "schedules", "scripts", "tests") for path in (ROOT / each).rglob("*.[pch]*")
                             if path.suffix in (".py", ".c", ".h")):
            sources.update(source.read_bytes())
        folder = folder / sources.hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)

    def module(name, build):
        path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.so"
        if not path.is_file():
            build(path)
        if config.getoption("--build-for"):
            pytest.skip("built, not run")
        return tvm_ffi.load_module(str(path))
    return module


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
