"""Additions to a float32 tensor in memory that many blocks add to: four neighbours by one instruction, from accumulators as they lie.

Of each 16 columns a lane holds two neighbours in either block of eight. A tensor that nobody reads but by the same map may keep its columns
in another order, in which these four stand side by side: `column_of`. A warp then adds 64 bytes to each of 8 rows by one instruction
(sm_90: PTX ISA, "red"; before, by four), and no lane waits for an answer.
"""
from tvm import tirx
from tvm.script import tirx as T

from schedules.lowering.rewrite import function_pass, once, replace_marked
from schedules.lowering.wide_stores import PAIR, Nest

#: Mark of the loop over the two blocks of eight columns, with the loop over the pair inside.
REDUCE_ADD = "pragma_flashtir_reduce_add"
#: Columns in which a lane has four.
COLUMNS = 16

_SOURCE = """\
__device__ __forceinline__ void flashtir_add(float *to, bool wanted, float a, float b, float c, float d) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%2, %3, %4, %5};}"
               :: "l"(to), "r"((int)wanted), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
"""
#: The same without a branch, which would keep products of mma.sync apart: what is not wanted is added to a place that nobody reads.
_SOURCE_STRAIGHT = """__device__ float4 flashtir_nowhere;
__device__ __forceinline__ void flashtir_add_straight(float *to, bool wanted, float a, float b, float c, float d) {
  to = wanted ? to : &flashtir_nowhere.x;
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}
"""


def column_of(c):
    """Where column c stands."""
    return c // COLUMNS * COLUMNS + c % 8 // PAIR * 4 + c % COLUMNS // 8 * PAIR + c % PAIR


@function_pass("flashtir.ReduceAdds")
def reduce_adds(func):
    """Turn each marked nest `for block in 2: for pair in 2: [if row exists:] out[..] = out[..] + value` into one reduction in memory."""
    return replace_marked(func, REDUCE_ADD, lambda mark: _add(Nest(mark.body), "flashtir_add", _SOURCE))


@function_pass("flashtir.ReduceAddsStraight")
def reduce_adds_straight(func):
    """The same without branches."""
    return replace_marked(func, REDUCE_ADD, lambda mark: _add(Nest(mark.body), "flashtir_add_straight", _SOURCE_STRAIGHT))


def _add(nest, function, source):
    values = [nest.at(nest.store.value.b, b, p) for b in range(COLUMNS // 8) for p in range(PAIR)]
    bounds = []
    index = _without_bounds(nest.at(nest.store.indices[0], 0, 0), bounds)
    place = tirx.address_of(tirx.BufferLoad(nest.store.buffer, [index]))
    add = tirx.Evaluate(T.cuda.func_call(function, place, nest.wanted, *values, source_code=source))
    return tirx.SeqStmt([*bounds, add]) if bounds else add


def _without_bounds(index, bounds):
    """The index with variables where minima, maxima and choices stand, such as the first turn of a loop: what is not a sum or product is
    computed in 32 bits, while the index will have 64."""
    if isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(index)(*(_without_bounds(part, bounds) for part in (index.a, index.b)))
    if not isinstance(index, (tirx.Min, tirx.Max, tirx.Select)):
        return index
    var = tirx.Var("bound", index.ty)
    bounds.append(tirx.Bind(var, once(index)))
    return var
