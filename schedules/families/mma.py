"""mma: tensor cores of sm_80 and later, by mma.sync, ldmatrix and cp.async (FlashAttention-2, sections 3.2 and 3.3).

The idea. A thread block takes one tile of query rows and walks over the key tiles; its warps split the rows, so that no warp needs
another's scores. S, P and O stay in registers, in the fragment layout of mma.sync m16n8k16: the accumulator of Q K^T is, after a
cast, an operand of P V, and a row's statistics live in the four lanes (a quad) that hold the row. K and V tiles come through shared
memory, stored with a swizzle that ldmatrix reads without bank conflicts, and are copied by cp.async one tile ahead.

The budget. Registers decide: per thread O takes q_tile * DV / threads, S takes q_tile * kv_tile / threads, of 255. At D = DV = 128
and 128 threads a tile of 128 x 64 takes 128 + 64, and some fifty more for fragments, statistics and addresses. Shared memory holds
Q once, and K and V twice. Head dimensions may be any multiple of 8: products run over channels rounded up to 16, shared tiles have rows
of a multiple of 32, with zeros at their ends.

The finished nest, one line a group of blocks::

    attn  @blockIdx.x
      Q_load                                      cp.async, all threads
      for t in key tiles, last one first          split in two where the mask ends
        K_load V_load of tile t + 1               cp.async, double buffered
        S          @warp: for c, j: ldmatrix, mma
        S_masked tile_max pair_max row_max_new rescale row_max_scaled P tile_sum row_sum_new P_cast    @warp @lane, registers
        O_acc_new  @warp: rescale where a row has a new maximum; for j, c: ldmatrix, mma
      O LSE                                       @warp @lane
"""
from schedules.families.mma_plan import (  # noqa: F401, the family's other half
    COPY_BYTES, NAME, MmaPlan, budget, decline, default_plan, knobs, packed_plan, tile_choices)
from schedules.intrinsics import mma as intrinsics
from schedules.intrinsics.mma import CHANNEL_STEPS
from schedules.lowering import mma_pipeline, rewrite, software_pipeline
from schedules.stages import bind_lanes, copy_cooperatively, loops_of, own_fragment, own_output, own_statistics, read_index, unroll_all
from te_defs.flash_attention import flash_attention_forward
from te_defs.integers import round_up

PIPELINE = "flashtir_mma"
CONFIG = mma_pipeline.CONFIG
#: The first stage that binds threads: what stands before it runs on llvm.
BINDS_AT = "bind_grid"
PLAN = MmaPlan

#: Views have a kernel of their own: addresses by strides change the key loop's registers and spills.
STRIDED = (False, True)

LOADS = ("Q_load", "K_load", "V_load")
STATISTICS = ("row_max_init", "row_sum_init", "tile_max", "pair_max", "row_max_new", "rescale", "row_max_scaled", "tile_sum",
              "row_sum_new", "row_sum_total", "row_sum_inverse")
#: Copies of shared tiles in fragments, as cache_read names them.
FRAGMENTS = ("Q_tile_shared.dyn_warp", "K_tile_shared.dyn_warp", "V_tile_shared.dyn_warp")


def compiler_options(plan):
    """What ptxas is asked for."""
    return {"register_level": plan.register_level}


def declare(workload, plan, negative_scale=False, strided=False, packed=False):
    """The plain function at the plan's tile, with statistics per lane of a quad; makes the intrinsics known that it will need."""
    d, dv = (round_up(size, CHANNEL_STEPS[1]) for size in (workload.head_dim, workload.value_dim))
    intrinsics.register(workload.dtype, {"A": (plan.q_tile, d), "K": (plan.kv_tile, d), "V": (plan.kv_tile, dv)})
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, row_lanes=4, negative_scale=negative_scale, strided=strided,
                                   packed=packed, channel_steps=CHANNEL_STEPS)


def place_buffers(sch, plan):
    """Tiles that are loaded go to shared memory; everything between the products stays in the registers of a warp.

    Loop nest::

        kv
          ...
          qk
            i in 128
              j in 112
                c in 64
                  S  [128, 112] warp
          ...
          pv
            i in 128
              c in 64
                j in 112
                  O_acc_new  [128, 64] warp
    """
    for block in LOADS:
        sch.set_scope(block, 0, "shared.dyn")
    for block in ("O_acc_init", "S", "S_masked", "P", "P_cast", "O_acc_new", *STATISTICS):
        sch.set_scope(block, 0, "warp")


