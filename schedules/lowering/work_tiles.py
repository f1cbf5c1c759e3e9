"""The statements of one work tile of a kernel with events, and the order in which a persistent grid wants them."""
import tvm
import tvm_ffi
from tvm import tirx

from schedules.intrinsics import events


def flat(stmt):
    """Statements of nested sequences, one list."""
    return [inner for part in stmt.seq for inner in flat(part)] if isinstance(stmt, tirx.SeqStmt) else [stmt]


def events_in(stmts, name):
    """Calls of one event, in program order."""
    found = []
    for stmt in stmts:
        tvm_ffi.structural_walk(stmt, (tvm.ir.Call, lambda call: found.append(call) if events.name_of(call) == name else None))
    return found


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
