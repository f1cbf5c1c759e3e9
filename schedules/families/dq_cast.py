"""The first and last steps of the backward pass with five products: sums of zero, and dQ, in the element type and scaled, from the sums in
memory. Memory bounds them.

A lane takes 16 neighbours of a row, by four loads of 16 bytes from the order in which lowering.reduce_adds keeps the sums, and two stores.
All rows are on blockIdx.x; they are counted in 32 bits, and offsets have 64.
"""
import tvm
from tvm import s_tir

from schedules import roles
from schedules.lowering import reduce_adds
from schedules.lowering.aligned_strides import ALIGNED_VIEWS
from schedules.lowering.wide_offsets import WIDE_OFFSETS
from schedules.stages import loops_of, unroll_all
from te_defs.fused_backward import attention_dq_cast, attention_dq_zeros

NAME = "dq_cast"
THREADS = 256
#: Elements of a load, and of a store.
LOAD, STORE = 4, 8


def give_rows_lanes(sch):
    """Split rows among lanes, and load and store whole vectors; return the loops over blocks and their lanes."""
    sums, out = sch.cache_read("dQ", 0, "local"), sch.cache_write("dQ", 0, "local")
    b, i, h, c = loops_of(sch, out)
    c, sixteen = sch.split(c, factors=[None, reduce_adds.COLUMNS])
    block, lane = sch.split(sch.fuse(b, i, h, c), factors=[None, THREADS])
    sch.compute_at("dQ", lane)
    sch.compute_at(sums, lane)
    for copy, elements in ((sums, LOAD), (out, STORE)):
        step, neighbour = sch.split(loops_of(sch, copy)[-1], factors=[None, elements])
        sch.unroll(step)
        sch.vectorize(neighbour)
    unroll_all(sch, loops_of(sch, "dQ")[-1:])
    return block, lane


def bind_threads(sch, block, lane):
    """Bind what `give_rows_lanes` returns; what stands before it runs on llvm."""
    sch.bind(block, "blockIdx.x")
    sch.bind(lane, "threadIdx.x")


def schedule(workload, strided=False):
    """A fresh Schedule of the function that makes dQ."""
    func = attention_dq_cast(workload, reduce_adds.column_of).with_attr(WIDE_OFFSETS, True).with_attr(ALIGNED_VIEWS, True)
    func = roles.with_strides(func) if strided else func
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    bind_threads(sch, *give_rows_lanes(sch))
    return sch


def zeros(workload):
    """A fresh Schedule of the function that sets the sums to zero, by stores of 16 bytes."""
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_dq_zeros(workload).with_attr(WIDE_OFFSETS, True)}), debug_mask=0)
    c, neighbour = sch.split(loops_of(sch, "dQ_sum")[-1], factors=[None, LOAD])
    sch.vectorize(neighbour)
    bind_threads(sch, *sch.split(sch.fuse(*loops_of(sch, "dQ_sum")[:-1]), factors=[None, THREADS]))
    return sch
