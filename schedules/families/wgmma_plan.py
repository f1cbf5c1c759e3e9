"""Plans of the wgmma family: their fields, what they take of the chip, the seeds, the space, and which plans one artefact holds."""
from dataclasses import dataclass

from schedules.intrinsics import wgmma as intrinsics
from schedules.intrinsics.mma import CHANNEL_STEPS
from schedules.lowering import order_of_work, register_shares, rings
from schedules.plan import Budget, Calls, Plan, fitting, require
from te_defs.integers import round_up

NAME = "wgmma"

LEAST_DIM = 32  # half of a swizzled line
#: Pairs of head dimensions that the architecture rows' plans were measured at, in the order in which others are compared with them.
MEASURED = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
#: Keys of a tile, and registers of a consumer by `budget`, that a seed has at most at head dimensions that nobody has measured.
MOST_KEYS, MOST_REGISTERS = 128, 200
#: Registers of a loader that asks for each line of a tile by itself, or looks key lengths up, at least (read off compiled kernels).
BUSY_LOADER_REGISTERS = 32
LOADER_REGISTERS = {1: 56, 2: 24, 3: 32}  # by consumer warpgroups, as FlashAttention-3 has them
#: Registers beside S, P and O: statistics, addresses, barriers (read off compiled kernels).
OTHER_REGISTERS = 32
#: Query rows of the sequences that a tuned plan is for, where nobody says; and the most for which the row's plan is the better guess.
TUNED_AT, SHORT = 4096, 1024
SLACK = 8  # powers of two by which scores may outgrow their row's reference value where the rescale is lazy


