"""The first and last steps of the backward pass with five products: sums of zero, and dQ, in the element type and scaled, from the sums in
memory. Memory bounds them.

A lane takes 16 neighbours of a row, by four loads of 16 bytes from the order in which wgmma_fused_backward keeps the sums, and two stores.
All rows are on blockIdx.x; they are counted in 32 bits, and offsets have 64.
"""
import tvm
from tvm import s_tir

from schedules import roles
from schedules.families.wgmma_fused_backward import flatten_sums, lay_out_sums
from schedules.intrinsics.wgmma_exchange import COLUMNS
from schedules.lowering.aligned_strides import ALIGNED_VIEWS
from schedules.lowering.wide_offsets import WIDE_OFFSETS
from schedules.stages import loops_of, unroll_all
from te_defs.fused_backward import attention_dq_cast, attention_dq_zeros

NAME = "dq_cast"
THREADS = 256
#: Elements of a load, and of a store.
LOAD, STORE = 4, 8


def give_rows_lanes(sch, channels):
    """Split rows among lanes, and load and store whole vectors; return the loops over blocks and their lanes."""
    lay_out_sums(sch, "scaled", ("read", 0))
    sums = sch.cache_read("scaled", 0, "local")
    sch.set_scope("scaled", 0, "local")
    b, i, h, c = loops_of(sch, "dQ")
    c, sixteen = sch.split(c, factors=[None, COLUMNS])
    block, lane = sch.split(sch.fuse(b, i, h, c), factors=[None, THREADS])
    sch.compute_at("scaled", lane)
    sch.compute_at(sums, lane)
    for copy, elements in ((sums, LOAD), ("dQ", STORE)):
        step, neighbour = sch.split(loops_of(sch, copy)[-1], factors=[None, elements])
        sch.unroll(step)
        sch.vectorize(neighbour)
    unroll_all(sch, loops_of(sch, "scaled")[-1:])
    flatten_sums(sch, sums, ("read", 0), channels)
    return block, lane


def bind_threads(sch, block, lane):
    """Bind what these return; what stands before it runs on llvm."""
    sch.bind(block, "blockIdx.x")
    sch.bind(lane, "threadIdx.x")


def schedule(workload, plan, strided=False):
    """A fresh Schedule of the function that makes dQ from sums as a plan keeps them."""
    func = attention_dq_cast(workload, plan.q_tile).with_attr(WIDE_OFFSETS, True).with_attr(ALIGNED_VIEWS, True)
    func = roles.with_strides(func) if strided else func
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    bind_threads(sch, *give_rows_lanes(sch, workload.head_dim))
    return sch


def give_zeros_lanes(sch, channels):
    """The same of the function that sets the sums to zero, by stores of 16 bytes."""
    sch.transform_layout("dQ_sum", ("write", 0), lambda b, h, t, i, c: (b, h, t, i * channels + c))
    *loops, c = loops_of(sch, "dQ_sum")
    c, neighbour = sch.split(c, factors=[None, LOAD])
    sch.vectorize(neighbour)
    return sch.split(sch.fuse(*loops, c), factors=[None, THREADS])


def zeros(workload, plan, in_order=False):
    """A fresh Schedule of the function that sets the sums to zero; where they are made `in_order`, whose turn it is, too."""
    func = attention_dq_zeros(workload, plan.q_tile, in_order).with_attr(WIDE_OFFSETS, True)
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    bind_threads(sch, *give_zeros_lanes(sch, workload.head_dim))
    if in_order:
        bind_threads(sch, *sch.split(sch.fuse(*loops_of(sch, "dQ_turns")), factors=[None, THREADS]))
    return sch
