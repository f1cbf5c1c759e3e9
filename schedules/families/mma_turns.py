"""In which order mma_backward and mma_fused_backward do what a turn has to do.

Tiles for the next turn are asked for by cp.async behind the first product: the barrier in front of that product then says both that what
has come may be read and that what was read in the turn before may be overwritten (lowering.few_barriers). Statistics, which are not copied
as they are, are fetched into registers and stored from there, when they have come.
"""
from schedules.lowering.few_barriers import ARRIVE
from schedules.stages import loops_of

#: Blocks of a statistic on its way to shared memory: to registers, and from there, as cache_write names it.
FETCH, STORE = "{}_load", "{}_tile_local"
STATISTICS = ("LSE", "delta")


def fetched(statements):
    """Statements with the loads of statistics in two parts."""
    at = statements.index(FETCH.format(STATISTICS[-1])) + 1
    return (*statements[:at], *(STORE.format(it) for it in STATISTICS), *statements[at:])


def moved(statements, names, behind):
    """Statements with some of them moved behind another one, in the order in which they are named."""
    rest = [it for it in statements if it not in names]
    at = rest.index(behind) + 1
    return (*rest[:at], *names, *rest[at:])


def arrive_behind(sch, *blocks):
    """Threads say behind these blocks that they have come so far, and meet where they must, instead of at barriers of one part."""
    for block in blocks:
        sch.annotate(next(loop for loop in loops_of(sch, block) if sch.get(loop).thread_binding is None), ARRIVE, 1)


def order(sch, loop, statements, executed, last=None, asked="S"):
    """Annotate the loop over turns with TVM's lists: what is loaded is so a turn ahead.

    statements  leaves of a turn in program order
    executed    the same in the order in which they are executed, but for loads
    last        the statement behind which statistics are stored, in a turn that has a barrier more. None: they are fetched in front of the
                first product and stored behind it; as they are read after that, they get two copies, and need no barrier
    asked       the statement behind which tiles are asked for
    """
    fetches = [FETCH.format(it) for it in STATISTICS if STORE.format(it) in statements]
    stores = [STORE.format(it) for it in STATISTICS if STORE.format(it) in statements]
    loads = [it for it in statements if it.endswith("_load") and it not in fetches]
    executed = [it for it in executed if it not in (*fetches, *stores, *loads)]
    if last is None:
        executed = (*fetches, *moved(executed, (*loads, *stores), "S"))
    else:
        executed = moved(moved(executed, (*loads, *fetches), asked), stores, last)
    stages = [0 if it in (*fetches, *loads, *stores) else 1 for it in statements]
    for key, value in (("stage", stages), ("order", [executed.index(it) for it in statements]), ("async_stages", [0])):
        sch.annotate(loop, f"software_pipeline_{key}", value)
