"""Registers of warps with roles: what a multiprocessor has is dealt anew by setmaxnreg once the roles are clear (FlashAttention-3, 3.1)."""
from schedules.intrinsics.mma import LANES
from schedules.intrinsics.wgmma import GROUP_WARPS

#: Threads of a warpgroup.
GROUP = LANES * GROUP_WARPS
REGISTERS_PER_SM = 65536
#: What setmaxnreg takes at most, and the multiple that it wants.
MOST_REGISTERS, REGISTER_STEP = 240, 8


def _share(groups):
    """Registers per thread of a whole SM, dealt evenly to some consumer warpgroups and a loader."""
    return REGISTERS_PER_SM // (GROUP * (groups + 1)) // REGISTER_STEP * REGISTER_STEP


def entry_registers(groups):
    """Registers per thread that a block of some consumer warpgroups and a loader can start with: an equal share for each, up to 240."""
    return min(_share(groups), MOST_REGISTERS)


def consumer_registers(groups, loader_registers):
    """Registers per thread of each of some consumer warpgroups, beside a loader warpgroup with so many, out of those of a whole SM."""
    return min((_share(groups) * (groups + 1) - loader_registers) // groups // REGISTER_STEP * REGISTER_STEP, MOST_REGISTERS)
