"""How TVMScript functions are parsed."""
import inspect
from pathlib import Path

import pytest
import tvm
from tvm.script import tirx as T

from te_defs import script
from te_defs.flash_attention import flash_attention_forward
from te_defs.flash_attention_backward import attention_dk_dv
from te_defs.workload import Workload

ROOT = Path(__file__).parent.parent
WORKLOAD = Workload(32, 16, "float16", "window", lengths="packed")


@pytest.mark.parametrize("declare", [flash_attention_forward, attention_dk_dv], ids=lambda declare: declare.__name__)
def test_gives_what_tvm_gives_without_a_look_at_callers(declare, monkeypatch):
    declare = inspect.unwrap(declare)
    with monkeypatch.context() as patch:
        patch.setattr(script, "prim_func", T.prim_func)
        wanted = declare(WORKLOAD, 32, 16)
    monkeypatch.setattr(inspect, "stack", lambda context=1: pytest.fail("it asks who calls"))
    tvm.ir.assert_structural_equal(declare(WORKLOAD, 32, 16), wanted)


@pytest.mark.parametrize("path", [path for layer in ("te_defs", "schedules") for path in sorted((ROOT / layer).rglob("*.py"))],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_all_of_ours_are_parsed_so(path):
    assert "@T.prim_func" not in path.read_text(), "write @script.prim_func"
