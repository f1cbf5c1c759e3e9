"""Blocks that plain TensorIR functions are made of, each written once: what it computes is handed in as a function of its place.

They are Python functions that build as they are called, from inside a TVMScript function. T.inline and T.macro would number the names of
their blocks from call to call.
"""
from contextlib import contextmanager

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder


@contextmanager
def block(name, axes, extents, kinds=None):
    """A block in loops of its own; yields its axes.

    axes   a letter for each loop
    kinds  "S" or "R" for each; None: all are spatial
    """
    with T.grid(*extents) as loops:
        loops = [IRBuilder.name(axis, loop) for axis, loop in zip(axes, loops if len(axes) > 1 else [loops])]
        with T.sblock(name):
            found = T.axis.remap(kinds or "S" * len(axes), loops)
            yield [IRBuilder.name(f"v{axis}", var) for axis, var in zip(axes, found if len(axes) > 1 else [found])]


def each(out, name, axes, value):
    """Set every element: out[place] = value(*place)."""
    with block(name, axes, out.shape) as place:
        T.buffer_store(out, value(*place), place)


def load(out, name, axes, exists, source, channels=None):
    """Copy a tile out [rows, channels] from source(row, channel), with zeros where a row does not exist, and past so many channels, if any
    number is given, where it has more; they are asked for 8 at a time, so that wide copies stay whole."""
    def there(row, c):
        return exists(row) if channels in (None, int(out.shape[1])) else tirx.And(exists(row), c // 8 < channels // 8)
    each(out, name, axes, lambda row, c: T.if_then_else(there(row, c), source(row, c), T.cast(0.0, out.dtype)))


def product(out, name, axes, terms, a, b, first=None):
    """Add up products in float32: out[row, column] = first[row, column] + the sum over terms of a(row, term) * b(column, term).

    axes   letters of row, column and term
    first  a matrix like out; None: zeros
    """
    with block(name, axes, (*out.shape, terms), "SSR") as (row, column, term):
        with T.init():
            T.buffer_store(out, T.float32(0) if first is None else first[row, column], [row, column])
        T.buffer_store(out, out[row, column] + T.cast(a(row, term), "float32") * T.cast(b(column, term), "float32"), [row, column])
