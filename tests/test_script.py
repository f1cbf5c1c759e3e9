"""How TVMScript functions are parsed."""
import inspect
from pathlib import Path

import pytest
import tvm
from tvm.script import tirx as T

from te_defs import script
from te_defs.flash_attention import flash_attention_forward
from te_defs.flash_attention_backward import attention_delta, attention_dk_dv
from te_defs.fused_backward import attention_dk_dv_dq
from te_defs.workload import Workload

ROOT = Path(__file__).parent.parent
WORKLOADS = [Workload(32, 16, "float16", "window", lengths="packed"), Workload(64, 64, "float32", "causal", "bias", True)]


@pytest.mark.parametrize("declare, tiles", [(flash_attention_forward, (32, 16)), (attention_dk_dv, (32, 16)), (attention_delta, ()),
                                            (attention_dk_dv_dq, (32, 16))], ids=lambda value: getattr(value, "__name__", ""))
def test_gives_what_tvm_gives_without_a_look_at_callers(declare, tiles, monkeypatch):
    """Whichever workload is the first to be declared."""
    declare = inspect.unwrap(declare)
    with monkeypatch.context() as patch:
        patch.setattr(script, "prim_func", T.prim_func)
        wanted = [declare(workload, *tiles) for workload in WORKLOADS]
    monkeypatch.setattr(inspect, "stack", lambda context=1: pytest.fail("it asks who calls"))
    for workload, func in zip(WORKLOADS * 2, wanted * 2):
        tvm.ir.assert_structural_equal(declare(workload, *tiles), func)


def test_points_at_what_cannot_be_parsed():
    for check in (True, False):
        with pytest.raises(tvm.error.DiagnosticError):
            @script.prim_func(s_tir=True, check_well_formed=check)
            def wrong(a: T.handle):
                A = T.match_buffer(a, (4,), "float32")
                A[0] = not_there  # noqa: F821


@pytest.mark.parametrize("path", [path for layer in ("te_defs", "schedules") for path in sorted((ROOT / layer).rglob("*.py"))],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_all_of_ours_are_parsed_so(path):
    assert "@T.prim_func" not in path.read_text(), "write @script.prim_func"
