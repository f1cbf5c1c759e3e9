"""Copies of whole tiles by the tensor memory accelerator (TMA), from blocks that say plainly what they copy.

A block annotated BULK_LOAD copies rows of a tensor [batch, rows, heads, channels] to a shared tile [chunks, rows, chunk], with zeros past
the last row, and past the last channel where the chunks have more. `lower_bulk_loads` checks exactly this and puts an event in its place;
`encode_tensor_map` has the host describe each tensor to the TMA by its run-time shape and strides (CUDA driver API,
cuTensorMapEncodeTiled), in front of the launch.

Where the rows are those of a sequence inside the tensor, a load must end with the sequence, and the TMA only knows ends of dimensions. Then
the tensor is described by addresses that wrap round at 2^64 (the ragged tensors of Triton): in a dimension of WRAP rows a row stands at
WRAP - size + row, so that whatever is past the sequence is past the dimension; a second one of the same stride moves the load to
start + size, and a third, of stride 2^64 / WRAP less a row, takes back WRAP rows. Chunks are boxes of their own.
"""
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import stmt as s_stmt
from tvm.script import tirx as T
from tvm.sym import Analyzer

from schedules.intrinsics import events
from schedules.intrinsics.wgmma import ELEMENT_BYTES
from schedules.lowering.rewrite import function_pass, substitute
from te_defs.lengths import SEQUENCE_ROWS

BULK_LOAD = "flashtir.bulk_load"
#: Blocks of what is done with a tile that comes by, inside the loop over these.
TURNS = ("kv", "rows")
#: cuTensorMapEncodeTiled: no interleave, swizzle of 64 or 128 bytes, L2 promotion of 128 bytes, zeros past the end.
INTERLEAVE_NONE, SWIZZLE, PROMOTE, FILL_ZERO = 0, {64: 2, 128: 3}, 2, 0

#: Rows of the dimension at whose end the loads of a sequence are clipped, and the size of the two that move them.
WRAP, UNBOUNDED = 1 << 30, 0x7FFF0000

#: Cache policies as `createpolicy.fractional.L2` makes them: queries are read once, keys and values by every query tile.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000


@tvm_ffi.register_error  # else TVM makes a RuntimeError of it
class BulkLoadError(ValueError):
    """A block that the tensor memory accelerator cannot copy."""


def _int(value):
    return tirx.IntImm("int32", value)


def _equal(ana, found, wanted):
    return all(ana.can_prove_equal(*pair) for pair in zip(found, wanted))


def _require(condition, block, wanted, found):
    if not condition:
        raise BulkLoadError(f"block {block.name_hint} must be {wanted} to become a bulk load, found {found}: correct the declaration")


@function_pass("flashtir.LowerBulkLoads")
def lower_bulk_loads(func):
    """Replace annotated blocks by bulk_load events, and bind the key tile of every event to the number of the turn."""
    def replace(block):
        if BULK_LOAD in block.annotations:
            event = tirx.Evaluate(_event(block, events.RINGS.index(str(block.annotations[BULK_LOAD]))))
            return _with_body(block, event, writes=())  # or a software pipeline would keep two of a tile that is read a turn later
        return block

    def bind(loop):
        block = getattr(loop.body, "block", None)
        if block is None or block.name_hint not in TURNS:
            return loop
        *outer, turn = (iter_var.var for iter_var in block.iter_vars)
        for head in outer:  # the turns of one query head after those of the other
            turn = head * loop.extent + turn
        body = _with_body(block, tvm_ffi.structural_map(
            block.body, (tvm.ir.Call, lambda call: turn if events.name_of(call) == "key_tile" else call)))
        realize = s_stmt.SBlockRealize(loop.body.iter_values, loop.body.predicate, body)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, realize, loop.thread_binding, loop.annotations, loop.step)

    return func.with_body(tvm_ffi.structural_map(func.body, ((s_stmt.SBlock, replace), (tirx.For, bind))))


def _with_body(block, body, writes=None):
    annotations = {key: value for key, value in block.annotations.items() if key != BULK_LOAD}
    return s_stmt.SBlock(block.iter_vars, block.reads, block.writes if writes is None else writes, block.name_hint, body, block.init,
                         block.alloc_buffers, block.match_buffers, annotations)


