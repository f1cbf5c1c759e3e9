"""The backward functions for wgmma: numbers on llvm up to the stage that binds threads, and what nvcc makes of the seeds."""
import re

import pytest

from schedules.arch import cuda_arch
from schedules.families import wgmma_backward
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import PlanError
from te_defs.workload import Workload
from tests.backward import Scheduled, alone, check_ragged, scheduled_apart, unbound

ARCH = cuda_arch("sm_90a")
PLANS = {"dq": wgmma_backward.WgmmaBackwardPlan(q_tile=64, kv_tile=32),
         "dk_dv": wgmma_backward.WgmmaBackwardPlan(q_tile=32, kv_tile=64)}
APART = {"dq": wgmma_backward.WgmmaBackwardPlan(q_tile=64, kv_tile=32, single=1),
         "dk": wgmma_backward.WgmmaBackwardPlan(q_tile=32, kv_tile=64, single=1),
         "dv": wgmma_backward.WgmmaBackwardPlan(q_tile=32, kv_tile=64, single=1)}
WORKLOADS = [Workload(64, 128, "float16", "causal"),
             Workload.parse("fwd_d64_dv64_bf16_window+softcap"), Workload(40, 72, "float16", "causal")]
WIDE = [Workload(256, 192, "float16", "causal"), Workload.parse("fwd_d136_dv72_bf16_window+softcap")]
COMPILED = [Workload(128, 128, "float16", "causal"), Workload(64, 64, "bfloat16", "full"),
            Workload.parse("fwd_d128_dv128_f16_window+softcap"), Workload(104, 72, "float16", "full"),
            *(Workload(*channels, "float16", mask) for channels in ((256, 256), (192, 128)) for mask in ("full", "causal")),
            Workload.parse("fwd_d200_dv248_bf16_window+softcap")]
CAUSAL = COMPILED[0]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_numbers_before_threads_are_bound(workload):
    check_ragged(Scheduled(wgmma_backward, PLANS, workload, unbound(wgmma_backward)), workload)


@pytest.mark.parametrize("workload", WIDE, ids=lambda w: w.name)
def test_numbers_of_functions_for_a_gradient_each(workload):
    check_ragged(scheduled_apart(wgmma_backward, APART, workload, unbound(wgmma_backward)), workload)


@pytest.mark.slow
@pytest.mark.parametrize("role, tile", [("dq", (128, 96, 3, 24)), ("dk_dv", (64, 128, 3, 24))])
def test_turns_across_each_other_compile_without_serialisation(toolkit, role, tile):
    """The products of one turn run beside the exponentials of the next: nvcc finds registers for all, but for numbers of the loader."""
    plan = wgmma_backward.WgmmaBackwardPlan(*tile, across=2)
    with cuda_compiler(toolkit, (ARCH.name,), CudaOptions(**wgmma_backward.compiler_options(plan))) as log:
        alone(wgmma_backward, role, Workload(128, 128, "float16", "full"), plan, ARCH)
    assert log.last.warnings == () and log.last.most("spill_store_bytes") <= 32


@pytest.mark.slow
@pytest.mark.parametrize("role, workload", [
    pytest.param(role, workload, id=f"{role}-{workload.name}")
    for workload in COMPILED for role in (APART if wgmma_backward.apart(workload) else PLANS)])
def test_seeds_compile_without_spills(toolkit, figures, role, workload):
    plan = wgmma_backward.default_plan(role, workload, ARCH)
    with cuda_compiler(toolkit, (ARCH.name,), CudaOptions(**wgmma_backward.compiler_options(plan))) as log:
        module = alone(wgmma_backward, role, workload, plan, ARCH)
    kernel, source = log.last, module.imports[0].inspect_source()
    assert kernel.warnings == () and kernel.most("static_smem_bytes") == 0
    assert (kernel.most("stack_bytes"), kernel.most("spill_store_bytes"), kernel.most("spill_load_bytes")) == (0, 0, 0)
    for instruction in ("wgmma.mma_async.sync.aligned.m64n", "cp.async.bulk.tensor.", "setmaxnreg.inc"):
        assert instruction in source
    figures(f"wgmma backward {role} {workload.name} {ARCH.name}", {"registers": kernel.most("registers"), "spilled_bytes": 0})


@pytest.mark.parametrize("workload, arch, reason", [
    (CAUSAL, cuda_arch("sm_80"), r"sm_80 has no wgmma \(sm_90a has\)"),
    (Workload(64, 64, "float32"), ARCH, "tensor cores take 16-bit inputs, not float32"),
    (Workload(80, 24, "float16"), ARCH, "head dimensions must be at least 32, not 80 and 24"),
])
def test_declines_with_a_reason(workload, arch, reason):
    assert re.fullmatch(reason, wgmma_backward.decline(workload, arch))


@pytest.mark.parametrize("role, changes, message", [
    ("dq", dict(q_tile=96), "the tile that stays must be 64 rows for each of one to three consumer warpgroups, found 96"),
    ("dk_dv", dict(kv_tile=256), "the tile that stays must be 64 rows for each of one to three consumer warpgroups, found 256"),
    ("dq", dict(kv_tile=40), "the tile that comes by must be a multiple of 16 up to 256, found 40: round it"),
    ("dk_dv", dict(q_tile=48), "q_tile must be a multiple of 32, found 48: round it"),
    ("dk_dv", dict(stages=0), "stages must be from 1 to 16, found 0: correct it"),
    ("dk_dv", dict(stages=9), r"shared memory of plan \(.*\) must stay within 232448 bytes on sm_90a, found"),
    ("dk_dv", dict(single=1), "single must be 0, or 1 for dq, dk, dv, found 1: correct it"),
    ("dv", dict(across=1), "across must be an order of dv, found 1: choose 0"),
    ("dk", dict(across=1), "across must be an order of dk, found 1: choose 0"),
    ("dk", dict(single=0), r"shared memory of plan \(.*\) must stay within 232448 bytes on sm_90a, found"),
    ("dk_dv", dict(q_tile=128), r"registers, about of plan \(.*\) must stay within 232 per consumer on sm_90a, found"),
])
def test_plan_errors(role, changes, message):
    workload = CAUSAL if role in PLANS else Workload(256, 256, "float16")
    plan = wgmma_backward.default_plan(role, workload, ARCH).but(**changes)
    with pytest.raises(PlanError, match=message):
        wgmma_backward.budget(role, workload, ARCH, plan)
