"""wgmma, backward, with five products: te_defs/fused_backward.py on Hopper's asynchronous tensor cores. The fastest, in no fixed order.

To what wgmma_backward does for dK and dV, by its stages, a turn adds dQ of its queries. No thread has their rows: the warpgroups hand dS
over to each other through shared memory, as [key][query], and meet; each then takes 64 of the queries, or all and a part of the channels,
and multiplies with the keys, which stay. While the product for dK runs, each warp sets its 16 rows of the result down in shared memory; one
thread beside the loader's has the whole tile added to memory by one instruction (as FlashAttention-3 does), and nobody waits for it but who
sets down the next. The sums lie in tiles of queries, and in these as warps set them down; `dq_cast` reads them so.

There are two copies of dS: who writes one has waited, in the turn before, for everybody's product with it two turns before. With the plan's
`across` dQ is the last product of a turn, handed over in the next one by the fence that dS needs, and has two copies, too.

In the nest of wgmma_backward, behind dS_cast::

    dS_cast_shared                            @warp: stores of matrices
    dQ_part                                   the consumers meet; @warp: a chain of wgmma, both operands from shared memory
    dK_acc_new                                as before
    dQ_part_warp dQ_part_warp_shared          dQ_part is awaited here; @warp: stores
    dQ_sum                                    an addition to memory, by the adder
"""
from tvm.s_tir import TensorIntrin

from schedules import roles
from schedules.families import wgmma_backward
from schedules.families.backward_turns import turn_of
from schedules.families.wgmma_backward import (  # noqa: F401, the same here
    CONFIG, PIPELINE, PLAN, STRIDED, WHOLE_ROWS, WgmmaBackwardPlan, ring_of, role_of, structure_of)
from schedules.intrinsics import events, wgmma_exchange
from schedules.intrinsics import wgmma as intrinsics
from schedules.lowering import rings, warp_roles
from schedules.plan import first_of, fitting, require
from schedules.stages import bind_lanes, loops_of, read_index

NAME = "wgmma_fused_backward"
ROLE = "fused"
BINDS_AT = "bind_grid"
#: The copy of dS in shared memory.
SHARED = "dS_cast_shared.dyn"

SUM_BYTES = 4
#: What a turn adds to dQ, in shared memory.
SET_DOWN = "dQ_part_warp_shared.dyn"

#: (q_tile, kv_tile, stages, loader_registers) by most channels. At 64, consumers need all of the 240 registers that loaders with 24 leave
#: them; these then keep some words in memory, where nobody waits for them.
TILES = {64: (128, 128, 2, 24), 128: (64, 128, 2, 40)}
#: The same, and `across`, for 64 channels where all rows see all keys: 4 % faster; under causal masks as fast at best.
EVEN_TILE = (128, 128, 2, 32, 1)


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    reason = wgmma_backward.decline(workload, arch)
    if reason is not None:
        return reason
    if wgmma_backward.apart(workload):
        return f"head dimensions must be at most {max(TILES)}, not {workload.head_dim} and {workload.value_dim}"
    if workload.head_dim % wgmma_exchange.CHUNK:
        return f"the head dimension must be a multiple of {wgmma_exchange.CHUNK}, not {workload.head_dim}"
    return None


def default_plan(workload, arch):
    """The tile for so many channels; where scores are modified the smaller one, as their slope needs S as long as dS does."""
    channels = max(TILES) if workload.score else max(workload.head_dim, workload.value_dim)
    even = (workload.mask, workload.lengths, channels) == ("full", "uniform", 64)
    tiles = [EVEN_TILE] * even + [tile for most, tile in sorted(TILES.items()) if most >= channels]
    plans = (WgmmaBackwardPlan(*tile) for tile in tiles)
    return first_of(fitting(plans, budget, workload, arch), NAME, workload, arch)


