"""Derivatives of scalar TIR expressions, which TVM has none of: by the chain rule, node by node, as te_defs/evaluate.py computes values."""
import tvm
from tvm import tirx

from te_defs.evaluate import UnknownExpression


def _const(value):
    return tirx.const(value, "float32")


#: Slopes of functions of one argument x whose value is f.
_SLOPES = {
    "exp": lambda x, f: f,
    "exp2": lambda x, f: f * _const(0.6931471805599453),
    "log": lambda x, f: _const(1) / x,
    "log2": lambda x, f: _const(1.4426950408889634) / x,
    "sqrt": lambda x, f: _const(0.5) / f,
    "rsqrt": lambda x, f: _const(-0.5) * f / x,
    "tanh": lambda x, f: _const(1) - f * f,
    "sigmoid": lambda x, f: f * (_const(1) - f),
    "sin": lambda x, f: tirx.cos(x),
    "cos": lambda x, f: _const(0) - tirx.sin(x),
    "abs": lambda x, f: _sign(x),
    "fabs": lambda x, f: _sign(x),
}
#: Functions that are flat wherever they have a slope.
_FLAT = ("floor", "ceil")


def _sign(x):
    return tirx.Select(x < _const(0), _const(-1), _const(1))


def derivative(expr, variable):
    """d expr / d variable as a float32 expression, for a float32 expression of a float32 variable, or of an expression, one and the same
    node wherever it stands for one.

    At a kink (of abs, min, max, Select) it is the slope on one side. UnknownExpression for what has no rule here.
    """
    slope = _slope(expr, variable)
    return _const(0) if slope is None else slope


def _slope(node, variable):
    """The derivative; None where the node does not depend on the variable, so that no zero is multiplied with what may be infinite."""
    if node.same_as(variable):
        return _const(1)
    kind = type(node).__name__
    if isinstance(node, (tirx.Var, tirx.IntImm, tirx.FloatImm)) or not str(node.ty).startswith(("float", "bfloat")):
        return None
    if kind in ("Add", "Sub", "Mul", "Div", "Min", "Max"):
        return _slope_of_pair(kind, node.a, node.b, _slope(node.a, variable), _slope(node.b, variable))
    if kind == "Select":
        return _choose(node.condition, _slope(node.true_value, variable), _slope(node.false_value, variable))
    if kind == "Cast":
        return _slope(node.value, variable)
    if kind in ("TensorLoad", "BufferLoad"):
        return None
    return _slope_of_call(node, variable)


def _slope_of_pair(kind, a, b, da, db):
    if da is None and db is None:
        return None
    if kind in ("Min", "Max"):
        return _choose(a <= b if kind == "Min" else a >= b, da, db)
    if kind in ("Add", "Sub"):
        db = db if kind == "Add" or db is None else _const(0) - db
        return da if db is None else db if da is None else da + db
    if kind == "Mul":
        da, db = None if da is None else da * b, None if db is None else a * db
    else:
        da, db = None if da is None else da / b, None if db is None else _const(0) - a / b * (db / b)
    return da if db is None else db if da is None else da + db


def _choose(condition, then, other):
    if then is None and other is None:
        return None
    return tirx.Select(condition, *(_const(0) if slope is None else slope for slope in (then, other)))


def _slope_of_call(node, variable):
    name = getattr(node.op, "name", "").split(".")[-1] if isinstance(node, tvm.ir.Call) else type(node).__name__
    if name == "if_then_else":
        return _choose(node.args[0], *(_slope(value, variable) for value in node.args[1:]))
    slopes = [_slope(value, variable) for value in getattr(node, "args", [])]
    if slopes and all(slope is None for slope in slopes) or name in _FLAT:
        return None
    if name == "pow" and slopes[1] is None:
        base, power = node.args
        return power * tirx.pow(base, power - _const(1)) * slopes[0]
    if name not in _SLOPES:
        raise UnknownExpression(f"an expression with a derivative was wanted, found {name} in {node}: use {', '.join(_SLOPES)}")
    return _SLOPES[name](node.args[0], node) * slopes[0]
