"""delta: rowsum(dO * O) of every row, the small function in front of the backward pass, on GPUs and CPUs. Memory bounds it.

Rows are taken in the order in which dO and O hold them. On a GPU a group of neighbouring lanes takes a row by loads of 16 bytes, two of
each tensor for a lane where the row has as many: 64 bytes pay for the three divisions that find the row's place in delta. Shuffles add
up what the lanes have. On a CPU a core takes one row after the other, and sums as many parts of it as a vector has lanes.

Rows are counted in 32 bits, over all batch entries and heads, as the elements of delta and LSE are; offsets into dO and O have 64. A GPU's
grid is on blockIdx.x: the other axes end at 65,535. The GPU's nest, of d 128 and float16::

    row / 32  @blockIdx.x
      row % 32  @threadIdx.y
        LSE_local, or dLSE_local LSE_local        one element of each row
        lane of 8  @threadIdx.x
          dO_local O_local                        registers, two vectors of 8 each
          row_sum                                 16 channels in order, then shuffles over the lanes
        delta                                     guarded: the last block may have fewer rows; 0 where the row sees no key
"""
import tvm
from tvm import s_tir

from schedules import roles
from schedules.lowering.aligned_strides import ALIGNED_VIEWS
from schedules.lowering.wide_offsets import WIDE_OFFSETS
from schedules.stages import loops_of
from te_defs.flash_attention_backward import attention_delta

NAME = "delta"

THREADS, WARP = 256, 32
#: Bytes of a load, and how many of each tensor a lane makes where a row has enough.
LOAD_BYTES, LOADS = 16, 2


def lanes_of(vectors):
    """Lanes that share a row of so many loads: a power of two that divides them, so that a warp has whole rows and no lane is idle."""
    lanes = min(vectors & -vectors, WARP)
    return lanes if lanes == 1 or vectors // lanes >= LOADS else lanes // 2


def rows_of(sch):
    """(loop over all rows, in memory order; loop over the channels of one)."""
    b, h, i, c = loops_of(sch, "row_sum")
    sch.reorder(b, i, h)
    return sch.fuse(b, i, h), c


def give_rows_lanes(sch, workload):
    """Split rows among lanes and load what a lane multiplies by whole vectors; return the loops over blocks, rows of a block and lanes."""
    vector = LOAD_BYTES // (4 if workload.dtype == "float32" else 2)
    row, c = rows_of(sch)
    lane, c = sch.split(c, factors=[lanes_of(workload.value_dim // vector), None])
    block, row = sch.split(row, factors=[None, THREADS // int(sch.get(lane).extent)])
    for read in (0, 1):
        copy = sch.cache_read("row_sum", read, "local")
        sch.compute_at(copy, lane)
        step, neighbour = sch.split(loops_of(sch, copy)[-1], factors=[None, vector])
        sch.unroll(step)
        sch.vectorize(neighbour)
    sch.unroll(c)
    sch.set_scope("row_sum", 0, "local")
    sch.reverse_compute_at("delta", row)
    # In front of the sum and by all lanes: inside the choice between two values their loads would each wait for what comes before.
    for read in [region.source.name for region in sch.get(sch.get_sblock("delta")).reads if "LSE" in region.source.name]:
        sch.compute_at(sch.cache_read("delta", read, "local"), row, index=-2)
    return block, row, lane


def bind_threads(sch, block, row, lane):
    """Bind what `give_rows_lanes` returns; what stands before it runs on llvm."""
    sch.bind(block, "blockIdx.x")
    sch.bind(row, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")


def sum_by_vectors(sch, workload, arch):
    """Deal rows to the cores; sum a row in parts, one for each lane of a vector, then these."""
    row, c = rows_of(sch)
    _, lane = sch.split(c, factors=[None, min(arch.vector_bits // 32, workload.value_dim & -workload.value_dim)])
    parts = sch.rfactor(lane, 0)
    sch.compute_at(parts, row, preserve_unit_loops=True)
    lane, c = loops_of(sch, parts, 2)
    sch.reorder(c, lane)
    sch.vectorize(lane)
    sch.parallel(row)
    sch.decompose_reduction(parts, c)  # last: a sum without its init can no longer be dealt to cores
    sch.reverse_compute_at("delta", row)


def schedule(workload, arch, strided=False, through_lse=False):
    """A fresh Schedule of the function; for views with strides where it is `strided`, with the gradient of the LSE where `through_lse`."""
    func = attention_delta(workload, through_lse).with_attr(WIDE_OFFSETS, True)
    func = roles.with_strides(func) if strided else func
    func = func.with_attr(ALIGNED_VIEWS, True) if arch.kind == "cuda" else func
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    if arch.kind == "cuda":
        bind_threads(sch, *give_rows_lanes(sch, workload))
    else:
        sum_by_vectors(sch, workload, arch)
    return sch
