"""The cpu family: numbers after every stage, the polynomial exp2, and registers that hold what they should."""
import re

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T
from tvm.target import codegen

from schedules.arch import cpu_arch, cuda_arch
from schedules.build import KERNEL, NEGATIVE_SCALE_KERNEL, build, build_plan, schedule
from schedules.families import cpu
from schedules.lowering.cpu_pipeline import select_in_tiles
from schedules.lowering.rewrite import is_call
from schedules.plan import PlanError
from schedules.space import Space, decisions, schedule_in
from te_defs import reference
from te_defs.workload import Shape, Workload
from tests.numbers import RAGGED, run, verdict

pytestmark = pytest.mark.slow

#: The machine of the test, with the vectors of AVX-512 whether it has them or not: LLVM takes wider ones apart.
HERE = cpu_arch(codegen.llvm_get_system_cpu(), 512, 2)
CAUSAL, FULL = Workload(64, 64, "float32", "causal"), Workload(40, 72, "float32", "full")
WIDENED = Workload(32, 16, "bfloat16", "causal")
STAGES = [stage.__name__ for stage in cpu.STAGES]
SMALL = cpu.CpuPlan(q_tile=64, kv_tile=16, lanes=16, panel_vectors=2, threads=2)


@pytest.fixture(scope="module")
def compiled():
    """Function (workload, plan, number of stages) -> the function on llvm, each compiled once."""
    known = {}

    def make(workload, plan=SMALL, stages=None):
        key = workload, plan, stages
        if key not in known:
            known[key] = build(schedule(cpu, workload, plan, stages).mod, cpu, HERE)[KERNEL]
        return known[key]
    return make


