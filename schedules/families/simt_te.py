"""simt_te: the simt schedule reached from the Tensor Expression of the online softmax, by the primitives that everybody knows.

The idea. te_defs/online.py declares whole tensors and one reduction over key tiles, with a tuple (row_max, row_sum, O) and an operator
that merges two partial results. Nothing there says FlashAttention; two primitives do: `reorder` brings the tile axis above the rows of
a query tile, and `compute_at` puts the computation of everything else below it. From then on it is the schedule of simt.py, whose
helpers this file uses, and so one may read the two side by side: what Tensor Expression takes away is written there by hand.

What it cannot say: a loop whose length depends on the query tile. So every key tile is computed and masked, and a causal mask, whose
hidden tiles must be skipped, is left to simt.

The budget. A thread holds its patch of O twice, in the tile's O_tile and in the running state, and two statistics more than in simt:
160 registers where simt takes 128. The parts of a tuple have one shape, so each thread column has a row_max and a row_sum of its own:
that is a copy for each thread, as in simt. Shared memory holds Q, V and, one after the other, K and P, in float32 for all inputs.

The finished nest, one line a group of blocks; rows are @threadIdx.y, columns @threadIdx.x::

    b h r  @blockIdx.x
      Q_load                                      shared, [channel, row]
      for t in key tiles
        K_load V_load                             shared, [channel, key] and [key, channel]
        S                                         for c: outer product of a thread's rows and keys
        S_masked tile_max P tile_sum              registers; tile_max and tile_sum by warp shuffles along a row
        P_shared.dyn                              shared, [key, row]
        O_tile                                    for j: outer product of a thread's rows and channels
        state                                     merge the tile's (row_max, row_sum, O) into the running one
      O row_max row_sum LSE
"""
from schedules.families import simt
from schedules.families.simt import (LOADS, P_PAD, VECTOR, check_divisibility, columns_of, compiler_options, own_patch, own_product, patch,
                                     resources, unroll_vectors)
from schedules.plan import first_of, fitting
from schedules.stages import loops_of, read_index, unroll_all
from te_defs.online import online_attention

NAME = "simt_te"
PIPELINE = simt.PIPELINE
CONFIG = simt.CONFIG
#: The first stage that binds threads: what stands before it runs on llvm.
BINDS_AT = "bind_grid"
PLAN = simt.SimtPlan

PRODUCTS = ("S", "O_tile")
ROW_REDUCTIONS = ("tile_max", "tile_sum")
#: The copy of P in shared memory, as cache_read names it.
P_SHARED = "P_shared.dyn"
#: What a key tile needs, last consumer first: compute_at wants a block's consumers below the loop before the block itself.
TILE_BLOCKS = ("O_tile", P_SHARED, "tile_sum", "P", "tile_max", "S_masked", "S", "V_load", "K_load")
#: What follows from the finished state, first producer first.
LAST_BLOCKS = ("O", "row_max", "row_sum", "LSE")
#: Where compute_at puts a block among those of a loop.
FIRST, LATEST = -2, -1
STATISTICS, OTHER_REGISTERS = 4, 24

#: Tiles and threads that are worth a try, the seed first.
TILES = (PLAN(64, 64, 8, 16), PLAN(128, 64, 16, 16), PLAN(64, 64, 16, 16), PLAN(64, 32, 16, 8), PLAN(32, 32, 8, 8, 4),
         PLAN(32, 16, 8, 16, 4), PLAN(32, 16, 8, 8, 4))


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    if workload.score or workload.sink:
        return "score modifications and sinks are declared in the tiled function alone"
    if workload.mask != "full":
        return f"a Tensor Expression cannot skip the key tiles that a {workload.mask} mask hides"
    if workload.lengths != "uniform":
        return f"a Tensor Expression cannot skip the key tiles that {workload.lengths} lengths leave out"
    return simt.decline(workload, arch)


def default_plan(workload, arch):
    """The seed: the first of TILES that fits; PlanError where none does."""
    return first_of(tile_choices(workload, arch), NAME, workload, arch)


