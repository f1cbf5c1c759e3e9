"""What the process at the device does: prove a kernel right, time it, let the last few duel. No PyTorch: NumPy and TVM's runtime.

A kernel's speed depends on what the chip did before: one that was idle runs several per cent faster for a moment, one that never rests gets
so hot and slow that the plan wins which takes the least power. So timings here have the rests and lengths of those of `scripts.bench`.
"""
import os
import random
import signal
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import tvm

from schedules.lowering.toolkit import preload
from schedules.tuning import gate
from schedules.tuning.reasons import WRONG, reason
from schedules.tuning.sensors import Sensors, summary

_DEVICES = {"cuda": tvm.cuda, "cpu": tvm.cpu}
#: Milliseconds of rest before each timed repeat of a measurement, and of the repeat. CPUs have no use for rests.
REST_MS = {"cuda": 20, "cpu": 0}
REPEAT_MS = {"cuda": 12, "cpu": 40}
REPEATS = 3
#: A candidate that a first look finds this many times slower than the best is not timed any longer.
HOPELESS = 1.5
#: Likewise one that is so many times slower in the first round of turns with the best. On a CPU others disturb single rounds by more.
BEHIND = {"cuda": 1.05, "cpu": HOPELESS}

#: What this process keeps from one kernel to the next: inputs, by workload and shape; and which file it has loaded from a path.
_kept = {}
_loaded = {}


@dataclass(frozen=True)
class Setting:
    """What a kernel is measured for.

    kind     "cuda" or "cpu"
    subject  what is tuned (schedules.tuning.subjects)
    shape    te_defs.workload.Shape that is timed
    """

    kind: str
    subject: object
    shape: object


