"""Additions to a float32 tensor in memory that many blocks add to: four neighbours by one instruction, straight from accumulators.

Of each 16 columns a lane holds two neighbours in either block of eight. The sums keep these four side by side
(families.wgmma_fused_backward, `sum_place`), and 8 rows as well: a warp adds to 512 bytes in a row by one instruction (sm_90: PTX ISA,
"red", vectors; before, by four), and no lane waits for an answer.
"""
from tvm import tirx
from tvm.script import tirx as T

from schedules.lowering.rewrite import function_pass, replace_marked
from schedules.lowering.wide_stores import PAIR, Nest

#: Mark of the loop over the two blocks of eight columns, with the loop over the pair inside.
REDUCE_ADD = "pragma_flashtir_reduce_add"
#: Blocks of eight columns of which a lane's four come.
BLOCKS = 2

_SOURCE = """\
__device__ __forceinline__ void flashtir_add(float *to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}
"""


@function_pass("flashtir.ReduceAdds")
def reduce_adds(func):
    """Turn each marked nest `for block in 2: for pair in 2: out[..] = out[..] + value` into one reduction in memory."""
    return replace_marked(func, REDUCE_ADD, lambda mark: _add(Nest(mark.body)))


def _add(nest):
    values = [nest.at(nest.store.value.b, b, p) for b in range(BLOCKS) for p in range(PAIR)]
    place = tirx.address_of(tirx.BufferLoad(nest.store.buffer, [_wide(nest.at(nest.store.indices[0], 0, 0))]))
    return tirx.Evaluate(T.cuda.func_call("flashtir_add", place, *values, source_code=_SOURCE))


def _wide(index):
    """The index in 64 bits, as tiles that are not full may reach over more elements than the tensor whose rows they hold; what its sums and
    products consist of, such as divisions, is computed in 32."""
    if isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(index)(_wide(index.a), _wide(index.b))
    return tirx.IntImm("int64", int(index)) if isinstance(index, tirx.IntImm) else tirx.Cast("int64", index)
