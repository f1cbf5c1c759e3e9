"""The gate: is a kernel right? Asked before it is timed, since nothing else in MetaSchedule looks at results and a wrong kernel is fast."""
import itertools
from dataclasses import dataclass, replace
from typing import Callable

import numpy as np
import tvm

from te_defs.random_calls import Call, random_call
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
#: What a would-be winner must answer besides: so many random calls, and shapes with data that are hard: scores of thousands, equal keys,
#: denormal numbers, each with rows that see no key under a causal mask, and more keys than any other case has.
RANDOM_CALLS = 24
HARD = tuple((Shape(batch=1, q_heads=2, kv_heads=1, q_len=130, kv_len=61), data) for data in ("large", "equal", "tiny")) + (
    (Shape(batch=1, q_heads=1, kv_heads=1, q_len=40, kv_len=1500), "large"),
    (Shape(batch=1, q_heads=1, kv_heads=1, q_len=40, kv_len=1500), "normal"))
#: Elements behind each output that a kernel must leave alone.
GUARD = 256


class Refused(Exception):
    """A kernel that must not be timed: the message says what is wrong with it."""


@dataclass(frozen=True)
class Case:
    """A call whose answer is known.

    shape     te_defs.workload.Shape
    inputs    tensors in front of the outputs, on the device
    outputs   ((sizes, NumPy's type), ...)
    behind    scale and what follows it
    answers   float64 answers of the outputs whose largest error is told
    judge     function of the outputs as arrays: None, or a sentence that says where they are wrong
    negative  whether it is for the twin that takes scales below zero
    """

    shape: Shape
    inputs: tuple
    outputs: tuple
    behind: tuple
    answers: tuple
    judge: Callable
    negative: bool = False


def cases(subject, device, seed=0, shapes=SHAPES):
    """The gate's cases for what is tuned (schedules.tuning.subjects), inputs on `device`; with its mask's samples in turn, those that tiles
    see the edges of first."""
    workload = subject.workload
    first, *others = workload.mask_class.samples
    return tuple(subject.case(shape, float(np.float32(factor * workload.head_dim**-0.5)),
                              make_arguments(workload, replace(shape, mask=mask), seed), seed, device)
                 for (shape, factor), mask in zip(shapes, itertools.cycle((*others, first))))


def large_set(subject, device, shapes=()):
    """The cases that a would-be winner must pass before it counts: random and hard calls, and shapes as `cases` takes them."""
    workload, samples = subject.workload, itertools.cycle(subject.workload.mask_class.samples)
    drawn = (random_call(number, [workload]) for number in itertools.count())
    hard = (Call(number, workload, replace(shape, mask=next(samples)), 1.0, data, "contiguous")
            for number, (shape, data) in enumerate(HARD))
    calls = (*hard, *itertools.islice((call for call in drawn if subject.is_asked(call.shape)), RANDOM_CALLS))
    return cases(subject, device, shapes=shapes) + tuple(
        subject.case(call.shape, call.rounded_scale, call.arguments, call.number, device, call.inputs()) for call in calls)


def on_device(arguments, device):
    """Values of a call's further arguments, its arrays as tensors."""
    return tuple(tvm.runtime.tensor(value, device) if isinstance(value, np.ndarray) else value for value in arguments)


class Output:
    """A tensor that is poisoned before a call, with a guard behind it."""

    def __init__(self, shape, dtype, device):
        self.shape, self.size = shape, int(np.prod(shape))
        self._poison = np.full(self.size + GUARD, np.nan, np.float32).astype(dtype)
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


def check(kernel, made, device, twin=None, same_bits=True):
    """Largest error over the cases; Refused at the first that is wrong in one of two runs, or differs from run to run.

    kernel     function (inputs, outputs, what is behind them) for scales from zero up
    made       what `cases` returned
    twin       the same for scales below zero where these have one; where it is None, such cases are passed over
    same_bits  whether two runs must give the same bits
    """
    worst = 0.0
    for case in made:
        function = twin if case.negative else kernel
        if function is None:
            continue
        outputs, runs = [Output(sizes, dtype, device) for sizes, dtype in case.outputs], []
        where = f"(N = {case.shape.q_len}, M = {case.shape.kv_len})"
        for _ in range(2):
            function(*case.inputs, *(output.tensor() for output in outputs), *case.behind)
            device.sync()
            runs.append([output.numpy() for output in outputs])
        for run in runs[:1 if same_bits else 2]:
            wrong = case.judge(run)
            if wrong is not None:
                raise Refused(f"{wrong} {where}")
        if same_bits and any(first.tobytes() != second.tobytes() for first, second in zip(*runs)):
            raise Refused(f"two runs on the same inputs differ {where}")
        worst = max(worst, *(float(np.abs(found.astype(np.float64) - answer).max(initial=0))
                             for found, answer in zip(runs[0], case.answers)))
    return worst
