"""wgmma, backward: the functions of te_defs/flash_attention_backward.py on Hopper's asynchronous tensor cores (FlashAttention-3).

The idea is that of wgmma.py with the order of mma_backward.py. Each consumer warpgroup keeps 64 rows, of queries for dQ, of keys for dK
and dV, and walks over the tiles of the other side, which a loader warpgroup brings through rings of shared memory; one of its warps brings
LSE and delta of the queries on the same way. The rows that stay are those of the accumulators, so P and dS are, after a cast, the first
operand of the products that add to dV, dK and dQ, straight from registers; the tile that was the second operand of S or dP is read once
more, with its channels side by side. S and dP are issued together, and the product with P runs beside the arithmetic on dS.

The budget. Per thread the accumulators take (D + DV) / 2 of 240 registers (dQ: D / 2), S and dP half of the rows of a tile that comes by
each, and the cast of P half of that where it is an operand; dS is cast in dP's registers. Shared memory holds the tiles that stay once, and
those that come by once for each stage of a ring. Products run over channels rounded up to 16; shared tiles have rows of whole swizzled
lines, at whose ends the accelerator puts zeros.

Above 128 channels the sums of dK and dV do not fit together, and each takes a function of its own, from the same declaration by what it
needs (schedules/outputs.py): eight products, all with 128 rows that stay. Two tiles of 128 rows and 256 channels leave room for three of
64: the one that is read by dP alone is free again before the middle of a turn, and has one copy.

The finished nest of dK and dV together, one line a group of blocks::

    attn  @blockIdx.x
      K_load V_load                               bulk loads
      for e in query heads, t in query tiles      the second split in two where the mask ends
        Q_load dO_load LSE_load delta_load        as far ahead as the rings reach
        S dP                                      @warp: two chains of wgmma for each warpgroup
        S_warp P P_masked P_cast                  the scores are awaited here; @warp @lane, registers
        dV_acc_new                                @warp: a chain of wgmma, P from registers
        dP_warp dS dS_cast                        the product with V is awaited here; @warp @lane, registers
        dK_acc_new                                @warp: a chain of wgmma, dS from registers
        dK_acc dV_acc                             both are awaited here
      dK dV                                       @warp @lane
"""
from dataclasses import dataclass
from functools import lru_cache, partial

from tvm.s_tir import TensorIntrin

from schedules import roles
from schedules.families import backward_roles, wgmma_plan
from schedules.families.backward_turns import ORDERS, turn_of
from schedules.intrinsics import events
from schedules.intrinsics import wgmma as intrinsics
from schedules.intrinsics.mma import CHANNEL_STEPS, LANES
from schedules.lowering import (
    bulk_loads, products_in_flight, register_shares, rings, row_statistics, warp_roles, wgmma_pipeline)
from schedules.plan import Budget, Plan, first_of, fitting, require
from schedules.stages import bind_lanes, loops_of, own_fragment, own_output, read_index
from te_defs.integers import round_up

NAME = "wgmma_backward"
PIPELINE = "flashtir_wgmma"
CONFIG = wgmma_pipeline.CONFIG
BINDS_AT = "bind_grid"
MAX_SPILL_BYTES = 0
#: The TMA finds the rows of a sequence by a row number, and has 31 bits for it.
WHOLE_ROWS = True
#: As in the forward pass: the host tells the strides of what is loaded to the TMA, and only stores compute with some.
STRIDED = (True,)


@dataclass(frozen=True)
class WgmmaBackwardPlan(Plan):
    """Knobs of one of the functions; the tile that stays has 64 rows for each consumer warpgroup.

    stages            copies of the tiles that come by, in their rings
    loader_registers  registers per thread that the loader warpgroup keeps, a multiple of 8; the consumers share the rest
    across            0: one turn behind the other; else the second part of a turn runs beside the first of the next (backward_turns).
                      2: no wait that stands behind the exponentials is moved up
    single            1: one of the tiles that come by has one copy (SINGLE_RINGS)
    """

    stages: int = 2
    loader_registers: int = 24
    across: int = 0
    single: int = 0


