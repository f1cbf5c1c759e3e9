"""Both members of the simt family without a GPU: numbers up to the first bind, then the resources and text of what is compiled."""
import re

import pytest
import tvm
import tvm_ffi
from tvm import s_tir
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import CUDA_ARCHS, cpu_arch, cuda_arch
from schedules.build import build, schedule
from schedules.families import simt, simt_te
from schedules.lowering import pass_lists
from schedules.lowering.cuda_compile import cuda_compiler
from schedules.plan import PlanError
from schedules.space import Space, schedule_in
from te_defs.workload import Workload
from tests.numbers import RAGGED, on_llvm, verdict
from tests.source_alone import source_alone

pytestmark = pytest.mark.slow

SMALL = simt.SimtPlan(q_tile=16, kv_tile=16, thread_rows=4, thread_columns=8, unroll=2)
MEMBERS = {family.NAME: family for family in (simt, simt_te)}
#: (member, workload) whose numbers are checked after each stage; D and DV differ, and 40 channels are 5 for each of 8 threads.
CHECKED = [(simt, Workload(16, 24, "float32", "causal")), (simt, Workload(24, 16, "float16", "full")),
           (simt_te, Workload(16, 40, "float32", "full"))]
UNBOUND = [(member, workload, n) for member, workload in CHECKED
           for n in range(1, 1 + [stage.__name__ for stage in member.STAGES].index(member.BINDS_AT))]
COMPILED = [(simt, Workload(64, 64, "float32", "full"), "sm_75"), (simt, Workload(64, 64, "float32", "causal"), "sm_90a"),
            (simt, Workload(128, 128, "float32", "full"), "sm_80"), (simt, Workload(64, 64, "float16", "causal"), "sm_75"),
            (simt, Workload(256, 256, "float32", "causal"), "sm_86"), (simt, Workload(80, 40, "float32", "full"), "sm_80"),
            (simt_te, Workload(64, 64, "float32", "full"), "sm_90a"), (simt_te, Workload(128, 128, "float16", "full"), "sm_75")]
COMPILED += [(simt, Workload(64, 64, "float32", "causal"), "sm_89"), (simt_te, Workload(64, 64, "float32", "full"), "sm_120")]


def name_of(value):
    return getattr(value, "NAME", None) or getattr(value, "name", None) or str(value)


@pytest.fixture(scope="module")
def after_stage():
    """Function (member, workload, number of stages) -> the half-scheduled function on llvm, each compiled once."""
    known = {}

    def build_prefix(*key):
        if key not in known:
            member, workload, stages = key
            known[key] = on_llvm(schedule(member, workload, SMALL, stages).mod)
        return known[key]
    return build_prefix


