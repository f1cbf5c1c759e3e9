"""The last step of the backward pass with five products: dQ, in the element type and scaled, from the sums in memory. Memory bounds it.

A lane takes 16 neighbours of a row, by four loads of 16 bytes from the order in which lowering.reduce_adds keeps the sums, and two stores.
All rows are on blockIdx.x; they are counted in 32 bits, and offsets have 64.
"""
import tvm
from tvm import s_tir

from schedules.lowering import delta_pipeline, reduce_adds
from schedules.stages import loops_of, unroll_all
from te_defs.fused_backward import attention_dq_cast

NAME = "dq_cast"
PIPELINE = "flashtir_delta"
CONFIG = delta_pipeline.CONFIG
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


def schedule(workload):
    """A fresh Schedule of the function."""
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_dq_cast(workload, reduce_adds.column_of)}), debug_mask=0)
    bind_threads(sch, *give_rows_lanes(sch))
    return sch


def build(workload, arch):
    """The function compiled as a runtime module; a compiler must be installed around the call (lowering.cuda_compile)."""
    mod = tvm.IRModule({NAME: schedule(workload).mod["main"].with_attr("global_symbol", NAME)})
    with arch.target(), tvm.transform.PassContext(config=CONFIG):
        return tvm.tirx.build(mod, target=arch.target(), pipeline=PIPELINE)