PLAN = WgmmaBackwardPlan
#: Registers of a loader that asks for each line of a tile by itself (read off compiled kernels).
BUSY_LOADER_REGISTERS = 40
#: The last is one that wgmma_fused_backward schedules, by the stages here and its own.
ROLES = {**backward_roles.ROLES, **backward_roles.APART, "fused": backward_roles.FUSED, "ordered": backward_roles.ORDERED}
#: What the roles of warps are told of a grid that is not persistent.
ROLE_KNOBS = {"query_stages": 1, "ping_pong": 0, "order_of_work": 0, "shared_decode": 0}
#: Most channels at which the sums of dK and dV fit in registers together.
TOGETHER = 128
#: Products that bring the tiles that come by: both operands are in shared memory.
PRODUCTS_OF_TILES = ("S", "dP")
#: Copies of products, as cache_read names them, with the block that reads the product first: later the places to wait for them.
READY = {"S_warp": ("P", "S"), "dP_warp": ("dS", "dP")}

#: The tile of which one copy may be enough: what comes by for dP alone is free again before the middle of a turn, and dO is needed for dV
#: only after it.
SINGLE_RINGS = {"dq": events.V, "dk": events.DO, "dv": events.DO}

#: (q_tile, kv_tile, stages, loader_registers, across, single) for each role, by most channels. One of the loader's warps has indices of two
#: loops in registers for dK and dV; up to 40 cost two consumer warpgroups no more than 32 do.
TILES = {"dq": {64: (128, 128, 2, 24), 128: (128, 128, 2, 24), 192: (128, 96, 2, 24, 0, 1), 256: (128, 64, 2, 24, 0, 1)},
         "dk_dv": {64: (96, 128, 2, 40), 128: (64, 128, 2, 40)},
         "dk": {192: (96, 128, 2, 40, 0, 1), 256: (64, 128, 2, 40, 0, 1)}, "dv": {192: (96, 128, 2, 40), 256: (96, 128, 2, 40, 0, 1)}}
#: The same, and `across`, for dQ of 128 channels where all rows see all keys: 6 % faster.
EVEN_TILE = (128, 96, 3, 24, 2)
#: The same where scores are modified, whose slope needs S as long as dS does, and for dQ where tiles have masks at both ends.
SMALLER_TILES = {"dq": {64: (128, 80, 2, 40), 128: (128, 80, 2, 40), 192: (128, 64, 2, 40), 256: (128, 48, 2, 40)},
                 "dk_dv": {64: (64, 128, 2, 40), 128: (32, 128, 3, 40)},
                 "dk": {192: (64, 128, 2, 40), 256: (32, 128, 3, 40)}, "dv": {192: (64, 128, 2, 40), 256: (64, 128, 2, 40)}}

#: The same above 192 channels for dQ where scores are modified and tiles have masks at both ends, whose bits take registers, too.
SMALLEST_TILE = (128, 32, 2, 40)


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    return wgmma_plan.decline(workload, arch)


def apart(workload):
    """Whether dK and dV take a function each."""
    return max(workload.head_dim, workload.value_dim) > TOGETHER


def default_plan(role, workload, arch):
    """The tile for so many channels."""
    channels = max(workload.head_dim, workload.value_dim)
    both_ends = role == "dq" and not workload.mask_class.from_start
    smaller = workload.score or both_ends
    tiles = [tile for most, tile in sorted((SMALLER_TILES if smaller else TILES)[role].items()) if most >= channels]
    even = (workload.mask, workload.score, workload.lengths, workload.head_dim, workload.value_dim) == ("full", "", "uniform", 128, 128)
    first = [EVEN_TILE] if even and role == "dq" else [SMALLEST_TILE] if workload.score and both_ends and channels > 192 else []
    plans = [WgmmaBackwardPlan(*tile) for tile in first + tiles]
    if not wgmma_plan.whole_lines(workload):
        plans = [plan.but(loader_registers=max(plan.loader_registers, BUSY_LOADER_REGISTERS)) for plan in plans]
    return first_of(fitting(plans, partial(budget, role), workload, arch), NAME, workload, arch)


def tile_choices(role, workload, arch):
    """Plans of all structures that fit; each is a search task of its own."""
    seed, query_rows = default_plan(role, workload, arch), role == "dq"
    plans = (seed.but(q_tile=stays if query_rows else streams, kv_tile=streams if query_rows else stays, across=across, single=single)
             for single in sorted({0, seed.single}) for across in (0, 2) for stays in (128, 192, 64) for streams in range(32, 161, 16))
    return fitting(plans, partial(budget, role), workload, arch)


