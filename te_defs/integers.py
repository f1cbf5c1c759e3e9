"""Arithmetic that takes Python's integers, NumPy's arrays and TIR expressions alike, so that one formula serves kernels and tests."""
import functools

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


def between(x, begin, end):
    """begin <= x < end, for begin and end from 0 on. One comparison of expressions, since a distance below zero is a large unsigned
    number; TVM would take minima and maxima of the ends apart, into a comparison each."""
    if not symbolic(x, begin, end):
        return both(_plain(np.less_equal(begin, x)), less(x, end))
    distance, length = (tirx.Cast("uint32", value) for value in (x - begin, tirx.max(end - begin, 0)))
    return tirx.LT(distance, length)


def select(condition, then, other):
    """`then` where the condition holds, or is an integer above zero, else `other`."""
    if not symbolic(condition, then, other):
        return _plain(np.where(condition, then, other))
    return tirx.Select(condition if str(condition.ty) == "bool" else condition > 0, then, other)


def first_where(holds, size):
    """The first x from 0 to size, below 2^30, for which holds(x); it must hold from there on, and counts as holding at size.

    holds  condition on an index below size, of Python's integers or NumPy's arrays, or of TIR expressions where size is one
    """
    steps = [1 << bit for bit in reversed(range(30))]

    def onward(x, step):
        """x, or x + step where the condition does not hold before that."""
        beyond = minimum(x + step, size) - 1
        if symbolic(size):
            return tirx.Select(tirx.And(x + step <= size, tirx.Not(holds(beyond))), x + step, x)
        return x + step * np.logical_and(x + step <= size, np.logical_not(holds(maximum(beyond, 0))))

    if not symbolic(size):
        return functools.reduce(onward, steps, 0)
    found = [tirx.Var(f"first_from_{step}", "int32") for step in steps]
    values = [onward(x, step) for x, step in zip([tirx.const(0, "int32"), *found], steps)]
    return functools.reduce(lambda rest, bound: tirx.Let(*bound, rest), reversed(list(zip(found, values))), found[-1])


def _plain(value):
    """NumPy's scalars as Python's, which TIR takes for constants of the right type."""
    return value.item() if np.ndim(value) == 0 else value
