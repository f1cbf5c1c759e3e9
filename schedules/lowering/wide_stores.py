"""Stores of 16 bytes from accumulators, where a lane holds pairs of neighbours only.

In the accumulator layout the four lanes of a quad hold, of each block of eight columns, two each; stored as they lie, a warp writes 8 rows
of 16 bytes at once, half of a memory sector each. The lanes exchange what they hold of four blocks, a transposition of 4 x 4 registers in
two steps of a butterfly, and each then stores one whole block. There is no branch around a store, or one exchange would wait for another.
"""
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.sym import Analyzer

from schedules.intrinsics.wgmma import PTX_DTYPE
from schedules.lowering.rewrite import function_pass, replace_marked, substitute

#: Mark of the loop over the four blocks of a lane's columns, with the loop over the pair inside.
WIDE_STORE = "pragma_flashtir_wide_store"
QUAD, BLOCK, PAIR = 4, 8, 2
#: Columns that a quad exchanges at once.
COLUMNS = QUAD * BLOCK

_PACK = """\
__device__ __forceinline__ unsigned flashtir_pack_%(kind)s(float low, float high) {
  unsigned both;
  asm("cvt.rn.%(kind)sx2.f32 %%0, %%1, %%2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
"""
_SOURCE = """\
__device__ __forceinline__ void flashtir_store_%(kind)s(void *to, int lane, bool wanted, unsigned a, unsigned b, unsigned c, unsigned d) {
  bool odd = lane & 1, upper = lane & 2;
  unsigned ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
  a = odd ? ab : a, b = odd ? b : ab, c = odd ? cd : c, d = odd ? d : cd;
  unsigned ac = __shfl_xor_sync(0xffffffffu, upper ? a : c, 2), bd = __shfl_xor_sync(0xffffffffu, upper ? b : d, 2);
  uint4 block = upper ? make_uint4(ac, bd, c, d) : make_uint4(a, b, ac, bd);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %%5, 0; @p st.global.v4.b32 [%%0], {%%1, %%2, %%3, %%4};}"
               :: "l"(to), "r"(block.x), "r"(block.y), "r"(block.z), "r"(block.w), "r"((int)wanted) : "memory");
}
"""


def pack(kind, low, high):
    """Two float32 rounded to 16 bits of a kind as the register that they share."""
    return T.cuda.func_call(f"flashtir_pack_{kind}", low, high, source_code=_PACK % {"kind": kind}, return_type="uint32")


@function_pass("flashtir.WideStores")
def wide_stores(func):
    """Turn each marked nest `for block in 4: for pair in 2: [if row exists:] out[..] = cast(value)` into an exchange and one store."""
    lanes = {}

    def remember(mark):
        if mark.attr_key == "thread_extent":
            lanes[str(mark.node.thread_tag)] = mark.node.var

    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, remember))
    return replace_marked(func, WIDE_STORE, lambda mark: _exchange(Nest(mark.body), lanes["threadIdx.x"]))


class Nest:
    """A marked nest of two loops: `for block: for pair: [if wanted:] store`."""

    def __init__(self, nest):
        loops, stores, guards = [], [], []
        tvm_ffi.structural_walk(
            nest, ((tirx.For, loops.append), (tirx.BufferStore, stores.append), (tirx.IfThenElse, guards.append)), order="pre")
        self.loop_vars, self.store = [loop.loop_var for loop in loops], stores[0]
        self.wanted = guards[0].condition if guards else tirx.const(True, "bool")

    def at(self, expr, *place):
        """An expression of the nest in one of its iterations."""
        values = {var: tirx.IntImm("int32", value) for var, value in zip(self.loop_vars, place, strict=True)}
        return tvm_ffi.structural_map(substitute(expr, values), (tvm.ir.TensorLoad, lambda load: tirx.BufferLoad(
            load.source, [Analyzer().simplify(index) for index in load.indices])))


def _exchange(nest, lane):
    store = nest.store
    kind = PTX_DTYPE[str(store.buffer.dtype)]
    values = [pack(kind, *(nest.at(store.value.value, b, p) for p in range(PAIR))) for b in range(QUAD)]
    # Lane q of the quad stores block q: eight columns a block, where it held two of each.
    index = nest.at(store.indices[0], 0, 0) + lane % QUAD * (BLOCK - PAIR)
    return tirx.Evaluate(T.cuda.func_call(f"flashtir_store_{kind}", tirx.address_of(tirx.BufferLoad(store.buffer, [index])), lane % QUAD,
                                          nest.wanted, *values, source_code=_SOURCE % {"kind": kind}))