@pytest.mark.parametrize("case", ["ragged", "few_keys", "grouped", "no_keys"])
@pytest.mark.parametrize("workload, stages", [
    *((CAUSAL, stages) for stages in range(1, len(STAGES) + 1)),
    *((workload, stages) for workload in (FULL, WIDENED) for stages in (1, len(STAGES) // 2, len(STAGES)))],
    ids=lambda value: STAGES[value - 1] if isinstance(value, int) else value.name)
def test_numbers_after_each_stage(compiled, workload, stages, case):
    assert verdict(compiled(workload, stages=stages), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("workload", [CAUSAL, FULL, WIDENED, Workload(64, 64, "float16", "full"), Workload(256, 8, "float32", "causal")],
                         ids=lambda w: w.name)
def test_numbers_of_the_seed(compiled, workload, case):
    assert verdict(compiled(workload, cpu.default_plan(workload, HERE)), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("changes", [
    dict(rows=2, unroll=4), dict(rows=16, panel_vectors=1), dict(rows=4, panel_vectors=4, unroll=2), dict(lanes=8, rows=4), dict(lanes=4),
    dict(threads=1), dict(threads=3), dict(q_tile=32, kv_tile=48)], ids=str)
def test_numbers_of_other_plans(compiled, changes):
    plan = SMALL.but(**changes)
    assert verdict(compiled(CAUSAL, plan), CAUSAL, Shape(1, 6, 3, 170, 210)) is None


def test_twin_serves_scales_below_zero():
    assert verdict(build_plan(cpu, CAUSAL, SMALL, HERE)[NEGATIVE_SCALE_KERNEL], CAUSAL, Shape(1, 2, 1, 50, 70), -1.5) is None


def test_drawn_plan_is_right_and_told():
    space = Space.around(cpu, CAUSAL, HERE, SMALL)
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": cpu.declare(CAUSAL, SMALL)}))
    schedule_in(sch, space, SMALL.but(rows=4, unroll=2))
    assert decisions(sch.mod)[2] | dict(rows=4, unroll=2) == decisions(sch.mod)[2]
    assert verdict(build(sch.mod, cpu, HERE)[KERNEL], CAUSAL, *RAGGED["ragged"]) is None


def test_arguments_need_no_alignment_beyond_their_elements(compiled):
    inputs = reference.make_inputs(CAUSAL, Shape(1, 1, 1, 40, 40))
    out, lse = run(compiled(CAUSAL), CAUSAL, inputs, 0.125)

    def shifted(array):
        """A copy whose first element stands 4 bytes behind a multiple of 64."""
        space = np.full(array.size + 32, np.nan, np.float32)
        start = (-space.ctypes.data % 64) // 4 + 1
        view = space[start:start + array.size].reshape(array.shape)
        view[...] = array
        return view
    q, k, v, out_shifted, lse_shifted = map(shifted, (*inputs, np.zeros_like(out), np.zeros_like(lse)))
    compiled(CAUSAL)(q, k, v, out_shifted, lse_shifted, 0.125)
    np.testing.assert_array_equal(out_shifted, out)
    np.testing.assert_array_equal(lse_shifted, lse)


def test_not_a_number_stays_one(compiled):
    q, k, v = reference.make_inputs(FULL, Shape(1, 1, 1, 20, 30))
    q[0, 3] = np.nan
    out, _ = run(compiled(FULL), FULL, (q, k, v), 0.125)
    assert np.isnan(out[0, 3]).all() and not np.isnan(np.delete(out[0], 3, axis=0)).any()


@pytest.fixture(scope="module")
def exp2():
    """float32 array -> its exp2 by the pipeline."""
    @T.prim_func(s_tir=True)
    def apply(x: T.handle, y: T.handle):
        n = T.int32()
        X = T.match_buffer(x, (n,), "float32", align=4)
        Y = T.match_buffer(y, (n,), "float32", align=4)
        for i in range(n):
            with T.sblock("Y"):
                vi = T.axis.spatial(n, i)
                Y[vi] = T.exp2(X[vi])

    function = tvm.tirx.build(tvm.IRModule({"main": apply}), HERE.target(), pipeline=cpu.PIPELINE)["main"]

    def call(x):
        arguments = tvm.runtime.tensor(x), tvm.runtime.tensor(np.full_like(x, np.nan))
        function(*arguments)
        return arguments[1].numpy()
    return call


def test_exp2_is_off_by_less_than_one_unit_in_the_last_place(exp2):
    x = np.concatenate([np.linspace(-125.5, 0, 1_000_001), np.linspace(-2, 127, 100_001)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(exp2(x) - exact) / np.spacing(exact.astype(np.float32))).max() < 1


def test_exp2_at_the_ends(exp2):
    below = np.linspace(-127, -126, 1001).astype(np.float32)
    assert np.abs(exp2(below)).max() <= 2.0**-126
    at = np.array([-np.inf, -(2.0**100), -127, -126, -1, 0, 1, np.nan], np.float32)
    np.testing.assert_array_equal(exp2(at), np.array([0, 0, 0, 2.0**-126, 0.5, 1, 2, np.nan], np.float32))


def inner_loops(assembly):
    """Bodies of the innermost loops, as lists of instructions."""
    lines = assembly.splitlines()
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    jumps = [(number, re.match(r"\s+j\w+\s+(\.L\w+)", line)) for number, line in enumerate(lines)]
    loops = [(labels[to[1]], number) for number, to in jumps if to and labels.get(to[1], number) < number]
    for start, end in loops:
        if not any((start, end) != other and start <= other[0] and other[1] <= end for other in loops):
            yield [line.strip() for line in lines[start:end + 1] if re.match(r"\s+[a-z]", line)]


@pytest.mark.parametrize("cpu_name, bits, register", [("skylake-avx512", 512, "zmm"), ("haswell", 256, "ymm")])
def test_products_keep_their_sums_in_registers(cpu_name, bits, register):
    arch = cpu_arch(cpu_name, bits, 2)
    plan = cpu.default_plan(CAUSAL, arch)
    assembly = build(schedule(cpu, CAUSAL, plan).mod, cpu, arch).inspect_source("asm")
    block = plan.rows * plan.panel_vectors
    multiply_adds = [(loop, sum(line.startswith("vfmadd231ps") for line in loop)) for loop in inner_loops(assembly)]
    products = [(loop, count) for loop, count in multiply_adds if count and count % block == 0]  # LLVM may unroll
    assert len(products) >= len(cpu.PRODUCTS)
    for loop, count in products:
        assert len(loop) < 2.5 * count
        assert [line for line in loop if re.match(rf"vmov\w+\s+%{register}\d+, .*\(", line)] == []


@pytest.mark.parametrize("mask, score, lengths", [("full", "", "uniform"), ("causal", "softcap", "keys"), ("window", "bias", "uniform"),
                                                  ("causal_top_left", "alibi", "packed")])
def test_no_value_decides_where_a_vector_goes(mask, score, lengths):
    """A branch on what lanes hold takes vectors apart, lane by lane; only places, such as that of a key, may ask for one."""
    func = select_in_tiles()(schedule(cpu, Workload(64, 64, "float32", mask, score, True, lengths=lengths), SMALL).mod)["main"]
    loads, branches = [], []
    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, lambda call: branches.append(call) if is_call(call, "if_then_else") else None))
    for branch in branches:
        tvm_ffi.structural_walk(branch.args[0], (tvm.ir.TensorLoad, loads.append))
    assert branches and [load for load in loads if "float" in str(load.ty)] == []


@pytest.mark.parametrize("bits, l1, l2", [(512, 48, 2048), (512, 32, 1024), (256, 32, 512), (128, 64, 1024)])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_seed_is_the_first_choice_and_all_choices_fit(head_dim, bits, l1, l2):
    arch, workload = cpu_arch("x", bits, 4, l1 * 1024, l2 * 1024), Workload(head_dim, head_dim, "float32")
    choices = cpu.tile_choices(workload, arch)
    assert choices[0] == cpu.default_plan(workload, arch) and len(set(choices)) == len(choices) >= 3
    for plan in choices:
        cpu.budget(workload, arch, plan)
        Space.around(cpu, workload, arch, plan)


@pytest.mark.parametrize("changes, message", [
    (dict(q_tile=48), "q_tile must be a multiple of a panel of 32 rows, found 48: round it"),
    (dict(kv_tile=20), "kv_tile and the value dimension must be multiples of rows, found 20 and 64 by 8: change rows"),
    (dict(rows=16), "vector registers of plan .* must stay within 32  on x, found 35"),
    (dict(kv_tile=512), "L1, a panel of Q or P of plan .* must stay within 32768 bytes on x, found 65536"),
    (dict(q_tile=2048), "L2, all tiles of plan .* must stay within 1048576 bytes on x, found"),
])
def test_budget_refuses(changes, message):
    with pytest.raises(PlanError, match=message):
        cpu.budget(CAUSAL, cpu_arch("x", 512, 2), SMALL.but(**changes))


def test_declines_a_gpu():
    assert cpu.decline(CAUSAL, cuda_arch("sm_80")) == "sm_80 is no CPU"
