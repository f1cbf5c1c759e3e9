"""mma, backward: the two functions of te_defs/flash_attention_backward.py on tensor cores of sm_80 and later (FlashAttention-2, section 3).

The idea is that of mma.py, twice. A thread block keeps a tile of rows and walks over the tiles of the other side; its warps split the rows
that stay, so that no warp needs another's scores. For dQ these are queries, for dK and dV keys: there S, P, dP and dS lie transposed in
the fragments of mma.sync, the scores of a key in one row. So P and dS are, after a cast, the first operand of the products that add to
dV, dK and dQ, as P is in the forward pass; the tile that was the second operand of S or dP is read once more, transposed on its way.

The budget. Per thread the accumulators take rows * (D + DV) / threads of 255 registers (dQ: rows * D), S and dP q_tile * kv_tile / threads
each. Shared memory holds the tiles that stay once and those that come by twice, and the statistics of q_tile queries.

Pictures are those of dK and dV, d 64, float16, causal.
"""
from schedules import roles
from schedules.families import mma_turns
from schedules.families.backward_roles import MMA_ROLES as ROLES
from schedules.families.mma_backward_plan import (  # noqa: F401, the family's other half
    NAME, PLAN, budget, compiler_options, decline, default_plan, knobs, tile_choices)
from schedules.families.mma_plan import COPY_BYTES
from schedules.intrinsics import mma as intrinsics
from schedules.lowering import mma_pipeline
from schedules.lowering.aligned_strides import ALIGNED_VIEWS
from schedules.lowering.few_barriers import FEW_BARRIERS
from schedules.stages import bind_lanes, copy_cooperatively, loops_of, own_fragment, own_output, read_index, share_columns, unroll_all

PIPELINE = "flashtir_mma"
CONFIG = mma_pipeline.CONFIG
BINDS_AT = "bind_grid"
#: Views have kernels of their own, as in the forward pass.
STRIDED = (False, True)


def role_of(name, _plan):
    """The Role of a name."""
    return ROLES[name]


def register(workload, plan):
    """Make the intrinsics known that a plan's tiles need."""
    d, dv = workload.head_dim, workload.value_dim
    for rows, columns in {(plan.q_tile, d), (plan.q_tile, dv), (plan.kv_tile, d), (plan.kv_tile, dv)}:
        intrinsics.register(workload.dtype, {operand: (rows, columns) for operand in "AKV"})


def declare(role, workload, plan):
    """The plain function at the plan's tile; makes the intrinsics known that it will need."""
    return declared(ROLES[role], workload, plan)


def declared(role, workload, plan):
    """The same of a Role."""
    register(workload, plan)
    return role.declare(workload, plan.q_tile, plan.kv_tile).with_attr({ALIGNED_VIEWS: True, FEW_BARRIERS: True})


def layout_of(role, block):
    """Index map of a block's matrix in fragments: scores lie transposed where keys are the rows."""
    return (lambda i, j: intrinsics.fragment_layout(j, i)) if role.transposes(block) else intrinsics.fragment_layout


def statistics_of(role):
    """(block that fetches a statistic, block that stores it in shared memory): two where they come by with the tiles."""
    blocks = [(mma_turns.FETCH.format(it), mma_turns.STORE.format(it)) for it in mma_turns.STATISTICS]
    return [(fetch, store if store in role.statements else fetch) for fetch, store in blocks]


def place_buffers(sch, plan, role):
    """Tiles and statistics go to shared memory, statistics that come by on their way through registers; everything between the products
    stays in the registers of a warp.

    Loop nest::

        rows
          i in 48
            c in 64
              Q_load  [48, 64] shared.dyn
          ...
          qk
            i in 48
              j in 128
                c in 64
                  S  [48, 128] warp
    """
    for fetch, store in statistics_of(role):
        if fetch != store:
            sch.cache_write(fetch, 0, "local")
        sch.set_scope(store, 0, "shared.dyn")
    for block in (*role.stays, *role.streams):
        sch.set_scope(block, 0, "shared.dyn")
    for block in role.written:
        sch.set_scope(block, 0, "warp")


def lay_out_fragments(sch, plan, role):
    """Lay all matrices out as mma.sync fragments: [tile row, tile column, lane, register].

    Loop nest::

        rows
          ...
          softmax
            i in 48
              j in 128
                P  [8, 3, 32, 8] warp
          ...
          pdo
            j in 128
              c in 64
                i in 48
                  dV_acc_new  [8, 4, 32, 8] warp
    """
    for block in role.written:
        sch.transform_layout(block, ("write", 0), layout_of(role, block))


