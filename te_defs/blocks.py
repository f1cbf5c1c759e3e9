"""Blocks that plain TensorIR functions are made of, written once: what a block computes is handed in as a function of its place."""
from tvm.script import tirx as T


@T.inline
def each(out, name, value):
    """Set every element of out [rows, columns]: value(row, column)."""
    for row, column in T.grid(*out.shape):
        with T.sblock(name):
            vr, vc = T.axis.remap("SS", [row, column])
            out[vr, vc] = value(vr, vc)


@T.inline
def load(out, name, exists, source):
    """Copy a tile, out [rows, columns], from source(row, column), with zeros where a row does not exist."""
    for row, column in T.grid(*out.shape):
        with T.sblock(name):
            vr, vc = T.axis.remap("SS", [row, column])
            out[vr, vc] = T.if_then_else(exists(vr), source(vr, vc), T.cast(0.0, out.dtype))


@T.inline
def product(out, name, terms, first, a, b):
    """Add up products in float32: out [rows, columns] = first(row, column) + the sum over terms of a(row, term) * b(column, term)."""
    for row, column, term in T.grid(*out.shape, terms):
        with T.sblock(name):
            vr, vc, vt = T.axis.remap("SSR", [row, column, term])
            with T.init():
                out[vr, vc] = first(vr, vc)
            out[vr, vc] += T.cast(a(vr, vt), "float32") * T.cast(b(vc, vt), "float32")


def zero(row, column):
    """What most sums start from."""
    return T.float32(0)