def knobs(role, workload, arch, plan):
    """Candidates of the sampled fields for a plan's structure."""
    return {"stages": (2, 3, 4), "loader_registers": (24, 32, 40)}


def budget(role, workload, arch, plan, more_bytes=0):
    """Divisibility, shared memory and registers of a plan, with so many bytes more; PlanError with the budget where it does not fit."""
    it, (products, lines) = ROLES[role], (channels_of(*(round_up(size, step) for size in (workload.head_dim, workload.value_dim)))
                                          for step in CHANNEL_STEPS)
    (stays, streams), groups = it.tiles(plan), it.tiles(plan)[0] // intrinsics.GROUP_ROWS
    require(stays in (64, 128, 192), "the tile that stays must be 64 rows for each of one to three consumer warpgroups", stays,
            "choose 64, 128 or 192")
    require(streams % 16 == 0 and 16 <= streams <= 256, "the tile that comes by must be a multiple of 16 up to 256", streams, "round it")
    require(plan.q_tile % row_statistics.ROWS == 0, f"q_tile must be a multiple of {row_statistics.ROWS}", plan.q_tile, "round it")
    require(1 <= plan.stages <= 16, "stages must be from 1 to 16", plan.stages, "correct it")
    require(0 <= plan.across < len(ORDERS) and role in ORDERS[plan.across], f"across must be an order of {role}", plan.across, "choose 0")
    require(plan.single in ((0, 1) if role in SINGLE_RINGS else (0,)), f"single must be 0, or 1 for {', '.join(SINGLE_RINGS)}", plan.single,
            "correct it")
    single = single_ring(role, plan)
    rows = {load: stays for load in it.stays} | {load: streams * (1 if ring_of(load) == single else plan.stages) for load in it.streams}
    numbers = len(it.statistics) * plan.q_tile * (1 if it.rows == "i" else plan.stages)
    shared = (intrinsics.ELEMENT_BYTES * sum(count * lines[load.split("_")[0]] for load, count in rows.items())
              + row_statistics.NUMBER_BYTES * numbers + rings.bookkeeping_bytes(plan.stages, 1, len(it.stays)) + more_bytes)
    sums = sum(products[out[1:]] for _, _, out in it.sums) // 2
    scores = streams // 2 * sum(product.block in PRODUCTS_OF_TILES for product in it.products)
    casts = streams // 4 * (sum(block.endswith("_cast") for block in it.scores) - 1)  # the last takes the registers of its own matrix
    return Budget((
        ("threads", register_shares.GROUP * (groups + 1), arch.threads_per_block, "of a block"),
        ("shared memory", shared, arch.smem_bytes, "bytes"),
        ("registers, about", sums + scores + casts, register_shares.consumer_registers(groups, plan.loader_registers), "per consumer"),
    )).check(plan, arch)


def compiler_options(plan):
    """What ptxas is asked for: nothing but TVM's own choice."""
    return {}


def role_of(name, plan):
    """The Role of a name, whatever the plan."""
    return ROLES[name]


def name_of(role):
    """The name of a Role."""
    return next(name for name, it in ROLES.items() if it is role)


def structure_of(plan):
    """The plan without what changes no intrinsic, and may be drawn: fields that only tell the roles of warps something."""
    return plan.but(stages=0, loader_registers=0)


def warps_of(role, plan):
    """Consumer warps; each owns 16 of the rows that stay."""
    return role.tiles(plan)[0] // intrinsics.WARP_ROWS


def ring_of(tile):
    """Ring of a tile by the start of its name, such as K_load or K_tile."""
    return events.RINGS.index(tile.split("_")[0])


def channels_of(d, dv):
    """Channels by the names of tensors."""
    return {"Q": d, "K": d, "dO": dv, "V": dv}


def product_channels(sch, role):
    """(D, DV) as the products have them."""
    *_, d = loops_of(sch, "S")
    dv = loops_of(sch, "dP")[-1] if "dP_warp" in ready_of(role) else loops_of(sch, "dV_acc_new")[-2]
    return int(sch.get(d).extent), int(sch.get(dv).extent)


