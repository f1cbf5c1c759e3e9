"""Sums in memory that blocks of the grid add to in order: each waits for its turn, and gives it to the next one when it has added.

A declaration reads from memory how far away its turn is, which is 0 where nothing runs side by side, and writes whose turn it is next
(te_defs/fused_backward.py). `take_turns_at_sums` makes the first an event that waits for 0, the second one that stands behind the addition;
warp_roles gives both to the thread that adds up.

Who waits, waits for a block of a smaller number, which the GPU has started before: so there is always one that need not wait.
"""
import tvm_ffi
from tvm import tirx
from tvm.s_tir import stmt as s_stmt
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.lowering.rewrite import function_pass, hold
from te_defs.fused_backward import DEALT

#: Annotation of the two blocks.
ORDERED = "flashtir.ordered"
AHEAD, TURN = "dQ_ahead", "dQ_turn"
#: What the thread before has added is in memory for whoever sees the turn given; additions of the bulk engine wait for neither.
_SOURCES = {
    "flashtir_await_turn": """\
__device__ __forceinline__ void flashtir_await_turn(const int *place, int turn) {
  int found;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(place) : "memory"); while (found != turn);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
""",
    "flashtir_give_turn": """\
__device__ __forceinline__ void flashtir_give_turn(int *place, int turn) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(place), "r"(turn) : "memory");
}
""",
}


@function_pass("flashtir.TakeTurnsAtSums")
def take_turns_at_sums(func):
    """Replace the stores of the annotated blocks by events; what a place in the grid comes to is computed once."""
    def lowered(block):
        if ORDERED not in block.annotations:
            return block
        stores = []
        tvm_ffi.structural_walk(block.body, (tirx.BufferStore, stores.append))
        store, = stores
        if block.name_hint == AHEAD:
            event = events.await_turn(tirx.address_of(store.value.a), store.value.b)
        else:
            event = events.give_turn(tirx.address_of(tirx.BufferLoad(store.buffer, store.indices)), store.value.b)
        return s_stmt.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, tirx.Evaluate(event))
    def place(bind):
        return hold(bind) if bind.var.name in DEALT else bind

    found = []
    tvm_ffi.structural_walk(func.body, (s_stmt.SBlock, lambda block: found.append(block) if ORDERED in block.annotations else None))
    return func.with_body(tvm_ffi.structural_map(func.body, ((s_stmt.SBlock, lowered), (tirx.Bind, place)))) if found else func


def await_turn(place, turn):
    """Call that waits."""
    return T.cuda.func_call("flashtir_await_turn", place, turn, source_code=_SOURCES["flashtir_await_turn"])


def give_turn(place, turn):
    """Call that gives a turn."""
    return T.cuda.func_call("flashtir_give_turn", place, turn, source_code=_SOURCES["flashtir_give_turn"])
