"""The plain function, unscheduled on llvm: the numbers that every family starts from."""
import numpy as np
import pytest
import tvm

from te_defs import reference
from te_defs.flash_attention import flash_attention_forward
from te_defs.workload import Shape, Workload
from tests.numbers import RAGGED, run, verdict

WORKLOADS = {w.name: w for w in (Workload(32, 32, "float32", "full"), Workload(32, 16, "float16", "causal"),
                                 Workload(16, 32, "bfloat16", "causal"), Workload(64, 64, "float16", "full"))}


@pytest.fixture(scope="module", params=[1, 4], ids=lambda lanes: f"lanes{lanes}")
def compiled(request):
    """Function (workload, negative_scale) -> its compiled plain form, each compiled once."""
    known = {}

    def build(workload, negative_scale=False):
        key = workload, negative_scale
        if key not in known:
            known[key] = tvm.compile(flash_attention_forward(workload, 32, 16, request.param, negative_scale), "llvm")
        return known[key]
    return build


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_numbers(compiled, workload, case):
    assert verdict(compiled(workload), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_twin_serves_scales_below_zero(compiled, workload):
    assert verdict(compiled(workload, negative_scale=True), workload, Shape(1, 2, 1, 50, 70), -1.5) is None


def test_what_lies_behind_the_mask_does_not_leak(compiled):
    workload = Workload(32, 32, "float32", "causal")
    q, k, v = reference.make_inputs(workload, Shape(1, 1, 1, 40, 40))
    clean = run(compiled(workload), workload, (q, k, v), 0.2)
    # Queries before 16 see no key from 16 on: a tile that holds only such keys is skipped for them.
    k[:, 20:], v[:, 32:] = np.nan, np.inf
    out, lse = run(compiled(workload), workload, (q, k, v), 0.2)
    np.testing.assert_array_equal(out[:, :16], clean[0][:, :16])
    np.testing.assert_array_equal(lse[..., :16], clean[1][..., :16])


def test_twice_the_same_bits(compiled):
    workload = WORKLOADS["fwd_d64_dv64_f16_full"]
    inputs = reference.make_inputs(workload, Shape(1, 2, 1, 45, 61))
    first, second = (run(compiled(workload), workload, inputs, 0.125) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_row_lanes_are_one_or_four():
    with pytest.raises(ValueError, match="row_lanes must be 1 or 4, found 3"):
        flash_attention_forward(WORKLOADS["fwd_d64_dv64_f16_full"], 32, 16, row_lanes=3)
