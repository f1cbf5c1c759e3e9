"""wgmma: Hopper's asynchronous tensor cores, fed by the tensor memory accelerator (FlashAttention-3, sections 3.1 and 3.2).

The idea. A thread block takes a tile of query rows. Consumer warpgroups of four warps own 64 rows each; one more warpgroup only asks the
tensor memory accelerator for tiles, which land in rings of shared memory and are handed over by barriers. Products are asynchronous: that
of the scores of tile t is issued, then that of the output of tile t - 1, and the exponentials of tile t run beside them; warpgroups may
take turns at issuing (ping-pong). The grid is persistent: a block goes on to its next tile, whose queries and first keys are there by then.

The budget. Registers decide again: per thread a consumer holds O (DV / 2), S (kv_tile / 2) and P (kv_tile / 4), of the 240 registers
that setmaxnreg gives to each of two consumer warpgroups, and 160 to each of three. Shared memory holds Q once or twice, and K and V
once for each stage of their rings. Products run over channels rounded up to 16; shared tiles have rows of whole swizzled lines, at whose
ends the accelerator puts zeros.

The finished nest, one line a group of blocks; pictures below are those of d 64, float16, causal::

    attn  @blockIdx.x                             for wave in the block's work tiles
      Q_load                                      one bulk load
      for t in key tiles, last one first          split in two where the mask ends
        K_load V_load                             bulk loads, as far ahead as the rings reach
        S                                         @warp: one chain of wgmma for each warpgroup
        S_warp                                    the scores are awaited here
        S_masked tile_max .. row_max_seen row_max_new rescale row_max_scaled P tile_sum row_sum_new P_cast    @warp @lane, registers
        O_acc_new                                 @warp: rescale where a row's reference moves; one chain of wgmma
        O_acc row_max row_sum                     the output is awaited here
      O LSE                                       @warp @lane
"""
from schedules.families.wgmma_plan import (  # noqa: F401, the family's other half
    NAME, SLACK, WgmmaPlan, budget, decline, default_plan, further_plans, knobs, tile_choices)
from schedules.intrinsics import wgmma as intrinsics
from schedules.intrinsics.mma import CHANNEL_STEPS, statistics_layout
from schedules.lowering import bulk_loads, polynomial_exp2, rewrite, software_pipeline, warp_roles, wgmma_pipeline
from schedules.stages import bind_lanes, loops_of, own_fragment, own_output, own_statistics
from te_defs.flash_attention import flash_attention_forward
from te_defs.integers import round_up

PIPELINE = "flashtir_wgmma"
CONFIG = wgmma_pipeline.CONFIG
#: The first stage that binds threads: what stands before it runs on llvm.
BINDS_AT = "bind_grid"
PLAN = WgmmaPlan
#: Rows, heads and channels are coordinates of the tensor memory accelerator, and offsets into O and LSE have 64 bits.
MAX_ELEMENTS = 2**40 - 1
#: One kernel takes contiguous tensors and views: the host tells the strides of Q, K and V to the TMA, and only the store of O computes
#: with some; the key loop is the same, instruction by instruction.
STRIDED = (True,)
#: The TMA finds the rows of a sequence by a row number, and has 31 bits for it.
WHOLE_ROWS = True
#: Local memory in the key loop would cost more than any tile gains.
MAX_SPILL_BYTES = 0

LOADS = ("Q_load", "K_load", "V_load")
STATISTICS = ("row_max_init", "row_sum_init", "tile_max", "pair_max", "row_max_new", "rescale", "row_max_scaled", "tile_sum",
              "row_sum_new", "row_sum_total", "row_sum_inverse")
#: The copy of the scores that waits for them, as cache_read names it.
READY = "S_warp"


def statistics_of(plan):
    """Blocks of the declaration that compute row statistics."""
    return STATISTICS + (("row_max_seen",) if plan.lazy_rescale else ())


def compiler_options(plan):
    """What ptxas is asked for: nothing but TVM's own choice."""
    return {}


def declare(workload, plan, negative_scale=False, strided=False):
    """The plain function at the plan's tile, with statistics per lane of a quad; makes the intrinsics known that it will need."""
    d, dv = (round_up(size, CHANNEL_STEPS[0]) for size in (workload.head_dim, workload.value_dim))
    intrinsics.register(workload.dtype, plan.q_tile, plan.kv_tile, d, dv)
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, row_lanes=4, negative_scale=negative_scale,
                                   max_slack=SLACK * plan.lazy_rescale, strided=strided, channel_steps=CHANNEL_STEPS)


