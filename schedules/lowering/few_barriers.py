"""Barriers of a loop over tiles, no more than its shared memory needs.

TVM's ThreadSync does not tell the copies of a double buffer apart, nor what a barrier in the turn before has settled, and puts five where
two would do. This pass runs behind it. In each loop that issues asynchronous copies it takes out the barriers that stand there and
goes through the turn, statement by statement, with the accesses that no barrier has settled yet: where one of them and an access of the
next statement are to the same copy of a buffer and one writes, a barrier goes in between. Who waits for an asynchronous copy has written
it at that moment. A turn begins with what the one before has left open; the loop has a barrier in front and behind.

Where a schedule marks statements, barriers have two parts (lowering.meetings): threads arrive behind these statements, and meet in front of
the first one that must not run before what others did up to there. Copies are then awaited at the last arrival of a turn.
"""
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.sym import Analyzer

from schedules.lowering.meetings import Meetings
from schedules.lowering.rewrite import function_pass, is_call, substitute

#: Attribute of a function whose loops are to have few barriers.
FEW_BARRIERS = "flashtir.few_barriers"
#: Mark of a loop behind which threads arrive.
ARRIVE = "pragma_flashtir_arrive"
_SYNC, _COMMIT, _WAIT, _COUNT = (
    "tvm_storage_sync", "async_commit_queue_scope", "async_wait_queue_scope", "async_wait_inflight_count")
_READ, _WRITE = 1, 2


@dataclass(frozen=True)
class _Access:
    """Access to a buffer; of a double buffer to the copy of the turn that is `ahead` of the present one, None: to any copy."""

    buffer: str
    ahead: int | None
    writes: bool

    def meets(self, other):
        """Whether the order of both matters."""
        same = self.buffer == other.buffer and (self.ahead == other.ahead or None in (self.ahead, other.ahead))
        return same and (self.writes or other.writes)

    def a_turn_later(self):
        """The same access, seen from the next turn."""
        return self if self.ahead is None else _Access(self.buffer, (self.ahead - 1) % 2, self.writes)


@function_pass("flashtir.FewBarriers")
def few_barriers(func):
    """Place the barriers of loops with asynchronous copies anew, in a function that has the attribute."""
    if not (func.attrs and FEW_BARRIERS in func.attrs):
        return func

    meetings = Meetings()

    def place(loop):
        stmts = _statements(loop.body)
        copying = [stmt for stmt in stmts if _has_mark(stmt, _COMMIT)]
        if not copying or any(_is_serial(stmt) for stmt in copying):
            return loop
        stmts = [stmt for stmt in map(_without_barriers, stmts) if stmt is not None]
        if any(_has_mark(stmt, ARRIVE) for stmt in stmts):
            return _with_meetings(loop, stmts, meetings)
        before = _places(stmts, loop.loop_var)
        body = [part for n, stmt in enumerate(stmts) for part in (_behind_barrier(stmt) if n in before else [stmt])]
        return tirx.SeqStmt([_barrier(), _with_body(loop, body), _barrier()])

    body = tvm_ffi.structural_map(func.body, (tirx.For, place))
    return func.with_body(meetings.opened(body) if meetings.used else body)


def _with_body(loop, stmts):
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, tirx.SeqStmt(stmts), None, loop.annotations, loop.step)


def _with_meetings(loop, stmts, meetings):
    """The loop with barriers in two parts. What a turn says and the next one meets is said before the loop, too, and met behind it."""
    arrivals, (wait,) = ([n for n, stmt in enumerate(stmts) if _has_mark(stmt, mark)] for mark in (ARRIVE, _WAIT))
    (before, on), marks = _meeting_places(stmts, loop.loop_var, arrivals), []
    tvm_ffi.structural_walk(stmts[wait], (tirx.AttrStmt, lambda it: marks.append(it) if it.attr_key in (_WAIT, _COUNT) else None))

    def awaited(stmt):
        for mark in sorted(marks, key=lambda it: it.attr_key == _WAIT):  # the count stands inside
            stmt = tirx.AttrStmt(mark.node, mark.attr_key, mark.value, stmt)
        return stmt

    def unmarked(stmt):
        return tvm_ffi.structural_map(stmt, (tirx.AttrStmt, lambda it: it.body if it.attr_key in (_WAIT, _COUNT, ARRIVE) else it))

    body = []
    for n, stmt in enumerate(stmts):
        body += [*([meetings.meet()] if n in before else ()), unmarked(stmt)]
        if n in arrivals:
            body.append(awaited(meetings.arrive()) if n == arrivals[-1] else meetings.arrive())
    front, behind = ([meetings.arrive()], [meetings.meet()]) if on else ([], [])
    return tirx.SeqStmt([awaited(_barrier()), *front, _with_body(loop, body), *behind, _barrier()])


def _barrier():
    return tirx.Evaluate(T.tvm_storage_sync("shared.dyn"))


def _statements(stmt):
    return [part for it in stmt.seq for part in _statements(it)] if isinstance(stmt, tirx.SeqStmt) else [stmt]


