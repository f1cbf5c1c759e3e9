"""Barriers of loops with asynchronous copies: one where two accesses to the same copy of a buffer need it, and none besides."""
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cuda_arch
from schedules.families import mma_backward, mma_fused_backward
from schedules.lowering.few_barriers import ARRIVE, FEW_BARRIERS, few_barriers
from te_defs.workload import Workload

ARCH = cuda_arch("sm_80")
CAUSAL = Workload(64, 64, "float16", "causal")


def turns(copies, exchange):
    """A loop whose turn waits for numbers, reads them, asks for the next ones, and where `exchange` hands one over through memory that has
    one copy; with a barrier in front of every statement. `copies` of the numbers, 1 or 2."""
    @T.prim_func
    def func(a: T.handle, o: T.handle, turns: T.int32):
        A = T.match_buffer(a, (4096,), "float32")
        O = T.match_buffer(o, (4096,), "float32")
        thread = T.launch_thread("threadIdx.x", 32)
        numbers = T.alloc_buffer((32 * copies,), "float32", scope="shared.dyn")
        handed = T.alloc_buffer((32,), "float32", scope="shared.dyn")
        for t in range(turns):
            T.tvm_storage_sync("shared.dyn")
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 0):
                    O[t * 32 + thread] = numbers[t % copies * 32 + 31 - thread]
            T.tvm_storage_sync("shared.dyn")
            with T.attr(0, "async_commit_queue_scope", 0):
                with T.attr(0, "async_scope", 1):
                    numbers[(t + 1) % copies * 32 + thread] = A[t * 32 + thread]
            if exchange:
                T.tvm_storage_sync("shared.dyn")
                handed[thread] = A[t]
                T.tvm_storage_sync("shared.dyn")
                O[t * 32 + thread] = handed[31 - thread]
    return func


def barriers(func):
    """For each serial loop the numbers of the statements, barriers not counted, in front of which a barrier stands."""
    found = []

    def visit(loop):
        if loop.kind != tirx.ForKind.SERIAL:
            return
        places, count = [], 0
        for stmt in loop.body.seq:
            inside = []
            tvm_ffi.structural_walk(stmt, (tvm.ir.Call, lambda call: inside.append(call) if "tvm_storage_sync" in str(call.op) else None))
            if inside:
                places.append(count)
            count += not isinstance(stmt, tirx.Evaluate)
        found.append(places)
    tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    return found


def placed(func):
    return few_barriers()(tvm.IRModule({"main": func.with_attr(FEW_BARRIERS, True)}))["main"]


@pytest.mark.parametrize("copies, exchange, places", [
    (2, False, [0]),  # what is asked for goes where the turn before has read
    (1, False, [0, 1]),  # it goes where this turn reads
    (2, True, [0, 3])])  # what was handed over a turn before was read before the barrier of the wait
def test_a_barrier_stands_between_accesses_to_one_copy(copies, exchange, places):
    assert barriers(placed(turns(copies, exchange))) == [places]


def test_the_loop_stands_between_barriers():
    assert str(placed(turns(2, False))).count("tvm_storage_sync") == 3


def test_a_barrier_behind_a_wait_is_inside():
    """In front of it the copies of other threads may still be under way."""
    text = str(placed(turns(2, False)))
    assert text.index("async_wait") < text.index("tvm_storage_sync", text.index("for t in")) < text.index("async_commit")


def marked_turns(marks):
    """A loop whose turn waits for numbers and reads them, asks for the next ones, hands one over and reads it; a statement each, which
    threads arrive behind where it is in `marks`."""
    names = [ARRIVE if number in marks else "unmarked" for number in range(4)]

    @T.prim_func
    def func(a: T.handle, o: T.handle, turns: T.int32):
        A = T.match_buffer(a, (4096,), "float32")
        O = T.match_buffer(o, (4096,), "float32")
        warp = T.launch_thread("threadIdx.y", 1)
        thread = T.launch_thread("threadIdx.x", 32)
        numbers = T.alloc_buffer((64,), "float32", scope="shared.dyn")
        handed = T.alloc_buffer((32,), "float32", scope="shared.dyn")
        for t in range(turns):
            with T.attr(0, "async_wait_queue_scope", 0):
                with T.attr(0, "async_wait_inflight_count", 0):
                    with T.attr(0, names[0], 1):
                        O[t * 32 + thread + warp] = numbers[t % 2 * 32 + 31 - thread]
            with T.attr(0, "async_commit_queue_scope", 0):
                with T.attr(0, "async_scope", 1):
                    numbers[(t + 1) % 2 * 32 + thread] = A[t * 32 + thread]
            with T.attr(0, names[2], 1):
                handed[thread] = A[t]
            with T.attr(0, names[3], 1):
                O[t * 32 + thread] = handed[31 - thread]
    return func


