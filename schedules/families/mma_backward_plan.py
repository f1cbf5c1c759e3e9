"""Plans of the family mma_backward: their fields, what they take of the chip, the seeds and the space."""
from dataclasses import dataclass
from functools import partial

from schedules.families.backward_roles import ROLES
from schedules.families.mma_plan import without_tensor_cores
from schedules.plan import Budget, Plan, first_of, fitting, require

NAME = "mma_backward"
#: Registers beside the sums, S and dP: fragments in flight, statistics, addresses; what compiled kernels get along with.
OTHER_REGISTERS = 31


@dataclass(frozen=True)
class MmaBackwardPlan(Plan):
    """Knobs of one of the two functions.

    warps           warps of a thread block; each takes a part of the rows that stay
    register_level  ptxas' --register-usage-level, 0 (fewest) to 10
    """

    warps: int
    register_level: int = 10

    def shares(self, _block):
        """How warps divide a block's matrix: (parts of its rows, parts of its columns)."""
        return self.warps, 1


PLAN = MmaBackwardPlan
#: (q_tile, kv_tile, warps) for each role, by most channels.
TILES = {"dq": {64: (128, 64, 4), 128: (64, 64, 4)}, "dk_dv": {64: (48, 128, 4), 128: (64, 64, 4)}}


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    reason = without_tensor_cores(workload, arch)
    if reason is not None:
        return reason
    if not {workload.head_dim, workload.value_dim} <= set(TILES["dq"]):
        return f"head dimensions must be {' or '.join(map(str, TILES['dq']))}, not {workload.head_dim} and {workload.value_dim}"
    return None


def default_plan(role, workload, arch):
    """The tile for so many channels; for dK and dV of modified scores, whose slope needs S as long as dS does, that for the most."""
    channels = max(TILES[role]) if workload.score and role == "dk_dv" else max(workload.head_dim, workload.value_dim)
    plans = (MmaBackwardPlan(*tile) for most, tile in sorted(TILES[role].items()) if most >= channels)
    return first_of(fitting(plans, partial(budget, role), workload, arch), NAME, workload, arch)


def tile_choices(role, workload, arch):
    """Plans of all tile shapes that fit; each is a search task of its own."""
    tiles = ((stays, streams, warps) for stays, warps in ((64, 4), (128, 4), (128, 8)) for streams in range(32, 129, 16))
    plans = (PLAN(stays, streams, warps) if role == "dq" else PLAN(streams, stays, warps) for stays, streams, warps in tiles)
    return fitting(plans, partial(budget, role), workload, arch)


def knobs(role, workload, arch, plan):
    """None beside the tile: one call of the compiler, with one register_level, makes all functions."""
    return {}


def budget(role, workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    d, dv = workload.head_dim, workload.value_dim
    return budget_of(ROLES[role], d if role == "dq" else d + dv, workload, arch, plan)


def budget_of(role, sums, workload, arch, plan):
    """The same of any Role, with sums of so many columns."""
    stays, streams = role.tiles(plan)
    d, dv, threads = workload.head_dim, workload.value_dim, 32 * plan.warps
    require(stays % (16 * plan.warps) == 0, "the tile that stays must be a multiple of 16 rows for each warp",
            f"{stays} rows and {plan.warps} warps", "change either")
    require(streams % 16 == 0, "the tile that streams by must be a multiple of 16", streams, "round it")
    statistics = 8 * plan.q_tile * (1 if role.rows == "i" else 2)  # those that come by have two copies
    return Budget((
        ("threads", threads, arch.threads_per_block, "of a block"),
        ("shared memory", 2 * (stays + 2 * streams) * (d + dv) + statistics, arch.smem_bytes, "bytes"),
        ("registers, about", stays * (sums + 2 * streams) // threads + OTHER_REGISTERS, arch.registers_per_thread, "per thread"),
    )).check(plan, arch)


def compiler_options(plan):
    """What ptxas is asked for."""
    return {"register_level": plan.register_level}
