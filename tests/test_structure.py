"""The rules of the tree that a reader relies on: imports, purity, length, and pictures of loop nests that are true."""
import ast
import functools
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

from schedules import build
from schedules.arch import cpu_arch, cuda_arch
from schedules.families import cpu_backward, mma_backward, mma_fused_backward, simt_backward
from schedules.nest import excerpt, loop_nest, pictured_blocks
from schedules.registry import FAMILIES
from te_defs.workload import Workload

ROOT = Path(__file__).parent.parent
#: Bottom to top: a package imports itself and those before it.
LAYERS = ("te_defs", "schedules", "scripts", "tests")
SOURCES = sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
OUTSIDE = {"te_defs": {"ml_dtypes", "numpy", "tvm"}, "schedules": {"ml_dtypes", "numpy", "tvm", "tvm_ffi", "xgboost"}}
#: What a function's result must not depend on unless a caller hands it in.
AMBIENT = re.compile(r"os\.(environ|getenv|getcwd)|sys\.argv|(pathlib\.)?Path\.(cwd|home)|time\.\w+"
                     r"|(datetime\.)?(datetime|date)\.(now|today)|print|input")
LONGEST = {"file": 400, "line": 140, "stage": 40}

#: Pictures are drawn for the first of these that a family takes; those of a backward family show the function with more blocks.
PICTURED = ((Workload(64, 64, "float16", "causal"), cuda_arch("sm_80")),
            (Workload(64, 64, "float32", "causal"), cuda_arch("sm_80")),
            (Workload(64, 64, "float32", "full"), cuda_arch("sm_80")),
            (Workload(64, 64, "float32", "causal"), cpu_arch("x86-64-v4", 512, 2)),
            (Workload(64, 64, "float16", "causal"), cuda_arch("sm_90a")))
BACKWARD = (cpu_backward, mma_backward, simt_backward)
STAGES = [(family, n) for family in (*FAMILIES, *BACKWARD) for n in range(1, len(family.STAGES) + 1)]
#: Of this one the stages that it does not share.
STAGES += [(mma_fused_backward, n) for n, stage in enumerate(mma_fused_backward.STAGES, 1)
           if stage.__module__ == mma_fused_backward.__name__]
PICTURE = re.compile(r"^( *)Loop nest::\n\n((?:\1 +\S.*\n)+)", re.MULTILINE)


def tree_of(path):
    return ast.parse((ROOT / path).read_text())


def imported(path):
    """Top-level names of all that a file imports, inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: write the whole name"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_one_way(path):
    layer = path.parts[0]
    allowed = set(LAYERS[:LAYERS.index(layer) + 1]) | set(sys.stdlib_module_names)
    names = set(imported(path))
    assert not names & set(LAYERS) - allowed
    if layer in OUTSIDE:
        assert not names - allowed - OUTSIDE[layer]


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] in ("te_defs", "schedules")], ids=str)
def test_what_a_caller_must_hand_in_is_not_read(path):
    calls = [(node.lineno, ast.unparse(node)) for node in ast.walk(tree_of(path)) if isinstance(node, (ast.Attribute, ast.Name))]
    assert [found for found in calls if AMBIENT.fullmatch(found[1])] == []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_length(path):
    lines = (ROOT / path).read_text().splitlines()
    assert len(lines) <= LONGEST["file"]
    assert [(number, len(line)) for number, line in enumerate(lines, 1) if len(line) > LONGEST["line"]] == []


def stage_id(value):
    family, number = value
    return f"{family.NAME}-{family.STAGES[number - 1].__name__}"


@pytest.mark.parametrize("value", STAGES, ids=stage_id)
def test_stage_is_short(value):
    family, number = value
    stage = family.STAGES[number - 1]
    assert len(inspect.getsource(stage).splitlines()) - len((inspect.getdoc(stage) or "").splitlines()) <= LONGEST["stage"]


def picture_in(text):
    """The picture in a docstring or a source text, flush left; None where there is none."""
    found = PICTURE.search(text + "\n")
    return found and textwrap.dedent(found[2]).rstrip()


@functools.cache
def nests(family):
    """The loop nest after each stage of a family, in order."""
    workload, arch = next((workload, arch) for workload, arch in PICTURED if family.decline(workload, arch) is None)
    if family is mma_fused_backward:
        plan = family.default_plan(workload, arch)
        sch, more = family.schedule(workload, plan, 0), (plan, family.role_of(family.ROLE, plan))
    elif family in BACKWARD:
        plan = family.default_plan("dk_dv", workload, arch)
        sch, more = family.schedule("dk_dv", workload, plan, 0), (plan, family.ROLES["dk_dv"])
    else:
        plan = family.default_plan(workload, arch)
        sch, more = build.schedule(family, workload, plan, 0), (plan,)
    found = []
    for stage in family.STAGES:
        stage(sch, *more)
        found.append(loop_nest(sch))
    return found


def rewrite_picture(stage, picture):
    """Put a picture in the place of the one in a stage's docstring, in its file as it is now: another stage's may have moved its lines."""
    path = Path(inspect.getsourcefile(stage))
    text = path.read_text()
    body = next(ast.get_source_segment(text, node) for node in ast.parse(text).body if getattr(node, "name", "") == stage.__name__)
    found = PICTURE.search(body)
    drawn = textwrap.indent(picture, found[1] + "    ") + "\n"
    path.write_text(text.replace(body, body[:found.start(2)] + drawn + body[found.end(2):]))


@pytest.mark.parametrize("value", STAGES, ids=stage_id)
def test_picture_in_the_docstring_is_true(value, request):
    """To draw one: write `Loop nest::`, a blank line and the names of the blocks to show, and run pytest --update-nests."""
    family, number = value
    stage = family.STAGES[number - 1]
    shown = picture_in(inspect.getdoc(stage) or "")
    assert shown is not None, "the docstring has no picture `Loop nest::`"
    true = excerpt(nests(family)[number - 1], pictured_blocks(shown))
    if request.config.getoption("--update-nests") and shown != true:
        rewrite_picture(stage, true)
    else:
        assert shown == true, "the nest has changed: run pytest --update-nests and look at the diff"
