"""The backward pass with five products: numbers on llvm up to the stage that binds threads, and what nvcc makes of it. Those of the plain
function are in tests/test_backward.py."""
import numpy as np
import pytest
import tvm
from tvm import s_tir

from schedules import backward
from schedules.arch import cuda_arch
from schedules.families import dq_cast, wgmma_fused_backward
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
SCHEDULED = [(Workload(64, 128, "float16", "causal"), PLAN), (Workload.parse("fwd_d64_dv64_bf16_window+softcap"), PLAN),
             (FULL, PLAN.but(kv_tile=128)), (Workload(64, 40, "float16", "causal"), PLAN),
             (Workload(64, 128, "float16", "causal"), PLAN.but(across=1))]


def test_keys_past_the_end_add_nothing():
    """Their scores are 0: where all others are far below, exp(0 - LSE) is more than float16, and float32, hold."""
    it = Workload(16, 32, "bfloat16", "full")
    dout, q, k, v, out, lse = problem(it, Shape(1, 1, 1, 20, 40), 1.0)[0]
    q[:], k[:] = 5, -5
    lse[:] = np.log(40) - 400
    assert np.isfinite(Fused(it)(dout, q, k, v, out, lse, 1.0)[0].astype(np.float32)).all()


class Scheduled(Fused):
    """The functions up to the stage that binds threads, on llvm."""

    def __init__(self, workload, plan):
        cast = s_tir.Schedule(tvm.IRModule({"main": attention_dq_cast(workload, reduce_adds.column_of)}), debug_mask=0)
        dq_cast.give_rows_lanes(cast)
        fused = wgmma_fused_backward.schedule(workload, plan, unbound(wgmma_fused_backward))
        self.compile(attention_delta(workload), fused.mod, cast.mod)


@pytest.mark.parametrize("workload, plan", SCHEDULED, ids=lambda it: getattr(it, "name", f"{it}"))
def test_numbers_before_threads_are_bound(workload, plan):
    check_ragged(Scheduled(workload, plan), workload)


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


@pytest.mark.parametrize("workload, reason", [
    (Workload(64, 64, "float32"), "tensor cores take 16-bit inputs, not float32"),
    (Workload(96, 64, "float16"), "the head dimension must be a multiple of 64, not 96"),
    (Workload(64, 256, "float16"), "head dimensions must be at most 128, not 64 and 256")])
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