def tile_products(sch, plan, role):
    """Cut the products into 16 x 16 x 16 blocks, the grain of the tensor cores, and give each warp its rows.

    The reduction runs outside the columns, so that one fragment of the first operand serves all of them.

    Loop nest::

        rows
          ...
          qk
            j_0_0 in 4
              c_0 in 4
                i_0 in 3
                  j_0_1 in 2
                    S_o
                      i_1 in 16
                        j_1 in 16
                          c_1 in 16
                            S  [8, 3, 32, 8] warp
          ...
          pdo
            j_0_0 in 4
              i_0 in 3
                c_0 in 4
                  j_0_1 in 2
                    dV_acc_new_o
                      j_1 in 16
                        c_1 in 16
                          i_1 in 16
                            dV_acc_new  [8, 4, 32, 8] warp
    """
    for product in role.products:
        (row, *grain), (column, *grain_2), (k, *grain_3) = (sch.split(loop, factors=[None, 16]) for loop in loops_of(sch, product.block))
        grain += grain_2 + grain_3
        if product.transposed:
            row, column = column, row
        sch.reorder(row, column, k, *grain)
        sch.blockize(grain[0])
        rows, parts = plan.shares(product.block)
        warp, step = sch.split(row, factors=[rows, None])
        sch.reorder(warp, column, k, step)
        warp, column = share_columns(sch, warp, column, parts)
        sch.reorder(warp, k, column, step)


def fragments_of(sch, product, block):
    """(block that copies a tile to fragments, operand of ldmatrix) for each tile that a product reads from shared memory."""
    producers = {sch.get(it).name_hint: it for it in sch.get_producers(block)}
    for tile, operand in ((product.first, "T" if product.first_turned else "A"), (product.second, "V" if product.turned else "K")):
        if tile is not None:
            yield next(it for name, it in producers.items() if name.startswith(f"{tile}_shared")), operand


def stage_fragments(sch, plan, role):
    """Read the operands of the products from shared memory into fragments, right before they are used.

    Loop nest::

        rows
          ...
          pdo
            j_0_0 in 4
              i_0 in 3
                c_0 in 4
                  ax0_0 in 1  unrolled
                    ax1_0 in 1  unrolled
                      ax0_1 in 16
                        ax1_1 in 16
                          dO_tile_shared.dyn_warp  [3, 4, 32, 8] warp
          ...
          dov
            j_0_0 in 4
              c_0 in 4
                ax0_0 in 2  unrolled
                  ax1_0 in 1  unrolled
                    ax0_1 in 16
                      ax1_1 in 16
                        V_tile_shared.dyn_warp  [8, 4, 32, 8] warp
    """
    for product in role.products:
        block = sch.get_sblock(f"{product.block}_o")
        _warp, k, column, _step = loops_of(sch, block)
        for tile, at in ((product.first, k), (product.second, column)):  # a fragment of the first serves all columns
            if tile is not None:
                sch.compute_at(sch.cache_read(block, read_index(sch, block, tile), "warp"), at)
        for fragment, operand in fragments_of(sch, product, block):
            i, j = loops_of(sch, fragment, 2)
            (i, i_frag), (j, j_frag) = (sch.split(loop, factors=[None, 16]) for loop in (i, j))
            sch.reorder(i, j, i_frag, j_frag)
            unroll_all(sch, (i, j))
            sch.transform_layout(fragment, ("write", 0), (lambda i, j: intrinsics.fragment_layout(j, i)) if operand == "T"
                                 else intrinsics.fragment_layout)


def bind_grid(sch, plan, role):
    """One thread block per tile that stays, head and batch entry, all on blockIdx.x: the other grid axes end at 65,535.

    Loop nest::

        b_g_r_fused in ...  @blockIdx.x
          attn
    """
    sch.bind(sch.fuse(*loops_of(sch, "attn")), "blockIdx.x")


