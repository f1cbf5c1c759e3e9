"""Values of scalar TIR expressions on NumPy arrays, so that what a kernel computes can be computed again in float64."""
import numpy as np
import tvm
from tvm import tirx

_BINARY = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Min": np.minimum, "Max": np.maximum, "EQ": np.equal, "NE": np.not_equal,
           "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "And": np.logical_and, "Or": np.logical_or,
           "FloorDiv": np.floor_divide, "FloorMod": np.mod, "Mod": np.fmod}
_CALLS = {"exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
          "abs": np.abs, "fabs": np.abs, "pow": np.power, "floor": np.floor, "ceil": np.ceil, "if_then_else": np.where,
          "likely": np.asarray, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x))}


class UnknownExpression(ValueError):
    """An expression that has no NumPy counterpart here."""


def evaluate(expr, values):
    """The value of an expression.

    values  {variable or buffer: array}; floating elements of buffers and casts to float32 take the precision of the first floating array,
            so that float64 scores are modified in float64
    """
    floating = next(np.asarray(value).dtype for value in values.values() if np.asarray(value).dtype.kind == "f")
    known = list(values.items())

    def look_up(key):
        return next(value for other, value in known if other.same_as(key))

    def convert(array, dtype):
        array = np.asarray(array)
        if dtype.startswith(("float", "bfloat")):
            return array.astype(floating)
        return array.astype(bool if dtype == "bool" else dtype)

    def value(node):
        kind = type(node).__name__
        if isinstance(node, (tirx.IntImm, tirx.FloatImm)):
            return np.asarray(node.value, floating if isinstance(node, tirx.FloatImm) else None)
        if isinstance(node, tirx.Var):
            return look_up(node)
        if kind in _BINARY:
            return _BINARY[kind](value(node.a), value(node.b))
        if kind == "Div":
            a, b = value(node.a), value(node.b)
            return a / b if a.dtype.kind == "f" else np.trunc(a / b).astype(a.dtype)
        if kind == "Not":
            return np.logical_not(value(node.a))
        if kind == "Select":
            return np.where(value(node.condition), value(node.true_value), value(node.false_value))
        if kind == "Cast":
            return convert(value(node.value), str(node.ty))
        if kind in ("TensorLoad", "BufferLoad"):
            array = look_up(node.source)
            return convert(array[tuple(value(index) for index in node.indices)], str(node.ty))
        name = getattr(node.op, "name", "").split(".")[-1] if isinstance(node, tvm.ir.Call) else kind
        if name not in _CALLS:
            raise UnknownExpression(f"an expression that NumPy can compute was wanted, found {name} in {node}: use {', '.join(_CALLS)}")
        return _CALLS[name](*map(value, node.args))
    with np.errstate(all="ignore"):
        return value(expr)
