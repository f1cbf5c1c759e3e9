"""Tiles that need a mask and tiles that do not: the loop over them is cut where the one kind ends and the other begins."""
import functools

import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from schedules.lowering import rewrite


def _mask_hint(stmt):
    """The condition of `if likely(condition): ... else: ...`, the declaration's sign for a tile that may skip its mask; else None."""
    if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is not None and rewrite.is_call(stmt.condition, "likely"):
        return stmt.condition.args[0]
    return None


#: Expressions of a comparison's operands that are not negative exactly where it holds.
NOT_NEGATIVE = {"GE": lambda a, b: a - b, "GT": lambda a, b: a - b - 1, "LE": lambda a, b: b - a, "LT": lambda a, b: b - a - 1}


def _bounds(condition, var):
    """(A, B) where the condition holds exactly for A <= var < B, with None for an end that is open; None where it has no such form."""
    ana = Analyzer()
    if isinstance(condition, tirx.And):
        parts = [_bounds(part, var) for part in (condition.a, condition.b)]
        if None in parts:
            return None
        ends = ([end for end in pair if end is not None] for pair in zip(*parts))
        return tuple(functools.reduce(inner, pair) if pair else None for inner, pair in zip((tirx.max, tirx.min), ends))
    form = NOT_NEGATIVE.get(type(condition).__name__)
    if form is None:
        return None
    expr = form(condition.a, condition.b)
    at_zero = rewrite.substitute(expr, {var: tirx.IntImm("int32", 0)})
    for slope, ends in ((1, lambda: (ana.simplify(0 - at_zero), None)), (-1, lambda: (None, ana.simplify(at_zero + 1)))):
        rest = ana.simplify(expr - at_zero - slope * var)
        if isinstance(rest, tirx.IntImm) and int(rest) == 0:
            return ends()
    return None


def _resolve_hints(stmt, branch):
    return tvm_ffi.structural_map(
        stmt, (tirx.IfThenElse, lambda node: node if _mask_hint(node) is None else getattr(node, branch)))


@rewrite.function_pass("flashtir.SplitMaskedTiles")
def split_masked_tiles(func):
    """Cut the loop over key tiles where tiles begin, and end, to need no mask, and resolve the mask's `if` in all parts.

    TVM's LoopPartition does not clip its first part to a symbolic extent: with one trip too few a tile would run twice.
    """
    def cut(loop):
        hints = []
        tvm_ffi.structural_walk(loop.body, (tirx.IfThenElse, lambda node: hints.append(_mask_hint(node))))
        found = (_bounds(condition, loop.loop_var) for condition in hints if condition is not None)
        bounds = next((ends for ends in found if ends is not None), None)
        if bounds is None or loop.kind != tirx.ForKind.SERIAL:
            return loop

        def clipped(end, least):
            return Analyzer().simplify(tirx.max(tirx.min(end - loop.min, loop.extent), least))

        def part(start, end, branch):
            body = _resolve_hints(loop.body, branch)
            return tirx.For(loop.loop_var, loop.min + start, end - start, loop.kind, body, None, loop.annotations, loop.step)
        first, last = bounds
        zero = tirx.IntImm("int32", 0)
        first = zero if first is None else clipped(first, zero)
        if last is None:
            return tirx.SeqStmt([part(zero, first, "else_case"), part(first, loop.extent, "then_case")])
        # Put in all places where a part uses them, and there in each other, the bounds of a window took most of the time of lowering.
        first, bind_first = rewrite.held("first_whole", first)
        last, bind_last = rewrite.held("end_of_whole", clipped(last, first))
        return tirx.SeqStmt([bind_first, bind_last, part(zero, first, "else_case"), part(first, last, "then_case"),
                             part(last, loop.extent, "else_case")])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, cut), order="pre"))


@rewrite.function_pass("flashtir.MaskPeeledTile")
def mask_peeled_tile(func):
    """Mask a tile that a software pipeline has peeled off the loop, without asking whether it needs it."""
    return func.with_body(_resolve_hints(func.body, "else_case"))
