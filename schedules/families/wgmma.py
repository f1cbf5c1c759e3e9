"""wgmma: Hopper's asynchronous tensor cores, fed by the tensor memory accelerator (FlashAttention-3, sections 3.1 and 3.2).

The idea. A thread block takes a tile of query rows; consumer warpgroups of four warps own 64 rows each, and one more warpgroup does nothing
but ask the tensor memory accelerator for tiles, which land in rings of shared memory and are handed over by mbarriers. Products are
asynchronous: that of the scores of tile t is issued, then that of the output of tile t - 1, and the exponentials of tile t run while the
tensor cores work. Where warpgroups take turns at issuing products (ping-pong), one computes exponentials while the other's products run.

The budget. Registers decide again: per thread a consumer holds 64 rows' worth of O (DV / 2), S (kv_tile / 2) and P (kv_tile / 4), of the 240
that setmaxnreg gives to two consumer warpgroups, and 160 to three. Shared memory holds Q once, and K and V once for each stage of their rings.

The finished nest, one line a group of blocks::

    attn  @blockIdx.x
      Q_load                                      one bulk load
      for t in key tiles, last one first          split in two where the mask ends
        K_load V_load of tile t + 1 and t         bulk loads by the loader warpgroup, as far ahead as the rings reach
        S          @warp: one chain of wgmma for each warpgroup
        O_acc_new of tile t - 1                   issued behind it, runs during the exponentials
        S_ready S_masked tile_max pair_max row_max_new rescale row_max_scaled P tile_sum row_sum_new    @warp @lane, registers
        O_acc rescaled, P_cast                    when that product is done
      O LSE                                       @warp @lane
"""
from dataclasses import dataclass

from schedules.intrinsics import wgmma as intrinsics
from schedules.intrinsics.mma import statistics_layout
from schedules.lowering import bulk_loads, polynomial_exp2, rewrite, software_pipeline, warp_roles, wgmma_pipeline
from schedules.plan import Budget, Plan, fitting, require
from schedules.stages import loops_of, own_fragment, own_statistics, own_wide_rows, unroll_all
from te_defs.flash_attention import flash_attention_forward

NAME = "wgmma"
PIPELINE = "flashtir_wgmma"
CONFIG = wgmma_pipeline.CONFIG
#: The first stage that binds threads: what stands before it runs on llvm.
BINDS_AT = "bind_grid"

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
LOADS = ("Q_load", "K_load", "V_load")
STATISTICS = ("row_max_init", "row_sum_init", "tile_max", "pair_max", "row_max_new", "rescale", "row_max_scaled", "tile_sum",
              "row_sum_new", "row_sum_total", "row_sum_inverse")
#: Registers beside S, P and O: statistics, addresses, barriers (read off compiled kernels).
OTHER_REGISTERS = 40
#: Bytes of shared memory for barriers.
BARRIER_BYTES = 1024


@dataclass(frozen=True)
class WgmmaPlan(Plan):
    """Knobs of the wgmma family; q_tile is 64 rows for each consumer warpgroup.

    blocks          thread blocks of a persistent grid, one for each multiprocessor; 0: one for each query tile
    order_of_work   in which blocks of a persistent grid take their tiles, schedules.lowering.order_of_work
    stages          copies of a K or V tile in its ring
    query_stages    copies of the Q tile: with 2 the next tile's queries come while this one is computed
    ping_pong       1: consumer warpgroups take turns at issuing products
    lazy_rescale    1: skip the rescale of O when no row of the warp has a new maximum
    hold            1: keep the exponentials in front of the wait for the output's product, beside which they are to run
    order           execution order of the key loop's statements, an index into software_pipeline.OVERLAPPED_ORDERS
    """

    blocks: int = 0
    order_of_work: int = 0
    stages: int = 2
    query_stages: int = 1
    ping_pong: int = 1
    lazy_rescale: int = 0
    hold: int = 1
    polynomial_share: int = 0
    order: int = 0

    @property
    def warps(self):
        """Consumer warps; each owns 16 query rows."""
        return self.q_tile // intrinsics.WARP_ROWS


