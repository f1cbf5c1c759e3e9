"""Tiles of 16-bit values that a schedule keeps in float32: the casts that TVM leaves around them."""
import tvm_ffi
from tvm import tirx

from schedules.lowering.rewrite import function_pass


@function_pass("flashtir.KeepWide")
def keep_wide(func):
    """Remove the casts float32 -> 16 bits -> float32 that TVM puts around a 16-bit tile which a schedule keeps in float32.

    A value from a 16-bit input comes out the same; a probability keeps digits that the input type has no room for.
    """
    def unwrap(outer):
        inner = outer.value
        narrow = isinstance(inner, tirx.Cast) and str(inner.ty) in ("float16", "bfloat16") and str(outer.ty) == "float32"
        return inner.value if narrow and str(inner.value.ty) == "float32" else outer

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Cast, unwrap)))
