"""Numbers that go with the rows of a tile, on the same way as the tile: through a ring of shared memory.

A block annotated TELL computes a number for each row, in float32. `tell_statistics` makes events of its stores and of all loads of what it
writes; warp_roles gives the stores to a warp beside the loader's, which works ahead like this, and a place in the ring to the numbers.
"""
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import stmt as s_stmt
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.lowering.rewrite import function_pass

#: Annotation of the block, with the name of the ring.
TELL = "flashtir.tell"
#: A multiple of this is the number of rows, so that whole warps compute them.
ROWS = 32
NUMBER_BYTES = 4
_SOURCES = {
    "flashtir_tell": "__device__ __forceinline__ void flashtir_tell(void *place, float value) { *(float *)place = value; }\n",
    "flashtir_told": "__device__ __forceinline__ float flashtir_told(const void *place) { return *(const float *)place; }\n",
}


@function_pass("flashtir.TellStatistics")
def tell_statistics(func):
    """Replace stores in annotated blocks by events `tell`, and loads of what they store by events `told`."""
    rings = {}

    def collect(block):
        if TELL in block.annotations:
            rings[block.writes[0].source] = events.RINGS.index(str(block.annotations[TELL]))

    tvm_ffi.structural_walk(func.body, (s_stmt.SBlock, collect))

    def ring_of(buffer):
        return next((ring for told, ring in rings.items() if told.same_as(buffer)), None)

    def load(node):
        ring = ring_of(node.source)
        return node if ring is None else events.told(tirx.address_of(node), ring)

    def store(node):
        ring = ring_of(node.buffer)
        return node if ring is None else tirx.Evaluate(events.tell(
            tirx.address_of(tirx.BufferLoad(node.buffer, node.indices)), ring, node.value))

    if not rings:
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, ((tvm.ir.TensorLoad, load), (tirx.BufferStore, store))))


def write(address, value):
    """Call that writes a number, where ThreadSync does not see it: barriers of the ring are in place already."""
    return T.cuda.func_call("flashtir_tell", address, value, source_code=_SOURCES["flashtir_tell"])


def read(address):
    """Call that reads a number."""
    return T.cuda.func_call("flashtir_told", address, source_code=_SOURCES["flashtir_told"], return_type="float32")