@dataclass(frozen=True)
class WgmmaPlan(Plan):
    """Knobs of the wgmma family; q_tile is 64 rows for each consumer warpgroup.

    blocks             thread blocks of a persistent grid: one for each multiprocessor of the fastest chip of its kind (on a chip with
                       fewer some wait for others: right, but slower than with a plan of its own); 0: one for each query tile
    order_of_work      in which the blocks of a persistent grid take their tiles: order_of_work.TO_AND_FRO or FAIR, for causal masks
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


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    if arch.kind != "cuda":
        return f"{arch.name} is no CUDA GPU"
    if not arch.wgmma_seed:
        return f"{arch.name} has no wgmma (sm_90a has)"
    if workload.dtype not in intrinsics.PTX_DTYPE:
        return f"tensor cores take 16-bit inputs, not {workload.dtype}"
    if min(workload.head_dim, workload.value_dim) < LEAST_DIM:
        return f"head dimensions must be at least {LEAST_DIM}, not {workload.head_dim} and {workload.value_dim}"
    return None


def _row_key(workload, arch):
    """Under which an architecture row has the plans of a workload: those of the next larger pair of head dimensions that was measured; a
    mask that it does not name has those of causal."""
    channels = next(d for d, dv in MEASURED if workload.head_dim <= d and workload.value_dim <= dv)
    return (channels, workload.mask) if (channels, workload.mask) in arch.wgmma_seed else (channels, "causal")


def default_plan(workload, arch):
    """The seed: the architecture row's plan for the head dimension and mask; at head dimensions that nobody has measured, with two
    warpgroups, as many keys as leave some registers, but no fewer where rows are whole lines."""
    # Where rows see as many keys as others there is nothing to deal fairly.
    even = workload.mask == "full" or not workload.mask_class.from_start
    order = order_of_work.TO_AND_FRO if even else order_of_work.FAIR
    plan = _dealt(workload, WgmmaPlan(**arch.wgmma_seed[_row_key(workload, arch)], blocks=arch.peak.sms, order_of_work=order))
    plan = _with_loader(workload, plan)
    if (workload.head_dim, workload.value_dim) in MEASURED:
        return _with_room(workload, plan)
    least = plan.kv_tile if plan.groups > 2 or whole_lines(workload) else 16
    tiles = [plan.but(kv_tile=kv_tile) for kv_tile in range(MOST_KEYS, least - 16, -16)] if plan.groups == 2 else [plan]
    fit = fitting(tiles, budget, workload, arch)
    return _with_room(workload, next(tile for tile in fit if _registers(workload, tile) <= MOST_REGISTERS or tile.kv_tile == least))


def _with_room(workload, plan):
    """The plan with room for the addresses of what a score modification reads for each score."""
    arguments = workload.score_class.arguments() if workload.score else ()
    if not any({"N", "M"} <= set(argument.kind.axes) for argument in arguments):
        return plan
    return plan.but(kv_tile=min(plan.kv_tile, 96 if workload.value_dim <= 128 else 48))


def _dealt(workload, plan):
    """The plan with a grid that suits the workload's lengths: that of packed sequences has a block for each tile, and those that lie past
    the end of their sequence end at once. A persistent grid would deal tiles as if all sequences had the same number."""
    return plan.but(blocks=0, shared_decode=0, query_stages=1) if workload.lengths == "packed" else plan


def whole_lines(workload):
    """Whether rows of all tensors fill the swizzled lines of their tiles: a tile is then one box for the tensor memory accelerator."""
    return all(size % intrinsics.chunk_of(size) == 0 for size in (workload.head_dim, workload.value_dim))


def _with_loader(workload, plan):
    """The plan with the registers that its loader needs: more where rows are no whole lines, and for key lengths."""
    busy = workload.lengths == "keys" or not whole_lines(workload)
    return plan.but(loader_registers=max(plan.loader_registers, BUSY_LOADER_REGISTERS)) if busy else plan


def _registers(workload, plan):
    """Registers per thread of a consumer, about: O, S and P, and the others."""
    return round_up(workload.value_dim, CHANNEL_STEPS[0]) // 2 + plan.kv_tile * 3 // 4 + OTHER_REGISTERS


def further_plans(workload, arch, plan, tuned_at=TUNED_AT):
    """[(plan, Calls), ...] of one artefact; a call takes the first that is for it, and the last is for any call.

    They are `plan`, for lengths like that at which it was tuned; what the architecture row has for other lengths; and a plan of a single
    warpgroup, for calls with so few tiles that larger ones would leave multiprocessors without work. Where `tuned_at` is None, the plan is
    for all lengths: others were tuned, too, and have their own.
    """
    lengths = arch.wgmma_lengths.get(_row_key(workload, arch), ((SHORT + 1, {}), (0, {})))
    lengths, tuned_at = (((0, {}),), 0) if tuned_at is None else (lengths, tuned_at)
    seed, home = default_plan(workload, arch), next(queries for queries, _ in lengths if queries <= tuned_at)
    one = dict(q_tile=intrinsics.GROUP_ROWS, blocks=0, shared_decode=0, query_stages=1, ping_pong=0, loader_registers=LOADER_REGISTERS[1])
    plans = [(plan if queries == home else _with_room(workload, _with_loader(workload, _dealt(workload, seed.but(**changes)))),
              Calls(queries, arch.peak.sms + 1, intrinsics.GROUP_ROWS)) for queries, changes in lengths]
    plans.append((plan.but(**one) if plan.groups > 1 else plan, Calls()))
    # Whatever is for one entry is for the next one, too.
    return [entry for entry, following in zip(plans, [*plans[1:], (None, None)]) if entry[0] != following[0]]


def tile_choices(workload, arch):
    """Plans of all structures that fit, the seed's first; each is a search task of its own."""
    seed = default_plan(workload, arch)
    sizes = [(q_tile, kv_tile) for q_tile in (128, 192) for kv_tile in range(64, 225, 16)] + [(64, 128), (64, 176)]
    tiles = [seed.but(q_tile=q_tile, kv_tile=kv_tile, query_stages=1, loader_registers=LOADER_REGISTERS[q_tile // intrinsics.GROUP_ROWS])
             for q_tile, kv_tile in sizes if (q_tile, kv_tile) != (seed.q_tile, seed.kv_tile)]
    plans = (_with_loader(workload, plan) for plan in (seed, seed.but(blocks=0, shared_decode=0), seed.but(lazy_rescale=0), *tiles))
    return fitting(plans, budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's structure."""
    orders = (order_of_work.TO_AND_FRO, order_of_work.FAIR) if plan.blocks and workload.mask != "full" else (plan.order_of_work,)
    return {"stages": (2, 3, 4), "query_stages": (1, 2), "ping_pong": (0, 1) if plan.groups > 1 else (plan.ping_pong,), "late_wait": (0, 1),
            "polynomial_share": (0, 1, 2), "shared_decode": (0, 1) if plan.blocks else (0,), "order_of_work": orders}


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    d, dv = (round_up(size, CHANNEL_STEPS[1]) for size in (workload.head_dim, workload.value_dim))
    require(plan.q_tile in (64, 128, 192), "q_tile must be 64 rows for each of one to three consumer warpgroups", plan.q_tile,
            "choose 64, 128 or 192")
    require(plan.kv_tile % 16 == 0 and 16 <= plan.kv_tile <= 256, "kv_tile must be a multiple of 16 up to 256", plan.kv_tile, "round it")
    require(plan.loader_registers % 8 == 0 and 24 <= plan.loader_registers <= register_shares.entry_registers(plan.groups),
            "loader_registers must be a multiple of 8 from 24 to what a thread starts with", plan.loader_registers, "round it")
    for name, least, most in (("blocks", 0, 65535), ("order_of_work", 0, 1), ("shared_decode", 0, 1), ("stages", 1, 16),
                              ("query_stages", 1, 16), ("ping_pong", 0, 1), ("late_wait", 0, 1), ("lazy_rescale", 0, 1),
                              ("polynomial_share", 0, 8)):
        require(least <= getattr(plan, name) <= most, f"{name} must be from {least} to {most}", getattr(plan, name), "correct it")
    tiles = 2 * (plan.query_stages * plan.q_tile * d + plan.stages * plan.kv_tile * (d + dv))
    return Budget((
        ("threads", register_shares.GROUP * (plan.groups + 1), arch.threads_per_block, "of a block"),
        ("shared memory", tiles + rings.bookkeeping_bytes(plan.stages, plan.query_stages), arch.smem_bytes, "bytes"),
        ("registers, about", _registers(workload, plan),
         register_shares.consumer_registers(plan.groups, plan.loader_registers), "per consumer"),
    )).check(plan, arch)
