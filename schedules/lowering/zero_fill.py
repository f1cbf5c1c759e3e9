"""Asynchronous copies to shared memory that write zeros where there is nothing to read, by cp.async's own zero fill.

TVM's form of such a copy is a branch, with a plain store of zeros on its other side, and counts the bytes of an offset in 32 bits: too few
for a tensor of more than 2^30 elements of two bytes.
"""
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.lowering.rewrite import function_pass, is_call

_NAME = "flashtir_copy_or_zero"
_SOURCE = f"""\
__device__ __forceinline__ void {_NAME}(void *shared, int to, const void *global, int from, int size, bool exists) {{
  unsigned place = __cvta_generic_to_shared((char *)shared + to * size);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(place), "l"((const char *)global + (long long)from * size), "r"(exists ? 16 : 0) : "memory");
}}
"""


@function_pass("flashtir.ZeroFill")
def zero_fill(func):
    """Replace TVM's asynchronous copies of 16 bytes, cp_async_raw(shared, offset, global, offset, 16[, exists])."""
    def replace(call):
        if not is_call(call, "cp_async_raw"):
            return call
        shared, to, source, start, size, *exists = call.args
        assert int(size) == 16, f"copies of 16 bytes are wanted, found {size}"
        element = tvm.DataType(source.ty.element_type.dtype).itemsize
        return T.cuda.func_call(_NAME, shared, to, source, start, element, *(exists or [tirx.const(True, "bool")]), source_code=_SOURCE)
    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, replace)))
