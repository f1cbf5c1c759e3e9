"""The backward functions on tensor cores: numbers on llvm up to the stage that binds threads, and what nvcc makes of the seeds."""
import pytest

from schedules.arch import cuda_arch
from schedules.families import mma_backward
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from te_defs.workload import Workload
from tests.backward import Scheduled, alone, check_ragged, unbound

PLANS = {"dq": mma_backward.MmaBackwardPlan(q_tile=64, kv_tile=32, warps=2),
         "dk_dv": mma_backward.MmaBackwardPlan(q_tile=32, kv_tile=64, warps=2)}
WORKLOADS = [Workload(64, 64, "float16", "causal"), Workload.parse("fwd_d64_dv64_bf16_window+softcap")]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_numbers_before_threads_are_bound(workload):
    check_ragged(Scheduled(mma_backward, PLANS, workload, unbound(mma_backward)), workload)


@pytest.mark.slow
@pytest.mark.parametrize("role", PLANS)
def test_seeds_compile(toolkit, figures, role):
    workload, arch = Workload(128, 128, "float16", "causal"), cuda_arch("sm_80")
    plan = mma_backward.default_plan(role, workload, arch)
    with cuda_compiler(toolkit, (arch.name,), CudaOptions(**mma_backward.compiler_options(plan))) as log:
        alone(mma_backward, role, workload, plan, arch)
    kernel = log.last
    assert not kernel.warnings
    figures(f"mma backward {role} {workload.name} {arch.name}",
            {"registers": kernel.most("registers"), "spilled_bytes": kernel.most("spill_store_bytes")})
