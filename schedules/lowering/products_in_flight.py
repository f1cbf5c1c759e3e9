"""How many products may still run behind the one that is waited for: counted on the program, however a software pipeline has cut it.

wgmma groups complete in the order in which they are issued, and a wait names a number: so many of the last ones may still run. Products
announce themselves (events.issued), waits say what they need (events.awaited), and this pass walks the program with the queue of what may
be in flight: several queues where a loop may be left after any turn. A wait takes the smallest number of all; one whose product has
completed on all ways needs no instruction.
"""
import math

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.lowering.rewrite import function_pass, replace_marked

ISSUED, AWAITED = "issued", "awaited"


@function_pass("flashtir.CountProducts")
def count_products(func):
    """Turn each wait into one for a number of products, and drop the announcements."""
    found = []
    tvm_ffi.structural_walk(func.body, (tirx.Evaluate, lambda stmt: found.append(stmt) if events.name_of(stmt.value) == ISSUED else None))
    return func.with_body(_walk(func.body, {()})[0]) if found else func


def _walk(stmt, queues):
    """(the statement with its waits counted, queues behind it), for the queues in front of it."""
    if isinstance(stmt, tirx.SeqStmt):
        parts = []
        for part in stmt.seq:
            part, queues = _walk(part, queues)
            parts.append(part)
        return tirx.SeqStmt(parts), queues
    if isinstance(stmt, tirx.For):
        before = None
        while before != queues:  # what is in flight at the end of a turn is at the start of the next
            before, queues = queues, queues | _walk(stmt.body, queues)[1]
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, _walk(stmt.body, queues)[0], stmt.thread_binding, stmt.annotations,
                        stmt.step), queues
    if isinstance(stmt, tirx.AttrStmt):
        body, queues = _walk(stmt.body, queues)
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body), queues
    if isinstance(stmt, tirx.IfThenElse):
        then, after = _walk(stmt.then_case, queues)
        other, without = _walk(stmt.else_case, queues) if stmt.else_case is not None else (None, queues)
        return tirx.IfThenElse(stmt.condition, then, other), after | without
    name = events.name_of(stmt.value) if isinstance(stmt, tirx.Evaluate) else None
    if name == ISSUED:
        return tirx.Evaluate(tirx.const(0, "int32")), {(*queue, str(stmt.value.args[1].value)) for queue in queues}
    if name == AWAITED:
        return _wait(str(stmt.value.args[1].value), queues)
    return stmt, queues


def _wait(product, queues):
    """A wait for the last product of a name, and the queues behind it."""
    behind = [queue[::-1].index(product) for queue in queues if product in queue]
    if not behind:
        return tirx.Evaluate(tirx.const(0, "int32")), queues
    allowed = min(behind)
    return tirx.Evaluate(T.ptx.wgmma.wait_group.sync.aligned(allowed)), {queue[max(len(queue) - allowed, 0):] for queue in queues}


#: Mark of a nest that computes probabilities, which are never below zero: what stands behind stays behind in machine code too.
HOLD = "pragma_flashtir_hold"
_HOLD_SOURCE = """\
template <int N> __device__ __forceinline__ void flashtir_hold(const float *p) {
  int any = 0;
  #pragma unroll
  for (int i = 0; i < N; ++i) any |= __float_as_int(p[i]);
  asm volatile("{.reg .pred p; setp.lt.s32 p, %0, 0; @p st.shared.s32 [%1], %0;}" :: "r"(any), "r"(0) : "memory");
}
"""


@function_pass("flashtir.HoldProbabilities")
def hold_probabilities(func):
    """Keep waits behind a marked nest behind it: as rewrite.hold_back, where no sums are at hand that a store could depend on. The signs of
    all values take half an instruction each."""
    def pin(mark):
        loops, stores = [], []
        tvm_ffi.structural_walk(mark.body, ((tirx.For, loops.append), (tirx.BufferStore, stores.append)), order="pre")
        first = tirx.address_of(tirx.BufferLoad(stores[0].buffer, [tirx.const(0, "int32")]))
        count = math.prod(int(loop.extent) for loop in loops)
        call = T.cuda.func_call(f"flashtir_hold<{count}>", first, source_code=_HOLD_SOURCE)
        return tirx.SeqStmt([mark.body, tirx.Evaluate(call)])

    return replace_marked(func, HOLD, pin)
