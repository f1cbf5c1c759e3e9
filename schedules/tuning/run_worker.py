"""What the process at the device does: prove a kernel right, time it, let the last few duel. No PyTorch: NumPy and TVM's runtime.

A kernel's speed depends on what the chip did before: one that was idle runs several per cent faster for a moment, one that never rests gets
so hot and slow that the plan wins which takes the least power. So timings here have the rests and lengths of those of `scripts.bench`.
"""
import random
import signal
from dataclasses import dataclass

import tvm

from schedules.build import KERNEL, NEGATIVE_SCALE_KERNEL
from schedules.lowering.toolkit import preload
from schedules.tuning import gate
from te_defs import reference
from te_defs.workload import timed_arguments

_DEVICES = {"cuda": tvm.cuda, "cpu": tvm.cpu}
#: Milliseconds of rest before each timed repeat of a measurement, and of the repeat. CPUs have no use for rests.
REST_MS = {"cuda": 20, "cpu": 0}
REPEAT_MS = {"cuda": 12, "cpu": 40}
REPEATS = 3
#: A candidate that a first look finds this many times slower than the best is not timed any longer.
HOPELESS = 1.5

#: What this process keeps from one kernel to the next: inputs, by workload and shape.
_kept = {}


@dataclass(frozen=True)
class Setting:
    """What a kernel is measured for.

    kind      "cuda" or "cpu"
    workload  te_defs.workload.Workload
    shape     te_defs.workload.Shape that is timed
    """

    kind: str
    workload: object
    shape: object


def start(kind, toolkit):
    """Prepare the process. Ctrl-C is for the main process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kind == "cuda":
        preload(toolkit)


def measure(path, setting, best_seconds):
    """Gate and time one kernel: {"seconds": [...], "error": largest error of O} or {"refused": why}.

    path          a .so that holds the function KERNEL, and perhaps its twin for scales below zero
    best_seconds  the best so far, None at the start
    """
    try:
        kernel = _Kernel(path, setting)
        error = kernel.check()
        look = kernel.seconds(1, 1)[0]
        if best_seconds is not None and look > HOPELESS * best_seconds:
            look = min(kernel.seconds(1, 2))
            if look > HOPELESS * best_seconds:
                return {"seconds": [look], "error": error}
        return {"seconds": kernel.rested(look, REPEATS), "error": error}
    except gate.Refused as refused:
        return {"refused": str(refused)}


def duel(paths, setting, rounds, seed):
    """Time several kernels in turns, in a new order each round: for each a dict as of `measure`, seconds of every round."""
    kernels, results = {}, [{} for _ in paths]
    for index, path in enumerate(paths):
        try:
            kernels[index] = _Kernel(path, setting)
            results[index] = {"seconds": [], "error": kernels[index].check(winner=True)}
        except gate.Refused as refused:
            results[index] = {"refused": str(refused)}
            kernels.pop(index)
    looks = {index: kernel.seconds(1, 1)[0] for index, kernel in kernels.items()}
    order, rng = list(kernels), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        for index in order:
            results[index]["seconds"] += kernels[index].rested(looks[index], 1)
    return results


class _Kernel:
    """A loaded kernel with the arguments that it is timed on."""

    def __init__(self, path, setting):
        self.setting, self.device = setting, _DEVICES[setting.kind](0)
        self.module = tvm.runtime.load_module(path)
        if setting not in _kept:
            _kept.clear()
            _kept[setting] = (gate.cases(setting.workload, self.device), _arguments(setting, self.device))
        self.cases, self.arguments = _kept[setting]

    def check(self, winner=False):
        """Largest error over the gate's cases; for a would-be winner on a GPU over many tiles of work as well."""
        cases = self.cases + (_many_tiles(self.setting, self.device) if winner and self.setting.kind == "cuda" else ())
        twin = self.module[NEGATIVE_SCALE_KERNEL] if self.module.implements_function(NEGATIVE_SCALE_KERNEL) else None
        return gate.check(self.module[KERNEL], self.setting.workload, cases, self.device, twin)

    def rested(self, look, repeats):
        """Seconds of a call as the module's docstring says, `repeats` times, of a kernel that took `look` seconds once."""
        kind = self.setting.kind
        calls = max(int(REPEAT_MS[kind] / 1e3 / max(look, 1e-7)), 1)
        return self.seconds(calls, 1 + repeats, REST_MS[kind])[1:]  # the first repeat is the untimed one

    def seconds(self, calls, repeats, rest=0):
        """Seconds of a call, a mean over `calls` calls in a row, `repeats` times, with so many milliseconds of rest after each."""
        timer = self.module.time_evaluator(KERNEL, self.device, number=calls, repeat=repeats, cooldown_interval_ms=rest)
        return [float(x) for x in timer(*self.arguments).results]


def _many_tiles(setting, device):
    """The gate's cases for would-be winners, kept like the others."""
    key = setting, "many tiles"
    if key not in _kept:
        _kept[key] = gate.cases(setting.workload, device, shapes=gate.MANY_TILES)
    return _kept[key]


def _arguments(setting, device):
    """Seeded inputs, outputs, scale and further arguments of the timed shape."""
    dtype = reference.numpy_dtype(setting.workload).name
    *_, out, lse = setting.shape.tensors(setting.workload)
    inputs = (tvm.runtime.tensor(x, device) for x in reference.make_inputs(setting.workload, setting.shape, seed=1))
    return (*inputs, tvm.runtime.empty(out, dtype, device), tvm.runtime.empty(lse, "float32", device),
            setting.workload.head_dim**-0.5, *gate.on_device(timed_arguments(setting.workload, setting.shape), device))
