"""O by the tensor memory accelerator: registers to shared memory in 16 x 16 matrices, and from there to the tensor in boxes.

A lane that stores its part of O itself exchanges it with its neighbours first (wide_stores), some 200 instructions a tile, while the warps
of a kernel are short of exactly these. Here it stores what it holds in the place of the queries, which nobody reads any more once the last
scores are there: each warpgroup in that of its own 64 rows, so that no other one has to wait. One thread hands the rows over to the
accelerator, which leaves out those past the end, and asks whether it has read them before it says that the queries' place is free.
"""
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrinsics import events, wgmma_exchange
from schedules.intrinsics.mma import LANES
from schedules.intrinsics.wgmma import GROUP_ROWS, GROUP_WARPS, PTX_DTYPE, WARP_ROWS
from schedules.intrinsics.wgmma_exchange import CHUNK, LINE
from schedules.lowering import bulk_loads, rewrite, wide_stores

#: The tensor that goes out so.
OUTPUT = "O"
#: Columns that one instruction stores of a warp's 16 rows.
STEP = 16
_SOURCES = {
    "flashtir_bulk_store": """\
__device__ __forceinline__ void flashtir_bulk_store(unsigned long long map, unsigned from, int channel, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
               :: "l"(map), "r"(channel), "r"(row), "r"(head), "r"(batch), "r"(from) : "memory");
}
""",
    "flashtir_bulk_commit": """\
__device__ __forceinline__ void flashtir_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
""",
    "flashtir_bulk_read": """\
__device__ __forceinline__ void flashtir_bulk_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
""",
}


def _call(name, *arguments):
    return tirx.Evaluate(T.cuda.func_call(name, *arguments, source_code=_SOURCES[name]))


def wait():
    """Statement of a thread that waits until the accelerator has read what it was told to store."""
    return _call("flashtir_bulk_read")


class Output:
    """What becomes of the store of O in a kernel.

    stmt     the nest that stores it, of a work tile's statements
    queries  bulk_load event of the queries
    tensor   buffer of O
    """

    def __init__(self, stmt, queries, tensor):
        self.stmt, self.queries, self.tensor = stmt, queries, tensor
        self.map = tirx.Var("O_map", bulk_loads.tensor_map_type())
        loops, marks = [], []
        tvm_ffi.structural_walk(stmt, ((tirx.For, loops.append), (tirx.AttrStmt, marks.append)), order="pre")
        self.half, self.group = loops[0].loop_var, loops[1].loop_var
        self.channels = int(loops[1].extent) * wide_stores.COLUMNS
        self.nest = wide_stores.Nest(marks[0].body)

    def described(self):
        """A bulk_load event that would load a warpgroup's rows of O, for the host to describe the tensor by."""
        _name, ring, address, _pointer, rows, heads, batch, _box_rows, _channels, _chunk, *strides, first, size, row, head, entry, tile = (
            self.queries.args)
        return events.bulk_load(ring, address, self.tensor.data, rows, heads, batch, GROUP_ROWS, self.channels, CHUNK,
                                *bulk_loads.strides_of(self.tensor), first, size, row, head, entry, tile)

    def value(self, half, block, pair):
        """What a lane stores of a row half, of the pair of columns in a block of eight."""
        at = {self.half: tirx.IntImm("int32", half), self.group: tirx.IntImm("int32", block // wide_stores.QUAD)}
        return rewrite.substitute(self.nest.at(self.nest.store.value.value, block % wide_stores.QUAD, pair), at)

    def statements(self, slot, warp, lane, speaks, barrier):
        """Statements of a consumer that write O.

        slot     shared address of the queries' place
        speaks   whether a thread is the one that speaks for its warpgroup
        barrier  number of the first of the barriers at which the threads of one warpgroup meet
        """
        rows, group, kind = int(self.queries.args[7]), warp // GROUP_WARPS, PTX_DTYPE[str(self.nest.store.buffer.dtype)]
        start = tirx.Var("output_rows", "int32")
        stmts = [tirx.Bind(start, slot + warp * (WARP_ROWS * LINE))]
        for step in range(self.channels // STEP):
            chunk, within = divmod(step * STEP, CHUNK)
            to = start + chunk * (rows * LINE) + wgmma_exchange.matrix_line(lane, within)
            pairs = [wide_stores.pack(kind, *(self.value(half, 2 * step + block, pair) for pair in range(wide_stores.PAIR)))
                     for block in range(2) for half in range(2)]
            stmts.append(tirx.Evaluate(wgmma_exchange.store_matrix(to, *pairs)))
        *_, row, head, batch, _tile = self.queries.args
        stores = [_call("flashtir_bulk_store", tirx.address_of(self.map), tirx.Cast("uint32", slot + group * (GROUP_ROWS * LINE) + chunk * (
            rows * LINE)), chunk * CHUNK, row + group * GROUP_ROWS, head, batch) for chunk in range(self.channels // CHUNK)]
        return [*stmts, tirx.Evaluate(T.ptx.fence.proxy.async_.shared__cta()),
                tirx.Evaluate(T.ptx.bar.sync(tirx.Cast("uint32", group + barrier), tirx.const(LANES * GROUP_WARPS, "uint32"))),
                tirx.IfThenElse(speaks, tirx.SeqStmt([*stores, _call("flashtir_bulk_commit")]), None)]


def output_of(work, queries, tensors):
    """The Output of a work tile; None where it writes gradients, where its rows are no whole chunks, or longer than those of the queries,
    or may end in the middle of the tensor."""
    def stores(stmt):
        found = []
        tvm_ffi.structural_walk(stmt, (tirx.AttrStmt, lambda mark: found.append(mark) if mark.attr_key == wide_stores.WIDE_STORE else None))
        return found

    stmt = next((stmt for stmt in work if stores(stmt)), None)
    if stmt is None or bulk_loads.in_sequence(queries):
        return None
    store = wide_stores.Nest(stores(stmt)[0].body).store
    if store.buffer.name != OUTPUT:  # dK and dV have no queries' place of their own
        return None
    output = Output(stmt, queries, next(tensor for tensor in tensors if tensor.name == store.buffer.name))
    held, chunk = (int(queries.args[place]) for place in (8, 9))
    return output if chunk == CHUNK and output.channels % CHUNK == 0 and output.channels <= -(-held // CHUNK) * CHUNK else None
