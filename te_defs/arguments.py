"""Run-time arguments that masks, score modifications and the sink bring along: they follow the scale in a call.

A mask or score modification is an instance of its dataclass; each field is an argument, and its annotation says of what kind: COUNT (a
number of keys), NUMBER, POSITIVE or a `tensor`. The same instance holds TIR variables when a kernel is declared, and numbers and arrays
when the reference computes.
"""
import importlib
from dataclasses import dataclass, fields

import numpy as np
import tvm
from tvm import tirx

from te_defs.integers import maximum, minimum

#: What the axes of a tensor argument are called, in the order of a score [B, H, N, M].
AXES = {"B": "batch", "H": "heads", "N": "queries", "M": "keys"}


@dataclass(frozen=True)
class Kind:
    """What an argument is.

    name   "count": an integer from 0 up; "number": finite, float32; "positive": likewise, above zero; "tensor"
    dtype  element type; None for that of Q, K and V
    axes   of a tensor: letters of AXES. Each may have size one in a call, and then serves all indices
    """

    name: str
    dtype: str | None
    axes: str = ""


COUNT, NUMBER, POSITIVE = Kind("count", "int32"), Kind("number", "float32"), Kind("positive", "float32")


def tensor(axes, dtype=None):
    """Kind of a tensor with these axes, such as "BHNM"; ValueError where one has no meaning."""
    if not axes or set(axes) - set(AXES):
        raise ValueError(f"axes of a tensor are letters of {''.join(AXES)}, found {axes!r}: correct them")
    return Kind("tensor", dtype, axes)


#: The commonest tensors: a number for each head, one for each score.
PER_HEAD, PER_SCORE = tensor("H", "float32"), tensor("BHNM")


@dataclass(frozen=True)
class Argument:
    """One argument of a call: its name and Kind."""

    name: str
    kind: Kind


class Operand:
    """A tensor argument as masks and scores read it: indices beyond an end read that end, so that an axis of size one serves them all."""

    def __init__(self, source, first=()):
        self.source, self.first = source, first

    def at(self, b):
        """The part at index b of the first axis."""
        return Operand(self.source, (*self.first, b))

    def __getitem__(self, indices):
        indices = (*self.first, *(indices if isinstance(indices, tuple) else (indices,)))
        # The largest is taken last: of an empty tensor, for which an entry passes some memory, index 0 may be read.
        return self.source[tuple(maximum(minimum(index, size - 1), 0) for index, size in zip(indices, self.source.shape, strict=True))]


class OwnElement(Operand):
    """An Operand, called `name`, of which nothing is read but the element at `place`: one and the same `node` wherever that is."""

    def __init__(self, operand, name, place):
        super().__init__(operand.source)
        self.name, self.place, self.node = name, place, operand[tuple(place)]

    def __getitem__(self, indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
        if not all(own.same_as(index) for index, own in zip(indices, self.place, strict=True)):
            own, found = (", ".join(map(str, some)) for some in (self.place, indices))
            raise ModifierError(f"{self.name}[{own}] must be all that a score reads of {self.name} for it to have a gradient, found "
                                f"{self.name}[{found}]: leave the gradient out")
        return self.node


class Modifier:
    """What masks and score modifications have in common.

    samples  values of the fields that are no tensors, as tuples: the first is what is timed, all of them what is tested
    """

    samples = ((),)

    @classmethod
    def arguments(cls):
        """Arguments of a call, in their order."""
        return tuple(Argument(field.name, field.type) for field in fields(cls))

    @classmethod
    def of(cls, values):
        """The instance with these values, tensors as Operands."""
        return cls(*(Operand(value) if argument.kind.axes else value for argument, value in zip(cls.arguments(), values, strict=True)))

    @classmethod
    def draw(cls, name, size, rng):
        """Random elements for the tensor argument `name` of this size."""
        return rng.standard_normal(size, np.float32)

    @classmethod
    def make(cls, scalars, sizes, dtype, rng, single=""):
        """Values of all arguments: `scalars` for those that are no tensors, random ones for tensors.

        sizes   {letter of AXES: size}
        dtype   NumPy's, of elements that the arguments leave open
        single  axes, as letters, that shall have size one
        """
        scalars, values = iter(scalars), []
        for name, kind in ((argument.name, argument.kind) for argument in cls.arguments()):
            size = tuple(1 if axis in single else sizes[axis] for axis in kind.axes)
            values.append(cls.draw(name, size, rng).astype(kind.dtype or dtype) if kind.axes else next(scalars))
        return tuple(values)


class ModifierError(ValueError):
    """A mask or score modification that cannot be had or does not do what it should."""


def find(kind, known, name, form):
    """What is known by a name, or what `module:attribute` names; ModifierError with one sentence where there is neither.

    kind  what is wanted, "mask" or "score"
    form  what a name of one's own looks like, such as "module:class"
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise ModifierError(f"{kind} must be one of {', '.join(known)} or {form}, found {name!r}: choose one of these")
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as reason:  # whatever the module does when it is imported
        raise ModifierError(f"a {kind} {name} was wanted, and importing it raised {type(reason).__name__}: {reason}: write module:name of "
                            "one that can be imported") from reason


def parameter(argument, dtype):
    """Parameter of a TIR function for an Argument, on elements of this type; the axes of tensors are symbolic, each by itself, since they
    may have size one."""
    kind = argument.kind
    if not kind.axes:
        return tirx.Var(argument.name, kind.dtype)
    sizes = [tirx.Var(f"{argument.name}_{axis}", "int32") for axis in kind.axes]
    return tirx.decl_buffer(sizes, kind.dtype or dtype, argument.name, data_alignment=tvm.DataType(kind.dtype or dtype).bits // 8)


def require_kinds(modifier, name):
    """ModifierError with one sentence where a field of a Modifier class, of this name, is of no Kind, or a sample lacks a number."""
    wrong = next((argument for argument in modifier.arguments() if not isinstance(argument.kind, Kind)), None)
    if wrong is not None:
        raise ModifierError(f"the fields of {name} must be COUNT, NUMBER, POSITIVE or a tensor of te_defs.arguments, found {wrong.name} to "
                            f"be {wrong.kind!r}: annotate it so, and without postponed annotations")
    numbers = [argument.name for argument in modifier.arguments() if not argument.kind.axes]
    if any(len(sample) != len(numbers) for sample in modifier.samples):
        raise ModifierError(f"the samples of {name} must be tuples of {len(numbers)} numbers ({', '.join(numbers) or 'none'}), found "
                            f"{modifier.samples}: give it some")
