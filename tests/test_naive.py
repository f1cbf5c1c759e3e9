"""The plain Tensor Expression attention: the definition, so its numbers stand on the reference alone."""
import pytest
import tvm

from te_defs.masks import MASKS
from te_defs.naive import naive_attention
from te_defs.workload import Shape, Workload
from tests.numbers import RAGGED, on_llvm, verdict

WORKLOADS = {w.name: w for w in (Workload(32, 32, "float32", "full"), Workload(32, 16, "float32", "causal"),
                                 Workload(16, 40, "float16", "causal"), Workload(16, 16, "bfloat16", "full"),
                                 *(Workload(16, 8, "float32", mask) for mask in MASKS if mask not in ("full", "causal")))}


@pytest.fixture(scope="module")
def compiled():
    """Function workload -> its compiled definition, each compiled once: all sizes are run-time."""
    known = {}

    def build(workload):
        if workload not in known:
            known[workload] = on_llvm(naive_attention(workload))
        return known[workload]
    return build


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_numbers(compiled, workload, case):
    assert verdict(compiled(workload), workload, *RAGGED[case]) is None


def test_takes_scales_below_zero(compiled):
    workload = WORKLOADS["fwd_d32_dv16_f32_causal"]
    assert verdict(compiled(workload), workload, Shape(1, 2, 1, 13, 11), -1.5) is None


def test_every_quantity_of_the_formula_is_a_block():
    schedule = tvm.s_tir.Schedule(naive_attention(WORKLOADS["fwd_d32_dv16_f32_causal"]))
    names = {schedule.get(block).name_hint for block in schedule.get_child_blocks(schedule.get_sblock("root"))}
    assert names == {"S", "S_masked", "row_max", "P", "row_sum", "O_acc", "O", "LSE"}
