"""Plans of the family simt_backward: what they take of the chip, the seeds and the space."""
from functools import partial

from schedules.families import simt
from schedules.families.simt import VECTOR, resources
from schedules.plan import first_of, fitting, require

NAME = "simt_backward"
#: thread_rows are threads along the rows that stay, thread_columns those along the rows that stream by, and along channels.
PLAN = simt.SimtPlan

#: (most channels, plan) for each role: patches of 8 rows by 4 columns, then smaller ones for many channels and small shared memories.
TILES = {"dq": ((64, PLAN(64, 32, 8, 8)), (128, PLAN(64, 32, 16, 8)), (256, PLAN(32, 16, 8, 8)), (256, PLAN(16, 8, 8, 8))),
         "dk_dv": ((64, PLAN(32, 64, 8, 8)), (128, PLAN(32, 32, 8, 8)), (256, PLAN(16, 16, 8, 8)), (256, PLAN(8, 16, 8, 8)))}
#: Registers for addresses and the like, read off compiled kernels.
OTHER_REGISTERS = 36
#: A row is whole lines of all banks, and this much longer, so that neighbouring rows begin in different ones.
LINE, PAD = 32, VECTOR


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    if arch.kind != "cuda":
        return f"{arch.name} is no CUDA GPU"
    if workload.dtype == "bfloat16" and arch.capability < (8, 0):
        return f"{arch.name} has no bfloat16 (sm_80 and later have)"
    return None


def default_plan(role, workload, arch):
    """The first of TILES that is for so many channels and fits; PlanError where none does."""
    channels = max(workload.head_dim, workload.value_dim)
    plans = (plan for most, plan in TILES[role] if most >= channels)
    return first_of(fitting(plans, partial(budget, role), workload, arch), NAME, workload, arch)


def tile_choices(role, workload, arch):
    """Plans of all tile shapes that fit; each is a search task of its own."""
    further = [PLAN(*(tile if role == "dq" else tile[::-1]), *threads) for tile in ((64, 64), (64, 32), (32, 32), (128, 32))
               for threads in ((8, 8), (16, 8), (8, 16))]
    return fitting(dict.fromkeys((*(plan for _, plan in TILES[role]), *further)), partial(budget, role), workload, arch)


def knobs(role, workload, arch, plan):
    """Candidates of the sampled fields within the budget, as in simt.py."""
    plans = fitting([plan.but(thread_rows=rows) for rows in (4, 8, 16, 32)], partial(budget, role), workload, arch)
    streams = plan.kv_tile if role == "dq" else plan.q_tile
    steps = (steps for steps in (4, 8, 16) if workload.head_dim % steps == workload.value_dim % steps == streams % steps == 0)
    return {"thread_rows": tuple(plan.thread_rows for plan in plans), "unroll": tuple(steps)}


def budget(role, workload, arch, plan):
    """Divisibility, threads, registers and shared memory of a plan; PlanError with the whole budget where it does not fit."""
    stays, streams = (plan.q_tile, plan.kv_tile) if role == "dq" else (plan.kv_tile, plan.q_tile)
    D, DV = workload.head_dim, workload.value_dim
    require(stays % plan.thread_rows == 0, "the tile that stays must be a multiple of thread_rows", f"{stays} on {plan.thread_rows}",
            "change either")
    require(streams % plan.thread_columns == D % plan.thread_columns == DV % plan.thread_columns == 0, "the tile that streams by and both "
            "head dimensions must be multiples of thread_columns", f"{streams}, {D} and {DV} on {plan.thread_columns}",
            "change thread_columns")
    rows, columns, channels = (size // threads for size, threads in (
        (stays, plan.thread_rows), (streams, plan.thread_columns), (D if role == "dq" else D + DV, plan.thread_columns)))
    registers = rows * (channels + 2 * columns + 1) + VECTOR * columns + OTHER_REGISTERS
    k, v, scores = (4 * streams * padded(size) for size in (D, DV, stays))
    smem = 4 * stays * (D + DV) + (k + max(v, scores) if role == "dq" else k + v + scores) + 8 * plan.q_tile
    return resources(plan, registers, smem, arch).check(plan, arch)


def padded(size):
    """Elements from a row to the next of a tile that is stored by rows, or of scores."""
    return size + (LINE + PAD - size % LINE) % LINE
