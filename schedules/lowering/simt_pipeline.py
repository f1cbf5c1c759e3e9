"""Pipeline `flashtir_simt`: TVM's own pass list for CUDA, cut short to what the simt family needs, with four passes more.

* `keep_wide` lets the backward pass keep tiles of 16-bit inputs in float32.
* `guard_masked_tiles` leaves the question whether a key exists to the tiles that need a mask.
* `split_masked_tiles` cuts the loop over key tiles at the first tile without mask, so that interior tiles run without either. It
  stands before LoopPartition, which would cut a symbolic loop wrongly, and before unrolling, while there is one mask to see.
* `hoist_divisions` takes the key head h // (H // G) out of the guarded loads: a compiler may not move a division out of a branch.
"""
import tvm_ffi
from tvm import s_tir, tirx

from schedules.lowering import masked_tiles, pass_lists, rewrite
from schedules.lowering.aligned_strides import aligned_strides
from schedules.lowering.empty_tiles import mark_empty_tiles, skip_empty_tiles
from schedules.lowering.keep_wide import keep_wide

#: Pass configuration that goes with the pipeline: the stock one.
CONFIG = {}


@rewrite.function_pass("flashtir.GuardMaskedTiles")
def guard_masked_tiles(func):
    """Ask whether a key exists only in tiles that need a mask: a tile without mask lies wholly inside the keys.

    The declaration guards a load of K or V by `not the last tile, or key < M`. The loop is cut by the mask's condition, which implies
    the guard; so the guarded store becomes `if likely(no mask): store unguarded; else: store guarded`, for the cut to resolve.
    """
    def hint_of(loop):
        found = []
        tvm_ffi.structural_walk(loop.body, (tirx.IfThenElse, lambda node: found.append(node.condition)))
        return next((condition for condition in found if rewrite.is_call(condition, "likely")), None)

    def split_guard(loop):
        hint = hint_of(loop)
        if hint is None or loop.kind != tirx.ForKind.SERIAL:
            return loop

        def split(store):
            load = store.value
            if not (rewrite.is_call(load, "if_then_else") and isinstance(load.args[0], tirx.Or)):
                return store
            return tirx.IfThenElse(hint, tirx.BufferStore(store.buffer, load.args[1], store.indices), store)
        body = tvm_ffi.structural_map(loop.body, (tirx.BufferStore, split))
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations, loop.step)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, split_guard)))


pass_lists.register("flashtir_simt", [
    keep_wide(),
    mark_empty_tiles(),
    *pass_lists.blocks_to_loops(),
    *pass_lists.flatten(),
    aligned_strides(),
    *pass_lists.split_key_loop([guard_masked_tiles(), masked_tiles.split_masked_tiles()]),
    *pass_lists.loops_to_statements(hoist=[s_tir.transform.HoistIfThenElse()]),
    tirx.transform.CommonSubexprElim(),
    *pass_lists.statements_to_function(),
], device=[
    tirx.transform.LowerWarpMemory(),
    rewrite.full_warp_mask(),
    skip_empty_tiles(),
    tirx.transform.StmtSimplify(),
    rewrite.release_held(),
    rewrite.hoist_divisions(),  # last: StmtSimplify puts the value of a binding back where it is used
])