PLAN = WgmmaPlan


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    if arch.kind != "cuda":
        return f"{arch.name} is no CUDA GPU"
    if not arch.wgmma:
        return f"{arch.name} has no wgmma (sm_90a has)"
    if workload.dtype not in intrinsics.PTX_DTYPE:
        return f"tensor cores take 16-bit inputs, not {workload.dtype}"
    if (workload.head_dim, workload.value_dim) not in HEAD_DIMS:
        return f"head dimensions must be among {HEAD_DIMS}, not {workload.head_dim} and {workload.value_dim}"
    return None


def default_plan(workload, arch):
    """The seed: the architecture row's tile for the head dimension and mask."""
    q_tile, kv_tile = arch.wgmma_tile[workload.head_dim, workload.mask]
    return WgmmaPlan(q_tile, kv_tile, blocks=arch.multiprocessors, order_of_work=int(workload.mask == "causal"))


def tile_choices(workload, arch):
    """Plans of all tile shapes that fit, the seed's first; each is a search task of its own."""
    seed = default_plan(workload, arch)
    plans = [seed] + [seed.but(q_tile=q_tile, kv_tile=kv_tile) for q_tile in (128, 192, 64) for kv_tile in range(64, 225, 16)
                      if (q_tile, kv_tile) != (seed.q_tile, seed.kv_tile)]
    return fitting(plans, budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's tile shape; heads_first reorders loops, so the seed decides it."""
    return {"stages": (2, 3, 4), "ping_pong": (0, 1), "order": tuple(range(len(software_pipeline.OVERLAPPED_ORDERS)))}


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    d, dv = workload.head_dim, workload.value_dim
    groups = plan.q_tile // intrinsics.GROUP_ROWS
    require(plan.q_tile in (64, 128, 192), "q_tile must be 64 rows for each of one to three consumer warpgroups", plan.q_tile,
            "choose 64, 128 or 192")
    require(plan.kv_tile % 16 == 0 and plan.kv_tile <= 256, "kv_tile must be a multiple of 16 up to 256", plan.kv_tile, "round it")
    return Budget((
        ("threads", 128 * (groups + 1), arch.threads_per_block, "of a block"),
        ("shared memory", 2 * (plan.query_stages * plan.q_tile * d + plan.stages * plan.kv_tile * (d + dv)) + BARRIER_BYTES, arch.smem_bytes, "bytes"),
        ("registers, about", dv // 2 + plan.kv_tile // 2 + plan.kv_tile // 4 + OTHER_REGISTERS,
         warp_roles.registers(groups)[1], "per consumer thread"),
    )).check(plan, arch)


def compiler_options(plan):
    """What ptxas is asked for."""
    return {"register_level": 10}


def declare(workload, plan, negative_scale=False):
    """The plain function at the plan's tile, with statistics per lane of a quad; makes the intrinsics known that it will need."""
    intrinsics.register(workload.dtype, plan.q_tile, plan.kv_tile, workload.head_dim, workload.value_dim)
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, row_lanes=4, negative_scale=negative_scale,
                                   max_slack=8 * plan.lazy_rescale)


def statistics_of(plan):
    return STATISTICS + (("row_max_seen",) if plan.lazy_rescale else ())


def place_buffers(sch, plan):
    """Tiles that are loaded go to shared memory; everything between the products stays in registers. A copy S_warp of the scores,
    later the place to wait for them, goes between the product and the mask.

    Loop nest::

        S
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

        S
    """
    for block in ("O_acc_init", READY, "S_masked", "P", "P_cast"):
        sch.transform_layout(block, ("write", 0), intrinsics.accumulator_layout)
    for block in (READY, "O_acc"):
        sch.transform_layout(block, ("read", 0), intrinsics.accumulator_layout)
    for block in statistics_of(plan):
        sch.transform_layout(block, ("write", 0), statistics_layout)


READY = "S_warp"


