"""The backward pass with five products: numbers on llvm up to the stage that binds threads, and what nvcc makes of it. Those of the plain
function are in tests/test_backward.py."""
import numpy as np
import pytest
import tvm
from tvm import s_tir

from schedules import backward
from schedules.arch import cuda_arch
from schedules.families import dq_cast, mma_fused_backward, wgmma_fused_backward
from schedules.families.mma_fused_backward import MmaFusedBackwardPlan
from schedules.lowering import reduce_adds
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import PlanError
from te_defs.flash_attention_backward import attention_delta
from te_defs.fused_backward import attention_dq_cast
from te_defs.workload import Shape, Workload
from tests.backward import Fused, check_ragged, problem, unbound

ARCH = cuda_arch("sm_90a")
PLAN = wgmma_fused_backward.WgmmaBackwardPlan(q_tile=64, kv_tile=64)
FULL = Workload(64, 64, "float16", "full")
CAUSAL, CAPPED = Workload(64, 128, "float16", "causal"), Workload.parse("fwd_d64_dv64_bf16_window+softcap")
SCHEDULED = [(wgmma_fused_backward, CAUSAL, PLAN), (wgmma_fused_backward, CAPPED, PLAN),
             (wgmma_fused_backward, FULL, PLAN.but(kv_tile=128)), (wgmma_fused_backward, CAUSAL, PLAN.but(across=1)),
             (mma_fused_backward, CAPPED, MmaFusedBackwardPlan(32, 64, 2)),
             (mma_fused_backward, CAUSAL, MmaFusedBackwardPlan(32, 64, 4, parts=2, query_rows=2)),
             (mma_fused_backward, FULL, MmaFusedBackwardPlan(48, 64, 2, query_rows=1))]
MMA_SEEDS = [(Workload(128, 128, "float16", "causal"), "sm_80"), (Workload(64, 64, "bfloat16", "full"), "sm_80"),
             (Workload(128, 128, "bfloat16", "full"), "sm_86"), (Workload(128, 128, "float16", "full"), "sm_90a")]


def test_keys_past_the_end_add_nothing():
    """Their scores are 0: where all others are far below, exp(0 - LSE) is more than float16, and float32, hold."""
    it = Workload(16, 32, "bfloat16", "full")
    dout, q, k, v, out, lse = problem(it, Shape(1, 1, 1, 20, 40), 1.0)[0]
    q[:], k[:] = 5, -5
    lse[:] = np.log(40) - 400
    assert np.isfinite(Fused(it)(dout, q, k, v, out, lse, 1.0)[0].astype(np.float32)).all()


class Scheduled(Fused):
    """The functions up to the stage that binds threads, on llvm."""

    def __init__(self, family, workload, plan):
        cast = s_tir.Schedule(tvm.IRModule({"main": attention_dq_cast(workload, reduce_adds.column_of)}), debug_mask=0)
        dq_cast.give_rows_lanes(cast)
        fused = family.schedule(workload, plan, unbound(family))
        self.compile(attention_delta(workload), fused.mod, cast.mod)


@pytest.mark.parametrize("family, workload, plan", SCHEDULED, ids=lambda it: getattr(it, "NAME", getattr(it, "name", f"{it}")))
def test_numbers_before_threads_are_bound(family, workload, plan):
    check_ragged(Scheduled(family, workload, plan), workload)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [Workload(128, 128, "float16", "causal"), Workload(64, 64, "bfloat16", "full")], ids=lambda w: w.name)
def test_seeds_compile_without_spills(toolkit, figures, workload):
    plan = wgmma_fused_backward.default_plan(workload, ARCH)
    with cuda_compiler(toolkit, (ARCH.name,), CudaOptions(**wgmma_fused_backward.compiler_options(plan))) as log:
        module = backward.build(wgmma_fused_backward, workload, plan, ARCH)
    source = module.imports[0].inspect_source()
    for kernel in log.kernels:
        assert kernel.warnings == () and kernel.most("static_smem_bytes") == 0
        assert (kernel.most("stack_bytes"), kernel.most("spill_store_bytes"), kernel.most("spill_load_bytes")) == (0, 0, 0)
    for instruction in ("_1_1_1_1", "stmatrix.sync.aligned.m8n8.x4.shared.b16", "red.relaxed.gpu.global.add.v4.f32"):
        assert instruction in source
    figures(f"wgmma backward fused {workload.name} {ARCH.name}", {"registers": log.kernels[0].most("registers"), "spilled_bytes": 0})


