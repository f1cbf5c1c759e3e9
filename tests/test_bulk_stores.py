"""O by the tensor memory accelerator: where lanes put what they hold, and which kernels store so."""
import collections
import itertools
import re

import pytest
import tvm
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cuda_arch
from schedules.build import schedule
from schedules.families import wgmma, wgmma_backward, wgmma_fused_backward
from schedules.intrinsics import wgmma_exchange
from schedules.intrinsics.wgmma_exchange import CHUNK, LINE
from schedules.lowering import bulk_stores
from te_defs.workload import Workload

ARCH = cuda_arch("sm_90a")


def test_matrices_lie_as_the_accelerator_swizzles_them():
    """A lane gives the address of a row of one matrix, and holds two columns of a row of each (PTX, stmatrix)."""
    for lane, column, block, half, pair in itertools.product(range(32), range(0, CHUNK, bulk_stores.STEP), range(2), range(2), range(2)):
        row, place = half * 8 + lane // 4, column + block * 8 + lane % 4 * 2 + pair
        found = wgmma_exchange.matrix_line((block * 2 + half) * 8 + lane // 4, column) + lane % 4 * 4 + pair * 2
        assert found == row * LINE + (place // 8 ^ row % 8) * 16 + place % 8 * 2


def calls_of(name, changes):
    """How often a kernel calls functions that store O, once roles are split, by their names without prefix."""
    workload = Workload.parse(name)
    return calls_in(schedule(wgmma, workload, wgmma.default_plan(workload, ARCH).but(**changes)))


def calls_in(sch):
    """The same of a Schedule."""
    func = sch.mod["main"].with_attr("target", ARCH.target())
    with ARCH.target(), tvm.transform.PassContext(config=wgmma.CONFIG):
        mod = get_tir_pipeline(wgmma.PIPELINE)[0](tvm.IRModule({"main": func}))
    return collections.Counter(re.findall(r'"flashtir_(store_matrix|bulk_[a-z]+)\w*"', mod.script()))


@pytest.mark.parametrize("name, changes, reads", [
    ("fwd_d64_dv64_f16_full", {}, 2), ("fwd_d128_dv128_bf16_causal", {}, 2), ("fwd_d128_dv64_f16_window+softcap+keys", {}, 2),
    ("fwd_d128_dv128_f16_full", dict(blocks=0, query_stages=1), 1)], ids=str)
def test_rows_go_out_in_boxes(name, changes, reads):
    """Shared memory is waited for before the next tile's queries may come, and at the end."""
    channels = Workload.parse(name).value_dim
    assert calls_of(name, changes) == {"store_matrix": channels // bulk_stores.STEP, "bulk_store": channels // CHUNK, "bulk_commit": 1,
                                       "bulk_read": reads}


@pytest.mark.parametrize("name, changes", [
    ("fwd_d128_dv128_f16_full+packed", {}), ("fwd_d96_dv96_f16_full", {}), ("fwd_d64_dv128_f16_full", {}),
    ("fwd_d128_dv128_f16_full", dict(query_stages=1))], ids=str)
def test_lanes_store_rows_themselves(name, changes):
    """Where sequences end inside a tile, rows are no whole chunks, the queries' place is too small, or the next ones want it."""
    assert calls_of(name, changes) == {}


@pytest.mark.parametrize("role", ["dq", "dk_dv"])
def test_lanes_store_gradients_themselves(role):
    workload = Workload.parse("fwd_d128_dv128_f16_causal")
    assert calls_in(wgmma_backward.schedule(role, workload, wgmma_backward.default_plan(role, workload, ARCH))) == {}


def test_where_dq_is_added_up_lanes_store_the_others_themselves():
    workload = Workload.parse("fwd_d64_dv64_f16_full")
    found = calls_in(wgmma_fused_backward.schedule(workload, wgmma_fused_backward.default_plan(workload, ARCH)))
    assert found == {"store_matrix": 2}, "dS alone, in the turns with a mask and in those without"