def single_ring(role, plan):
    """The ring of which there is one copy; None where there is no such."""
    return SINGLE_RINGS[role] if plan.single else None


def ready_of(role):
    """Of READY what a Role has."""
    return {copy: pair for copy, pair in READY.items() if pair[0] in role.scores}


@lru_cache(maxsize=16)
def intrinsics_of(role, dtype, plan, d, dv):
    """(name, description, implementation) of what a function needs at a plan, by the block that it replaces."""
    stays, streams = ROLES[role].tiles(plan)
    channels, made, products = channels_of(d, dv), {}, ROLES[role].products
    awaited = {product.second for product in products if product.block in PRODUCTS_OF_TILES}
    for product in products:
        size = channels[product.second.split("_")[0]]
        if product.first is None:
            made[product.block] = intrinsics.wgmma_sum(dtype, streams, size, ring_of(product.second), [events.issued(product.block)],
                                                       arrives=product.second not in awaited)
        else:
            made[product.block] = intrinsics.wgmma_scores(
                dtype, stays, streams, size, ring_of(product.first), ring_of(product.second), product.transposed,
                announced=[events.issued(product.block)])
    for block, product in waits_of(role, plan).items():
        size = streams if block in READY else dv if block.startswith("dV") else d
        made[block] = intrinsics.ready(size, [events.awaited(product)], turn_of(role, plan).releases[block],
                                       ROLES[role].transposes(product))
    return {block: (f"wgmma_{role}_{block}_{dtype}_{plan}_{d}_{dv}".replace(" ", "_"), *pair) for block, pair in made.items()}


def waits_of(role, plan):
    """The product that each copy waits for, of those that the role's own products are."""
    named = {copy: product for copy, (_, product) in READY.items()} | {back: f"{back}_new" for _, back, _ in ROLES[role].sums}
    return {block: named[block] for block in turn_of(role, plan).releases if block in named}


def declare(role, workload, plan):
    """The plain function at the plan's tile; makes the intrinsics known that it will need."""
    channels = (round_up(size, CHANNEL_STEPS[0]) for size in (workload.head_dim, workload.value_dim))
    for intrinsic in intrinsics_of(role, workload.dtype, structure_of(plan), *channels).values():
        TensorIntrin.register(*intrinsic, override=True)
    return ROLES[role].declare(workload, plan.q_tile, plan.kv_tile, channel_steps=CHANNEL_STEPS)


def layout_of(role, block):
    """Index map of a block's matrix in accumulators: scores lie transposed where keys are the rows."""
    turned = role.transposes(block.removesuffix("_warp"))
    return (lambda i, j: intrinsics.accumulator_layout(j, i)) if turned else intrinsics.accumulator_layout


def place_buffers(sch, plan, role):
    """Tiles and statistics go to shared memory; everything between the products stays in registers. A copy of S and one of dP, later the
    places to wait for them, go between these products and what is done with them."""
    for first, product in ready_of(role).values():
        sch.cache_read(first, read_index(sch, sch.get_sblock(first), product), "warp")
    for block in (*role.stays, *role.streams, *role.statistics):
        sch.set_scope(block, 0, "shared.dyn")
    for block in role.written:
        sch.set_scope(block, 0, "warp")


def lay_out_accumulators(sch, plan, role):
    """Lay all matrices out as wgmma accumulators: [16-row step, lane, register]."""
    for block in (*role.written, *ready_of(role)):
        sch.transform_layout(block, ("write", 0), layout_of(role, block))


def lay_out_boxes(sch, plan, role):
    """Lay the shared tiles out as the boxes that a bulk load writes, [chunk, row, channel of the chunk], and make each copy one block."""
    channels = channels_of(*product_channels(sch, role))
    for block in (*role.stays, *role.streams):
        tensor = block.removesuffix("_load")
        sch.transform_layout(block, ("write", 0), intrinsics.box_layout(intrinsics.chunk_of(channels[tensor])))
        sch.annotate(sch.blockize(loops_of(sch, block)[-2]), bulk_loads.BULK_LOAD, tensor)


