"""Pipeline `flashtir_cpu`: TVM's own pass list without what is for GPUs, with six small ones of ours.

LoopPartition is left out: it cuts a symbolic loop wrongly, and here the mask's `if` costs one well predicted jump for a row of vectors.
"""
import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.lowering import pass_lists, rewrite
from schedules.lowering.empty_tiles import mark_empty_tiles, skip_empty_tiles
from schedules.lowering.keep_wide import keep_wide
from schedules.lowering.polynomial_exp2 import polynomial_exp2

#: Pass configuration that goes with the pipeline: the stock one.
CONFIG = {}

#: Mark of the loop over the tiles of one thread.
TO_AND_FRO = "pragma_flashtir_to_and_fro"


@rewrite.function_pass("flashtir.DropHints")
def drop_hints(func):
    """Take `likely` away, which TVM's code generator for LLVM does not know."""
    return func.with_body(tvm_ffi.structural_map(
        func.body, (tvm.ir.Call, lambda call: call.args[0] if rewrite.is_call(call, "likely") else call)))


@rewrite.function_pass("flashtir.SelectInTiles")
def select_in_tiles(func):
    """Select between values that exist in any case: elements of a tile and constants. A vector cannot branch, it would be taken apart.

    An if_then_else that guards a load from an argument stays one; what its condition loads itself, such as a sink, it does not guard.
    """
    arguments = [buffer for buffer in func.params if isinstance(buffer, tirx.Buffer)]

    def loads_of(expr):
        loads = []
        tvm_ffi.structural_walk(expr, (tvm.ir.TensorLoad, loads.append))
        return [load for load in loads if any(load.source.same_as(buffer) for buffer in arguments)]

    def select(call):
        if not rewrite.is_call(call, "if_then_else"):
            return call
        condition, *values = call.args
        known = loads_of(condition)
        guarded = (load for value in values for load in loads_of(value))
        exist = all(any(tvm_ffi.structural_equal(load, other) for other in known) for load in guarded)
        return tirx.Select(*call.args) if exist else call

    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, select)))


@rewrite.function_pass("flashtir.ToAndFro")
def to_and_fro(func):
    """Deal tiles to threads as one deals cards to and fro: in every second turn of the marked loop the last thread comes first.

    Under a causal mask each query tile is longer than the next; dealt always in one direction, the first thread would have the longest
    of every turn.
    """
    def deal(threads):
        if threads.kind != tirx.ForKind.PARALLEL:
            return threads

        def turn_round(mark):
            if mark.attr_key != TO_AND_FRO:
                return mark
            turns, hand = mark.body, tirx.Var("hand", "int32")
            forward = tirx.EQ(tirx.truncmod(turns.loop_var, 2), tirx.const(0, "int32"))
            dealt = tirx.Select(forward, threads.loop_var, threads.extent - 1 - threads.loop_var)
            body = tirx.SeqStmt([tirx.Bind(hand, dealt), rewrite.substitute(turns.body, {threads.loop_var: hand})])
            return tirx.For(turns.loop_var, turns.min, turns.extent, turns.kind, body, None, turns.annotations, turns.step)

        body = tvm_ffi.structural_map(threads.body, (tirx.AttrStmt, turn_round))
        return tirx.For(threads.loop_var, threads.min, threads.extent, threads.kind, body, None, threads.annotations, threads.step)

    def drop(mark):
        return mark.body if mark.attr_key == TO_AND_FRO else mark

    # A mark that is left belongs to one thread alone, whose loop the simplifier has taken away.
    return func.with_body(tvm_ffi.structural_map(tvm_ffi.structural_map(func.body, (tirx.For, deal)), (tirx.AttrStmt, drop)))


pass_lists.register("flashtir_cpu", [
    keep_wide(),
    drop_hints(),
    select_in_tiles(),
    polynomial_exp2(),
    mark_empty_tiles(),
    skip_empty_tiles(),
    *pass_lists.blocks_to_loops(),
    *pass_lists.flatten(),
    *pass_lists.loops_to_statements(hoist=[s_tir.transform.HoistIfThenElse()]),
    to_and_fro(),  # after the simplifier, which would put the binding back where it is used
    # LLVM's analysis of loop counters takes ten seconds over nested floor divisions by sizes, and none over these.
    rewrite.truncated_division(),
    tirx.transform.CommonSubexprElim(),
    *pass_lists.statements_to_function(),
])
