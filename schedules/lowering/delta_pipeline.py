"""Pipeline `flashtir_delta`, for GPUs and CPUs: the shared pass list, with offsets of 64 bits into tensors: dO may have 2^31 elements."""
import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.lowering import pass_lists, rewrite

#: Pass configuration that goes with the pipeline: the stock one.
CONFIG = {}


def _wide(index):
    """An index in 64 bits: sums and products become wide; what they are made of fits in 32, and wide divisions would cost much more."""
    if isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(index)(_wide(index.a), _wide(index.b))
    return tirx.IntImm("int64", int(index)) if isinstance(index, tirx.IntImm) else tirx.Cast("int64", index)


@rewrite.function_pass("flashtir.WideOffsets")
def wide_offsets(func):
    """Compute offsets into tensors with 64 bits; run this behind flattening, which makes one offset of a place."""
    def offsets(buffer, found):
        return [_wide(index) for index in found] if buffer.scope() == "global" else found

    return func.with_body(tvm_ffi.structural_map(func.body, (
        (tvm.ir.TensorLoad, lambda load: tirx.BufferLoad(load.source, offsets(load.source, load.indices))),
        (tirx.BufferStore, lambda store: tirx.BufferStore(store.buffer, store.value, offsets(store.buffer, store.indices))))))


pass_lists.register("flashtir_delta", [
    *pass_lists.blocks_to_loops(),
    *pass_lists.flatten(),
    wide_offsets(),
    *pass_lists.loops_to_statements(hoist=[s_tir.transform.HoistIfThenElse()]),
    rewrite.truncated_division(),
    tirx.transform.CommonSubexprElim(),
    *pass_lists.statements_to_function(),
], device=[
    tirx.transform.LowerWarpMemory(),
    rewrite.full_warp_mask(),
    tirx.transform.StmtSimplify(),
])