def lay_out_boxes(sch, plan):
    """Lay the shared tiles out as the boxes that a bulk load writes, [chunk, row, channel of the chunk], and make each copy one block.

    Loop nest::

        S
    """
    for block in LOADS:
        channels = int(sch.get(sch.get_sblock(block)).writes[0].source.shape[1])
        sch.transform_layout(block, ("write", 0), intrinsics.box_layout(intrinsics.chunk_of(channels)))
        sch.annotate(sch.blockize(loops_of(sch, block)[-2]), bulk_loads.BULK_LOAD, block[0])


def tile_products(sch, plan):
    """Give each warp its 16 rows of both products, all columns and the whole reduction: what one chain of wgmma computes.

    Loop nest::

        S
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

        S
    """
    for block in ("O_acc_init", "S_masked", "P", "P_cast"):
        own_fragment(sch, block, plan.warps)
    own_wide_rows(sch, "O", plan.warps)
    for block in (*statistics_of(plan), "row_max", "row_sum", "LSE"):
        own_statistics(sch, block, plan.warps)


def bind_products(sch, plan):
    """Warps take their rows of the products, and the products' first values get statements of their own: zero, or rescaled O.

    Loop nest::

        S
    """
    for product in ("S_o", "O_acc_new_o"):
        warp, whole = loops_of(sch, product)
        sch.bind(warp, "threadIdx.y")
        init = sch.decompose_reduction(product, whole)
        i, j = loops_of(sch, sch.get_child_blocks(init)[0], 2)
        half, row = sch.split(i, factors=[2, 8])
        column, quad, pair = sch.split(j, factors=[None, 4, 2])
        sch.reorder(row, quad, column, half, pair)
        sch.bind(sch.fuse(row, quad), "threadIdx.x")
        unroll_all(sch, (column, half, pair))
    sch.annotate(column, rewrite.LAZY_RESCALE, plan.lazy_rescale)


def use_tensor_cores(sch, plan):
    """Replace the products by wgmma, and the copies behind them by waits.

    Loop nest::

        S
    """
    names = intrinsics.names(*sizes_of(sch, plan))
    for block in (READY, "O_acc"):
        i, _j = loops_of(sch, block, 2)
        warp, row = sch.split(i, factors=[plan.warps, None])
        sch.bind(warp, "threadIdx.y")
        sch.tensorize(row, names["scores" if block == READY else "output"])
    for block, product in (("S", "qk"), ("O_acc_new", "pv")):
        sch.tensorize(loops_of(sch, block)[-3], names[product])


def sizes_of(sch, plan):
    """(dtype, q_tile, kv_tile, D, DV) of the function that is scheduled."""
    q, v = (sch.get(sch.get_sblock(block)).writes[0].source for block in ("Q_load", "V_load"))
    return q.dtype, plan.q_tile, plan.kv_tile, int(q.shape[0] * q.shape[2]), int(v.shape[0] * v.shape[2])


def overlap(sch, plan):
    """Ask for the software pipeline in which a tile's output product follows the next tile's score product, and for the warps' roles.

    Loop nest::

        attn
    """
    attn = sch.get_sblock("attn")
    sch.annotate(attn, software_pipeline.OVERLAPPED_ORDER, 3 if plan.lazy_rescale else 0)
    sch.annotate(attn, warp_roles.STAGES, plan.stages)
    sch.annotate(attn, warp_roles.PING_PONG, plan.ping_pong)
    sch.annotate(attn, warp_roles.QUERY_STAGES, plan.query_stages)
    sch.annotate(attn, warp_roles.ORDER_OF_WORK, plan.order_of_work)
    sch.annotate(loops_of(sch, "P")[3], polynomial_exp2.POLYNOMIAL_SHARE, plan.polynomial_share)
    sch.annotate(loops_of(sch, "row_sum_new")[-1], rewrite.HOLD, plan.hold)


STAGES = (place_buffers, lay_out_accumulators, lay_out_boxes, tile_products, bind_grid, bind_accumulators, bind_products,
          use_tensor_cores, overlap)
