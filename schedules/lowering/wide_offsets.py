"""Offsets of 64 bits into the tensors of a function that says so: they may have 2^31 elements and more."""
import tvm
import tvm_ffi
from tvm import tirx

from schedules.lowering.rewrite import function_pass

#: Attribute of such a function: True, or the names of those tensors that may be so large.
WIDE_OFFSETS = "flashtir.wide_offsets"


def _wide(index):
    """An index in 64 bits: sums and products become wide; what they are made of fits in 32, and wide divisions would cost much more."""
    if isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(index)(_wide(index.a), _wide(index.b))
    return tirx.IntImm("int64", int(index)) if isinstance(index, tirx.IntImm) else tirx.Cast("int64", index)


@function_pass("flashtir.WideOffsets")
def wide_offsets(func):
    """Compute offsets into tensors with 64 bits where the function has the attribute. This comes behind the passes that make one offset of
    a place and narrow indices, and in front of vectors."""
    if not (func.attrs and WIDE_OFFSETS in func.attrs):
        return func

    names = None if func.attrs[WIDE_OFFSETS] is True else set(map(str, func.attrs[WIDE_OFFSETS]))

    def offsets(buffer, found):
        wide = buffer.scope() == "global" and (names is None or buffer.name in names)
        return [_wide(index) for index in found] if wide else found

    return func.with_body(tvm_ffi.structural_map(func.body, (
        (tvm.ir.TensorLoad, lambda load: tirx.BufferLoad(load.source, offsets(load.source, load.indices))),
        (tirx.BufferStore, lambda store: tirx.BufferStore(store.buffer, store.value, offsets(store.buffer, store.indices))))))
