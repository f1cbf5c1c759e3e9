"""Blocks that ask for the tensor memory accelerator: what becomes of one that copies whole rows, and what is refused."""
import re

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.lowering import bulk_loads

ROWS, CHANNELS, CHUNK = 16, 128, 64


def copy(value, place=lambda j, c: (c // CHUNK, j, c % CHUNK), rows=ROWS, channels=CHANNELS, strides=None, width=CHANNELS):
    """A function with one block that asks for a bulk load: it puts value(Q, i, j, c, n, m, b, h) at place(j, c) of a shared tile.

    Q is [batch, n, heads, width], i the row of it that belongs to row j of the tile, c the channel, b the batch entry and h the head.
    """
    @T.prim_func(s_tir=True, check_well_formed=False)
    def load(q: T.handle, n: T.int32, m: T.int32, b: T.int32, h: T.int32):
        T.func_attr({"global_symbol": "main"})
        B, H = T.int32(), T.int32()
        Q = T.match_buffer(q, (B, n, H, width), "float16", strides=strides)
        for t in range((n + (ROWS - 1)) // ROWS):
            with T.sblock("kv"):
                vt = T.axis.opaque((n + (ROWS - 1)) // ROWS, t)
                tile = T.sblock_alloc_buffer((CHANNELS // CHUNK, ROWS, CHUNK), "float16", scope="shared.dyn")
                with T.sblock("K_load_o"):
                    T.reads()
                    T.writes()
                    T.sblock_attr({bulk_loads.BULK_LOAD: "K"})
                    for j, c in T.grid(rows, channels):
                        with T.sblock("K_load"):
                            vj, vc = T.axis.remap("SS", [j, c])
                            at = T.meta_var(place(vj, vc))
                            tile[at[0], at[1], at[2]] = value(Q, vt * ROWS + vj, vj, vc, n, m, b, h)
    return load


def zero():
    return T.float16(0)


def plain(Q, i, j, c, n, m, b, h):
    return T.if_then_else(T.Or(i < 0, i < n), Q[b, i, h, c], zero())


def lowered(func):
    return bulk_loads.lower_bulk_loads()(tvm.IRModule({"main": func}))["main"]


def event_in(func):
    """The one event bulk_load of a function."""
    calls = []
    tvm_ffi.structural_walk(
        func.body, (tvm.ir.Call, lambda call: calls.append(call) if events.name_of(call) == "bulk_load" else None))
    call, = calls
    return call


def test_a_copy_of_whole_rows_becomes_one_event():
    func = lowered(copy(plain))
    _name, ring, _address, pointer, rows, heads, batch, box_rows, channels, chunk, *strides, row, head, entry, tile = event_in(func).args
    Q = func.params[0]
    n, _m, b, h = func.params[1:]
    assert int(ring) == events.K and tvm_ffi.structural_equal(pointer, Q.data)
    assert [int(size) for size in (box_rows, channels, chunk)] == [ROWS, CHANNELS, CHUNK]
    assert all(found.same_as(size) for found, size in zip((batch, rows, heads), Q.shape))
    assert head.same_as(h) and entry.same_as(b)
    assert "if_then_else" not in str(func.body)
    ana = tvm.sym.Analyzer()
    line = tirx.Cast("int64", Q.shape[2]) * CHANNELS
    assert all(ana.can_prove_equal(*pair) for pair in zip(strides, (tirx.Cast("int64", n) * line, line, CHANNELS)))
    assert ana.can_prove_equal(row, tile * ROWS + tirx.max(1 - n, tirx.IntImm("int32", 0))), "the tile is the key loop's"


def test_a_view_has_strides_of_its_own():
    own = [tirx.Var(name, "int32") for name in ("batch", "row", "head")]
    strides = event_in(lowered(copy(plain, strides=[*own, 1]))).args[10:13]
    assert all(found.same_as(stride) for found, stride in zip(strides, own))


def padded(width):
    """The same with zeros from a channel on."""
    return lambda Q, i, j, c, n, m, b, h: T.if_then_else(tirx.And(T.Or(i < 0, i < n), c // 8 < width // 8), Q[b, i, h, c], zero())


def test_a_tile_may_have_zeros_past_the_last_channel():
    call = event_in(lowered(copy(padded(80), width=80)))
    assert [int(size) for size in call.args[7:10]] == [ROWS, 80, CHUNK]
    assert bulk_loads.box_bytes(call) == ROWS * CHANNELS * 2, "zeros count too"
    map_ = tirx.Var("map", bulk_loads.tensor_map_type())
    barrier, address = (tirx.Var(name, "uint32") for name in ("barrier", "address"))
    place = [tirx.IntImm("int32", number) for number in (0, 99, 5, 6, 7)]
    loads = bulk_loads.load_instructions(call, map_, place, tirx.IntImm("int32", 0), address, barrier, True)
    assert [[int(x) for x in load.args if isinstance(x, tirx.IntImm)][:4] for load in loads] == [[0, 5, 6, 7], [CHUNK, 5, 6, 7]]


@pytest.mark.parametrize("value, width", [(plain, 80), (padded(88), 80), (padded(72), 80), (padded(64), 64), (padded(80), CHANNELS)],
                         ids=["no_bound", "too_many", "too_few", "a_line_of_zeros", "zeros_over_channels"])
def test_zeros_that_are_not_those_past_the_last_channel_are_refused(value, width):
    refused(copy(value, width=width), "bounded by the channels of its tensor")


WHOLE_ROWS, ZEROS, END = "a copy of whole rows one after the other", "filled with zeros past its bound", "bounded by the end of its tensor"
BOX, ALL = r"stored as \[chunk, row, channel of the chunk\]", "a copy of all rows of its tile and all channels"


@pytest.mark.parametrize("value, message", [
    (lambda Q, i, j, c, n, m, b, h: Q[b, i, h, c], "a load with a bound"),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i, h, c], T.float16(1)), ZEROS),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i, h, c], Q[b, 0, h, c]), ZEROS),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i <= n, Q[b, i, h, c], zero()), ZEROS),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < m, Q[b, i, h, c], zero()), END),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n - 1, Q[b, i, h, c], zero()), END),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i, h, c] * T.float16(2), zero()), "a copy"),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i, h, CHANNELS - 1 - c], zero()), WHOLE_ROWS),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i + j, h, c], zero()), WHOLE_ROWS),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i * m, h, c], zero()), WHOLE_ROWS),
    (lambda Q, i, j, c, n, m, b, h: T.if_then_else(i < n, Q[b, i, h + j, c], zero()), WHOLE_ROWS),
], ids=["no_bound", "filled_with_ones", "filled_with_another_row", "one_row_too_many", "bound_of_another", "one_row_too_few", "arithmetic",
        "channels_backwards", "every_other_row", "rows_far_apart", "a_head_for_each_row"])
def test_what_is_no_copy_with_zeros_past_the_end_is_refused(value, message):
    refused(copy(value), message)


@pytest.mark.parametrize("changes, message", [
    (dict(channels=CHUNK), ALL),
    (dict(rows=ROWS // 2), ALL),
    (dict(place=lambda j, c: (c // CHUNK, ROWS - 1 - j, c % CHUNK)), BOX),
    (dict(place=lambda j, c: (c % 2, j, c // 2)), BOX),
], ids=["half_of_the_channels", "half_of_the_rows", "rows_backwards", "channels_scattered"])
def test_what_does_not_fill_a_box_in_order_is_refused(changes, message):
    refused(copy(plain, **changes), message)


def refused(func, message):
    with pytest.raises(bulk_loads.BulkLoadError) as error:
        lowered(func)
    first, *context = str(error.value).splitlines()
    assert re.fullmatch(f"block K_load_o must be {message} to become a bulk load, found .*: correct the declaration", first)
    assert not context or context[1].startswith("Error in pass"), "one sentence, and what TVM adds to it"
