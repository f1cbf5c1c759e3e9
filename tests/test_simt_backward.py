"""The backward functions on CUDA cores: numbers on llvm up to the stage that binds threads, and what nvcc makes of the seeds."""
from dataclasses import replace

import pytest
import tvm
import tvm_ffi
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import CUDA_ARCHS, cpu_arch, cuda_arch
from schedules.families import simt_backward
from schedules.families.simt import SimtPlan
from schedules.lowering import pass_lists
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import PlanError
from te_defs.flash_attention_backward import attention_delta
from te_defs.workload import Shape, Workload, make_arguments
from tests.backward import Plain, alone, verdict
from tests.numbers import on_llvm

#: Patches of 4 rows by 1 column, and of 2 rows by 2.
PLANS = {"dq": SimtPlan(q_tile=16, kv_tile=8, thread_rows=4, thread_columns=8, unroll=2),
         "dk_dv": SimtPlan(q_tile=16, kv_tile=16, thread_rows=8, thread_columns=8, unroll=2)}
#: D and DV differ, and 40 channels are five for each of eight threads.
WORKLOADS = [Workload(24, 40, "float32", "causal"), Workload.parse("fwd_d16_dv8_bf16_window+softcap")]
SHAPES = [(Shape(1, 2, 1, 37, 70), 0.125), (Shape(1, 1, 1, 70, 33), -0.2), (Shape(1, 2, 2, 5, 0), 0.0)]
COMPILED = [(Workload(64, 64, "float32", "causal"), "sm_80"), (Workload(128, 128, "float16", "full"), "sm_90a"),
            (Workload(64, 64, "float16", "full"), "sm_75"), (Workload(80, 40, "bfloat16", "full"), "sm_120")]


class Scheduled(Plain):
    """The functions after the first stages, on llvm."""

    def __init__(self, workload, stages):
        self.delta = on_llvm(attention_delta(workload))
        self.dq, self.dk_dv = (on_llvm(simt_backward.schedule(role, workload, PLANS[role], stages).mod) for role in PLANS)


def number_of(stage):
    return [it.__name__ for it in simt_backward.STAGES].index(stage)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_numbers_before_threads_are_bound(workload):
    function = Scheduled(workload, number_of(simt_backward.BINDS_AT))
    for shape, scale in SHAPES:
        shape = replace(shape, mask=workload.mask_class.samples[2] if workload.mask == "window" else ())
        assert verdict(function, workload, shape, scale, make_arguments(workload, shape)) is None, shape


@pytest.mark.parametrize("role", PLANS)
def test_all_blocks_are_bound_to_the_same_threads(role):
    """TVM launches the first extent that it sees and does not compare the others with it."""
    workload = Workload(64, 64, "float32", "full")
    plan, extents = simt_backward.default_plan(role, workload, cuda_arch("sm_80")), {"threadIdx.x": set(), "threadIdx.y": set()}

    def note(loop):
        if loop.thread_binding is not None and loop.thread_binding.thread_tag in extents:
            extents[loop.thread_binding.thread_tag].add(int(loop.extent))
    tvm_ffi.structural_walk(simt_backward.schedule(role, workload, plan).mod["main"].body, (tvm.tirx.For, note))
    assert extents == {"threadIdx.x": {plan.thread_columns}, "threadIdx.y": {plan.thread_rows}}


@pytest.mark.parametrize("dims", [(16, 16), (8, 64), (64, 8)], ids=str)
@pytest.mark.parametrize("role", PLANS)
def test_budget_tells_the_shared_memory_that_lowering_takes(role, dims):
    """What the second of the loops that a mask leaves takes, too."""
    arch, workload = cuda_arch("sm_90a"), Workload(*dims, "float16", "causal")
    plan = PLANS[role].but(q_tile=32, kv_tile=32, thread_rows=16)
    func = simt_backward.schedule(role, workload, plan).mod["main"].with_attr("target", arch.target())
    with arch.target(), tvm.transform.PassContext(config=pass_lists.UNROLLED_BY_NVCC):  # unrolled, there is ten times as much to lower
        lowered = get_tir_pipeline(simt_backward.PIPELINE)[0](tvm.IRModule({"main": func}))
    sizes = []
    for func in lowered.functions.values():
        tvm_ffi.structural_walk(func.body, (tvm.tirx.AllocBuffer, lambda alloc: sizes.append(int(alloc.buffer.shape[0]))
                                            if alloc.buffer.scope() == "shared.dyn" else None))
    rows = simt_backward.budget(role, workload, arch, plan).rows
    assert sizes == [next(used for name, used, *_ in rows if name == "shared memory")]


@pytest.mark.slow
@pytest.mark.parametrize("workload, arch", COMPILED, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("role", PLANS)
def test_seeds_compile(toolkit, figures, role, workload, arch):
    arch = cuda_arch(arch)
    plan = simt_backward.default_plan(role, workload, arch)
    with cuda_compiler(toolkit, (arch.name,), CudaOptions(**simt_backward.compiler_options(plan))) as log:
        source = alone(simt_backward, role, workload, plan, arch).imports[0].inspect_source()
    kernel = log.last
    assert f"__launch_bounds__({plan.thread_rows * plan.thread_columns})" in source
    assert not kernel.warnings
    spilled = kernel.most("spill_store_bytes")
    assert spilled == 0 or workload.head_dim not in (64, 128)  # of others some addresses, in front of the loops
    figures(f"simt backward {role} {workload.name} {arch.name}", {"registers": kernel.most("registers"), "spilled_bytes": spilled})


@pytest.mark.parametrize("arch", CUDA_ARCHS)
@pytest.mark.parametrize("role", PLANS)
def test_all_head_dimensions_have_a_seed(role, arch):
    for d in range(8, 257, 8):
        for workload in (Workload(*pair, "float32") for pair in ((d, d), (d, 64), (64, d), (256, d), (d, 8))):
            simt_backward.default_plan(role, workload, cuda_arch(arch))


@pytest.mark.parametrize("workload, arch, reason", [
    (Workload(64, 64, "float32"), cpu_arch("x", 256, 2), "x is no CUDA GPU"),
    (Workload(64, 64, "bfloat16"), cuda_arch("sm_75"), "sm_75 has no bfloat16 (sm_80 and later have)"),
    (Workload(64, 64, "bfloat16"), cuda_arch("sm_80"), None),
    (Workload(8, 256, "float16"), cuda_arch("sm_75"), None)], ids=lambda value: getattr(value, "name", value))
def test_declines_with_a_reason(workload, arch, reason):
    assert simt_backward.decline(workload, arch) == reason


@pytest.mark.parametrize("changes, message", [
    (dict(thread_rows=3), "the tile that stays must be a multiple of thread_rows, found 64 on 3: change either"),
    (dict(thread_columns=16), "must be multiples of thread_columns, found 32, 64 and 40 on 16"),
    (dict(thread_rows=4), r"registers \(estimate\) of plan .* must stay within 255 per thread on sm_75"),
    (dict(q_tile=256, thread_rows=32), "shared memory of plan .* must stay within 65536 bytes on sm_75"),
])
def test_budget_refuses(changes, message):
    with pytest.raises(PlanError, match=message):
        simt_backward.budget("dq", Workload(64, 40, "float32"), cuda_arch("sm_75"), SimtPlan(64, 32, 8, 8).but(**changes))
