"""Rings: copies of tiles in shared memory, each with a barrier that says "full" and one that says "empty", and where all of it stands.

A tile's number modulo the copies is its copy, its number divided by them the turn, whose last bit is the phase to wait for. Tiles that come
by have `stages` copies, or one where they are `single`, and are numbered by the turns of the loop over them; those that stay have
`query_stages`, and are numbered by the tiles of work. A tile that the consumers write for each other has no barriers here, and two copies:
who writes one has met the others since they read it (warp_exchange). A tile that consumers write to have it added to memory has one copy or
two, and barriers with the parts exchanged: consumers say "full". In shared memory stand first the tiles, then the numbers that go with
their rows, then the barriers.
"""
import math

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.intrinsics.wgmma import ELEMENT_BYTES
from schedules.lowering import bulk_loads, rewrite, work_tiles
from schedules.lowering.row_statistics import NUMBER_BYTES

BARRIER_BYTES = 8
#: Copies of a tile that consumers write for each other.
MET_COPIES = 2


def barrier_bytes(stages, query_stages, stays=1, added=0):
    """Shared memory of the barriers: a full and an empty one for each copy of the tiles that stay, of the two that come by, and of what is
    added to memory, of which there are so many copies."""
    return 2 * (stays * query_stages + 2 * stages + added) * BARRIER_BYTES


def bookkeeping_bytes(stages, query_stages, stays=1):
    """Shared memory of barriers, and of what the loader tells about each copy of Q."""
    return barrier_bytes(stages, query_stages, stays) + query_stages * rewrite.FACT_BYTES


def element_bytes(tile):
    """Bytes of an element of a tile."""
    return tile.dtype.bits // 8


class Rings:
    """The rings of one kernel.

    single   ring of tiles that come by of which there is one copy: a turn is done with it early; None: there is no such
    sums     copies of a tile that is added to memory
    loads    bulk_load event of each ring by its number
    stays    rings of tiles that stay
    met      {ring: tile} of those that consumers write for each other
    added    the same of those that are added to memory
    numbers  {buffer of numbers that go with a tile: (its ring, its first element)}
    shared   the one buffer of shared memory
    """

    def __init__(self, program, stages, query_stages, single=None, sums=1):
        self.stages, self.query_stages, self.single, self.sums = stages, query_stages, single, sums
        self.loads = {int(call.args[1]): call for call in work_tiles.events_in(program, "bulk_load")}
        self.stays = {ring for ring, call in self.loads.items() if bulk_loads.is_loaded_once(call)}
        self.met = {int(call.args[2]): call.args[1].args[0].source for call in work_tiles.events_in(program, "hand_over")}
        self.added = {int(call.args[2]): call.args[1].args[0].source for call in work_tiles.events_in(program, "reclaim")}
        self.tile_bytes = {ring: bulk_loads.box_bytes(call) for ring, call in self.loads.items()}
        self.tile_bytes |= {ring: math.prod(map(int, tile.shape)) * element_bytes(tile) for ring, tile in (self.met | self.added).items()}
        self.numbers = {}
        for call in work_tiles.events_in(program, "tell"):
            self.numbers.setdefault(call.args[1].args[0].source, (int(call.args[2]), self.offset(None)))
        elements = self.offset(None) + (self.barrier_bytes() + query_stages * rewrite.FACT_BYTES) // ELEMENT_BYTES
        self.shared = tirx.decl_buffer((elements,), bulk_loads.tile_of(self.loads[events.Q]).dtype, "shared", scope="shared.dyn")

    def barrier_bytes(self):
        return barrier_bytes(self.stages, self.query_stages, len(self.stays), self.sums * len(self.added))

    def offset(self, ring):
        """First element of a ring in shared memory; for None the first behind all of them, and behind the numbers that go with tiles.
        Boxes are whole swizzle periods of 1 KiB."""
        before = [other for other in self.tile_bytes if ring is None or other < ring]
        numbers = sum(self.numbers_of(other) * NUMBER_BYTES * self.copies(other) for other in before) if ring is None else 0
        return (sum(self.tile_bytes[other] * self.copies(other) for other in before) + numbers) // ELEMENT_BYTES

    def copies(self, ring):
        if ring in self.met:
            return MET_COPIES
        if ring in self.added or ring == self.single:
            return self.sums if ring in self.added else 1
        return self.query_stages if ring in self.stays else self.stages

    def numbers_of(self, ring):
        """Numbers that go with one tile of a ring."""
        return sum(int(buffer.shape[0]) for buffer, (other, _) in self.numbers.items() if other == ring)

    def barrier(self, ring, copy, empty):
        """Shared address of a barrier: for each ring first the full ones, then the empty ones."""
        first = 2 * sum(self.copies(other) for other in self.loads if other < ring)
        index = copy + (first + empty * self.copies(ring))
        base = T.cuda.cvta_generic_to_shared(tirx.address_of(tirx.BufferLoad(self.shared, [tirx.const(self.offset(None), "int32")])))
        return base + tirx.Cast("uint32", index * BARRIER_BYTES)

    def turn(self, ring, done, tiles, key_tile):
        """(copy, phase) of a ring for a key tile of this work tile, or for its queries."""
        number, copies = tiles if ring in self.stays else done + key_tile, tirx.const(self.copies(ring), "int32")
        return tirx.truncmod(number, copies), tirx.truncmod(tirx.truncdiv(number, copies), tirx.const(2, "int32"))

    def facts(self, wave):
        """Shared address of what the loader tells the consumers about the work tile of a wave."""
        first = self.offset(None) + self.barrier_bytes() // ELEMENT_BYTES
        base = T.cuda.cvta_generic_to_shared(tirx.address_of(tirx.BufferLoad(self.shared, [tirx.const(first, "int32")])))
        return base + tirx.Cast("uint32", tirx.truncmod(wave, tirx.const(self.query_stages, "int32")) * rewrite.FACT_BYTES)

    def place_of(self, pointer, copy):
        """Address of a number that goes with this copy of a tile."""
        element = pointer.args[0]
        first = next(first for buffer, (_, first) in self.numbers.items() if buffer.same_as(element.source))
        index = (copy * int(element.source.shape[0]) + element.indices[0]) * (NUMBER_BYTES // ELEMENT_BYTES) + first
        return tirx.address_of(tirx.BufferLoad(self.shared, [index]))

    def place_tiles(self, body, allocations):
        """The body with all shared tiles in one buffer, behind each other, and the allocations that are left.

        One buffer, since the merging of shared allocations does not see that the address of a tile is taken.
        """
        tiles = {ring: bulk_loads.tile_of(call) for ring, call in self.loads.items()} | self.met | self.added
        offsets = {ring: self.offset(ring) for ring in tiles}

        def place(load):
            ring = next((ring for ring, tile in tiles.items() if tile.same_as(load.source)), None)
            return load if ring is None else tirx.BufferLoad(
                self.shared, [load.indices[0] * (element_bytes(load.source) // ELEMENT_BYTES) + offsets[ring]])
        placed = [*tiles.values(), *self.numbers]
        kept = [stmt for stmt in allocations if not any(stmt.buffer.same_as(tile) for tile in placed)]
        return tvm_ffi.structural_map(body, (tvm.ir.TensorLoad, place)), [*kept, tirx.AllocBuffer(self.shared)]
