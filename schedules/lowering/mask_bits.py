"""Masks as words of bits: what a row sees of a tile is a range of its columns, so one word says it of 32 of them (FlashAttention-4's way).

A comparison for each score and each end of the range costs as many instructions as the exponentials do. Here each row counts how
many of a lane's columns lie before either end and makes words of so many ones; every score then asks for its bit, which the compiler moves
to predicates seven at a time.
"""
import functools
import itertools
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from schedules.lowering import masked_tiles, rewrite

WORD = 32
_ALL, _NONE = (tirx.const(bits, "uint32") for bits in (2**WORD - 1, 0))
#: Fewer columns are not worth their words.
LEAST_COLUMNS = 8


@dataclass(frozen=True)
class _Columns:
    """What a lane has of a row's columns: `side` neighbours in each block of `step`, in so many blocks."""

    step: int
    side: int
    blocks: int

    @property
    def number(self):
        return self.side * self.blocks

    def places(self):
        """The columns, counted from the first."""
        return [block * self.step + n for block in range(self.blocks) for n in range(self.side)]

    def before(self, end):
        """How many of them lie before column `end`, which may be any number."""
        end = tirx.max(tirx.min(end, self.step * self.blocks), 0)
        return tirx.truncdiv(end, self.step) * self.side + tirx.min(tirx.truncmod(end, self.step), self.side)


def _nest(loop):
    """(loops, store) of a perfect nest of unrolled loops around the choice between a value and a constant; else None."""
    loops = []
    while isinstance(loop, tirx.For) and loop.kind == tirx.ForKind.UNROLLED:
        loops.append(loop)
        loop = loop.body
    chosen = getattr(loop, "value", None)
    if not loops or not isinstance(loop, tirx.BufferStore) or not rewrite.is_call(chosen, "if_then_else"):
        return None
    return (loops, loop) if isinstance(chosen.args[2], tirx.FloatImm) else None


def _comparisons(condition):
    """The comparisons that a condition is made of by "and" and "or"; None of anything else."""
    if isinstance(condition, (tirx.And, tirx.Or)):
        parts = [_comparisons(part) for part in (condition.a, condition.b)]
        return None if None in parts else parts[0] + parts[1]
    return [condition] if type(condition).__name__ in masked_tiles.NOT_NEGATIVE else None


def _margin(comparison):
    """An expression that is not negative exactly where a comparison holds."""
    return masked_tiles.NOT_NEGATIVE[type(comparison).__name__](comparison.a, comparison.b)


def _slope(expr, var):
    """By how much an expression grows with a variable; None where it is not linear in it."""
    ana = Analyzer()
    at_zero, at_one = (rewrite.substitute(expr, {var: tirx.IntImm("int32", value)}) for value in (0, 1))
    slope = ana.simplify(at_one - at_zero)
    if not isinstance(slope, tirx.IntImm):
        return None
    rest = ana.simplify(expr - at_zero - slope * var)
    return int(slope) if isinstance(rest, tirx.IntImm) and int(rest) == 0 else None


def _columns(loops, comparisons):
    """(loops over columns, _Columns): the loops that move all comparisons the way the innermost one does, if it moves them by one or not
    at all; None where these make no blocks."""
    slopes = [[_slope(_margin(comparison), loop.loop_var) for loop in loops] for comparison in comparisons]
    moved = [row for row in slopes if row[-1] != 0]
    if not moved or any(row[-1] not in (1, -1) for row in moved):
        return None
    steps = [{row[n] * row[-1] if row[n] is not None else None for row in moved} for n in range(len(loops))]
    over = {n: min(found) for n, found in enumerate(steps) if len(found) == 1 and None not in found and min(found) > 0}
    if any(row[n] != 0 for row in slopes if row[-1] == 0 for n in over):
        return None
    places = [sum(step * value for step, value in zip(over.values(), point))
              for point in itertools.product(*(range(int(loops[n].extent)) for n in over))]
    side = next((n for n, place in enumerate(places) if place != n), len(places))
    columns = _Columns(places[side] if side < len(places) else side, side, len(places) // side)
    return ([loops[n] for n in over], columns) if places == columns.places() and len(places) >= LEAST_COLUMNS else None


def _ones(count):
    """A word whose lowest bits are ones, so many of them."""
    kept = tirx.max(tirx.min(count, WORD), 1)  # a shift by the whole word would have no meaning
    return tirx.Select(count > 0, tirx.shift_right(_ALL, (WORD - kept).astype("uint32")), _NONE)


class _Words:
    """Words of one row: (condition, place of the first column) -> bits that say of up to 32 columns where the condition holds.

    binds  what they use: an end of a range stands in a word eight times, and simplified in each, that of a window took most of lowering
    """

    def __init__(self, columns, column_vars):
        self.columns, self.column_vars, self.binds = columns, column_vars, []

    def word(self, condition, place):
        if isinstance(condition, (tirx.And, tirx.Or)):
            combine = tirx.bitwise_and if isinstance(condition, tirx.And) else tirx.bitwise_or
            return combine(*(self.word(part, place) for part in (condition.a, condition.b)))
        ana, margin = Analyzer(), _margin(condition)
        slope = _slope(margin, self.column_vars[-1])
        at_first = ana.simplify(rewrite.substitute(margin, {var: tirx.IntImm("int32", 0) for var in self.column_vars}))
        if slope == 0:
            return tirx.Select(at_first >= 0, _ALL, _NONE)
        end = rewrite.set_aside(self.binds, "end_seen", ana.simplify(at_first + 1 if slope < 0 else 0 - at_first))
        ones = _ones(self.columns.before(end) - place)
        return ones if slope < 0 else tirx.bitwise_not(ones)


def _by_bits(loops, store, over, columns):
    """The nest, row by row, with bits in the place of comparisons."""
    condition, value, otherwise = store.value.args
    column_vars, rows = [loop.loop_var for loop in over], [loop for loop in loops if all(loop is not other for other in over)]
    place = functools.reduce(lambda outer, loop: outer * int(loop.extent) + loop.loop_var, over, tirx.IntImm("int32", 0))
    stmts = []
    for point in itertools.product(*(range(int(loop.extent)) for loop in rows)):
        row = {loop.loop_var: tirx.IntImm("int32", at) for loop, at in zip(rows, point)}
        words, held = _Words(columns, column_vars), []
        for first in range(0, columns.number, WORD):
            held.append(tirx.Bind(tirx.Var("seen", "uint32"), words.word(rewrite.substitute(condition, row), first)))
        stmts += [*words.binds, *held]
        word = functools.reduce(lambda others, n: tirx.Select(place < n * WORD, others, held[n].var), range(1, len(held)), held[0].var)
        bit = tirx.bitwise_and(word, tirx.shift_left(tirx.const(1, "uint32"), (place % WORD).astype("uint32")))
        chosen = tirx.if_then_else(bit != tirx.const(0, "uint32"), value, otherwise)
        body = rewrite.substitute(tirx.BufferStore(store.buffer, chosen, store.indices), row)
        for loop in reversed(over):
            body = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations, loop.step)
        stmts.append(body)
    return tirx.SeqStmt(stmts)


@rewrite.function_pass("flashtir.MaskBits")
def mask_bits(func):
    """Replace the comparisons of masks in unrolled nests; to run when lanes have their registers, before divisions are hoisted. A nest of
    another form stays as it is."""
    def replace(loop):
        nest = _nest(loop)
        comparisons = nest and _comparisons(nest[1].value.args[0])
        found = comparisons and _columns(nest[0], comparisons)
        return _by_bits(*nest, *found) if found else loop

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, replace), order="pre"))
