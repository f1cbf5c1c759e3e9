"""Barriers of loops with asynchronous copies: one where two accesses to the same copy of a buffer need it, and none besides."""
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cuda_arch
from schedules.families import mma_backward, mma_fused_backward
from schedules.lowering.few_barriers import FEW_BARRIERS, few_barriers
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