def lay_out_fragments(sch, plan):
    """Lay the matrices out as mma.sync fragments and the row statistics by lane: [tile row, tile column, lane, register].

    Registers per thread: S takes q_tile * kv_tile / threads, O takes q_tile * DV / threads.

    Loop nest::

        softmax
          i in 128
            j in 112
              S_masked  [8, 7, 32, 8] warp
          ...
          i in 128
            l in 4
              rescale  [8, 32, 2] warp
    """
    for block in ("O_acc_init", "S_masked", "P", "P_cast"):
        sch.transform_layout(block, ("write", 0), intrinsics.fragment_layout)
    sch.transform_layout("S_masked", ("read", 0), intrinsics.fragment_layout)
    sch.transform_layout("O_acc", ("read", 0), intrinsics.fragment_layout)
    for block in STATISTICS:
        sch.transform_layout(block, ("write", 0), intrinsics.statistics_layout)


def tile_products(sch, plan):
    """Cut both products into 16 x 16 x 16 blocks, the grain of the tensor cores, and give each warp its rows.

    The reduction runs outside the columns, so that one fragment of Q or P serves all of them.

    Loop nest::

        kv
          ...
          qk
            i_0_0 in 4
              c_0 in 4
                j_0 in 7
                  i_0_1 in 2
                    S_o
                      i_1 in 16
                        j_1 in 16
                          c_1 in 16
                            S  [8, 7, 32, 8] warp
          ...
          pv
            i_0_0 in 4
              j_0 in 7
                c_0 in 4
                  i_0_1 in 2
                    O_acc_new_o
                      i_1 in 16
                        c_1 in 16
                          j_1 in 16
                            O_acc_new  [8, 4, 32, 8] warp
    """
    for product in ("S", "O_acc_new"):
        i, j, k = loops_of(sch, product)
        (i, i_frag), (j, j_frag), (k, k_frag) = (sch.split(loop, factors=[None, 16]) for loop in (i, j, k))
        sch.reorder(i, j, k, i_frag, j_frag, k_frag)
        sch.blockize(i_frag)
        warp, step = sch.split(i, factors=[plan.warps, None])
        sch.reorder(warp, k, j, step)


def stage_fragments(sch, plan):
    """Read the operands of the products from shared memory into fragments, right before they are used.

    Loop nest::

        qk
          i_0_0 in 4
            c_0 in 4
              ...
              j_0 in 7
                ax0_0 in 1  unrolled
                  ax1_0 in 1  unrolled
                    ax0_1 in 16
                      ax1_1 in 16
                        K_tile_shared.dyn_warp  [7, 4, 32, 8] warp
    """
    for product, tile in (("S_o", "Q_tile"), ("S_o", "K_tile"), ("O_acc_new_o", "V_tile")):
        block = sch.get_sblock(product)
        _warp, k, j, _step = loops_of(sch, block)
        fragment = sch.cache_read(block, read_index(sch, block, tile), "warp")
        sch.compute_at(fragment, k if tile == "Q_tile" else j)  # a fragment of Q serves all columns j
    for block in FRAGMENTS:
        i, j = loops_of(sch, block, 2)
        (i, i_frag), (j, j_frag) = (sch.split(loop, factors=[None, 16]) for loop in (i, j))
        sch.reorder(i, j, i_frag, j_frag)
        unroll_all(sch, (i, j))
        sch.transform_layout(block, ("write", 0), intrinsics.fragment_layout)


def bind_grid(sch, plan):
    """One thread block per query tile, head and batch entry, all on blockIdx.x: the other grid axes end at 65,535.

    Loop nest::

        r_b_h_fused in ...  @blockIdx.x
          attn
    """
    b, h, r = loops_of(sch, "attn")
    if plan.heads_first:
        sch.reorder(r, b, h)
    sch.bind(sch.fuse(*loops_of(sch, "attn")), "blockIdx.x")


