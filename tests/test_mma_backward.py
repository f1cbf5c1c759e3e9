"""The backward functions on tensor cores: numbers on llvm up to the stage that binds threads, and what nvcc makes of the seeds."""
from dataclasses import replace

import pytest
import tvm

from schedules.arch import cuda_arch
from schedules.families import mma_backward
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from te_defs.flash_attention_backward import attention_delta
from te_defs.workload import Shape, Workload, make_arguments
from tests.backward import Plain, verdict

PLANS = {"dq": mma_backward.MmaBackwardPlan(q_tile=64, kv_tile=32, warps=2),
         "dk_dv": mma_backward.MmaBackwardPlan(q_tile=32, kv_tile=64, warps=2)}
WORKLOADS = [Workload(64, 64, "float16", "causal"), Workload.parse("fwd_d64_dv64_bf16_window+softcap")]
SHAPES = [(Shape(1, 2, 1, 37, 70), 0.125), (Shape(1, 1, 1, 70, 33), -0.2), (Shape(1, 2, 2, 5, 0), 0.0)]


class Scheduled(Plain):
    """The functions after the first stages, on llvm."""

    def __init__(self, workload, stages):
        self.delta = tvm.compile(attention_delta(workload), "llvm")
        self.dq, self.dk_dv = (tvm.compile(mma_backward.schedule(role, workload, PLANS[role], stages).mod, "llvm") for role in PLANS)


def number_of(stage):
    return [it.__name__ for it in mma_backward.STAGES].index(stage)


def check(function, workload):
    for shape, scale in SHAPES:
        shape = replace(shape, mask=workload.mask_class.samples[2] if workload.mask == "window" else ())
        assert verdict(function, workload, shape, scale, make_arguments(workload, shape)) is None, shape


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_numbers_before_threads_are_bound(workload):
    check(Scheduled(workload, number_of(mma_backward.BINDS_AT)), workload)


@pytest.mark.slow
@pytest.mark.parametrize("role", PLANS)
def test_seeds_compile(toolkit, figures, role):
    workload, arch = Workload(128, 128, "float16", "causal"), cuda_arch("sm_80")
    plan = mma_backward.default_plan(role, workload, arch)
    with cuda_compiler(toolkit, (arch.name,), CudaOptions(**mma_backward.compiler_options(plan))) as log:
        mma_backward.build(role, workload, plan, arch)
    kernel = log.last
    assert not kernel.warnings
    figures(f"mma backward {role} {workload.name} {arch.name}",
            {"registers": kernel.most("registers"), "spilled_bytes": kernel.most("spill_store_bytes")})
