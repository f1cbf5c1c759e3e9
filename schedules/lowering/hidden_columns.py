"""Columns of a tile of scores that a mask hides from all rows of a warp: no time for their exponentials.

A tile that a mask cuts through has, for the 16 rows of a warp, columns that none of them sees. Behind `mask_bits` the words that say who
sees what are at hand, so a vote of the warp tells for each part of the columns whether anybody sees one. Where nobody does, its maxima,
exponentials and sums are left out, and its probabilities are zero: the same numbers, bit for bit. Branches take registers.

The statements that this is about, in one sequence: under a mark the words and the nests that mask S by them, the row maxima, whatever else,
P, its row sums. Where they are not all there, or a row has several words, everything stays as it is.
"""
import functools
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx

from schedules.lowering import mask_bits, rewrite
from schedules.lowering.rewrite import FULL_WARP, function_pass, substitute
from schedules.lowering.work_tiles import flat

#: Mark of the nest that masks S; 0: leave everything as it is.
SKIP = "pragma_flashtir_skip_hidden"
#: Parts of a tile's columns.
PARTS = 2


@dataclass(frozen=True)
class _Nest:
    """A perfect nest of unrolled loops around one store, or around one that starts a reduction and the one that goes on.

    place  index of the register that the nest is about, of those with the tile's scores
    start  the store that starts, if any
    """

    loops: tuple
    store: tirx.BufferStore
    place: object
    start: object = None

    def part(self, number, registers, store=None):
        """The nest of a part of the registers, with another store in the place of its own if any is given; None where no loop cuts them
        into parts."""
        store = store or self.store
        at = next((n for n, loop in enumerate(self.loops)
                   if int(loop.extent) % PARTS == 0 and (mask_bits.slope(self.place, loop.loop_var) or 0) * int(loop.extent) == registers),
                  None)
        if at is None:
            return None
        var, extent = self.loops[at].loop_var, int(self.loops[at].extent) // PARTS
        body = substitute(store, {var: var + number * extent})
        for n, loop in reversed(list(enumerate(self.loops))):
            body = tirx.For(loop.loop_var, loop.min, extent if n == at else loop.extent, loop.kind, body, None, loop.annotations, loop.step)
        return body

    def started(self):
        """The statement that starts the reduction for all rows: in the outermost loop, that over rows."""
        rows = self.loops[0]
        return tirx.For(rows.loop_var, rows.min, rows.extent, rows.kind, self.start, None, rows.annotations, rows.step)


def _loads(value, buffer):
    """Indices at which an expression reads a buffer."""
    found = []
    tvm_ffi.structural_walk(value, (tvm.ir.TensorLoad, lambda load: found.append(load.indices[0]) if load.source.same_as(buffer) else None))
    return found


def _nest(stmt, buffer):
    """The _Nest of a statement that reads a buffer with scores, under a mark without effect or none; None of anything else."""
    if isinstance(stmt, tirx.AttrStmt) and isinstance(stmt.value, tirx.IntImm) and int(stmt.value) == 0:
        stmt = stmt.body
    loops = []
    while isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.UNROLLED:
        loops.append(stmt)
        stmt = stmt.body
    stores = flat(stmt)
    start = stores[0].then_case if len(stores) == 2 and isinstance(stores[0], tirx.IfThenElse) and stores[0].else_case is None else None
    if not loops or not isinstance(stores[-1], tirx.BufferStore) or len(stores) != 1 + (start is not None):
        return None
    places = _loads(stores[-1].value, buffer)
    return _Nest(tuple(loops), stores[-1], places[0], start) if len(places) == 1 else None


def _masked(parts):
    """(words, _Nests) of a sequence that is the words of a mask and what they mask; None of another one."""
    words, nests = [], []
    while 2 * len(words) + 1 < len(parts):
        bind, nest = parts[2 * len(words):2 * len(words) + 2]
        if not (isinstance(bind, tirx.Bind) and bind.var.name == mask_bits.SEEN and isinstance(nest, tirx.For)):
            break
        found = mask_bits.nest_of(nest)
        if found is None:
            return None
        words.append(bind.var)
        loops, store = found
        nests.append(_Nest(tuple(loops), store, store.indices[0]))
    return (words, nests) if words and 2 * len(words) == len(parts) else None


def _without_hidden(marked, parts):
    """The statements of a mask, and those behind them, with the statements that hidden columns need not run in branches; None where these
    are not what stands there."""
    asides = [stmt for stmt in marked if rewrite.is_aside(stmt)]
    marked = [stmt for stmt in marked if not rewrite.is_aside(stmt)]
    found = _masked(marked)
    if found is None:
        return None
    words, masked = found
    scores = masked[0].store.buffer
    maxima = _nest(parts[0], scores) if parts else None
    after = next((n for n in range(1, len(parts)) if _nest(parts[n], scores)), None)
    if maxima is None or maxima.start is None or after is None or after + 1 >= len(parts):
        return None
    exponentials = _nest(parts[after], scores)
    sums = _nest(parts[after + 1], exponentials.store.buffer)
    registers = len(words) * functools.reduce(lambda product, loop: product * int(loop.extent), masked[0].loops, 1)
    if sums is None or sums.start is None or None in [it.part(0, registers) for it in (*masked, maxima, exponentials, sums)]:
        return None

    bits = registers // len(words) // PARTS
    seen = functools.reduce(tirx.bitwise_or, words)
    votes, by_scores, by_exponentials = [], [], []
    for part in range(PARTS):
        word = tirx.bitwise_and(tirx.shift_right(seen, tirx.const(part * bits, "uint32")), tirx.const(2**bits - 1, "uint32"))
        vote = tirx.call_extern("int32", "__any_sync", tirx.const(FULL_WARP, "uint32"), (word != tirx.const(0, "uint32")).astype("int32"))
        any_sees = tirx.Var("any_sees", "int32")
        votes.append(tirx.Bind(any_sees, vote))
        # What nobody sees is copied, which costs nothing, or registers would have to keep what they held before.
        copies = [it.part(part, registers, tirx.BufferStore(it.store.buffer, it.store.value.args[1], it.store.indices)) for it in masked]
        zero = tirx.BufferStore(exponentials.store.buffer, tirx.const(0, exponentials.store.buffer.dtype), exponentials.store.indices)
        by_scores.append(tirx.IfThenElse(
            any_sees != 0, tirx.SeqStmt([it.part(part, registers) for it in (*masked, maxima)]), tirx.SeqStmt(copies)))
        by_exponentials.append(tirx.IfThenElse(
            any_sees != 0, tirx.SeqStmt([it.part(part, registers) for it in (exponentials, sums)]),
            exponentials.part(part, registers, zero)))
    return [*asides, *marked[::2], *votes, maxima.started(), *by_scores, *parts[1:after], sums.started(),
            *by_exponentials, *parts[after + 2:]]


@function_pass("flashtir.SkipHiddenColumns")
def skip_hidden_columns(func):
    """Leave out, behind marked nests, the exponentials of columns that a mask hides from all rows of a warp; to run behind mask_bits."""
    def skip(sequence):
        parts, n = flat(sequence), 0
        while n < len(parts):
            if isinstance(parts[n], tirx.AttrStmt) and parts[n].attr_key == SKIP:
                found = _without_hidden(flat(parts[n].body), parts[n + 1:]) if int(parts[n].value) else None
                parts = [*parts[:n], *(found or [parts[n].body, *parts[n + 1:]])]
            n += 1
        return tirx.SeqStmt(parts)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.SeqStmt, skip)))