def place_buffers(sch, plan):
    """Tiles that are loaded go to shared memory; everything between the products stays in registers. A copy S_warp of the scores,
    later the place to wait for them, goes between the product and the mask.

    Loop nest::

        kv
          ...
          qk
            i in 192
              j in 128
                c in 64
                  S  [192, 128] warp
          softmax
            ax0 in 192
              ax1 in 128
                S_warp  [192, 128] warp
            i in 192
              j in 128
                S_masked  [192, 128] warp
    """
    sch.cache_read("S_masked", 0, "warp")
    for block in LOADS:
        sch.set_scope(block, 0, "shared.dyn")
    for block in ("O_acc_init", "S", "S_masked", "P", "P_cast", "O_acc_new", *statistics_of(plan)):
        sch.set_scope(block, 0, "warp")


def lay_out_accumulators(sch, plan):
    """Lay the matrices out as wgmma accumulators and the row statistics by lane: [16-row step, lane, register].

    Registers per thread: S takes kv_tile / 2, P kv_tile / 4, O takes DV / 2.

    Loop nest::

        softmax
          ...
          i in 192
            j in 128
              S_masked  [12, 32, 64] warp
          ...
          i in 192
            l in 4
              rescale  [12, 32, 2] warp
    """
    for block in ("O_acc_init", READY, "S_masked", "P", "P_cast"):
        sch.transform_layout(block, ("write", 0), intrinsics.accumulator_layout)
    for block in (READY, "O_acc"):
        sch.transform_layout(block, ("read", 0), intrinsics.accumulator_layout)
    for block in statistics_of(plan):
        sch.transform_layout(block, ("write", 0), statistics_layout)


def product_channels(sch):
    """(D, DV) as the products have them, before these are tiled."""
    (*_, c), (_, v, _) = loops_of(sch, "S"), loops_of(sch, "O_acc_new")
    return int(sch.get(c).extent), int(sch.get(v).extent)


def lay_out_boxes(sch, plan):
    """Lay the shared tiles out as the boxes that a bulk load writes, [chunk, row, channel of the chunk], and make each copy one block.

    Loop nest::

        K_load_o
          j in 128
            c in 64
              K_load  [1, 128, 64] shared.dyn
    """
    d, dv = product_channels(sch)
    for block, channels in zip(LOADS, (d, d, dv)):
        sch.transform_layout(block, ("write", 0), intrinsics.box_layout(intrinsics.chunk_of(channels)))
        sch.annotate(sch.blockize(loops_of(sch, block)[-2]), bulk_loads.BULK_LOAD, block[0])


def tile_products(sch, plan):
    """Give each warp its 16 rows of both products, all columns and the whole reduction: what one chain of wgmma computes.

    Loop nest::

        kv
          ...
          qk
            i_0 in 12
              c_0 in 1
                S_o
                  i_1 in 16
                    j in 128
                      c_1 in 64
                        S  [12, 32, 64] warp
          ...
          pv
            i_0 in 12
              j_0 in 1
                O_acc_new_o
                  i_1 in 16
                    c in 64
                      j_1 in 128
                        O_acc_new  [12, 32, 32] warp
    """
    for product in ("S", "O_acc_new"):
        i, j, k = loops_of(sch, product)
        warp, row = sch.split(i, factors=[plan.warps, None])
        whole, k = sch.split(k, factors=[1, None])
        sch.reorder(warp, whole, row, j, k)
        sch.blockize(row)


def bind_grid(sch, plan):
    """One thread block per query tile, head and batch entry, all on blockIdx.x: the other grid axes end at 65,535.

    Loop nest::

        b_h_r_fused_1 in 132  @blockIdx.x
          b_h_r_fused_0 in ...
            attn
    """
    b, h, r = loops_of(sch, "attn")
    tile = sch.fuse(b, h, r)
    if plan.blocks:
        wave, tile = sch.split(tile, factors=[None, plan.blocks])
        sch.reorder(tile, wave)
        sch.annotate(wave, warp_roles.WAVES, 1)
    sch.bind(tile, "blockIdx.x")


