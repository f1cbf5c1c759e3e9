"""wgmma: Hopper's asynchronous tensor cores, fed by the tensor memory accelerator (FlashAttention-3, sections 3.1 and 3.2).

The idea. A thread block takes a tile of query rows. Consumer warpgroups of four warps own 64 rows each; one more warpgroup only asks the
tensor memory accelerator for tiles, which land in rings of shared memory and are handed over by barriers. Products are asynchronous: that
of the scores of tile t is issued, then that of the output of tile t - 1, and the exponentials of tile t run beside them; warpgroups may
take turns at issuing (ping-pong). The grid is persistent: a block goes on to its next tile, whose queries and first keys are there by then.

The budget. Registers decide again: per thread a consumer holds O (DV / 2), S (kv_tile / 2) and P (kv_tile / 4), of the 240 registers
that setmaxnreg gives to each of two consumer warpgroups, and 160 to each of three. Shared memory holds Q once or twice, and K and V
once for each stage of their rings.

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
from dataclasses import dataclass, replace

from schedules.intrinsics import wgmma as intrinsics
from schedules.intrinsics.mma import statistics_layout
from schedules.lowering import bulk_loads, order_of_work, polynomial_exp2, rewrite, software_pipeline, warp_roles, wgmma_pipeline
from schedules.plan import Budget, Calls, Plan, fitting, require
from schedules.stages import loops_of, own_fragment, own_statistics, own_wide_rows, unroll_all
from te_defs.flash_attention import flash_attention_forward

NAME = "wgmma"
PIPELINE = "flashtir_wgmma"
CONFIG = wgmma_pipeline.CONFIG
BINDS_AT = "bind_grid"  # the first stage that binds threads: what stands before it runs on llvm

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
#: Rows, heads and channels are coordinates of the tensor memory accelerator, and offsets into O and LSE have 64 bits.
MAX_ELEMENTS = 2**40 - 1
MAX_SPILL_BYTES = 0  # local memory in the key loop would cost more than any tile gains
LOADS = ("Q_load", "K_load", "V_load")
STATISTICS = ("row_max_init", "row_sum_init", "tile_max", "pair_max", "row_max_new", "rescale", "row_max_scaled", "tile_sum",
              "row_sum_new", "row_sum_total", "row_sum_inverse")
READY = "S_warp"  # the copy of the scores that waits for them, as cache_read names it
LOADER_REGISTERS = {1: 56, 2: 24, 3: 32}  # by consumer warpgroups, as FlashAttention-3 has them
#: Registers beside S, P and O: statistics, addresses, barriers (read off compiled kernels).
OTHER_REGISTERS = 32
SLACK = 8  # powers of two by which scores may outgrow their row's reference value where the rescale is lazy


@dataclass(frozen=True)
class WgmmaPlan(Plan):
    """Knobs of the wgmma family; q_tile is 64 rows for each consumer warpgroup.

    blocks             thread blocks of a persistent grid, one for each multiprocessor; 0: one for each query tile
    order_of_work      in which the blocks of a persistent grid take their tiles, schedules.lowering.order_of_work
    shared_decode      1: the loader works out what the next tile of a persistent grid is, and tells the consumers
    stages             copies of a K or V tile in its ring
    query_stages       copies of the Q tile: with 2 the next tile's queries come while this one is computed
    ping_pong          1: consumer warpgroups take turns at issuing products
    late_wait          1: keep the exponentials in front of the wait for the output's product, beside which they are to run
    lazy_rescale       1: let scores outgrow a row's reference value by 2^SLACK, and skip the rescale of O where no row of a warp moves it
    polynomial_share   eighths of the exponentials that run on the multiply-add units
    loader_registers   registers per thread that the loader warpgroup keeps, a multiple of 8; the consumers share the rest
    """

    blocks: int = 0
    order_of_work: int = 0
    shared_decode: int = 0
    stages: int = 2
    query_stages: int = 1
    ping_pong: int = 1
    late_wait: int = 1
    lazy_rescale: int = 1
    polynomial_share: int = 0
    loader_registers: int = 24

    @property
    def groups(self):
        """Consumer warpgroups."""
        return self.q_tile // intrinsics.GROUP_ROWS

    @property
    def warps(self):
        """Consumer warps; each owns 16 query rows."""
        return intrinsics.GROUP_WARPS * self.groups

    @property
    def statistics(self):
        """Blocks of the declaration that compute row statistics."""
        return STATISTICS + (("row_max_seen",) if self.lazy_rescale else ())


PLAN = WgmmaPlan


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    if arch.kind != "cuda":
        return f"{arch.name} is no CUDA GPU"
    if not arch.wgmma_seed:
        return f"{arch.name} has no wgmma (sm_90a has)"
    if workload.dtype not in intrinsics.PTX_DTYPE:
        return f"tensor cores take 16-bit inputs, not {workload.dtype}"
    if (workload.head_dim, workload.value_dim) not in HEAD_DIMS:
        return f"head dimensions must be among {HEAD_DIMS}, not {workload.head_dim} and {workload.value_dim}"
    return None


def default_plan(workload, arch):
    """The seed: the architecture row's tile for the head dimension and mask."""
    seed = arch.wgmma_seed[workload.head_dim, workload.mask]
    return WgmmaPlan(**seed, blocks=arch.peak.sms, order_of_work=int(workload.mask == "causal"))


