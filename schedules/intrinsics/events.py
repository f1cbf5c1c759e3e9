"""What warps tell each other while tiles travel through shared memory: calls that stand in TIR until the roles of the warps are split.

A tensor intrinsic says *what* must have happened ("the tile of K is there"); schedules.lowering.warp_roles turns these calls into
mbarriers, once it is known which warps load, how many copies of a tile the ring has and how the grid walks over the work.
"""
from tvm import tirx
from tvm.script import tirx as T

PREFIX = "flashtir."
#: Rings by number: shared tiles that one warpgroup fills and the others empty; dS is one that the others fill for each other, and dQ one
#: from which each warp adds its own part to memory.
Q, K, V, DO, DS, DQ = range(6)
RINGS = ("Q", "K", "V", "dO", "dS", "dQ")


def key_tile():
    """The number of the turn, in the loop over the tiles that come by; it moves with the statement when the software pipeline shifts this.
    Outside that loop it stays, and says that the tile is one that is loaded once."""
    return T.call_extern("int32", PREFIX + "key_tile")


def wait_full(ring):
    """Wait until the ring's tile of this turn has arrived."""
    return T.call_extern("int32", PREFIX + "wait_full", ring, key_tile())


def release(ring, tile=None):
    """This warpgroup has read the tile, that of this turn of the key loop where none is named: it may be overwritten."""
    return T.call_extern("int32", PREFIX + "release", ring, key_tile() if tile is None else tile)


def release_before():
    """This warpgroup's part of what was written in the place of the queries, those of the work tile before, has been read from there."""
    return T.call_extern("int32", PREFIX + "release_before")


def slot_bytes(ring):
    """Offset in bytes of this turn's copy of the tile."""
    return T.call_extern("int32", PREFIX + "slot_bytes", ring, key_tile())


def group_bytes(rows_bytes):
    """Offset in bytes of this warp's 16 rows from the first row of its warpgroup, `rows_bytes` for each warp."""
    return T.call_extern("int32", PREFIX + "group_bytes", rows_bytes)


def take_turn():
    """Wait for this warpgroup's turn at the tensor cores."""
    return T.call_extern("int32", PREFIX + "take_turn")


def pass_turn():
    """Hand the tensor cores to the next warpgroup."""
    return T.call_extern("int32", PREFIX + "pass_turn")


def hand_over(pointer, ring):
    """This warpgroup has written its part of this turn's copy of a tile, at `pointer`, for products of all that compute to read."""
    return T.call_extern("int32", PREFIX + "hand_over", pointer, ring, key_tile())


def meet(ring):
    """Wait until all warpgroups that compute have handed over their parts of this turn's copy of a tile."""
    return T.call_extern("int32", PREFIX + "meet", ring, key_tile())


def reclaim(pointer, ring):
    """Wait until what stood in a tile of which there is one copy, at `pointer` this warp's part, has been read by `add_up`."""
    return T.call_extern("int32", PREFIX + "reclaim", pointer, ring, key_tile())


def add_up(pointer, to, elements, ring):
    """This warp has written its part of a tile, at `pointer` so many float32: all parts, which stand side by side, are to be added to as
    many that stand so in memory, `to` those of this part. Nobody waits."""
    return T.call_extern("int32", PREFIX + "add_up", pointer, to, elements, ring, key_tile())


def await_turn(pointer, turn):
    """Wait until a number in memory says that it is this turn to add up."""
    return T.call_extern("int32", PREFIX + "await_turn", pointer, turn)


def give_turn(pointer, turn):
    """Once what was added up is in memory, say there that it is another turn."""
    return T.call_extern("int32", PREFIX + "give_turn", pointer, turn)


def wait_scores():
    """Wait until the scores are there, while the product of the tile before may still run."""
    return T.call_extern("int32", PREFIX + "wait_scores", key_tile())


def issued(product):
    """The product of this name is on its way: schedules.lowering.products_in_flight counts it."""
    return T.call_extern("int32", PREFIX + "issued", product)


def awaited(product):
    """Wait until the last product of this name is there, and nothing that was issued behind it."""
    return T.call_extern("int32", PREFIX + "awaited", product)


def bulk_load(*arguments):
    """Load one tile into its ring: see schedules.lowering.bulk_loads for the arguments."""
    return tirx.call_extern("int32", PREFIX + "bulk_load", *arguments)


def tell(pointer, ring, value):
    """Put a number that goes with the ring's tile of this turn in its place in shared memory."""
    return tirx.call_extern("int32", PREFIX + "tell", pointer, ring, key_tile(), value)


def told(pointer, ring):
    """The number in that place."""
    return tirx.call_extern("float32", PREFIX + "told", pointer, ring, key_tile())


def name_of(call):
    """Name of an event without its prefix; None for any other expression."""
    if getattr(getattr(call, "op", None), "name", "") != "tirx.call_extern":
        return None
    name = str(call.args[0].value)
    return name[len(PREFIX):] if name.startswith(PREFIX) else None
