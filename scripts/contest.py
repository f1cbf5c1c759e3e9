"""Contestants of a benchmark and the clock that they take turns on."""
import random
import statistics
import time
from dataclasses import dataclass
from typing import Callable

import numpy as np
import tvm

from te_defs import reference


@dataclass(frozen=True)
class Contestant:
    """A name, and a call without arguments that computes the attention of the round's data once."""

    name: str
    call: Callable


class TvmData:
    """Random tensors of one shape on the device, for machines without PyTorch."""

    def __init__(self, workload, shape, kind, seed):
        self.device = tvm.runtime.device(kind, 0)
        inputs = reference.make_inputs(workload, shape, seed)
        out, lse = (np.zeros(size, dtype) for size, dtype in zip(shape.tensors(workload)[3:], (reference.numpy_dtype(workload), "float32")))
        self.tensors = [tvm.runtime.tensor(array, self.device) for array in (*inputs, out, lse)]

    def seconds(self, call, repeats):
        """Mean time of a call over some calls in a row, by the host's clock around all of them."""
        self.device.sync()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self.device.sync()
        return (time.perf_counter() - start) / repeats

    def peers(self, workload):
        """No other library to compare with."""
        return []


class TorchData:
    """The same as PyTorch tensors, with PyTorch's attention as further contestants. CUDA events time GPU calls."""

    #: Name -> torch.nn.attention.SDPBackend of a GPU; FLASH_ATTENTION is FlashAttention-2.
    BACKENDS = {"FlashAttention-2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}

    def __init__(self, workload, shape, kind, seed):
        import torch
        self.torch, self.kind = torch, kind
        dtype, generator = getattr(torch, workload.dtype), torch.Generator(kind).manual_seed(seed)
        *inputs, out, lse = shape.tensors(workload)
        self.tensors = [torch.randn(size, generator=generator, device=kind).to(dtype) for size in inputs]
        self.tensors += [torch.zeros(out, dtype=dtype, device=kind), torch.zeros(lse, device=kind)]

    def seconds(self, call, repeats):
        """Mean time of a call over some calls in a row."""
        if self.kind == "cpu":
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        before, after = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(repeats):
            call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3 / repeats

    def peers(self, workload):
        """PyTorch's own kernels on the same tensors, as far as they take the workload."""
        if self.kind == "cpu":
            return [Contestant("PyTorch", self._attention(workload))]
        from torch.nn.attention import SDPBackend
        peers = [Contestant(name, self._attention(workload, getattr(SDPBackend, backend))) for name, backend in self.BACKENDS.items()]
        return [peer for peer in peers if self._takes(peer)]

    def _attention(self, workload, backend=None):
        from torch.nn.attention import sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
        # PyTorch wants [B, H, N, D]; views, so that everyone reads the same memory.
        q, k, v = (tensor.transpose(1, 2) for tensor in self.tensors[:3])
        causal = workload.mask == "causal"  # aligned top-left there, which is the same for the equal lengths of a benchmark

        def call():
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

        def call_backend():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)
        return call if backend is None else call_backend

    @staticmethod
    def _takes(peer):
        try:
            peer.call()
        except RuntimeError:
            return False
        return True


def contest(contestants, data, rounds, milliseconds, rest, seed):
    """Seconds of every contestant in every round, by name.

    All take turns in an order that is drawn anew each round: one that always follows a cool one would gain by it. Before each measurement
    there is a rest of `rest` seconds and two untimed calls; then calls for about `milliseconds`.
    """
    rng = random.Random(seed)
    times = {contestant.name: [] for contestant in contestants}
    repeats = {}
    for contestant in contestants:
        contestant.call()
        repeats[contestant.name] = max(1, round(milliseconds / 1e3 / data.seconds(contestant.call, 1)))
    for _ in range(rounds):
        for contestant in rng.sample(contestants, len(contestants)):
            time.sleep(rest)
            contestant.call()
            contestant.call()
            times[contestant.name].append(data.seconds(contestant.call, repeats[contestant.name]))
    return times


def summary(times, operations):
    """Per contestant: median, least and most milliseconds, and TFLOP/s at the median for this many operations."""
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows[name] = {"ms": 1e3 * median, "ms_least": 1e3 * min(seconds), "ms_most": 1e3 * max(seconds),
                      "tflops": operations / median / 1e12}
    return rows
