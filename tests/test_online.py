"""The online softmax in Tensor Expression: its numbers as declared, and split-KV, which one primitive makes of it."""
import re
import textwrap

import pytest
import tvm

from schedules import split_kv
from schedules.nest import excerpt, loop_nest, pictured_blocks
from te_defs.online import online_attention
from te_defs.workload import Shape, Workload
from tests.numbers import RAGGED, on_llvm, verdict

WORKLOADS = {w.name: w for w in (Workload(32, 32, "float32", "full"), Workload(32, 16, "float32", "causal"),
                                 Workload(16, 40, "float16", "causal"), Workload(16, 16, "bfloat16", "full"))}
SPLIT = split_kv.SplitKvPlan(q_tile=8, kv_tile=16, chunk_tiles=2)
SPLIT_STAGES = [stage.__name__ for stage in split_kv.STAGES]


def scheduled(workload, plan, stages):
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": split_kv.declare(workload, plan)}), debug_mask=0)
    for stage in split_kv.STAGES[:stages]:
        stage(sch, plan)
    return sch


@pytest.fixture(scope="module")
def compiled():
    """Function (key, maker of a function or module) -> it on llvm, each compiled once."""
    known = {}

    def build(key, make):
        if key not in known:
            known[key] = on_llvm(make())
        return known[key]
    return build


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_numbers_as_declared(compiled, workload, columns, case):
    function = compiled((workload, columns), lambda: online_attention(workload, 16, 32, columns))
    assert verdict(function, workload, *RAGGED[case]) is None


def test_takes_scales_below_zero(compiled):
    workload = WORKLOADS["fwd_d32_dv16_f32_causal"]
    function = compiled((workload, 4), lambda: online_attention(workload, 16, 32, 4))
    assert verdict(function, workload, Shape(1, 2, 1, 50, 70), -1.5) is None


def test_columns_must_divide_the_value_dimension():
    with pytest.raises(ValueError, match="columns must divide the value dimension 40, found 16: choose a divisor"):
        online_attention(WORKLOADS["fwd_d16_dv40_f16_causal"], 16, 16, columns=16)


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("stages", range(1, len(SPLIT_STAGES) + 1), ids=SPLIT_STAGES)
@pytest.mark.parametrize("workload", [WORKLOADS["fwd_d32_dv16_f32_causal"]], ids=lambda w: w.name)
def test_split_kv_numbers_after_each_stage(compiled, workload, stages, case):
    function = compiled((workload, "split", stages), lambda: scheduled(workload, SPLIT, stages).mod)
    assert verdict(function, workload, *RAGGED[case]) is None


@pytest.mark.parametrize("keys", [1, 32, 33, 64, 200])
def test_chunks_are_as_many_as_the_keys_fill(compiled, keys):
    """A last chunk that is part empty, one that is full, and a single one must all merge to the same softmax."""
    workload = WORKLOADS["fwd_d32_dv16_f32_causal"]
    function = compiled((workload, "split", 3), lambda: scheduled(workload, SPLIT, 3).mod)
    assert verdict(function, workload, Shape(2, 2, 1, 1, keys)) is None


@pytest.mark.parametrize("number", range(1, len(SPLIT_STAGES) + 1), ids=SPLIT_STAGES)
def test_split_kv_picture_in_the_docstring_is_true(number):
    shown = re.search(r"Loop nest::\n\n((?: +.*\n?)+)", split_kv.STAGES[number - 1].__doc__)[1]
    shown = textwrap.dedent(shown).rstrip()
    nest = loop_nest(scheduled(Workload(64, 64, "float16", "full"), split_kv.DEFAULT, number))
    assert shown == excerpt(nest, pictured_blocks(shown))