def tile_products(sch, plan, role):
    """Give each warp its 16 rows of all products, all columns and the whole reduction: what one chain of wgmma computes."""
    for product in role.products:
        *plane, k = loops_of(sch, product.block)
        rows = plane.pop(1 if product.transposed else 0)
        warp, row = sch.split(rows, factors=[warps_of(role, plan), None])
        whole, k = sch.split(k, factors=[1, None])
        plane.insert(1 if product.transposed else 0, row)
        sch.reorder(warp, whole, *plane, k)
        sch.blockize(plane[0])


def bind_grid(sch, plan, role):
    """One thread block per tile that stays, head and batch entry, all on blockIdx.x: the other grid axes end at 65,535."""
    sch.bind(sch.fuse(*loops_of(sch, "attn")), "blockIdx.x")


def tell_statistics(sch, plan, role):
    """LSE and delta come with the queries, by the lanes of one warp of the loader."""
    for block in role.statistics:
        _turn, lane = sch.split(loops_of(sch, block)[-1], factors=[None, LANES])
        sch.bind(lane, "threadIdx.x")
        sch.annotate(sch.get_sblock(block), row_statistics.TELL, "Q")


def bind_accumulators(sch, plan, role):
    """Every lane computes the elements of scores and accumulators that its registers hold."""
    warps = warps_of(role, plan)
    for block in role.scores:
        if role.rows == "j":
            sch.reorder(*reversed(loops_of(sch, block, 2)))
        own_fragment(sch, block, warps)
    sch.annotate(loops_of(sch, "P")[2], products_in_flight.HOLD, int(plan.across > 1))
    for init, _, store in role.sums:
        own_fragment(sch, init, warps)
        own_output(sch, store, warps)


def bind_products(sch, plan, role):
    """Warps take their rows of the products, and the products' first values get statements of their own."""
    for product in role.products:
        block = f"{product.block}_o"
        warp, whole = loops_of(sch, block)
        sch.bind(warp, "threadIdx.y")
        init = sch.get_child_blocks(sch.decompose_reduction(block, whole))[0]
        i, j = loops_of(sch, init, 2)
        if product.transposed:
            sch.reorder(j, i)
            i, j = j, i
        bind_lanes(sch, i, j)


def use_tensor_cores(sch, plan, role):
    """Replace the products by wgmma, and the copies behind them by waits."""
    name = name_of(role)
    dtype = sch.get(sch.get_sblock("Q_load")).writes[0].source.dtype
    names = {block: it for block, (it, *_) in intrinsics_of(name, dtype, structure_of(plan), *product_channels(sch, role)).items()}
    for block in waits_of(name, plan):
        loops = loops_of(sch, block, 2)
        at = int(role.transposes(block.removesuffix("_warp")))
        warp, row = sch.split(loops[at], factors=[warps_of(role, plan), None])
        loops[at] = row
        sch.reorder(warp, *loops)
        sch.bind(warp, "threadIdx.y")
        sch.tensorize(loops[0], names[block])
    for product in role.products:
        sch.tensorize(loops_of(sch, product.block)[-3], names[product.block])


def order_turn(sch, plan, role):
    """Put what a turn does in its order, and ask for the warps' roles."""
    name = name_of(role)
    statements = list(role.statements)
    for copy, (first, _) in ready_of(role).items():
        statements.insert(statements.index(first), copy)
    loop = loops_of(sch, role.turn)[-1]
    for key, value in zip(("stage", "order"), turn_of(name, plan).lists(statements)):
        sch.annotate(loop, f"software_pipeline_{key}", value)
    attn = sch.get_sblock("attn")
    for knob in warp_roles.KNOBS:
        sch.annotate(attn, f"{warp_roles.PREFIX}{knob}", ROLE_KNOBS[knob] if knob in ROLE_KNOBS else getattr(plan, knob))
    if plan.single:
        sch.annotate(attn, f"{warp_roles.PREFIX}{warp_roles.SINGLE}", single_ring(name, plan))


STAGES = (place_buffers, lay_out_accumulators, lay_out_boxes, tile_products, bind_grid, tell_statistics, bind_accumulators, bind_products,
          use_tensor_cores, order_turn)


def schedule(role, workload, plan, stages=None, strided=False):
    """A fresh Schedule of a function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(role, workload, plan), STAGES[:stages], plan, ROLES[role], strided)
