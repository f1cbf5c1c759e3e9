"""What several families' stages share: finding loops and reads by name, fragments of a warp."""
from schedules.intrinsics.mma import LANES
from schedules.lowering import wide_stores


def loops_of(sch, block, last=None):
    """The loops above a block inside its own scope, outermost first; the innermost `last` of them where given."""
    loops = list(sch.get_loops(sch.get_sblock(block) if isinstance(block, str) else block))
    return loops if last is None else loops[-last:]


def read_index(sch, block, buffer):
    """Position of the read of `buffer` (by the start of its name) among the reads of a block."""
    names = [region.source.name for region in sch.get(block).reads]
    return next(n for n, name in enumerate(names) if name.startswith(buffer))


def unroll_all(sch, loops):
    for loop in loops:
        sch.unroll(loop)


def split_fragment_rows(sch, loop, warps):
    """Rows of a tile -> (warp, 16-row step of the warp, half of the step, row of the half)."""
    return sch.split(loop, factors=[warps, None, 2, 8])


def share_columns(sch, warp, column, parts):
    """Divide the columns of what a warp has, whose loop is the one inside that over warps, among so many warps: (loop over all of them,
    columns of one)."""
    if parts == 1:
        return warp, column
    part, column = sch.split(column, factors=[parts, None])
    return sch.fuse(warp, part), column


def own_fragment(sch, block, warps, parts=1, vectorize=None):
    """Let every lane of a warp compute the elements of a matrix [rows, columns] that it holds in its fragment registers.

    Loop nest of the block::

        warp @threadIdx.y, lane @threadIdx.x, unrolled 16-row step, 16-column step, column half, row half, column pair

    parts      of the columns, each by a warp of its own
    vectorize  elements of the pair that one store writes, 1 or 2 (an integer or a random variable); None unrolls the pair
    """
    i, j = loops_of(sch, block, 2)
    warp, step, half, row = split_fragment_rows(sch, i, warps)
    if parts > 1:
        sch.reorder(warp, j, step, half, row)
        warp, j = share_columns(sch, warp, j, parts)
    column, column_half, quad, pair = sch.split(j, factors=[None, 2, 4, 2])
    sch.reorder(warp, row, quad, step, column, column_half, half, pair)
    sch.bind(warp, "threadIdx.y")
    sch.bind(sch.fuse(row, quad), "threadIdx.x")
    unroll_all(sch, (step, column, column_half, half))
    if vectorize is None:
        sch.unroll(pair)
    else:
        outer, inner = sch.split(pair, factors=[None, vectorize])
        sch.unroll(outer)
        sch.vectorize(inner)


def bind_lanes(sch, row, column):
    """Let every lane compute what it holds of an accumulator of 16 rows, by these two loops over it; return the loop over its blocks of
    eight columns."""
    half, row = sch.split(row, factors=[2, 8])
    eight, quad, pair = sch.split(column, factors=[None, 4, 2])
    sch.reorder(row, quad, eight, half, pair)
    sch.bind(sch.fuse(row, quad), "threadIdx.x")
    unroll_all(sch, (eight, half, pair))
    return eight


def own_output(sch, block, warps, parts=1):
    """Let every lane store what it holds of an output [rows, columns]: whole blocks of eight columns where there are four for each lane of
    a quad, else the pairs that it holds side by side."""
    if int(sch.get(loops_of(sch, block)[-1]).extent) // parts % wide_stores.COLUMNS == 0:
        own_rows(sch, block, warps, parts, wide_stores.QUAD, wide_stores.WIDE_STORE)
    else:
        own_fragment(sch, block, warps, parts, vectorize=2)


def own_rows(sch, block, warps, parts, blocks, mark):
    """Let every lane handle a row of a matrix [rows, columns] that is held in accumulators by so many blocks of eight columns at once; the
    nest of each is marked for a pass (lowering.wide_stores, lowering.reduce_adds).

    Loop nest of the block::

        warp @threadIdx.y, lane @threadIdx.x, unrolled 16-row step, row half, group of blocks, block, column pair
    """
    i, j = loops_of(sch, block, 2)
    warp, step, half, row = split_fragment_rows(sch, i, warps)
    if parts > 1:
        sch.reorder(warp, j, step, half, row)
        warp, j = share_columns(sch, warp, j, parts)
    group, eight, quad, pair = sch.split(j, factors=[None, blocks, 4, 2])
    sch.reorder(warp, row, quad, step, half, group, eight, pair)
    sch.bind(warp, "threadIdx.y")
    sch.bind(sch.fuse(row, quad), "threadIdx.x")
    unroll_all(sch, (step, half, group, eight, pair))
    sch.annotate(eight, mark, 1)


def own_statistics(sch, block, warps):
    """Let every lane compute its column of the row statistics [rows, 4], reductions included."""
    i, lane, *reduction = loops_of(sch, block)
    warp, step, half, row = split_fragment_rows(sch, i, warps)
    sch.reorder(warp, row, lane, step, half, *reduction)
    sch.bind(warp, "threadIdx.y")
    sch.bind(sch.fuse(row, lane), "threadIdx.x")
    unroll_all(sch, (step, half, *reduction))


def copy_cooperatively(sch, block, warps, elements):
    """Let all threads of a block copy a tile [rows, columns] together, `elements` neighbours by one load, in row order; return the
    outermost loop."""
    fused = sch.fuse(*loops_of(sch, block, 2))
    turn, warp, lane, vector = sch.split(fused, factors=[None, warps, LANES, elements])
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    sch.vectorize(vector)
    sch.unroll(turn)
    return turn