def start(kind, toolkit):
    """Prepare the process. Ctrl-C is for the main process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kind == "cuda":
        preload(toolkit)


def answers(kind):
    """Whether a device still does what it is asked; an error, or no answer at all, where it does not."""
    sent = np.arange(16, dtype=np.float32)
    return bool((tvm.runtime.tensor(sent, _DEVICES[kind](0)).numpy() == sent).all())


def prepare(setting):
    """Make the inputs and right answers that kernels of a setting are measured with, those for would-be winners too."""
    _inputs(setting)
    _large_set(setting)


def measure(path, setting, best_seconds, best_path=None):
    """Gate and time one kernel: {"seconds": [...], "error": largest error of O, or of gradients} or {"refused": why}.

    path          a .so that holds the subject's function, and perhaps its twin for scales below zero
    best_seconds  the best so far, None at the start
    best_path     its .so: each round is then timed in turn with one of the best, and its seconds are those that it would have taken beside
                  a best that takes best_seconds. What slows both, such as a hot chip or a neighbour, does not count
    """
    try:
        kernel = _Kernel(path, setting)
        error = kernel.check(kernel.cases)
        look = kernel.seconds(1, 1)[0]
        if best_seconds is not None and look > HOPELESS * best_seconds:
            look = min(kernel.seconds(1, 2))
            if look > HOPELESS * best_seconds:
                return {"seconds": [look], "error": error}
        if best_path is None:
            return {"seconds": kernel.rested(look, REPEATS), "error": error}
        return {"seconds": _in_turns(kernel, look, _best(best_path, setting), best_seconds), "error": error}
    except gate.Refused as refused:
        return {"refused": reason(WRONG, refused)}


def prove(path, setting):
    """Ask a would-be winner all that the gate knows: {"error": as of `measure`} or {"refused": why}."""
    try:
        kernel = _Kernel(path, setting)
        error = kernel.check(kernel.cases)
        kernel.check(_large_set(setting))
        return {"error": error}
    except gate.Refused as refused:
        return {"refused": reason(WRONG, refused)}


def duel(paths, setting, rounds, seed):
    """Time several kernels that are proved in turns, in a new order each round: for each {"seconds": those of every round, "sensors": what
    the GPU's said meanwhile}."""
    kernels = [_Kernel(path, setting) for path in paths]
    looks, results = [kernel.seconds(1, 1)[0] for kernel in kernels], [{"seconds": [], "sensors": []} for _ in kernels]
    sensors = Sensors() if setting.kind == "cuda" else None
    order, rng = list(range(len(kernels))), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        for index in order:
            with sensors.watching() if sensors else nullcontext(()) as readings:
                results[index]["seconds"] += kernels[index].rested(looks[index], 1)
            results[index]["sensors"] += readings
    return [{**result, "sensors": summary(result["sensors"])} for result in results]


def _in_turns(kernel, look, best, best_seconds):
    """Seconds of a kernel in rounds with the best, who begins in every other one; of one that is clearly behind those of the first."""
    found = []
    for number in range(REPEATS):
        turns = [(kernel, look), (best, best_seconds)]
        took = {each: each.rested(expected, 1)[0] for each, expected in (turns if number % 2 else reversed(turns))}
        found.append(best_seconds * took[kernel] / took[best])
        if found[0] > BEHIND[kernel.setting.kind] * best_seconds:
            break
    return found


def load(path):
    """The module of a .so. The loader gives the library that it has from a path, whatever file is there by now: one kernel would be judged
    and timed in the place of another, so a path that was another file's is a RuntimeError."""
    found = os.stat(path)
    which = found.st_dev, found.st_ino, found.st_mtime_ns
    if _loaded.setdefault(path, which) != which:
        raise RuntimeError(f"every kernel must have a path of its own, found that {path} was another one's before: name it otherwise")
    return tvm.runtime.load_module(path)


class _Kernel:
    """A loaded kernel with the arguments that it is timed on."""

    def __init__(self, path, setting):
        self.setting, self.device = setting, _DEVICES[setting.kind](0)
        self.module = load(path)
        self.cases, self.arguments = _inputs(setting)

    def check(self, cases):
        """Largest error over some cases."""
        subject = self.setting.subject
        twin = self.module[subject.twin] if subject.twin and self.module.implements_function(subject.twin) else None
        return gate.check(self.module[subject.function], cases, self.device, twin, subject.same_bits)

    def rested(self, look, repeats):
        """Seconds of a call as the module's docstring says, `repeats` times, of a kernel that took `look` seconds once."""
        kind = self.setting.kind
        calls = max(int(REPEAT_MS[kind] / 1e3 / max(look, 1e-7)), 1)
        return self.seconds(calls, 1 + repeats, REST_MS[kind])[1:]  # the first repeat is the untimed one

    def seconds(self, calls, repeats, rest=0):
        """Seconds of a call, a mean over `calls` calls in a row, `repeats` times, with so many milliseconds of rest after each."""
        timer = self.module.time_evaluator(
            self.setting.subject.function, self.device, number=calls, repeat=repeats, cooldown_interval_ms=rest)
        return [float(x) for x in timer(*self.arguments).results]


def _best(path, setting):
    """The kernel of the best so far, kept while it is."""
    if _kept.get("best", (None,))[0] != path:
        _kept["best"] = path, _Kernel(path, setting)
    return _kept["best"][1]


def _inputs(setting):
    """(cases of the gate, arguments that kernels are timed on), kept as long as the setting stays."""
    if setting not in _kept:
        device = _DEVICES[setting.kind](0)
        _kept.clear()
        _kept[setting] = (gate.cases(setting.subject, device), setting.subject.timed(setting.shape, device))
    return _kept[setting]


def _large_set(setting):
    """The gate's cases for would-be winners, kept like the others."""
    key = setting, "large set"
    if key not in _kept:
        shapes = setting.subject.many_tiles if setting.kind == "cuda" else ()
        _kept[key] = gate.large_set(setting.subject, _DEVICES[setting.kind](0), shapes)
    return _kept[key]
