"""wgmma, backward, with five products in a fixed order: wgmma_fused_backward where tiles of keys add to dQ one after the other.

The thread that adds up waits until it is its turn at a tile of the sums, and says whose is next once its addition is in memory
(schedules/lowering/ordered_sums.py; FlashAttention-3 does so where it is told to be deterministic). Nobody waits for it: consumers are a
turn further.

Few wait at all. The last tile of keys is the first to add: under a causal mask each then begins with queries that no other has to see
before, and goes on to the next ones a turn after the tile of keys behind it. Where all see all, each is the time of an addition behind the
one before from its start on, and the grid is dealt by that: of one head no more tiles begin together than can.

In its nest dQ_ahead stands in front of dQ_sum, and dQ_turn behind it.
"""
from schedules import roles
from schedules.families import wgmma_fused_backward
from schedules.families.wgmma_fused_backward import (  # noqa: F401, the same here
    BINDS_AT, CONFIG, PIPELINE, PLAN, STRIDED, WHOLE_ROWS, budget, compiler_options, default_plan, knobs, role_of, tile_choices)
from schedules.lowering.ordered_sums import AHEAD, ORDERED, TURN
from te_defs.masks import MASKS, Mask

NAME = "wgmma_ordered_backward"
ROLE = "ordered"


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    reason = wgmma_fused_backward.decline(workload, arch)
    mask = workload.mask_class
    if reason is None and not any((mask.query_begin, mask.query_end) == (it.query_begin, it.query_end) for it in (Mask, *MASKS.values())):
        return "who waits for whom is known only where which queries see a key is said by one of the project's own masks"
    return reason


def declare(workload, plan):
    """The plain function at the plan's tile; makes the intrinsics known that it will need."""
    return wgmma_fused_backward.declare(workload, plan, ROLE)


def take_turns(sch, plan, role):
    """Whose turn it is, blocks of the grid tell each other: no two of them write the same, though both read and write there."""
    sch.set_scope(AHEAD, 0, "local")
    for name in (AHEAD, TURN):
        sch.annotate(sch.get_sblock(name), ORDERED, 1)
    for name in ("rows", "attn"):
        block = sch.get_sblock(name)
        for kind, regions in (("read", sch.get(block).reads), ("write", sch.get(block).writes)):
            sch.unsafe_hide_buffer_access(block, kind, [n for n, region in enumerate(regions) if region.source.name == "dQ_turns"])


_AT = [stage.__name__ for stage in wgmma_fused_backward.STAGES].index("hide_sums") + 1
STAGES = (*wgmma_fused_backward.STAGES[:_AT], take_turns, *wgmma_fused_backward.STAGES[_AT:])


def schedule(workload, plan, stages=None, strided=False):
    """A fresh Schedule of the function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(workload, plan), STAGES[:stages], plan, role_of(ROLE, plan), strided)
