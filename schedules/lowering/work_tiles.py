"""The statements of one work tile of a kernel with events, and the order in which a persistent grid wants them."""
import tvm
import tvm_ffi
from tvm import tirx

from schedules.intrinsics import events
from schedules.lowering.rewrite import substitute


def flat(stmt):
    """Statements of nested sequences, one list."""
    return [inner for part in stmt.seq for inner in flat(part)] if isinstance(stmt, tirx.SeqStmt) else [stmt]


def events_in(stmts, name):
    """Calls of one event, in program order."""
    found = []
    for stmt in stmts:
        tvm_ffi.structural_walk(stmt, (tvm.ir.Call, lambda call: found.append(call) if events.name_of(call) == name else None))
    return found


def last_turn(stmt, name):
    """The number of the last turn that has an event of this name: that of its last call, with all loops in their last turn; None where it
    has none."""
    if isinstance(stmt, tirx.SeqStmt):
        return next((found for found in (last_turn(part, name) for part in reversed(stmt.seq)) if found is not None), None)
    if isinstance(stmt, tirx.For):
        found = last_turn(stmt.body, name)
        return None if found is None else substitute(found, {stmt.loop_var: stmt.min + stmt.extent - 1})
    if isinstance(stmt, tirx.AttrStmt):
        return last_turn(stmt.body, name)
    if isinstance(stmt, tirx.IfThenElse):
        return last_turn(stmt.then_case, name)
    called = isinstance(stmt, tirx.Evaluate) and events.name_of(stmt.value) == name
    return stmt.value.args[-1] if called else None


def release_queries(work, early):
    """A work tile's statements with an event by which the next tile's queries may come: behind the key loop, as the scores are all
    computed; or, where O is written in their place, behind the first scores of the tile that follows."""
    name, last, event = ("wait_scores", -1, events.release(events.Q, 0)) if early else ("release", 0, events.release_before())
    at = [n for n, stmt in enumerate(work) if events_in([stmt], name)][last] + 1
    return [*work[:at], tirx.Evaluate(event), *work[at:]]


def keys_first(work):
    """A work tile's statements with the queries loaded behind the first keys: these find room while the queries still wait for theirs."""
    loads = [n for n, stmt in enumerate(work) if isinstance(stmt, tirx.Evaluate) and events.name_of(stmt.value) == "bulk_load"]
    queries, keys = loads[:2]
    return [*work[:queries], *work[queries + 1:keys + 1], work[queries], *work[keys + 1:]]
