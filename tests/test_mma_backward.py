"""The backward functions on tensor cores: numbers on llvm up to the stage that binds threads, and what nvcc makes of the seeds."""
import numpy as np
import pytest

from schedules.arch import cuda_arch
from schedules.families import mma_backward
from schedules.intrinsics import mma as intrinsics
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from te_defs.workload import Workload
from tests.backward import Scheduled, alone, check_ragged, unbound

PLANS = {"dq": mma_backward.PLAN(q_tile=64, kv_tile=32, warps=2),
         "dk_dv": mma_backward.PLAN(q_tile=32, kv_tile=64, warps=2)}
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


@pytest.mark.parametrize("operand", "AKVT")
def test_ldmatrix_brings_what_mma_sync_reads(operand):
    """PTX ISA: lane 8 m + r names row r of matrix m; lane l gets the pair from 2 * (l % 4) on of row l / 4 of each, or of its column.
    A and T, K and V are the operands of one product where what is read is stored in two ways."""
    transposed, row, half = intrinsics._LDMATRIX[operand]
    tile = np.arange(256).reshape(16, 16)
    matrices = [np.array([tile[row(lane), 8 * half(lane):][:8] for lane in range(8 * m, 8 * m + 8)]) for m in range(4)]
    got = [[(matrix.T if transposed else matrix)[lane // 4, lane % 4 * 2 + pair] for matrix in matrices for pair in range(2)]
           for lane in range(32)]
    if operand in "AT":  # registers of A [row, k]: rows g and g + 8 of k 2q, then of k 2q + 8
        wanted = [[(lane // 4 + 8 * (n // 2 % 2), lane % 4 * 2 + 8 * (n // 4) + n % 2) for n in range(8)] for lane in range(32)]
    else:  # of B [k, column] for columns g, then g + 8: k 2q, then 2q + 8
        wanted = [[(lane % 4 * 2 + 8 * (n // 2 % 2) + n % 2, lane // 4 + 8 * (n // 4)) for n in range(8)] for lane in range(32)]
    stored_otherwise = operand in "TK"
    assert got == [[tile[place[::-1] if stored_otherwise else place] for place in places] for places in wanted]