def tile_choices(workload, arch):
    """Plans of all structures that fit; each is a search task of its own."""
    seed = default_plan(workload, arch)
    plans = (seed.but(q_tile=q_tile, kv_tile=kv_tile, across=across) for across in (0, 1)
             for q_tile, kv_tile in ((64, 128), (128, 128), (64, 192), (64, 64), (192, 192)))
    return fitting(plans, budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's structure."""
    return wgmma_backward.knobs(ROLE, workload, arch, plan)


def shares(plan, channels):
    """(groups of 64 queries, channels of each share): how the consumer warpgroups divide what a turn adds to dQ."""
    queries = plan.q_tile // intrinsics.GROUP_ROWS
    return queries, channels // (plan.kv_tile // intrinsics.GROUP_ROWS // queries)


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    groups, queries = (tile // intrinsics.GROUP_ROWS for tile in (plan.kv_tile, plan.q_tile))
    require(plan.q_tile % intrinsics.GROUP_ROWS == 0 and groups % max(queries, 1) == 0 and workload.head_dim * queries % (groups * 32) == 0,
            "consumer warpgroups must be able to share 64 query rows each, or parts of 32 channels", f"q_tile={plan.q_tile}",
            "choose 64, or as many as key rows")
    copies = 1 + (plan.across > 0)
    handed = rings.MET_COPIES * intrinsics.ELEMENT_BYTES * plan.q_tile * plan.kv_tile
    added = copies * SUM_BYTES * plan.q_tile * workload.head_dim
    return wgmma_backward.budget(ROLE, workload, arch, plan, handed + added + rings.barrier_bytes(0, 0, 0, copies))


def compiler_options(plan):
    """What ptxas is asked for: its own level, at which all accumulators find room."""
    return {"register_level": 5}


def intrinsics_of(dtype, plan, channels):
    """(name, description, implementation) of what this family adds, by the block that it replaces."""
    _, share = shares(plan, channels)
    made = {SHARED: wgmma_exchange.hand_over(dtype, plan.kv_tile, plan.q_tile),
            "dQ_part": wgmma_exchange.product_of_tiles(dtype, plan.kv_tile, share, intrinsics.chunk_of(channels), ring_of("K_tile"),
                                                        [events.issued("dQ_part")]),
            SET_DOWN: wgmma_exchange.set_down(share), "dQ_sum": wgmma_exchange.add_up(share),
            "dQ_part_warp": intrinsics.ready(share, [events.awaited("dQ_part")], turn_of(ROLE, plan).releases["dQ_part_warp"])}
    named = f"{dtype}_{structure_of(plan)}_{channels}"
    return {block: (f"wgmma_{ROLE}_{block}_{named}".replace(" ", "_"), *pair) for block, pair in made.items()}


def declare(workload, plan, role=ROLE):
    """The plain function of a role at the plan's tile; makes the intrinsics known that it will need."""
    for intrinsic in intrinsics_of(workload.dtype, plan, workload.head_dim).values():
        TensorIntrin.register(*intrinsic, override=True)
    return wgmma_backward.declare(role, workload, plan)


def channels_of(sch):
    """Channels of dQ."""
    return int(sch.get(sch.get_sblock("K_load")).reads[0].source.shape[-1])


def sum_place(i, c):
    """Place of element (i, c) in a tile of the sums: what a warp adds, 16 rows and some times 16 channels, stands side by side."""
    return (i // intrinsics.WARP_ROWS, *wgmma_exchange.piece_place(i % intrinsics.WARP_ROWS, c))


def lay_out_sums(sch, block, access):
    """Lay the sums of dQ out as `sum_place` says: the tensor of an access ("read" or "write", index) of a block that stands in no other."""
    sch.transform_layout(block, access, lambda b, h, t, i, c: (b, h, t, *sum_place(i, c)))


def flatten_sums(sch, block, access, channels):
    """The same as who allocates them knows them: [batch entry, head, tile, place in the tile]."""
    groups, rows, columns = channels // wgmma_exchange.COLUMNS, intrinsics.WARP_ROWS, wgmma_exchange.COLUMNS
    sch.transform_layout(block, access, lambda b, h, t, step, group, row, column: (
        b, h, t, ((step * groups + group) * rows + row) * columns + column))


def place_exchange(sch, plan, role):
    """dS goes to shared memory beside the registers; what it adds to dQ stays in registers, with a copy as the place to wait for it."""
    product = sch.get_sblock("dQ_part")
    sch.cache_read(product, read_index(sch, product, "dS_cast"), "shared.dyn")
    addition = sch.get_sblock("dQ_sum")
    sch.cache_read(addition, read_index(sch, addition, "dQ_part"), "warp")
    sch.set_scope(product, 0, "warp")
    sch.cache_read(addition, read_index(sch, addition, "dQ_part_warp"), "shared.dyn")


def lay_out_exchange(sch, plan, role):
    """Lay dS out in lines of 64 queries, and what is added to dQ as accumulators of the warps that share it, and like the sums."""
    queries, share = shares(plan, channels_of(sch))
    steps = queries * intrinsics.GROUP_ROWS // intrinsics.WARP_ROWS
    sch.transform_layout(SHARED, ("write", 0), lambda i, j: (i // wgmma_exchange.CHUNK, j, i % wgmma_exchange.CHUNK))
    for block in ("dQ_part", "dQ_part_warp"):
        sch.transform_layout(block, ("write", 0), lambda i, c: (
            c // share * steps + i // intrinsics.WARP_ROWS, *intrinsics.accumulator_place(i, c % share)))
    sch.transform_layout(SET_DOWN, ("write", 0), sum_place)


def lay_out_memory(sch, plan, role):
    """Lay the sums in memory out as what is added to them: so many elements of a tile."""
    written = [region.source.name for region in sch.get(sch.get_sblock("attn")).writes]
    sums = "write", written.index("dQ_sum")
    lay_out_sums(sch, "attn", sums)
    flatten_sums(sch, "attn", sums, channels_of(sch))


def split_share(sch, plan, i, c):
    """Loops over rows and channels of dQ -> (share, 16-row step, row of it, channel of the share)."""
    queries, share = shares(plan, channels_of(sch))
    step, row = sch.split(i, factors=[queries * intrinsics.GROUP_ROWS // intrinsics.WARP_ROWS, None])
    part, channel = sch.split(c, factors=[None, share])
    return part, step, row, channel


def tile_exchange(sch, plan, role):
    """Give each warp 16 rows of what is added to dQ, the channels of its share and the whole reduction."""
    i, c, k = loops_of(sch, "dQ_part")
    part, step, row, channel = split_share(sch, plan, i, c)
    whole, k = sch.split(k, factors=[1, None])
    sch.reorder(part, step, whole, row, channel, k)
    sch.blockize(row)


def hide_sums(sch, plan, role):
    """The addition reads what it writes, but only to add: blocks of the grid may do it side by side. Where in the sums a block of the grid
    writes is not told: since these were laid out, TVM would say it by variables that are bound inside the block."""
    addition = sch.get_sblock("dQ_sum")
    attn = sch.get_sblock("attn")
    for block in (addition, *(sch.get_sblock(name) for name in ("sum", "rows")), attn):
        sch.unsafe_hide_buffer_access(block, "read", [read_index(sch, block, "dQ_sum")])
    written = [region.source.name for region in sch.get(attn).writes]
    sch.unsafe_hide_buffer_access(attn, "write", [written.index("dQ_sum")])


def bind_exchange(sch, plan, role):
    """Warps take their shares of the product, and the lanes what they hold of its first values."""
    part, step, whole = loops_of(sch, "dQ_part_o")
    warp = sch.fuse(part, step)
    sch.bind(warp, "threadIdx.y")
    init = sch.get_child_blocks(sch.decompose_reduction("dQ_part_o", whole))[0]
    bind_lanes(sch, *loops_of(sch, init, 2))


def use_exchange(sch, plan, role):
    """Replace the copies by stores that warpgroups meet at, a wait and stores, the product by wgmma and the addition by that of pieces."""
    names = {block: name for block, (name, *_) in intrinsics_of(
        sch.get(sch.get_sblock("K_load")).writes[0].source.dtype, plan, channels_of(sch)).items()}
    i, j = loops_of(sch, SHARED, 2)
    warp, j = sch.split(j, factors=[None, intrinsics.WARP_ROWS])
    sch.reorder(warp, i, j)
    sch.bind(warp, "threadIdx.y")
    sch.tensorize(i, names[SHARED])
    sch.tensorize(loops_of(sch, "dQ_part")[-3], names["dQ_part"])
    for block in ("dQ_part_warp", SET_DOWN, "dQ_sum"):
        part, step, row, channel = split_share(sch, plan, *loops_of(sch, block, 2))
        sch.reorder(part, step, row, channel)
        sch.bind(sch.fuse(part, step), "threadIdx.y")
        sch.tensorize(row, names[block])


def defer_additions(sch, plan, role):
    """Let turns hand over what they add in the next one, where dQ is the last product and one fence will do for both."""
    if plan.across:
        sch.annotate(sch.get_sblock("attn"), f"{warp_roles.PREFIX}{warp_roles.DEFERS}", 1)


STAGES = (place_exchange, wgmma_backward.place_buffers, wgmma_backward.lay_out_accumulators, lay_out_exchange, lay_out_memory,
          wgmma_backward.lay_out_boxes, wgmma_backward.tile_products, tile_exchange, hide_sums, wgmma_backward.bind_grid,
          wgmma_backward.tell_statistics, wgmma_backward.bind_accumulators, wgmma_backward.bind_products, bind_exchange, use_exchange,
          wgmma_backward.use_tensor_cores, wgmma_backward.order_turn, defer_additions)


def schedule(workload, plan, stages=None, strided=False):
    """A fresh Schedule of the function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(workload, plan), STAGES[:stages], plan, role_of(ROLE, plan), strided)
