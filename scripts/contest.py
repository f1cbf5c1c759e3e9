"""Contestants of a benchmark, the clock that they take turns on, and the gauge that is read meanwhile."""
import ctypes
import random
import statistics
import time
from dataclasses import dataclass
from typing import Callable

import numpy as np
import tvm

from schedules.lowering.toolkit import DRIVER
from schedules.tuning.gate import on_device
from te_defs import reference
from te_defs.workload import timed_arguments


@dataclass(frozen=True)
class Contestant:
    """A name, and a call without arguments that computes the attention of the round's data once."""

    name: str
    call: Callable


@dataclass(frozen=True)
class Turn:
    """One measurement: mean seconds of a call, and the readings of a Gauge while the calls ran."""

    seconds: float
    readings: tuple = ()


class _FieldValue(ctypes.Structure):
    """NVML's nvmlFieldValue_t for a field whose value is an unsigned int."""

    _fields_ = [("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong), ("latency", ctypes.c_longlong),
                ("type", ctypes.c_int), ("error", ctypes.c_int), ("value", ctypes.c_uint), ("upper_half", ctypes.c_uint)]


class Gauge:
    """SM clock and power of one GPU. A reading is (MHz, W), None in the place of what NVML cannot tell.

    The power sensor averages, over a time of the order of 0.1 s: only a measurement that takes longer has a figure of its own.
    """

    #: nvml.h: NVML_CLOCK_SM and NVML_FI_DEV_POWER_INSTANT.
    SM_CLOCK, POWER_INSTANT = 1, 186
    #: Seconds between two readings.
    INTERVAL = 0.005

    def __init__(self, nvml, handle):
        self.nvml, self.handle = nvml, handle

    def read(self):
        return self._megahertz(), self._watts()

    def watch(self, done):
        """Readings until `done()`, which may already be so."""
        readings = []
        while not done():
            readings.append(self.read())
            time.sleep(self.INTERVAL)
        return tuple(readings)

    def _megahertz(self):
        clock = ctypes.c_uint()
        return None if self.nvml.nvmlDeviceGetClockInfo(self.handle, self.SM_CLOCK, ctypes.byref(clock)) else clock.value

    def _watts(self):
        power = _FieldValue(field=self.POWER_INSTANT)
        if not self.nvml.nvmlDeviceGetFieldValues(self.handle, 1, ctypes.byref(power)) and not power.error:
            return power.value / 1e3
        # Chips without that field tell their power of now here, where later ones tell the mean of the last second.
        milliwatts = ctypes.c_uint()
        return None if self.nvml.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(milliwatts)) else milliwatts.value / 1e3


def find_gauge():
    """Gauge of CUDA's first device, whichever that is for NVML; None where one of the two libraries is not there or fails."""
    try:
        driver, nvml = ctypes.CDLL(DRIVER), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    bus, handle = ctypes.create_string_buffer(32), ctypes.c_void_p()
    failed = (driver.cuInit(0) or driver.cuDeviceGetPCIBusId(bus, len(bus), 0)
              or nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)))
    return None if failed else Gauge(nvml, handle)


class TvmData:
    """Random tensors of one shape on the device, for machines without PyTorch: Q, K, V, O, LSE in the order of the exported call, the
    arguments behind the scale and, with `backward`, dO, dQ, dK and dV."""

    def __init__(self, workload, shape, kind, seed, backward=False):
        self.kind, self.shape, self.device = kind, shape, tvm.runtime.device(kind, 0)
        self.gauge = find_gauge() if kind == "cuda" else None
        inputs = reference.make_inputs(workload, shape, seed)
        out, lse = (np.zeros(size, dtype) for size, dtype in zip(shape.tensors(workload)[3:], (reference.numpy_dtype(workload), "float32")))
        self.tensors = [tvm.runtime.tensor(array, self.device) for array in (*inputs, out, lse)]
        dout = np.random.default_rng([seed, 1]).standard_normal(out.shape, np.float32).astype(out.dtype)
        self.gradients = [tvm.runtime.tensor(array, self.device) for array in (dout, *inputs)] if backward else []
        self.arguments = on_device(timed_arguments(workload, shape), self.device)

    def measure(self, call, repeats):
        """Turn of some calls in a row, by the host's clock around all of them."""
        self.device.sync()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        readings = (self.gauge.read(),) if self.gauge else ()  # here a GPU still works on what was launched
        self.device.sync()
        return Turn((time.perf_counter() - start) / repeats, readings)


class TorchData:
    """The same as PyTorch tensors, which PyTorch's kernels take too. CUDA events time GPU calls."""

    def __init__(self, workload, shape, kind, seed, backward=False):
        import torch
        self.torch, self.kind, self.shape = torch, kind, shape
        self.gauge = find_gauge() if kind == "cuda" else None
        dtype, generator = getattr(torch, workload.dtype), torch.Generator(kind).manual_seed(seed)
        *inputs, out, lse = shape.tensors(workload)
        self.tensors = [torch.randn(size, generator=generator, device=kind).to(dtype) for size in inputs]
        self.tensors += [torch.zeros(out, dtype=dtype, device=kind), torch.zeros(lse, device=kind)]
        self.gradients = [torch.randn(size, generator=generator, device=kind).to(dtype) for size in (out, *inputs)] if backward else []
        self.arguments = on_device(timed_arguments(workload, shape), tvm.runtime.device(kind, 0))

    def measure(self, call, repeats):
        """Turn of some calls in a row."""
        if self.kind == "cpu":
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return Turn((time.perf_counter() - start) / repeats)
        before, after = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(repeats):
            call()
        after.record()
        readings = self.gauge.watch(after.query) if self.gauge else ()
        after.synchronize()
        return Turn(before.elapsed_time(after) / 1e3 / repeats, readings)


def contest(contestants, data, rounds, milliseconds, rest, seed):
    """Turns of every contestant, one a round, by name.

    The order is drawn anew each round: one that always follows a cool one would gain by it. Before each measurement there is a rest of
    `rest` seconds and two untimed calls; then calls for about `milliseconds`.
    """
    rng = random.Random(seed)
    turns = {contestant.name: [] for contestant in contestants}
    repeats = {}
    for contestant in contestants:
        contestant.call()
        repeats[contestant.name] = max(1, round(milliseconds / 1e3 / data.measure(contestant.call, 1).seconds))
    for _ in range(rounds):
        for contestant in rng.sample(contestants, len(contestants)):
            time.sleep(rest)
            contestant.call()
            contestant.call()
            turns[contestant.name].append(data.measure(contestant.call, repeats[contestant.name]))
    return turns


def summary(turns, operations):
    """Per contestant: median, least and most milliseconds, TFLOP/s at the median for this many operations, and the medians of all
    readings of the SM clock in MHz and of the power in W (None where there are none)."""
    rows = {}
    for name, measured in turns.items():
        seconds = [turn.seconds for turn in measured]
        median = statistics.median(seconds)
        megahertz, watts = (_median(reading[k] for turn in measured for reading in turn.readings) for k in range(2))
        rows[name] = {"ms": 1e3 * median, "ms_least": 1e3 * min(seconds), "ms_most": 1e3 * max(seconds),
                      "tflops": operations / median / 1e12, "mhz": megahertz, "watts": watts}
    return rows


def _median(readings):
    known = [reading for reading in readings if reading is not None]
    return statistics.median(known) if known else None
