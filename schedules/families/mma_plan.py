"""Plans of the mma family: their fields, what they take of the chip, the seeds and the space."""
from dataclasses import dataclass

from schedules.intrinsics import mma as intrinsics
from schedules.intrinsics.mma import CHANNEL_STEPS
from schedules.lowering import software_pipeline
from schedules.plan import Budget, Plan, first_of, fitting, require
from te_defs.integers import round_up

NAME = "mma"

COPY_BYTES = 16
LEAST_VALUE_DIM = 16
#: Query rows of a tile that the heads of a group share: 16 for each of four warps.
PACKED_ROWS = 64
#: (q_tile, kv_tile, warps) for head dimensions at which a row's tile is no whole number of turns of its copies.
SMALL_TILES = ((64, 64, 4), (64, 32, 4))
#: Registers beside S and O: fragments of Q, K and V in flight, statistics, addresses (read off compiled kernels).
OTHER_REGISTERS = 56


@dataclass(frozen=True)
class MmaPlan(Plan):
    """Knobs of the mma family.

    warps           warps of a thread block; each takes q_tile / warps query rows
    heads_first     grid order; 1: all heads of one query tile, then the next tile; 0: all tiles of one head first
    order           execution order of the key loop's statements, an index into software_pipeline.ORDERS
    lazy_rescale    1: skip the rescale of O when no row of the warp has a new maximum
    register_level  ptxas' --register-usage-level, 0 (fewest) to 10
    """

    warps: int
    heads_first: int = 0
    order: int = 2
    lazy_rescale: int = 1
    register_level: int = 10


def without_tensor_cores(workload, arch):
    """Why mma.sync cannot serve the workload on an architecture, or None."""
    if arch.kind != "cuda":
        return f"{arch.name} is no CUDA GPU"
    if not arch.mma:
        return f"{arch.name} has no mma.sync m16n8k16 (sm_80 and later have)"
    if workload.dtype not in intrinsics.PTX_DTYPE:
        return f"tensor cores take 16-bit inputs, not {workload.dtype}"
    return None


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    reason = without_tensor_cores(workload, arch)
    if reason is not None:
        return reason
    if workload.value_dim < LEAST_VALUE_DIM:
        return f"the value dimension must be at least {LEAST_VALUE_DIM}, a fragment's columns, not {workload.value_dim}"
    if not _seeds(workload, arch):
        return f"no tile fits {arch.name} at head dimensions {workload.head_dim} and {workload.value_dim}"
    return None


def _seeds(workload, arch):
    """Plans that fit: of the architecture row's tiles those for so many channels, then SMALL_TILES; heads side by side under a causal mask
    so that long tiles start first."""
    channels = max(workload.head_dim, workload.value_dim)
    tiles = (tile for most, tile in sorted(arch.mma_tile.items()) if most >= channels)
    plans = (MmaPlan(*tile, heads_first=int(workload.mask != "full")) for tile in (*tiles, *SMALL_TILES))
    return fitting(plans, budget, workload, arch)


def default_plan(workload, arch):
    """The seed: the first tile that fits."""
    return first_of(_seeds(workload, arch), NAME, workload, arch)


def packed_plan(workload, arch):
    """The plan for few queries of grouped heads: few rows, so that not many of them are empty, and the seed's keys as far as they fit."""
    seed = default_plan(workload, arch)
    tiles = [seed.but(q_tile=PACKED_ROWS, warps=PACKED_ROWS // 16, kv_tile=kv_tile) for kv_tile in (seed.kv_tile, 64, 32)]
    return first_of(fitting(tiles, budget, workload, arch), NAME, workload, arch)


def tile_choices(workload, arch):
    """Plans of all tile shapes that fit, the seed's first; each is a search task of its own."""
    seed = default_plan(workload, arch)
    plans = [seed] + [seed.but(q_tile=q_tile, kv_tile=kv_tile) for q_tile in (128, 64) for kv_tile in range(32, 129, 16)
                      if (q_tile, kv_tile) != (seed.q_tile, seed.kv_tile)]
    return fitting(plans, budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's tile shape; heads_first reorders loops, so the seed decides it."""
    return {"warps": tuple(w for w in (4, 8) if plan.q_tile % (16 * w) == 0),
            "order": tuple(range(len(software_pipeline.ORDERS))), "lazy_rescale": (0, 1), "register_level": (5, 10)}


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    threads = 32 * plan.warps
    (_, product_dv), (d, dv) = ([round_up(size, step) for size in (workload.head_dim, workload.value_dim)] for step in CHANNEL_STEPS)
    row, value_row = (size if intrinsics.swizzled(size) else size + intrinsics.ROW_GAP for size in (d, dv))
    require(plan.q_tile % (16 * plan.warps) == 0, "q_tile must be a multiple of 16 rows for each warp",
            f"q_tile {plan.q_tile} and {plan.warps} warps", "change either")
    require(plan.kv_tile % 16 == 0, "kv_tile must be a multiple of 16", plan.kv_tile, "round it")
    chunk = threads * COPY_BYTES // 2
    for name, elements in (("Q", plan.q_tile * d), ("K", plan.kv_tile * d), ("V", plan.kv_tile * dv)):
        require(elements % chunk == 0, f"a tile of {name} must be whole turns of {chunk} elements that all threads copy together",
                elements, "change the tile or the warps")
    accumulators = plan.q_tile * (product_dv + plan.kv_tile) // threads
    return Budget((
        ("threads", threads, arch.threads_per_block, "of a block"),
        ("shared memory", 2 * (plan.q_tile * row + 2 * plan.kv_tile * (row + value_row)), arch.smem_bytes, "bytes"),
        ("registers, about", accumulators + OTHER_REGISTERS, arch.registers_per_thread, "per thread"),
    )).check(plan, arch)
