"""Arithmetic that takes Python's integers, NumPy's arrays and TIR expressions alike, so that one formula serves kernels and tests."""
import numpy as np
import tvm
from tvm import tirx


def symbolic(*values):
    """Whether one of the values is a TIR expression."""
    return any(isinstance(value, tvm.ir.Expr) for value in values)


def divide(a, b):
    """a / b without its fraction, for b > 0; a must not be negative."""
    return tirx.truncdiv(a, b) if symbolic(a, b) else a // b


def round_up(a, step):
    """The smallest multiple of step that is at least a."""
    return -(-a // step) * step


def tiles_of(rows, tile):
    """Number of tiles that hold so many rows."""
    return (rows + (tile - 1)) // tile


def remainder(a, b):
    """What `divide` leaves of a."""
    return tirx.truncmod(a, b) if symbolic(a, b) else a % b


def maximum(a, b):
    return tirx.max(a, b) if symbolic(a, b) else _plain(np.maximum(a, b))


def minimum(a, b):
    return tirx.min(a, b) if symbolic(a, b) else _plain(np.minimum(a, b))


def less(a, b):
    return tirx.LT(a, b) if symbolic(a, b) else _plain(np.less(a, b))


def both(a, b):
    """Whether two conditions hold."""
    return tirx.And(a, b) if symbolic(a, b) else _plain(np.logical_and(a, b))


def counted(condition):
    """1 where the condition holds, else 0."""
    return tirx.Cast("int32", condition) if symbolic(condition) else _plain(np.asarray(condition).astype(int))


def select(condition, then, other):
    """`then` where the condition holds, or is an integer above zero, else `other`."""
    if not symbolic(condition, then, other):
        return _plain(np.where(condition, then, other))
    return tirx.Select(condition if str(condition.ty) == "bool" else condition > 0, then, other)


def _plain(value):
    """NumPy's scalars as Python's, which TIR takes for constants of the right type."""
    return value.item() if np.ndim(value) == 0 else value
