"""The gate: is a kernel right? Asked before it is timed, since nothing else in MetaSchedule looks at results and a wrong kernel is fast."""
import itertools
from dataclasses import dataclass, replace

import numpy as np
import tvm

from schedules.build import signs
from te_defs import reference
from te_defs.workload import Shape, make_arguments

#: (shape, scale as a multiple of 1 / sqrt(D)): ragged lengths, grouped heads, more queries than keys (rows without keys under a causal
#: mask), one row, enough tiles for a pipeline to fill, no keys. The last is for the twin of the kernel that takes scales below zero.
SHAPES = (
    (Shape(batch=2, q_heads=4, kv_heads=2, q_len=77, kv_len=90), 1.0),
    (Shape(batch=1, q_heads=2, kv_heads=1, q_len=130, kv_len=61), 1.0),
    (Shape(batch=1, q_heads=2, kv_heads=2, q_len=1, kv_len=257), 0.0),
    (Shape(batch=1, q_heads=3, kv_heads=1, q_len=333, kv_len=777), 1.0),
    (Shape(batch=1, q_heads=1, kv_heads=1, q_len=33, kv_len=0), 1.0),
    (Shape(batch=1, q_heads=3, kv_heads=1, q_len=199, kv_len=333), -1.0),
)
#: What a would-be winner must pass besides: several tiles of work for every block of a persistent grid, so many that a causal mask's
#: order of work deals in pairs too.
MANY_TILES = ((Shape(batch=2, q_heads=200, kv_heads=20, q_len=200, kv_len=210), 1.0),)
#: Elements behind each output that a kernel must leave alone.
GUARD = 256


class Refused(Exception):
    """A kernel that must not be timed: the message says what is wrong with it."""


@dataclass(frozen=True)
class Case:
    """Inputs on the device, scale and what follows it, and the float64 answer with the errors that it allows."""

    shape: Shape
    inputs: tuple
    scale: float
    arguments: tuple
    out: np.ndarray
    lse: np.ndarray
    bound: float
    lse_bound: float


def cases(workload, device, seed=0, shapes=SHAPES):
    """The gate's cases for a workload, inputs on `device`; with its mask's samples in turn, those that tiles see the edges of first."""
    first, *others = workload.mask_class.samples
    made = []
    for (shape, factor), mask in zip(shapes, itertools.cycle((*others, first))):
        q, k, v = reference.make_inputs(workload, shape, seed)
        scale, arguments = float(np.float32(factor * workload.head_dim**-0.5)), make_arguments(workload, replace(shape, mask=mask), seed)
        out, lse = reference.forward(workload, q, k, v, scale, arguments)
        bounds = reference.tolerances(workload, q, k, v, scale, arguments, (out, lse))
        inputs = tuple(tvm.runtime.tensor(x, device) for x in (q, k, v))
        made.append(Case(shape, inputs, scale, on_device(arguments, device), out, lse, *bounds))
    return tuple(made)


def on_device(arguments, device):
    """Values of a call's further arguments, its arrays as tensors."""
    return tuple(tvm.runtime.tensor(value, device) if isinstance(value, np.ndarray) else value for value in arguments)


class Output:
    """A tensor that is poisoned before a call, with a guard behind it."""

    def __init__(self, shape, dtype, device):
        self.shape, self.size = shape, int(np.prod(shape))
        self._poison = np.full(self.size + GUARD, np.nan, dtype)
        self._whole = tvm.runtime.tensor(self._poison, device)

    def tensor(self):
        """The tensor to hand to the kernel, holding NaN."""
        self._whole.copyfrom(self._poison)
        return self._whole._create_view(self.shape)

    def numpy(self):
        """What the kernel wrote; Refused where it wrote past the end."""
        values = self._whole.numpy()
        if values[self.size:].tobytes() != self._poison[self.size:].tobytes():
            raise Refused("the kernel writes past the end of an output")
        return values[:self.size].reshape(self.shape)


def check(kernel, workload, made, device, twin=None):
    """Largest error of O over the cases; Refused at the first that is wrong or differs from run to run.

    kernel  function (q, k, v, out, lse, scale, the workload's arguments) for scales from zero up
    made    what `cases` returned
    twin    the same for scales below zero; where it is None, so are those cases
    """
    worst = 0.0
    for case in made:
        function = twin if case.scale < 0 and True in signs(workload) else kernel
        if function is None:
            continue
        *_, out_shape, lse_shape = case.shape.tensors(workload)
        out, lse = Output(out_shape, reference.numpy_dtype(workload), device), Output(lse_shape, np.float32, device)
        runs = []
        for _ in range(2):
            function(*case.inputs, out.tensor(), lse.tensor(), case.scale, *case.arguments)
            device.sync()
            runs.append((out.numpy(), lse.numpy()))
        wrong = reference.mismatch(*runs[0], case.out, case.lse, case.bound, case.lse_bound)
        if wrong is not None:
            raise Refused(f"{wrong} (N = {case.shape.q_len}, M = {case.shape.kv_len})")
        if any(first.tobytes() != second.tobytes() for first, second in zip(*runs)):
            raise Refused(f"two runs on the same inputs differ (N = {case.shape.q_len}, M = {case.shape.kv_len})")
        worst = max(worst, float(np.abs(runs[0][0].astype(np.float64) - case.out).max(initial=0)))
    return worst