def tile_choices(workload, arch):
    """Plans of all tile shapes that fit, the seed's first; each is a search task of its own."""
    return fitting(TILES, budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's tile shape."""
    return simt.knobs(workload, arch, plan, budget)


def budget(workload, arch, plan):
    """Divisibility, threads, registers and shared memory of a plan; PlanError with the whole budget where it does not fit."""
    check_divisibility(workload, plan)
    rows, keys, channels = patch(workload, plan)
    registers = rows * (keys + 2 * channels + STATISTICS + 1) + max(keys, channels) + OTHER_REGISTERS
    k_or_p = plan.kv_tile * max(workload.head_dim, plan.q_tile + P_PAD)
    smem = 4 * (plan.q_tile * workload.head_dim + plan.kv_tile * workload.value_dim + k_or_p)
    return resources(plan, registers, smem, arch).check(plan, arch)


def declare(workload, plan, negative_scale=False):
    """The Tensor Expression at the plan's tiles, with as many columns to a statistic as a thread owns; it takes scales of either sign."""
    return online_attention(workload, plan.q_tile, plan.kv_tile, workload.value_dim // plan.thread_columns)


def tile_queries(sch, plan):
    """Cut the rows into query tiles and bring the key tiles above their rows: a query tile now passes over the keys once.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              t in ...
                i_1 in 64
                  e in 16
                    state  [..., ..., ..., 16]
              ax0 in 64
                ax1 in 64
                  O
    """
    b, h, i, e, t = loops_of(sch, "state")
    r, i = sch.split(i, factors=[None, plan.q_tile])
    sch.reorder(b, h, r, t, i, e)
    for block in LAST_BLOCKS:
        sch.reverse_compute_at(block, r)


def share_probabilities(sch, plan):
    """Copy P to shared memory, transposed: the second product sums over all keys of a row, and a thread will have only some of them.

    Keys that the threads of a row store together become neighbours, one padded row of q_tile apart, so that they use different banks.

    Loop nest::

        ax0 in ...
          ax1 in ...
            ax2 in ...
              ax3 in ...
                ax4 in 64
                  P_shared.dyn  [..., ..., ..., 4, 16, ...] shared.dyn
    """
    keys, _ = columns_of(sch, "S", plan, reductions=1)
    product = sch.get_sblock("O_tile")
    sch.cache_read(product, read_index(sch, product, "P"), "shared.dyn", consumer_blocks=[product])  # tile_sum goes on reading P
    sch.transform_layout(P_SHARED, ("write", 0), lambda b, h, i, t, j: (b, h, t, j % keys, j // keys, i))
    sch.storage_align(P_SHARED, 0, axis=4, factor=32, offset=P_PAD)


def stream_keys(sch, plan):
    """Compute everything of a key tile inside the loop over key tiles, the loads first: this is the FlashAttention nest.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ax0 in 64
                ax1 in 64
                  Q_load  [..., ..., ..., 64]
              t in ...
                ax0 in 64
                  ax1 in 64
                    K_load  [..., ..., ..., 64, 64]
                ...
                ax0 in 64
                  ax1 in 64
                    ax2 in 64
                      S  [..., ..., ..., ..., 64]
                ...
                ax0 in 64
                  ax1 in 64
                    P  [..., ..., ..., ..., 64]
                ...
                i_1 in 64
                  e in 16
                    state  [..., ..., ..., 16]
    """
    _b, _h, r, t, _i, _e = loops_of(sch, "state")
    for block in TILE_BLOCKS:
        sch.compute_at(block, t, index=FIRST if block in LOADS else LATEST)
    sch.compute_at("Q_load", r)


def share_tiles(sch, plan):
    """Put Q, K and V tiles into shared memory, Q and K transposed, columns grouped by four as in simt.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ...
              t in ...
                ax0 in 64
                  ax1 in 64
                    K_load  [..., ..., ..., 64, 1, 16, 4] shared.dyn
    """
    keys, key_vector = columns_of(sch, "S", plan, reductions=1)
    channels, vector = columns_of(sch, "O_tile", plan, reductions=1)
    for block in LOADS:
        sch.set_scope(block, 0, "shared.dyn")
    sch.transform_layout("Q_load", ("write", 0), lambda b, h, i, c: (b, h, c, i))
    sch.transform_layout("K_load", ("write", 0), lambda b, h, t, j, c: (b, h, t, c, j % keys // key_vector, j // keys, j % key_vector))
    sch.transform_layout("V_load", ("write", 0), lambda b, h, t, j, c: (b, h, t, j, c % channels // vector, c // channels, c % vector))


def keep_in_registers(sch, plan):
    """Everything else lives in registers. The buffers are still whole tensors here: lowering cuts them to what a thread uses.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ...
              t in ...
                ...
                ax0 in 64
                  ax1 in 64
                    ax2 in 64
                      S  [..., ..., ..., ..., 64] local
    """
    for block in (*PRODUCTS, *ROW_REDUCTIONS, "S_masked", "P", "row_max", "row_sum"):
        sch.set_scope(block, 0, "local")
    for part in range(len(sch.get(sch.get_sblock("state")).writes)):
        sch.set_scope("state", part, "local")


def tile_products(sch, plan):
    """Give each thread a patch of S and of O_tile, and write out a few steps of the sums: outer products of rows and columns.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ...
              t in ...
                ...
                ax0_0 in 8
                  ax1_0 in 16
                    ax2_0 in 8
                      ax2_1 in 8  unrolled
                        ax0_1 in 8  unrolled
                          ax1_1_0 in 1  unrolled
                            ax1_1_1 in 4  vectorized
                              S  [..., ..., ..., ..., 64] local
    """
    for product in PRODUCTS:
        own_product(sch, product, plan)


def tile_elements(sch, plan):
    """Elementwise work and the running state follow the patches; P goes to shared memory by rows, O to global memory by columns.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ...
              t in ...
                ...
                i_1_0 in 8
                  e_0 in 16
                    i_1_1 in 8  unrolled
                      e_1 in 1  unrolled
                        state  [..., ..., ..., 16] local
    """
    for block in ("S_masked", "P", "state"):
        unroll_all(sch, own_patch(sch, block, plan)[1:])
    _, i, j = own_patch(sch, P_SHARED, plan)
    sch.reorder(j, i)
    sch.unroll(j)
    unroll_vectors(sch, i, VECTOR)
    _, vector = columns_of(sch, "O", plan)
    i, c = loops_of(sch, "O", 2)  # split in place: rows past the end are predicated, and such a block cannot be reordered
    sch.unroll(sch.split(i, factors=[plan.thread_rows, None])[1])
    unroll_vectors(sch, sch.split(c, factors=[plan.thread_columns, None])[1], vector)


def tile_rows(sch, plan):
    """Split a row's maximum and sum among its threads; the last two only pick one of the equal copies.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ...
              t in ...
                ...
                ax0_0 in 8
                  ax0_1 in 8
                    ax1_0 in 16
                      ax1_1 in 4  unrolled
                        tile_max  [..., ..., ..., ...] local
    """
    for block in (*ROW_REDUCTIONS, "row_max", "row_sum"):
        i, j = loops_of(sch, block, 2)
        sch.split(i, factors=[plan.thread_rows, None])  # stays a loop: TVM cannot lower a written-out reduction across threads
        sch.unroll(sch.split(j, factors=[plan.thread_columns, None])[1])
    sch.unroll(sch.split(loops_of(sch, "LSE", 1)[0], factors=[plan.thread_rows, None])[1])


def tile_copies(sch, plan):
    """Let all threads load a tile together, as in simt.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              ax1_0_ax0_fused_0 in 8  unrolled
                ax1_0_ax0_fused_1 in 8
                  ax1_0_ax0_fused_2 in 16
                    ax1_1 in 4  vectorized
                      Q_load  [..., ..., 64, ...] shared.dyn
    """
    simt.tile_copies(sch, plan)


def bind_grid(sch, plan):
    """One thread block for each query tile of each head, all on blockIdx.x: the other grid axes end at 65,535.

    Loop nest::

        b_h_i_0_fused in ...  @blockIdx.x
          ...
          t in ...
            ...
            ax0_0 in 8
              ax1_0 in 16
                ax2_0 in 8
                  ax2_1 in 8  unrolled
                    ax0_1 in 8  unrolled
                      ax1_1_0 in 1  unrolled
                        ax1_1_1 in 4  vectorized
                          O_tile  [..., ..., ..., ..., 64] local
    """
    sch.bind(sch.fuse(*loops_of(sch, "state")[:3]), "blockIdx.x")


def bind_threads(sch, plan):
    """Bind rows to threadIdx.y and columns to threadIdx.x, everywhere with the same two extents: TVM does not check that.

    Loop nest::

        b_h_i_0_fused in ...  @blockIdx.x
          ...
          t in ...
            ...
            i_1_0 in 8  @threadIdx.y
              e_0 in 16  @threadIdx.x
                i_1_1 in 8  unrolled
                  e_1 in 1  unrolled
                    state  [..., ..., ..., 16] local
    """
    grid, tile = 1, 2  # loops above a block of the query tile, and above one of a key tile
    places = {block: (tile, tile + 1) for block in (*PRODUCTS, "S_masked", "P", P_SHARED, "state")}
    places |= {block: (tile, tile + 2) for block in ROW_REDUCTIONS} | {block: (tile + 1, tile + 2) for block in ("K_load", "V_load")}
    places |= {block: (grid, grid + 2) for block in ("O", "row_max", "row_sum")} | {"Q_load": (grid + 1, grid + 2)}
    for block, (row, column) in places.items():
        loops = loops_of(sch, block)
        sch.bind(loops[row], "threadIdx.y")
        sch.bind(loops[column], "threadIdx.x")
    sch.bind(loops_of(sch, "LSE")[grid], "threadIdx.y")


def separate_init(sch, plan):
    """Start the sums before their loops and the state before the key tiles. Last, since a sum without its init can no longer be bound.

    Loop nest::

        b_h_i_0_fused in ...  @blockIdx.x
          ...
          i_1_0_init in 8  @threadIdx.y
            e_0_init in 16  @threadIdx.x
              i_1_1_init in 8  unrolled
                e_1_init in 1  unrolled
                  state_init  [..., ..., ..., 16] local
          t in ...
            ...
            i_1_0 in 8  @threadIdx.y
              e_0 in 16  @threadIdx.x
                i_1_1 in 8  unrolled
                  e_1 in 1  unrolled
                    state_update  [..., ..., ..., 16] local
    """
    for product in PRODUCTS:
        sch.decompose_reduction(product, loops_of(sch, product)[4])
    sch.decompose_reduction("state", loops_of(sch, "state")[1])


STAGES = (tile_queries, share_probabilities, stream_keys, share_tiles, keep_in_registers, tile_products, tile_elements, tile_rows,
          tile_copies, bind_grid, bind_threads, separate_init)