@pytest.mark.slow
@pytest.mark.parametrize("workload, sm", MMA_SEEDS, ids=lambda it: getattr(it, "name", it))
def test_seeds_of_mma_compile(toolkit, figures, workload, sm):
    arch = cuda_arch(sm)
    plan = mma_fused_backward.default_plan(workload, arch)
    with cuda_compiler(toolkit, (sm,), CudaOptions(**mma_fused_backward.compiler_options(plan))) as log:
        module = backward.build(mma_fused_backward, workload, plan, arch)
    source = module.imports[0].inspect_source()
    for instruction in ("ldmatrix.sync.aligned.m8n8.x4.trans", "mma.sync.aligned.m16n8k16", "flashtir_nowhere", "cp.async.cg"):
        assert instruction in source
    assert not any(kernel.warnings for kernel in log.kernels)
    kernel = log.kernels[0]
    figures(f"mma backward fused {workload.name} {sm}",
            {"registers": kernel.most("registers"), "spilled_bytes": kernel.most("spill_store_bytes")})


@pytest.mark.parametrize("workload, reason", [
    (Workload(64, 64, "float32"), "tensor cores take 16-bit inputs, not float32"),
    (Workload(96, 64, "float16"), "the head dimension must be a multiple of 64, not 96")])
def test_declines_with_a_reason(workload, reason):
    assert wgmma_fused_backward.decline(workload, ARCH) == reason


@pytest.mark.parametrize("changes, message", [
    (dict(q_tile=96), "consumer warpgroups must be able to share 64 query rows each, or parts of 32 channels, found q_tile=96"),
    (dict(kv_tile=192), "consumer warpgroups must be able to share 64 query rows each, or parts of 32 channels, found q_tile=64"),
    (dict(stages=5), r"shared memory of plan \(.*\) must stay within 232448 bytes on sm_90a, found")])
def test_plan_errors(changes, message):
    workload = Workload(128, 128, "float16", "causal")
    with pytest.raises(PlanError, match=message):
        wgmma_fused_backward.budget(workload, ARCH, wgmma_fused_backward.default_plan(workload, ARCH).but(**changes))


@pytest.mark.parametrize("workload, sm, reason", [
    (Workload(64, 64, "float32"), "sm_80", "tensor cores take 16-bit inputs, not float32"),
    (FULL, "sm_75", "sm_75 has no mma.sync m16n8k16 (sm_80 and later have)"),
    (Workload(96, 64, "float16"), "sm_80", "head dimensions must be 64 or 128, not 96 and 64")])
def test_mma_declines_with_a_reason(workload, sm, reason):
    assert mma_fused_backward.decline(workload, cuda_arch(sm)) == reason


@pytest.mark.parametrize("changes, message", [
    (dict(kv_tile=96), "kv_tile must be whole blocks of 16 for each of 4 parts, found 96: change either"),
    (dict(q_tile=48), "q_tile must be whole blocks of 16 for each of 2 parts, found 48: change either"),
    (dict(query_rows=16), "q_tile must be whole blocks of 16 for each of 16 parts, found 64: change either"),
    (dict(warps=32, kv_tile=512), "head_dim must be whole blocks of 16 for each of 16 parts, found 128: change either"),
    (dict(kv_tile=256), r"shared memory of plan \(.*\) must stay within 166912 bytes on sm_80, found"),
    (dict(warps=4, kv_tile=64, parts=1, q_tile=128), r"shared memory of plan \(.*\) must stay within 166912 bytes on sm_80, found")])
def test_mma_plan_errors(changes, message):
    workload, arch = Workload(128, 128, "float16", "causal"), cuda_arch("sm_80")
    with pytest.raises(PlanError, match=message):
        mma_fused_backward.budget(workload, arch, mma_fused_backward.default_plan(workload, arch).but(**changes))


@pytest.mark.parametrize("sm", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("workload", [Workload(128, 128, "float16"), Workload(64, 128, "bfloat16"), Workload(64, 64, "float16", "window")],
                         ids=lambda w: w.name)
def test_mma_has_a_plan_for_every_chip_that_it_takes(workload, sm):
    mma_fused_backward.budget(workload, cuda_arch(sm), mma_fused_backward.default_plan(workload, cuda_arch(sm)))