def copy_tiles(sch, plan, role):
    """All threads copy the tiles to shared memory together, 16 bytes each, into the swizzled layout that ldmatrix reads.

    Loop nest::

        rows
          i_c_fused_0 in 3  unrolled
            i_c_fused_1 in 4  @threadIdx.y
              i_c_fused_2 in 32  @threadIdx.x
                i_c_fused_3 in 8  vectorized
                  Q_load  [48, 64] shared.dyn
          ...
          statistics
            i_0 in 1  unrolled
              i_1 in 4  @threadIdx.y
                i_2 in 32  @threadIdx.x
                  LSE_load  [48] local
    """
    for block in (*role.stays, *role.streams):
        copy_cooperatively(sch, block, plan.warps, COPY_BYTES // 2)
        sch.annotate(sch.get_sblock(block), "permuted_layout", 1)
    for block in dict.fromkeys(it for pair in statistics_of(role) for it in pair):
        turn, warp, lane = sch.split(loops_of(sch, block)[-1], factors=[None, plan.warps, intrinsics.LANES])
        sch.bind(warp, "threadIdx.y")
        sch.bind(lane, "threadIdx.x")
        sch.unroll(turn)


def bind_fragments(sch, plan, role):
    """Every lane computes the elements of scores and accumulators that its registers hold.

    Loop nest::

        rows
          ...
          gradient
            j_0 in 4  @threadIdx.y
              j_3_i_2_fused in 32  @threadIdx.x
                j_1 in 2  unrolled
                  i_0 in 3  unrolled
                    i_1 in 2  unrolled
                      j_2 in 2  unrolled
                        i_3 in 2  unrolled
                          dS  [8, 3, 32, 8] warp
          ...
          back
            j_0 in 4  @threadIdx.y
              j_3_c_2_fused in 32  @threadIdx.x
                j_1 in 2  unrolled
                  c_0 in 4  unrolled
                    c_1 in 2  unrolled
                      j_2 in 2  unrolled
                        c_3 in 2  unrolled
                          dK_acc  [8, 4, 32, 8] warp
    """
    for block in role.scores:
        if role.rows == "j":
            sch.reorder(*reversed(loops_of(sch, block, 2)))
        own_fragment(sch, block, *plan.shares(block))
    for init, back, store in role.sums:
        own_fragment(sch, init, *plan.shares(init))
        own_fragment(sch, back, *plan.shares(back))
        own_output(sch, store, *plan.shares(store))


def bind_products(sch, plan, role):
    """Warps take their rows of the products, and the products' first values get statements of their own.

    Loop nest::

        dov
          j_0_0 in 4  @threadIdx.y
            i_0_init in 3  unrolled
              j_0_1_init in 2  unrolled
                dP_o_init
            ...
            c_0 in 4  unrolled
              ...
              i_0 in 3  unrolled
                ...
                j_0_1 in 2  unrolled
                  dP_o_update
    """
    for product in role.products:
        block = f"{product.block}_o"
        warp, k, column, step = loops_of(sch, block)
        sch.bind(warp, "threadIdx.y")
        unroll_all(sch, (k, column, step))
        init = sch.get_child_blocks(sch.decompose_reduction(block, k))[0]
        i, j = loops_of(sch, init, 2)
        if product.transposed:
            sch.reorder(j, i)
            i, j = j, i
        bind_lanes(sch, i, j)


def use_tensor_cores(sch, plan, role):
    """Replace the 16 x 16 copies by ldmatrix and the 16 x 16 x 16 products by mma.sync.

    Loop nest::

        dsq
          j_0_0 in 4  @threadIdx.y
            ...
            i_0 in 3  unrolled
              c_0 in 4  unrolled
                ...
                j_0_1 in 2  unrolled
                  dK_acc_new_o_update
    """
    for product in role.products:
        block = sch.get_sblock(f"{product.block}_o_update")
        for fragment, operand in list(fragments_of(sch, product, block)):
            shared = sch.get(fragment).reads[0].source
            sch.tensorize(loops_of(sch, fragment)[-2], intrinsics.ldmatrix_name(operand, shared.dtype, *shared.shape))
        sch.tensorize(loops_of(sch, product.block)[-3], f"mma_{product.form}_{shared.dtype}")


def pipeline_loads(sch, plan, role):
    """Copy the tiles that stream by one turn ahead, by cp.async, double buffered.

    Loop nest::

        rows
          i_c_fused_0 in 3  unrolled
            i_c_fused_1 in 4  @threadIdx.y
              i_c_fused_2 in 32  @threadIdx.x
                i_c_fused_3 in 8  vectorized
                  Q_load  [48, 64] shared.dyn
    """
    mma_turns.order(sch, loops_of(sch, role.turn)[-1], role.statements, role.statements)


STAGES = (place_buffers, lay_out_fragments, tile_products, stage_fragments, bind_grid, copy_tiles, bind_fragments, bind_products,
          use_tensor_cores, pipeline_loads)


def schedule(role, workload, plan, stages=None, strided=False):
    """A fresh Schedule of a function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(role, workload, plan), STAGES[:stages], plan, role_of(role, plan), strided)
