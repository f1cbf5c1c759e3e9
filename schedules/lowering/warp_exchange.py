"""What consumer warpgroups hand over: to each other a tile that all have written a part of, for products; to a thread of the loader
warpgroup, the adder, a tile that it adds to memory by one instruction (FlashAttention-3 has a warp for this, too)."""
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrinsics.wgmma import GROUP_WARPS
from schedules.lowering import ordered_sums, work_tiles
from schedules.lowering.register_shares import GROUP
from schedules.lowering.rewrite import constant, once

FLOAT_BYTES = 4


class Exchange:
    """What the roles of a kernel do of it. They have `rings`, `groups` consumer warpgroups of `warps` warps, variables `warp` and `lane`,
    and `defers`: whether what is to be added is handed over in the next turn, where one fence will do for both."""

    def hand_over(self, done, tiles, pointer, ring, key_tile):
        """What a thread has written is made visible to products first, and with it what it has to add from the turn before."""
        following = [tirx.truncmod(self._group() + ahead, constant(self.groups)) for ahead in range(1, self.groups)]
        return [T.ptx.fence.proxy.async_.shared__cta(),
                *(self._meeting("arrive", done, tiles, ring, key_tile, group) for group in following),
                *(self._set_down(done, tiles, key_tile) if self.defers else [])]

    def meet(self, done, tiles, ring, key_tile):
        return [self._meeting("sync", done, tiles, ring, key_tile, self._group())]

    def _meeting(self, action, done, tiles, ring, key_tile, group):
        """The barrier at which a group waits for all others, one for each copy: who is ahead arrives for the next turn already."""
        copy, _phase = self.rings.turn(int(ring), done, tiles, key_tile)
        first = self.groups + 1  # behind those at which turns are taken
        return getattr(T.ptx.bar, action)(tirx.Cast("uint32", copy * self.groups + group + first), constant(self.groups * GROUP, "uint32"))

    def _group(self):
        return tirx.truncdiv(self.warp, constant(GROUP_WARPS))

    def reclaim(self, done, tiles, pointer, ring, key_tile):
        copy, phase = self.rings.turn(int(ring), done, tiles, key_tile)
        return [self._wait(ring, copy, 1, 1 - phase)]

    def add_up(self, done, tiles, pointer, to, elements, ring, key_tile):
        """What a thread has written is made visible to the addition first."""
        return [] if self.defers else [T.ptx.fence.proxy.async_.shared__cta(), *self._set_down(done, tiles, key_tile)]

    def last_set_down(self):
        """Statements that hand over what the last turn has to add: those of a next one."""
        if not self.defers:
            return []
        following = work_tiles.last_turn(tirx.SeqStmt(self.program), "hand_over") + 1
        calls = [T.ptx.fence.proxy.async_.shared__cta(), *self._set_down(constant(0), constant(0), following)]
        return [call if isinstance(call, tirx.Stmt) else tirx.Evaluate(call) for call in calls]

    def _set_down(self, done, tiles, key_tile):
        """A warp says that its part of what is added is there."""
        ring, = self.rings.added
        copy, _phase = self.rings.turn(ring, done, tiles, key_tile)
        return [T.cuda.warp_sync(), self.arrive(ring, copy, tirx.EQ(self.lane, constant(0)), empty=0)]

    def added_up(self, done, tiles, pointer, to, elements, ring, key_tile):
        """Statements of the adder, for the parts of all warps from the first one's on. A tile that is handed over in the next turn stands
        in this turn's copy, but that it is there is told by the barrier of the next one's."""
        copy, _phase = self.rings.turn(int(ring), done, tiles, key_tile)
        told, phase = self.rings.turn(int(ring), done, tiles, key_tile + int(self.defers))
        bounds = []
        to = _place(to, bounds)
        bytes_ = tirx.Cast("uint32", elements * (self.warps * FLOAT_BYTES))
        place = T.cuda.cvta_generic_to_shared(pointer) + tirx.Cast("uint32", copy * self.rings.tile_bytes[int(ring)])
        calls = (self._wait(ring, told, 0, phase),
                 T.ptx["cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"](to, place, bytes_),
                 T.ptx.cp.async_.bulk.commit_group(), T.ptx.cp.async_.bulk.wait_group.read(0))
        return [*bounds, *map(tirx.Evaluate, calls), self.arrive(ring, copy, None)]

    def await_turn(self, done, tiles, pointer, turn):
        bounds = []
        place = _place(pointer, bounds)
        return [*bounds, ordered_sums.await_turn(place, turn)]

    def give_turn(self, done, tiles, pointer, turn):
        bounds = []
        place = _place(pointer, bounds)
        return [*bounds, ordered_sums.give_turn(place, turn)]

    def first_set_down(self):
        """Statements of the adder for what the first of turns that defer hands over: nothing."""
        ring, = self.rings.added
        return [tirx.Evaluate(self._wait(ring, constant(0), 0, constant(0)))] if self.defers else []

    def _wait(self, ring, copy, empty, phase):
        return T.cuda.mbarrier_wait(self.rings.barrier(int(ring), copy, empty), phase)


def _place(pointer, bounds):
    """An address in memory with its index `_without_bounds`."""
    element = pointer.args[0]
    return tirx.address_of(tirx.BufferLoad(element.source, [_without_bounds(element.indices[0], bounds)]))


def _without_bounds(index, bounds):
    """The index with variables where minima, maxima, choices and conditions stand, such as the first turn of a loop: what is not a sum or
    product is computed in 32 bits, while the index will have 64."""
    if isinstance(index, tirx.Mul) and any(isinstance(part, tirx.Cast) and str(part.value.ty) == "bool" for part in (index.a, index.b)):
        pass
    elif isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(index)(*(_without_bounds(part, bounds) for part in (index.a, index.b)))
    elif not isinstance(index, (tirx.Min, tirx.Max, tirx.Select)):
        return index
    var = tirx.Var("bound", index.ty)
    bounds.append(tirx.Bind(var, once(index)))
    return var
