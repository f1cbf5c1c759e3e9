"""Score modifications: what becomes of a score before it is masked. One class serves the kernel and the reference.

A modification is a Tensor Expression: `modify` takes the scaled score s (float32), its batch entry b, head h, query row i and key row j
(int32) and the lengths, and returns a float32 expression. The reference evaluates that very expression, in float64 (te_defs/evaluate.py).
Rows and keys past the end can be asked for: what comes of them is thrown away.

A function of one's own, `score(s, b, h, i, j)`, is named in a workload as `module:function`, a class likewise.
"""
import inspect
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import tvm
from tvm import tirx

from te_defs.arguments import PER_HEAD, PER_SCORE, POSITIVE, Modifier, ModifierError, OwnElement, find, parameter, require_kinds
from te_defs.derivative import derivative
from te_defs.evaluate import evaluate


def _variables():
    """TIR variables for what `modify` takes: s, b, h, i, j and the lengths."""
    return [tirx.Var(name, "float32" if name == "s" else "int32") for name in ("s", "b", "h", "i", "j", "n", "m")]


@dataclass(frozen=True)
class Score(Modifier):
    """What score modifications have in common."""

    name: ClassVar[str]

    def modify(self, s, b, h, i, j, q_len, kv_len):
        """The modified score, a float32 expression."""
        raise NotImplementedError

    def derivative(self, s, b, h, i, j, q_len, kv_len):
        """The derivative of the modified score by the scaled score, a float32 expression; by rules, unless a class knows better."""
        return derivative(self.modify(s, b, h, i, j, q_len, kv_len), s)

    def slope_of(self, name, s, b, h, i, j, q_len, kv_len):
        """The derivative of the modified score by the element of a tensor argument that it reads, a float32 expression, by rules.

        ModifierError where it reads another element than that of its own place, which has the gradients of many scores."""
        axes = next(argument.kind.axes for argument in self.arguments() if argument.name == name)
        element = OwnElement(getattr(self, name), name, [dict(zip("BHNM", (b, h, i, j)))[axis] for axis in axes])
        return derivative(replace(self, **{name: element}).modify(s, b, h, i, j, q_len, kv_len), element.node)

    def applied(self, s, lengths):
        """NumPy scores [B, H, N, M] modified, in their own precision; the tensors of this instance are arrays."""
        return self._evaluated(type(self).modify, s, lengths)

    def applied_slopes(self, s, lengths):
        """The derivatives at scores [B, H, N, M], likewise."""
        return self._evaluated(type(self).derivative, s, lengths)

    def applied_slopes_of(self, name, s, lengths):
        """The derivatives by the elements of a tensor argument, likewise."""
        return self._evaluated(lambda self, *place: self.slope_of(name, *place), s, lengths)

    def _evaluated(self, method, s, lengths):
        variables, places = _variables(), np.meshgrid(*(np.arange(size) for size in s.shape), indexing="ij", sparse=True)
        arguments, values = [], dict(zip(variables, (s, *places, *lengths)))
        for argument, value in zip(self.arguments(), vars(self).values()):
            if argument.kind.axes:
                arguments.append(tirx.decl_buffer(value.source.shape, str(value.source.dtype), argument.name))
                values[arguments[-1]] = value.source
            else:
                arguments.append(tirx.Var(argument.name, "float32"))
                values[arguments[-1]] = np.float32(value)
        return np.broadcast_to(evaluate(method(type(self).of(arguments), *variables), values), s.shape)


@dataclass(frozen=True)
class Softcap(Score):
    """cap * tanh(s / cap): scores stay within the cap (Gemma 2). tanh(x) is 1 - 2 / (1 + exp(2 x)), which neither overflows nor is slow,
    but loses what is small beside 1: near zero it is the first terms of its series."""

    name = "softcap"
    samples = ((30.0,), (1.5,), (1e5,))
    #: Below it the next term of the series, 62 / 2835 x^8, is less than float32 tells.
    NEAR: ClassVar[float] = 0.125
    cap: POSITIVE

    def modify(self, s, b, h, i, j, q_len, kv_len):
        one, two, third, near = (tirx.const(value, "float32") for value in (1, 2, 1 / 3, self.NEAR))
        x = s / self.cap
        square = x * x
        series = x * (one - square * (third - square * (tirx.const(2 / 15, "float32") - square * tirx.const(17 / 315, "float32"))))
        return self.cap * tirx.Select(tirx.abs(x) < near, series, one - two / (one + tirx.exp(two * x)))

    def derivative(self, s, b, h, i, j, q_len, kv_len):
        """1 - tanh^2: by rules it would be a quotient of exponentials, which overflow."""
        t = self.modify(s, b, h, i, j, q_len, kv_len) / self.cap
        return tirx.const(1, "float32") - t * t


@dataclass(frozen=True)
class Alibi(Score):
    """Less for keys that are further away, by a slope of the head's own (ALiBi); counted from the aligned diagonal."""

    name = "alibi"
    slopes: PER_HEAD

    @classmethod
    def draw(cls, name, size, rng):
        return 2.0 ** (-8 * np.arange(1, size[0] + 1) / size[0])

    def modify(self, s, b, h, i, j, q_len, kv_len):
        return s - self.slopes[h] * tirx.abs((i + kv_len - q_len - j).astype("float32"))


@dataclass(frozen=True)
class Bias(Score):
    """An additive bias [batch, heads, queries, keys] of the element type; each axis may have size one."""

    name = "bias"
    bias: PER_SCORE

    def modify(self, s, b, h, i, j, q_len, kv_len):
        return s + self.bias[b, h, i, j].astype("float32")


SCORES = {score.name: score for score in (Softcap, Alibi, Bias)}


def find_score(name):
    """Class of a score modification, by its name in SCORES or as `module:function` or `module:class`; ModifierError where there is
    none."""
    found = find("score", SCORES, name, "module:function")
    if isinstance(found, type) and issubclass(found, Score):
        return found
    if not callable(found):
        raise ModifierError(f"a score is a function (s, b, h, i, j) or a class of te_defs.scores.Score, found {name} to be "
                            f"{type(found).__name__}: correct it")
    return _of_function(name, found)


def _of_function(name, function):
    """Score class of a user's function (s, b, h, i, j)."""
    def modify(self, s, b, h, i, j, q_len, kv_len):
        return function(s, b, h, i, j)
    return type("Function", (Score,), {"name": name, "modify": modify, "__doc__": inspect.getdoc(function)})


def prove(score, name):
    """ModifierError where a score class, of this name, raises on expressions or returns something else than a float32 expression."""
    require_kinds(score, name)
    arguments = [parameter(argument, "float16") for argument in score.arguments()]
    try:
        found = score.of(arguments).modify(*_variables())
    except Exception as reason:
        raise ModifierError(f"score {name} must take TIR expressions s, b, h, i, j, and raised {type(reason).__name__}: {reason}: "
                            "correct it") from reason
    kind = str(found.ty) if isinstance(found, tvm.ir.Expr) else type(found).__name__
    if kind != "float32":
        raise ModifierError(f"score {name} must return a float32 expression, found {kind}: cast it")