def further_plans(workload, arch, plan):
    """[(plan, Calls), ...], the last for all calls: `plan`; the architecture row's for short sequences; and one of a single warpgroup for
    grids of which larger tiles would leave multiprocessors without work."""
    one = dict(q_tile=intrinsics.GROUP_ROWS, blocks=0, shared_decode=0, query_stages=1, ping_pong=0, loader_registers=LOADER_REGISTERS[1])
    small = fitting([plan.but(**one)], budget, workload, arch) if plan.groups > 1 else ()
    wave = Calls(tiles=arch.peak.sms + 1, rows=intrinsics.GROUP_ROWS) if small else Calls()
    changes, most = arch.wgmma_short.get((workload.head_dim, workload.mask), ({}, 0))
    short = [entry for entry in fitting([plan.but(**changes)], budget, workload, arch) if entry != plan]
    first = [(plan, replace(wave, queries=most + 1)), *((entry, wave) for entry in short)] if short else [(plan, wave)]
    return [*first, *((entry, Calls()) for entry in small)]


def tile_choices(workload, arch):
    """Plans of all structures that fit, the seed's first; each is a search task of its own."""
    seed = default_plan(workload, arch)
    sizes = [(q_tile, kv_tile) for q_tile in (128, 192) for kv_tile in range(64, 225, 16)] + [(64, 128), (64, 176)]
    tiles = [seed.but(q_tile=q_tile, kv_tile=kv_tile, query_stages=1, loader_registers=LOADER_REGISTERS[q_tile // intrinsics.GROUP_ROWS])
             for q_tile, kv_tile in sizes if (q_tile, kv_tile) != (seed.q_tile, seed.kv_tile)]
    return fitting([seed, seed.but(blocks=0, shared_decode=0), seed.but(lazy_rescale=0), *tiles], budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's structure."""
    orders = (order_of_work.TO_AND_FRO, order_of_work.FAIR) if plan.blocks and workload.mask == "causal" else (plan.order_of_work,)
    return {"stages": (2, 3, 4), "query_stages": (1, 2), "ping_pong": (0, 1) if plan.groups > 1 else (plan.ping_pong,), "late_wait": (0, 1),
            "polynomial_share": (0, 1, 2), "shared_decode": (0, 1) if plan.blocks else (0,), "order_of_work": orders}


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    d, dv = workload.head_dim, workload.value_dim
    require(plan.q_tile in (64, 128, 192), "q_tile must be 64 rows for each of one to three consumer warpgroups", plan.q_tile,
            "choose 64, 128 or 192")
    require(plan.kv_tile % 16 == 0 and 16 <= plan.kv_tile <= 256, "kv_tile must be a multiple of 16 up to 256", plan.kv_tile, "round it")
    require(plan.loader_registers % 8 == 0 and plan.loader_registers >= 24, "loader_registers must be a multiple of 8 from 24 on",
            plan.loader_registers, "round it")
    tiles = 2 * (plan.query_stages * plan.q_tile * d + plan.stages * plan.kv_tile * (d + dv))
    return Budget((
        ("threads", warp_roles.GROUP * (plan.groups + 1), arch.threads_per_block, "of a block"),
        ("shared memory", tiles + warp_roles.bookkeeping_bytes(plan.stages, plan.query_stages), arch.smem_bytes, "bytes"),
        ("registers, about", dv // 2 + plan.kv_tile * 3 // 4 + OTHER_REGISTERS,
         warp_roles.consumer_registers(plan.groups, plan.loader_registers), "per consumer"),
    )).check(plan, arch)


def compiler_options(plan):
    """What ptxas is asked for: nothing but TVM's own choice."""
    return {}


def declare(workload, plan, negative_scale=False):
    """The plain function at the plan's tile, with statistics per lane of a quad; makes the intrinsics known that it will need."""
    intrinsics.register(workload.dtype, plan.q_tile, plan.kv_tile, workload.head_dim, workload.value_dim)
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, row_lanes=4, negative_scale=negative_scale,
                                   max_slack=SLACK * plan.lazy_rescale)


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
    for block in ("O_acc_init", "S", "S_masked", "P", "P_cast", "O_acc_new", *plan.statistics):
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
    for block in plan.statistics:
        sch.transform_layout(block, ("write", 0), statistics_layout)


def lay_out_boxes(sch, plan):
    """Lay the shared tiles out as the boxes that a bulk load writes, [chunk, row, channel of the chunk], and make each copy one block.

    Loop nest::

        K_load_o
          j in 128
            c in 64
              K_load  [1, 128, 64] shared.dyn
    """
    for block in LOADS:
        channels = int(sch.get(sch.get_sblock(block)).writes[0].source.shape[1])
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
    own_wide_rows(sch, "O", plan.warps)
    for block in (*plan.statistics, "row_max", "row_sum", "LSE"):
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
        half, row = sch.split(i, factors=[2, 8])
        column, quad, pair = sch.split(j, factors=[None, 4, 2])
        sch.reorder(row, quad, column, half, pair)
        sch.bind(sch.fuse(row, quad), "threadIdx.x")
        unroll_all(sch, (column, half, pair))
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

        b_h_r_fused_1 in 132  @blockIdx.x
          b_h_r_fused_0 in ...
            attn
    """
    attn = sch.get_sblock("attn")
    sch.annotate(attn, software_pipeline.OVERLAP, plan.lazy_rescale)
    for knob in warp_roles.KNOBS:
        sch.annotate(attn, f"{warp_roles.PREFIX}{knob}", getattr(plan, knob))
    sch.annotate(loops_of(sch, "P")[3], polynomial_exp2.POLYNOMIAL_SHARE, plan.polynomial_share)
    sch.annotate(loops_of(sch, "row_sum_new")[-1], rewrite.LATE_WAIT, plan.late_wait)


STAGES = (place_buffers, lay_out_accumulators, lay_out_boxes, tile_products, bind_grid, bind_accumulators, bind_products,
          use_tensor_cores, overlap)