def bind_accumulators(sch, plan):
    """Every lane computes the elements of S, P, O and of the statistics that its registers hold.

    Loop nest::

        softmax
          ...
          i_0 in 12  @threadIdx.y
            i_3_j_2_fused in 32  @threadIdx.x
              i_1 in 1  unrolled
                j_0 in 8  unrolled
                  j_1 in 2  unrolled
                    i_2 in 2  unrolled
                      j_3 in 2  unrolled
                        S_masked  [12, 32, 64] warp
          i_0 in 12  @threadIdx.y
            i_3_l_fused in 32  @threadIdx.x
              i_1 in 1  unrolled
                i_2 in 2  unrolled
                  s in 16  unrolled
                    p in 2  unrolled
                      tile_max  [12, 32, 2] warp
    """
    for block in ("O_acc_init", "S_masked", "P", "P_cast"):
        own_fragment(sch, block, plan.warps)
    own_output(sch, "O", plan.warps)
    for block in (*statistics_of(plan), "row_max", "row_sum", "LSE"):
        own_statistics(sch, block, plan.warps)


def bind_products(sch, plan):
    """Warps take their rows of the products, and the products' first values get statements of their own: zero, or rescaled O.

    Loop nest::

        pv
          i_0 in 12  @threadIdx.y
            O_acc_new_o_init
            ...
            j_0 in 1
              O_acc_new_o_update
    """
    for product in ("S_o", "O_acc_new_o"):
        warp, whole = loops_of(sch, product)
        sch.bind(warp, "threadIdx.y")
        init = sch.decompose_reduction(product, whole)
        i, j = loops_of(sch, sch.get_child_blocks(init)[0], 2)
        column = bind_lanes(sch, i, j)
        if product == "O_acc_new_o":
            sch.annotate(column, rewrite.LAZY_RESCALE, plan.lazy_rescale)


def use_tensor_cores(sch, plan):
    """Replace the products by wgmma, and the copies behind them by waits.

    Loop nest::

        kv
          ...
          qk
            i_0 in 12  @threadIdx.y
              ...
              c_0 in 1
                S_o_update
          ...
          softmax
            ax0_0 in 12  @threadIdx.y
              S_warp_o  [12, 32, 64] warp
    """
    q = sch.get(sch.get_sblock("Q_load")).writes[0].source
    names = intrinsics.names(q.dtype, plan.q_tile, plan.kv_tile, *product_channels(sch))
    for block in (READY, "O_acc"):
        i, _j = loops_of(sch, block, 2)
        warp, row = sch.split(i, factors=[plan.warps, None])
        sch.bind(warp, "threadIdx.y")
        sch.tensorize(row, names["scores" if block == READY else "output"])
    for block, product in (("S", "qk"), ("O_acc_new", "pv")):
        sch.tensorize(loops_of(sch, block)[-3], names[product])


def overlap(sch, plan):
    """Ask for the software pipeline in which a tile's output product follows the next tile's score product, and for the warps' roles.

    What lowering makes of it (software_pipeline.expand_overlap, then warp_roles.split_roles)::

        loader      for wave: K(0), Q; for t: K(t + 1), V(t); V(last)
        consumers   for wave: issue S(0); wait; softmax(0)
                              for t: issue S(t + 1) and O(t); wait for S; softmax(t + 1); wait for O; rescale O; P to 16 bits
                              issue O(last); wait; store O and LSE

    Loop nest::

        b_h_r_fused_1 in 132  @blockIdx.x
          b_h_r_fused_0 in ...
            attn
    """
    attn = sch.get_sblock("attn")
    sch.annotate(attn, software_pipeline.OVERLAP, plan.lazy_rescale)
    for knob in warp_roles.KNOBS:
        sch.annotate(attn, f"{warp_roles.PREFIX}{knob}", getattr(plan, knob))
    _warp, _lane, _step, column, *_ = loops_of(sch, "P")
    sch.annotate(column, polynomial_exp2.POLYNOMIAL_SHARE, plan.polynomial_share)
    sch.annotate(loops_of(sch, "row_sum_new")[-1], rewrite.LATE_WAIT, plan.late_wait)


STAGES = (place_buffers, lay_out_accumulators, lay_out_boxes, tile_products, bind_grid, bind_accumulators, bind_products,
          use_tensor_cores, overlap)