def _event(block, ring):
    """bulk_load(ring, shared address, tensor, its rows, heads, batch, box rows, channels, chunk, strides of batch entries, rows and heads
    in elements, first row and number of rows of the sequence, first row in it, head, batch entry, tile)."""
    rows, channels = block.body, block.body.body
    realize, ana = channels.body, Analyzer()
    store = realize.block.body
    guarded = isinstance(store.value, tvm.ir.Call) and store.value.op.name.endswith("if_then_else")
    _require(guarded, block, "a load with a bound", type(store.value).__name__)
    condition, load, other = store.value.args
    channel_bound = None
    if isinstance(condition, tirx.And):
        condition, channel_bound = condition.a, condition.b
    # "An inner tile, or in range": where the hint holds nothing is out of range.
    bound = condition.b if isinstance(condition, tirx.Or) else condition
    zero = isinstance(other, tirx.FloatImm) and float(other.value) == 0
    _require(isinstance(bound, tirx.LT) and zero, block, "filled with zeros past its bound", f"{other} unless {condition}")
    _require(isinstance(load, tvm.ir.TensorLoad), block, "a copy", load)

    r, c = rows.loop_var, channels.loop_var
    for loop in (rows, channels):
        ana.bind(loop.loop_var, tvm.ir.Range(loop.min, loop.extent))
    values = {iter_var.var: value for iter_var, value in zip(realize.block.iter_vars, realize.iter_values)}
    read, written = ([substitute(index, values) for index in indices] for indices in (load.indices, store.indices))
    size_batch, size_rows, heads, size_channels = load.source.shape
    size_batch, strides = getattr(size_batch, "value", size_batch), strides_of(load.source)
    size = _sequence_in(bound.b, size_rows)
    left = substitute(bound.a - bound.b, values)  # below zero where the row exists
    row = ana.simplify(substitute(left, {r: _int(0), c: _int(0)}) + size)
    batch, place, head, _channel = (ana.simplify(substitute(index, {r: _int(0), c: _int(0)})) for index in read)
    chunks, box_rows, chunk = store.buffer.shape
    first = ana.simplify(place - row)
    _require(_equal(ana, read, (batch, place + r, head, c)), block, "a copy of whole rows one after the other", read)
    _require(_equal(ana, [left], [row + r - size]) and (_is_sequence(size) or _equal(ana, [first], [_int(0)])), block,
             "bounded by the end of its tensor", bound)
    _require(_equal(ana, written, (c // chunk, r, c % chunk)), block, "stored as [chunk, row, channel of the chunk]", written)
    _require(_equal(ana, (rows.extent, channels.extent), (box_rows, chunks * chunk)), block,
             "a copy of all rows of its tile and all channels", f"{rows.extent} rows and {channels.extent} channels")
    if channel_bound is None:
        exact = _equal(ana, [chunks * chunk], [size_channels])
    else:
        held, wanted = (ana.simplify(bound) for bound in (substitute(channel_bound, values), c < size_channels))
        exact = tvm_ffi.structural_equal(held, wanted) and _chunks(size_channels, chunk) == int(chunks)
    _require(exact, block, "bounded by the channels of its tensor", f"{channels.extent} channels, bound {channel_bound}")
    address = tirx.address_of(tirx.BufferLoad(store.buffer, [_int(0)] * 3))
    if not _is_sequence(size):
        row = row + tirx.max(1 - size_rows, _int(0))  # an empty tensor is described as one row, which must not be read
    return events.bulk_load(_int(ring), address, load.source.data, size_rows, heads, size_batch, box_rows, size_channels, chunk,
                            *strides, first, size, row, head, batch, events.key_tile())


def _is_sequence(size):
    """Whether a number of rows is that of a sequence inside the tensor: a variable that was bound to what a tensor of lengths says."""
    return isinstance(size, tirx.Var) and size.name in SEQUENCE_ROWS


def _sequence_in(expr, otherwise):
    """The number of a sequence's rows in an expression."""
    found = []
    tvm_ffi.structural_walk(expr, (tirx.Var, lambda var: found.append(var) if _is_sequence(var) else None))
    return found[0] if found else otherwise


def in_sequence(call):
    """Whether the rows of a bulk_load event are those of a sequence inside the tensor."""
    return _is_sequence(call.args[14])


def strides_of(tensor):
    """Strides of batch entries, rows and heads of a tensor, in elements: what it was declared with, or those of a contiguous one."""
    if len(tensor.strides):
        return tensor.strides[:3]
    _batch, rows, heads, channels = tensor.shape
    line = tirx.Cast("int64", heads) * channels
    return tirx.Cast("int64", rows) * line, line, channels


def _chunks(channels, chunk):
    """Chunks that hold a row of so many channels."""
    return -(-int(channels) // int(chunk))


def _in_one_box(channels, chunk):
    """Whether one instruction brings all chunks of a tile: where the tensor's rows are whole chunks. Else each chunk is a box of its own,
    since only the end of a dimension is filled with zeros."""
    return int(channels) % int(chunk) == 0


def tile_exists(call):
    """Whether the tile of a bulk_load event has a row of its sequence."""
    _first, size, row = call.args[13:16]
    return row < size


def tensor_map_type():
    """Type of a variable that holds a tensor map; in a kernel's parameters it stands for the map itself."""
    return T.handle("tensormap").ty


def encode_tensor_map(tensor_map, call, stand_in, apart=False):
    """Host statement that describes the tensor of a bulk_load event by its run-time shape and strides, in a variable.

    Five dimensions from the inside: channel of a chunk, row, chunk, head, batch entry; without that of chunks, and with all channels in the
    first, where each chunk is a box of its own, as it is where chunks are `apart`. No dimension may be zero, so an empty tensor counts as
    one of size one, whatever its strides are; nothing of it is loaded, but the address must be one of the device: that of `stand_in`. Of a
    tensor that holds sequences the five are channel, head and the three dimensions of rows that the module describes.
    """
    pointer, rows, heads, batch, box_rows, channels, chunk = call.args[3:10]
    empty = tirx.EQ(rows, _int(0))
    line = int(chunk) * ELEMENT_BYTES
    rows, heads, batch = (tirx.max(size, _int(1)) for size in (rows, heads, batch))
    compact, given = tirx.const(int(channels), "int64"), (tirx.Cast("int64", stride) for stride in call.args[10:13])
    batch_bytes, row_bytes, head_bytes = (tirx.Select(empty, compact, stride) * ELEMENT_BYTES for stride in given)
    dims = [chunk, rows, _int(int(channels) // int(chunk)), heads, batch]
    strides = [row_bytes, _int(line), head_bytes, batch_bytes]
    box = [chunk, box_rows, _int(int(channels) // int(chunk)), _int(1), _int(1)]
    if in_sequence(call):
        dims = [channels, heads, _int(WRAP), _int(UNBOUNDED), _int(UNBOUNDED)]
        strides = [head_bytes, row_bytes, row_bytes, tirx.const(2**64 // WRAP, "int64") - row_bytes]
        box = [chunk, _int(1), box_rows, _int(1), _int(1)]
    elif apart or not _in_one_box(channels, chunk):
        dims[0] = channels
        for sizes, place in ((dims, 2), (strides, 1), (box, 2)):
            del sizes[place]
    element = pointer.ty.element_type
    allocated = tvm.ir.Call(tvm.ir.Op.get("tirx.tvm_stack_alloca"), [tvm.ir.StringImm("tensormap"), _int(1)], None, ret_ty=tensor_map.ty)

    def encode(address):
        return tirx.Evaluate(tirx.call_packed(
            "runtime.cuTensorMapEncodeTiled", tensor_map, tvm.ir.StringImm(str(element.dtype)), _int(len(dims)), address, *dims, *strides,
            *box, *[_int(1)] * len(dims), _int(INTERLEAVE_NONE), _int(SWIZZLE[line]), _int(PROMOTE), _int(FILL_ZERO)))
    return tirx.SeqStmt([tirx.Bind(tensor_map, allocated), tirx.IfThenElse(empty, encode(stand_in), encode(pointer))])


def rows_of_entry(call):
    """Rows between the batch entries of the tensor of a bulk_load event, which its strides must make a whole number."""
    batch_stride, row_stride, _head_stride = call.args[10:13]
    return tirx.Cast("int32", tirx.truncdiv(batch_stride, tirx.Cast("int64", tirx.max(row_stride, _int(1)))))


def load_instructions(call, tensor_map, coordinates, entry_rows, address, barrier, reused):
    """The TMA instructions that bring the tile of a bulk_load event to a shared address and count its bytes on a barrier: one for a box
    [1, 1, chunks, rows, chunk], or one for each chunk, a box [1, 1, rows, chunk], or [1, 1, rows, 1, chunk] of a sequence.

    coordinates  first row of the sequence and number of rows, first row in it, head, batch entry
    entry_rows   rows between batch entries
    reused       whether other tiles of work read it again soon, so that it should stay in the L2 cache
    """
    first, size, row, head, batch = coordinates
    policy = tirx.const(EVICT_LAST if reused else EVICT_FIRST, "uint64")
    box_rows, channels, chunk = map(int, call.args[7:10])

    def load(address, *place):
        instruction = f"cp.async.bulk.tensor.{len(place)}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        return T.ptx[instruction](address, tirx.address_of(tensor_map), *place, barrier, policy)

    if in_sequence(call):
        place = head, WRAP - size + row, batch * entry_rows + first + size, WRAP
    elif _in_one_box(channels, chunk):
        return [load(address, 0, row, 0, head, batch)]
    else:
        place = row, head, batch
    return [load(address + tirx.const(number * box_rows * chunk * ELEMENT_BYTES, "uint32"), number * chunk, *place)
            for number in range(_chunks(channels, chunk))]


def is_loaded_once(call):
    """Whether a bulk_load event stands outside the loop over the tiles that come by."""
    return events.name_of(call.args[-1]) == "key_tile"


def tensor_of(call):
    """Pointer to the tensor that a bulk_load event reads."""
    return call.args[3]


def tile_of(call):
    """Shared buffer that a bulk_load event writes."""
    return call.args[2].args[0].source


def box_bytes(call):
    """Bytes that a bulk_load event brings, the zeros with which it fills its boxes included."""
    box_rows, channels, chunk = map(int, call.args[7:10])
    return box_rows * _chunks(channels, chunk) * chunk * ELEMENT_BYTES
