"""Turns that consumer warpgroups take at issuing products, so that one computes exponentials while the other has the tensor cores
(FlashAttention-3, section 3.1, ping-pong)."""
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrinsics.wgmma import GROUP_WARPS
from schedules.lowering.register_shares import GROUP


class Turns:
    """What the roles of a kernel do of turns. They have `ping_pong`, whether they take any, `groups` consumer warpgroups, and a variable
    `warp`, the number of a thread's warp."""

    @property
    def takes_turns(self):
        return self.ping_pong and self.groups > 1

    def take_turn(self, done, tiles):
        return [self.named_barrier("sync", self.warp // GROUP_WARPS)] if self.takes_turns else []

    def pass_turn(self, done, tiles):
        following = tirx.truncmod(self.warp // GROUP_WARPS + 1, tirx.const(self.groups, "int32"))
        return [self.named_barrier("arrive", following)] if self.takes_turns else []

    def named_barrier(self, action, group):
        """A barrier of the group that waits and the one that lets it go; number 0 is that of the whole block."""
        return getattr(T.ptx.bar, action)(tirx.Cast("uint32", group + 1), tirx.const(2 * GROUP, "uint32"))

    def first_turn(self):
        """The last group gives the first one its turn."""
        return self._of_one(tirx.EQ(self.warp // GROUP_WARPS, tirx.const(self.groups - 1, "int32")), "arrive")

    def last_turn(self):
        """The turn that nobody takes any more: no barrier may be left with threads that have arrived."""
        return self._of_one(tirx.LT(self.warp, tirx.const(GROUP_WARPS, "int32")), "sync")

    def _of_one(self, group, action):
        """What one group does at the barrier of the first one."""
        first = tirx.const(0, "int32")
        return [tirx.IfThenElse(group, tirx.Evaluate(self.named_barrier(action, first)), None)] if self.takes_turns else []
