"""The backward pass with five products: numbers on llvm, unscheduled and up to the stage that binds threads, and what nvcc makes of it."""
import functools
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import s_tir

from schedules.arch import cuda_arch
from schedules.families import dq_cast, wgmma_fused_backward
from schedules.lowering import reduce_adds
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import PlanError
from te_defs.flash_attention_backward import attention_delta
from te_defs.fused_backward import attention_dq_cast
from te_defs.lengths import sample
from te_defs.workload import Shape, Workload, make_arguments
from tests.backward import Fused, check_ragged, problem, unbound, verdict
from tests.test_backward import CALLS, FEATURES, LENGTHS, WORKLOADS, featured

ARCH = cuda_arch("sm_90a")
PLAN = wgmma_fused_backward.WgmmaBackwardPlan(q_tile=64, kv_tile=64)
SCHEDULED = [(Workload(64, 128, "float16", "causal"), PLAN), (Workload.parse("fwd_d64_dv64_bf16_window+softcap"), PLAN),
             (Workload(64, 64, "float16", "full"), PLAN.but(kv_tile=128)),
             (Workload(64, 64, "float16", "full"), PLAN.but(q_tile=128, kv_tile=128)),
             (Workload(64, 128, "float16", "causal"), PLAN.but(across=1)),
             (Workload(64, 64, "float16", "full"), PLAN.but(q_tile=128, kv_tile=128, across=1))]


@pytest.fixture(scope="module")
def fused():
    """Function workload -> its functions, unscheduled, compiled once."""
    return functools.cache(Fused)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_numbers(fused, workload, call):
    shape, factor = CALLS[call]
    for mask in workload.mask_class.samples:
        assert verdict(fused(workload), workload, replace(shape, mask=mask), factor * workload.head_dim**-0.5, mask) is None


@pytest.mark.parametrize("features", FEATURES)
def test_features(fused, features):
    it = featured(features)
    for number, (n, m, single, scale) in enumerate(((37, 50, "", 0.25), (50, 20, "BHNM", 0.25), (5, 0, "B", 1.0), (0, 15, "H", 1.0))):
        shape = Shape(2, 6, 2, n, m, it.mask_class.samples[min(number, len(it.mask_class.samples) - 1)])
        assert verdict(fused(it), it, shape, scale, make_arguments(it, shape, number, single), seed=number) is None


@pytest.mark.parametrize("features", LENGTHS)
def test_lengths(fused, features):
    it = featured(features)
    for number, (n, m) in enumerate(((37, 50), (60, 20), (1, 33))):
        mask = it.mask_class.samples[-1]
        (batch, rows, keys), lengths = sample(it.lengths, 3, n, m)
        shape = Shape(batch, 4, 2, rows, keys, mask)
        if it.lengths == "packed":
            lengths = (*lengths, int(np.diff(lengths[1]).max()))
        assert verdict(fused(it), it, shape, 0.25, make_arguments(it, shape, number), lengths, number) is None


def test_keys_past_the_end_add_nothing(fused):
    """Their scores are 0: where all others are far below, exp(0 - LSE) is more than float16, and float32, hold."""
    it = Workload(16, 32, "bfloat16", "full")
    dout, q, k, v, out, lse = problem(it, Shape(1, 1, 1, 20, 40), 1.0)[0]
    q[:], k[:] = 5, -5
    lse[:] = np.log(40) - 400
    assert np.isfinite(fused(it)(dout, q, k, v, out, lse, 1.0)[0].astype(np.float32)).all()


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