def _is_serial(stmt):
    return isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.SERIAL


def _is_barrier(stmt):
    return isinstance(stmt, tirx.Evaluate) and is_call(stmt.value, _SYNC)


def _without_barriers(stmt):
    """A statement without the barriers inside; None where nothing else is in it."""
    def strip(node):
        rest = [part for part in node.seq if not _is_barrier(part)]
        return node if len(rest) == len(node.seq) else rest[0] if len(rest) == 1 else tirx.SeqStmt(rest)
    return None if _is_barrier(stmt) else tvm_ffi.structural_map(stmt, (tirx.SeqStmt, strip))


def _has_mark(stmt, key):
    found = []
    tvm_ffi.structural_walk(stmt, (tirx.AttrStmt, lambda mark: found.append(mark) if mark.attr_key == key else None))
    return bool(found)


def _behind_barrier(stmt):
    """A statement with a barrier in front of it; behind what it waits for."""
    if not _has_mark(stmt, _WAIT):
        return [_barrier(), stmt]

    def inside(mark):
        if mark.attr_key != _COUNT:
            return mark
        return tirx.AttrStmt(mark.node, mark.attr_key, mark.value, tirx.SeqStmt([_barrier(), mark.body]))
    return [tvm_ffi.structural_map(stmt, (tirx.AttrStmt, inside))]


def _accesses(stmts, turn):
    """For each statement its accesses to shared memory. Copies of double buffers are told from the first one that is found."""
    first, zero = [], tirx.IntImm("int32", 0)

    def ahead(index):
        copies = set()

        def copy(node):
            if isinstance(node.b, tirx.IntImm) and int(node.b) == 2 and not substitute(node.a, {turn: zero}).same_as(node.a):
                first.append(node.a)
                distance = Analyzer().simplify(node.a - first[0])
                if isinstance(distance, tirx.IntImm):
                    copies.add(int(distance) % 2)
        tvm_ffi.structural_walk(index, (tirx.FloorMod, copy))
        return copies.pop() if len(copies) == 1 else None

    def of(stmt):
        found = set()

        def add(buffer, index, writes):
            found.add(_Access(str(buffer.name), ahead(index), writes))

        def pointer(call):
            if is_call(call, "tvm_access_ptr"):
                for bit in (_READ, _WRITE):
                    if int(call.args[4]) & bit:
                        add(call.args[1], call.args[2], bit == _WRITE)

        tvm_ffi.structural_walk(stmt, (
            (tvm.ir.Call, pointer),
            (tvm.ir.TensorLoad, lambda load: add(load.source, load.indices[0], False) if "shared" in load.source.scope() else None),
            (tirx.BufferStore, lambda store: add(store.buffer, store.indices[0], True) if "shared" in store.buffer.scope() else None)))
        return found

    return [of(stmt) for stmt in stmts]


def _accesses_and_copies(stmts, turn):
    """(accesses, those by which copies are written) of each statement."""
    accesses = _accesses(stmts, turn)
    return accesses, [{it for it in found if it.writes} if _has_mark(stmt, _COMMIT) else set() for stmt, found in zip(stmts, accesses)]


def _places(stmts, turn):
    """Numbers of the statements that a barrier must stand in front of."""
    accesses, copied = _accesses_and_copies(stmts, turn)
    waits = [_has_mark(stmt, _WAIT) for stmt in stmts]
    pending = {it.a_turn_later() for some in copied for it in some}
    places, known, unsettled = set(), None, set()
    while places != known:
        known = set(places)
        for n, found in enumerate(accesses):
            if waits[n]:
                unsettled |= pending
                pending = set()
            if n in places or any(it.meets(other) for it in found for other in unsettled):
                places.add(n)
                unsettled = set()
            unsettled |= found
            pending |= copied[n]
        unsettled, pending = ({it.a_turn_later() for it in some} for some in (unsettled, pending))
    return places


def _meeting_places(stmts, turn, arrivals):
    """(numbers of the statements that threads must meet in front of, one behind each arrival; whether the last one is behind the turn)."""
    accesses, copied = _accesses_and_copies(stmts, turn)
    places, known, open_, covered, pending, arrived = set(), None, set(), set(), set(), False
    while places != known:
        known = set(places)
        for n, found in enumerate(accesses):
            if any(it.meets(other) for it in found for other in open_):
                raise ValueError(f"threads must arrive between accesses to the same memory, found no mark in front of statement {n} of a "
                                 "turn: mark one before it")
            if n in places or any(it.meets(other) for it in found for other in covered) or n in arrivals and arrived:
                places.add(n)
                covered, arrived = set(), False
            open_ |= found
            pending |= copied[n]
            if n in arrivals:
                late = pending if n == arrivals[-1] else set()
                covered, open_, pending, arrived = open_ | late, set(), pending - late, True
        open_, covered, pending = ({it.a_turn_later() for it in some} for some in (open_, covered, pending))
    return places, arrived