def told(func):
    """What stands in the loop: meetings, waits for copies, arrivals and the statements that read or write."""
    found = []

    def visit(stmt):
        if isinstance(stmt, tirx.SeqStmt):
            [visit(it) for it in stmt.seq]
        elif isinstance(stmt, tirx.AttrStmt):
            found.extend(["wait"] * (stmt.attr_key == "async_wait_inflight_count"))
            visit(stmt.body)
        elif isinstance(stmt, tirx.BufferStore):
            found.extend([] if stmt.buffer.name == "phase" else [f"to {stmt.buffer.name}"])
        elif isinstance(stmt, tirx.Evaluate):
            found.append("meet" if "flashtir_meet(" in str(stmt) else "arrive" if "flashtir_arrive(" in str(stmt) else str(stmt))

    tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: visit(loop.body)))
    return found


def test_threads_arrive_where_they_are_told_and_meet_where_they_must():
    """What was handed over is read behind a meeting; numbers are, too, and what is handed over next may only then overwrite the last."""
    assert told(placed(marked_turns((2, 3)))) == [
        "meet", "to O", "to numbers", "to handed", "arrive", "meet", "to O", "wait", "arrive"]


def test_arrivals_and_meetings_take_turns():
    """Also where nothing asks for a meeting: it stands in front of the next arrival."""
    assert told(placed(marked_turns((0, 2, 3)))) == [
        "meet", "to O", "arrive", "to numbers", "meet", "to handed", "arrive", "meet", "to O", "wait", "arrive"]


def test_what_is_said_before_a_loop_and_in_its_last_turn_is_met():
    text = str(placed(marked_turns((2, 3))))
    assert text.count("flashtir_open_meetings(unsigned") == 1
    before, loop = text.split("for t in range(turns)")
    assert before.index("async_wait_inflight_count") < before.rindex("tvm_storage_sync") < before.rindex("flashtir_arrive")
    assert loop.rindex("flashtir_meet") < loop.rindex("tvm_storage_sync")


def test_an_access_that_no_arrival_stands_before():
    with pytest.raises(ValueError, match="threads must arrive between accesses to the same memory, found no mark in front of statement 3"):
        placed(marked_turns((3,)))


def test_functions_without_the_attribute_stay():
    mod = tvm.IRModule({"main": turns(2, True)})
    assert tvm_ffi.structural_equal(few_barriers()(mod), mod)


@pytest.mark.parametrize("function, most", [("dq", 1), ("dk_dv", 1), ("fused", 2)])
def test_turns_of_gradients(function, most):
    """All loops over tiles that come by, and only these, have so many."""
    if function == "fused":
        sch = mma_fused_backward.schedule(CAUSAL, mma_fused_backward.default_plan(CAUSAL, ARCH))
    else:
        sch = mma_backward.schedule(function, CAUSAL, mma_backward.default_plan(function, CAUSAL, ARCH))
    with ARCH.target(), tvm.transform.PassContext(config=mma_backward.CONFIG):
        mod = get_tir_pipeline(mma_backward.PIPELINE)[0](tvm.IRModule({"main": sch.mod["main"].with_attr("target", ARCH.target())}))
    counts = []

    def count(loop):
        syncs, loops = [], []
        tvm_ffi.structural_walk(loop.body, ((tvm.ir.Call, lambda call: syncs.append(call) if "tvm_storage_sync" in str(call.op) else None),
                                            (tirx.For, lambda it: loops.append(it) if it.kind == tirx.ForKind.SERIAL else None)))
        if loop.kind == tirx.ForKind.SERIAL and syncs and not any(it.loop_var.name.startswith("t") for it in loops):
            counts.append(len(syncs))
    for func in mod.functions.values():
        tvm_ffi.structural_walk(func.body, (tirx.For, count))
    assert counts == [most] * 2, "with a mask and without"