@pytest.mark.parametrize("case", ["ragged", "few_keys", "grouped", "no_keys", "zero_scale"])
@pytest.mark.parametrize("member, workload, stages", UNBOUND, ids=lambda value: name_of(value))
def test_numbers_after_each_stage_before_the_first_bind(after_stage, member, workload, stages, case):
    assert verdict(after_stage(member, workload, stages), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("member", MEMBERS.values(), ids=list(MEMBERS))
def test_all_blocks_are_bound_to_the_same_threads(member):
    """TVM launches the first extent that it sees and does not compare the others with it."""
    workload = Workload(64, 64, "float32", "full")
    plan = member.default_plan(workload, cuda_arch("sm_80"))
    extents = {"threadIdx.x": set(), "threadIdx.y": set()}

    def note(loop):
        if loop.thread_binding is not None and loop.thread_binding.thread_tag in extents:
            extents[loop.thread_binding.thread_tag].add(int(loop.extent))
    tvm_ffi.structural_walk(schedule(member, workload, plan).mod["main"].body, (tvm.tirx.For, note))
    assert extents == {"threadIdx.x": {plan.thread_columns}, "threadIdx.y": {plan.thread_rows}}


@pytest.mark.parametrize("member", MEMBERS.values(), ids=list(MEMBERS))
def test_a_drawn_plan_gives_the_schedule_of_the_plan_in_integers(member):
    workload, arch = Workload(64, 64, "float32", "full"), cuda_arch("sm_80")
    seed = member.default_plan(workload, arch)
    space = Space.around(member, workload, arch, seed)
    drawn = s_tir.Schedule(tvm.IRModule({"main": member.declare(workload, seed)}), debug_mask=0)
    schedule_in(drawn, space, chosen=seed.but(unroll=4))
    replayed = s_tir.Schedule(tvm.IRModule({"main": member.declare(workload, seed)}), debug_mask=0)
    drawn.trace.apply_to_schedule(replayed, remove_postproc=False)
    direct = schedule(member, workload, seed.but(unroll=4))
    assert tvm_ffi.structural_equal(drawn.mod, replayed.mod)
    assert str(direct.mod["main"].body.block.body) == str(drawn.mod["main"].body.block.body)


@pytest.mark.parametrize("member, workload, plan", [(member, workload, plan) for member, workload in (
    (simt, Workload(64, 64, "float32", "causal")), (simt, Workload(128, 64, "float16", "full")),
    (simt_te, Workload(64, 64, "float16", "full"))) for plan in member.tile_choices(workload, cuda_arch("sm_90a"))], ids=name_of)
def test_budget_tells_the_shared_memory_that_lowering_takes(member, workload, plan):
    arch = cuda_arch("sm_90a")
    func = schedule(member, workload, plan).mod["main"].with_attr("target", arch.target())
    with arch.target(), tvm.transform.PassContext(config=pass_lists.UNROLLED_BY_NVCC):  # unrolled, there is ten times as much to lower
        lowered = get_tir_pipeline(member.PIPELINE)[0](tvm.IRModule({"main": func}))
    sizes = []
    for func in lowered.functions.values():
        tvm_ffi.structural_walk(func.body, (tvm.tirx.AllocBuffer, lambda alloc: sizes.append(int(alloc.buffer.shape[0]))
                                            if alloc.buffer.scope() == "shared.dyn" else None))
    told = next(used for name, used, *_ in member.budget(workload, arch, plan).rows if name == "shared memory")
    assert sizes == [told]


@pytest.mark.parametrize("member, workload, arch", COMPILED, ids=name_of)
def test_seed_plan_compiles_without_spills(toolkit, figures, member, workload, arch):
    arch = cuda_arch(arch)
    plan = member.default_plan(workload, arch)
    with cuda_compiler(toolkit, (arch.name,)) as log:
        source = build(schedule(member, workload, plan).mod, member, arch).imports[0].inspect_source()
    kernel = log.last
    assert f"__launch_bounds__({plan.thread_rows * plan.thread_columns})" in source and "__shfl" in source
    assert "__activemask" not in source.split("main_kernel")[-1] and kernel.warnings == () and kernel.most("spill_store_bytes") == 0
    figures(f"{member.NAME} {workload.name} {arch.name}", {"registers": kernel.most("registers"), "spilled_bytes": 0})


@pytest.fixture
def source_of(toolkit):
    """Function (member, workload) -> CUDA source of its seed for sm_80."""
    def make(member, workload):
        arch = cuda_arch("sm_80")
        with source_alone(toolkit, arch.name):
            return build(schedule(member, workload, member.default_plan(workload, arch)).mod, member, arch).imports[0].inspect_source()
    return make


def key_loops(source):
    """The texts of the loops over key tiles, in order."""
    return [text.split("\n  }\n")[0] for text in re.split(r"\n  for \(int t", source)[1:]]


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_interior_tiles_run_without_mask_and_without_guards(source_of, mask):
    masked, interior = key_loops(source_of(simt, Workload(64, 64, "float32", mask)))
    assert "if (" in masked and re.search("inf", masked, re.IGNORECASE)
    assert "if (" not in interior and not re.search("inf", interior, re.IGNORECASE)
    # Before the loads, before S, before P takes the place of K, before O.
    assert masked.count("__syncthreads()") == interior.count("__syncthreads()") == 4


@pytest.mark.parametrize("member", MEMBERS.values(), ids=list(MEMBERS))
def test_key_head_is_divided_out_once(source_of, member):
    source = source_of(member, Workload(64, 64, "float32", "full"))
    assert source.count("(H / G)") == 1 and not any("quotient =" in loop for loop in key_loops(source))


@pytest.mark.parametrize("member, workload, arch, reason", [
    (simt, Workload(64, 64, "float32"), cpu_arch("x", 256, 2), "x is no CUDA GPU"),
    (simt, Workload(64, 64, "bfloat16"), cuda_arch("sm_80"), "CUDA cores are scheduled for float32 and float16 inputs, not bfloat16"),
    (simt_te, Workload(64, 64, "float32", "causal"), cuda_arch("sm_80"),
     "a Tensor Expression cannot skip the key tiles that a causal mask hides"),
    (simt_te, Workload(64, 64, "bfloat16"), cuda_arch("sm_80"), "CUDA cores are scheduled for float32 and float16 inputs, not bfloat16"),
    (simt, Workload(64, 64, "float32", "causal"), cuda_arch("sm_75"), None),
    (simt_te, Workload(64, 64, "float16"), cuda_arch("sm_75"), None),
], ids=name_of)
def test_declines_with_a_reason(member, workload, arch, reason):
    assert member.decline(workload, arch) == reason


@pytest.mark.parametrize("changes, message", [
    (dict(thread_rows=32), "q_tile must be a multiple of 4 rows for each thread row, found q_tile 64 and 32 thread rows: change either"),
    (dict(thread_columns=64), "kv_tile and the value dimension must be multiples of thread_columns, found 64 and 80 on 64"),
    (dict(q_tile=256, thread_rows=8), r"registers \(estimate\) of plan .* must stay within 255 per thread on sm_75, found 509"),
    (dict(q_tile=128, thread_rows=16), "shared memory of plan .* must stay within 65536 bytes on sm_75, found"),
])
def test_budget_refuses(changes, message):
    plan = simt.SimtPlan(64, 64, 8, 16)
    with pytest.raises(PlanError, match=message):
        simt.budget(Workload(64, 80, "float32"), cuda_arch("sm_75"), plan.but(**changes))


@pytest.mark.parametrize("arch", CUDA_ARCHS)
@pytest.mark.parametrize("member", MEMBERS.values(), ids=list(MEMBERS))
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (80, 40), (128, 128), (192, 128), (256, 256)], ids=str)
def test_seed_is_the_first_choice_and_all_choices_fit(dims, member, arch):
    workload, arch = Workload(*dims, "float32"), cuda_arch(arch)
    choices = member.tile_choices(workload, arch)
    assert choices[0] == member.default_plan(workload, arch) and len(set(choices)) == len(choices)
    for plan in choices:
        space = Space.around(member, workload, arch, plan)
        assert plan in space.fitting_plans()