def copy_tiles(sch, plan):
    """All threads copy the tiles to shared memory together, 16 bytes each, into the swizzled layout that ldmatrix reads.

    Shared memory: q_tile * D for Q and kv_tile * (D + DV) for K and V, these twice once the loop is pipelined; 2 bytes an element. Rows
    that no swizzle fits have a gap behind them.

    Loop nest::

        attn
          load_queries
            i_c_fused_0 in 8  unrolled
              i_c_fused_1 in 4  @threadIdx.y
                i_c_fused_2 in 32  @threadIdx.x
                  i_c_fused_3 in 8  vectorized
                    Q_load  [128, 64] shared.dyn
          ...
          t in ...
            kv
              j_c_fused_0 in 7  unrolled
                j_c_fused_1 in 4  @threadIdx.y
                  j_c_fused_2 in 32  @threadIdx.x
                    j_c_fused_3 in 8  vectorized
                      K_load  [112, 64] shared.dyn
    """
    for block in LOADS:
        columns = int(sch.get(sch.get_sblock(block)).writes[0].source.shape[1])
        turn = copy_cooperatively(sch, block, plan.warps, COPY_BYTES // 2)
        if intrinsics.swizzled(columns):
            sch.annotate(sch.get_sblock(block), "permuted_layout", 1)
        else:
            sch.storage_align(block, 0, axis=0, factor=columns, offset=intrinsics.ROW_GAP)
        if block == "Q_load":  # the pipeline makes K_load and V_load asynchronous
            sch.annotate(turn, rewrite.ASYNC_COPY, 1)


def bind_fragments(sch, plan):
    """Every lane computes the elements of S, P, O and of the statistics that its registers hold.

    Loop nest::

        softmax
          i_0 in 4  @threadIdx.y
            i_3_j_2_fused in 32  @threadIdx.x
              i_1 in 2  unrolled
                j_0 in 7  unrolled
                  j_1 in 2  unrolled
                    i_2 in 2  unrolled
                      j_3 in 2  unrolled
                        S_masked  [8, 7, 32, 8] warp
          i_0 in 4  @threadIdx.y
            i_3_l_fused in 32  @threadIdx.x
              i_1 in 2  unrolled
                i_2 in 2  unrolled
                  s in 14  unrolled
                    p in 2  unrolled
                      tile_max  [8, 32, 2] warp
    """
    for block in ("O_acc_init", "S_masked", "P", "P_cast", "O_acc"):
        own_fragment(sch, block, plan.warps)
    own_output(sch, "O", plan.warps)
    for block in (*STATISTICS, "row_max", "row_sum", "LSE"):
        own_statistics(sch, block, plan.warps)


def bind_products(sch, plan):
    """Warps take their rows of the products, and the products' first values get statements of their own: zero, or rescaled O.

    Loop nest::

        pv
          i_0_0 in 4  @threadIdx.y
            c_0_init in 4  unrolled
              i_0_1_init in 2  unrolled
                O_acc_new_o_init
            ...
            j_0 in 7  unrolled
              c_0 in 4  unrolled
                ...
                i_0_1 in 2  unrolled
                  O_acc_new_o_update
    """
    for product in ("S_o", "O_acc_new_o"):
        warp, k, j, step = loops_of(sch, product)
        sch.bind(warp, "threadIdx.y")
        unroll_all(sch, (k, j, step))
        init = sch.decompose_reduction(product, k)
        i, j = loops_of(sch, sch.get_child_blocks(init)[0], 2)
        bind_lanes(sch, i, j)


def use_tensor_cores(sch, plan):
    """Replace the 16 x 16 copies by ldmatrix and the 16 x 16 x 16 products by mma.sync.

    Loop nest::

        qk
          i_0_0 in 4  @threadIdx.y
            ...
            c_0 in 4  unrolled
              ...
              j_0 in 7  unrolled
                ...
                i_0_1 in 2  unrolled
                  S_o_update
    """
    for block, operand in zip(FRAGMENTS, "AKV"):
        shared = sch.get(sch.get_sblock(block)).reads[0].source
        sch.tensorize(loops_of(sch, block)[-2], intrinsics.ldmatrix_name(operand, shared.dtype, *shared.shape))
    for block, product in (("S", "qk"), ("O_acc_new", "pv")):
        sch.tensorize(loops_of(sch, block)[-3], f"mma_{product}_{shared.dtype}")


def pipeline_loads(sch, plan):
    """Ask for K and V one tile ahead, for the plan's order of statements, and for the vote that skips the rescale.

    Loop nest::

        pv
          i_0_0 in 4  @threadIdx.y
            c_0_init in 4  unrolled
              i_0_1_init in 2  unrolled
                O_acc_new_o_init
    """
    sch.annotate(sch.get_sblock("attn"), software_pipeline.ORDER, plan.order)
    sch.annotate(loops_of(sch, "O_acc_new_o_init")[1], rewrite.LAZY_RESCALE, plan.lazy_rescale)


STAGES = (place_buffers, lay_out_fragments, tile_products, stage_fragments, bind_grid, copy_tiles, bind_fragments, bind_products,
          use_tensor_cores, pipeline_loads)
