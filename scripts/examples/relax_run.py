"""Run compiled Transformer blocks of relax_block.py with TVM's runtime and NumPy alone: check them, then time them in turns.

    python -m scripts.examples.relax_run build/block --rounds 5

Wants in that folder block.json and the executables that it names, as relax_block.py leaves them.
"""
import argparse
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from scripts.run import DONE, FAILED, RunError, load  # sets TVM up to do without its compiler

import tvm  # isort: skip

POOLED = 2  # allocator of the virtual machine
#: Rows of which the error of plain float32 is known.
ROWS_OF_PLAIN = 64


def norm(x, weight):
    """Root-mean-square norm over channels, times a weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(1e-5)) * weight


def gelu(x):
    """x times the normal distribution function, by Abramowitz and Stegun's formula 7.1.26 for erf, to 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x) * 2**-0.5)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * np.exp(-x * x / 2)
    return x * np.where(x > 0, 1 - tail / 2, tail / 2)


def in_order(a, b):
    """a [N,K] times b [K,M], summed one k after the other, as a plain loop does; BLAS rounds better than any kernel's need be."""
    out = np.zeros((len(a), b.shape[1]), a.dtype)
    for k in range(len(b)):
        out += a[:, k, None] * b[k]
    return out


def attend(q, k, v, times):
    """Causal attention of one head, q, k, v [N,D]."""
    s = times(q, k.T) * q.dtype.type(q.shape[1] ** -0.5)
    s = np.where(np.tri(*s.shape, dtype=bool), s, s.dtype.type(-np.inf))
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return times(p, v) / p.sum(axis=1, keepdims=True)


def block(tokens, weights, heads, times, as_kept):
    """The Transformer block of relax_block.py on tokens [N], [N,C], with products by `times`; `as_kept` rounds what stands between
    operators."""
    def linear(x, name):
        return as_kept(times(x, weights[f"{name}.linear.weight"].T))
    x = weights["tokens.weight"][tokens]
    channels = x.shape[1]
    angles = np.arange(len(x))[:, None] * np.exp(np.arange(0, channels, 2) * (-np.log(10000.0) / channels))[None]
    x = as_kept(x + as_kept(np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(x.dtype)))
    seen = as_kept(norm(x, weights["before_attention.weight"]))
    q, k, v = (linear(seen, f"attention.{name}").reshape(len(x), heads, -1) for name in "qkv")
    out = np.stack([as_kept(attend(q[:, h], k[:, h], v[:, h], times)) for h in range(heads)], axis=1).reshape(x.shape)
    x = as_kept(x + linear(out, "attention.o"))
    up = linear(as_kept(norm(x, weights["before_forward.weight"])), "up")
    return as_kept(x + linear(as_kept(gelu(up)), "down"))


def make_inputs(spec, seed=0):
    """tokens [B,N] and {name: weight} of a block, seeded, in its type."""
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal(shape, np.float32) * (1 if len(shape) == 1 or name == "tokens.weight" else shape[1] ** -0.5)
               for name, shape in spec["weights"]}
    tokens = rng.integers(0, dict(spec["weights"])["tokens.weight"][0], (spec["batch"], spec["length"])).astype("int32")
    return tokens, {name: weight.astype(spec["dtype"]) for name, weight in weights.items()}


def tolerance_and_answer(tokens, weights, heads, dtype):
    """(largest error that is allowed, float64 answer [N,C]) for the first batch entry: twice the error that plain float32 makes in the
    first rows, which no later token has a part in, with what stands between operators rounded to the type, and a rounding step."""
    exact, plain = ({name: weight.astype(kind) for name, weight in weights.items()} for kind in (np.float64, np.float32))
    answer, rows = block(tokens[0], exact, heads, np.matmul, lambda x: x), ROWS_OF_PLAIN
    found = block(tokens[0][:rows], plain, heads, in_order, lambda x: x.astype(dtype).astype(np.float32))
    return 2 * np.abs(found - answer[:rows]).max() + np.finfo(dtype).eps * np.abs(answer).max(), answer


def machine(executable, device):
    """The virtual machine of an executable on a device."""
    module = executable["vm_load_executable"]()
    host = () if device == tvm.cpu() else (tvm.cpu().dlpack_device_type(), 0, POOLED)
    module["vm_initialization"](device.dlpack_device_type(), 0, POOLED, *host)
    return module


def seconds(call, device, floor=0.02):
    """Seconds of one call, of so many that they take `floor`."""
    calls, elapsed = 1, 0.0
    while True:
        device.sync()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        device.sync()
        elapsed = time.perf_counter() - begin
        if elapsed >= floor:
            return elapsed / calls
        calls = max(2 * calls, int(1.2 * calls * floor / max(elapsed, 1e-9)))


def attention_inside(module, call):
    """What the kernel's call inside a block is given and does: (function, arguments), as the block itself makes it."""
    found = []

    def look(function, name, before, _, *arguments):
        if name.startswith("flash_attention_") and not before:
            found.append((function, arguments))
        return 0
    module["set_instrument"](look)
    call()
    module["set_instrument"](None)
    return found[0]


def run(folder, rounds):
    """Print a table of all executables, then how the attention inside the block compares with the bare kernel."""
    if not (folder / "block.json").is_file():
        raise RunError(f"a folder that relax_block.py wrote is wanted, found no block.json in {folder}: run that first")
    spec = json.loads((folder / "block.json").read_text())
    loaded = {name: load(folder / f"{name}.so") for name in (*spec["executables"], "attention")}  # first, since it brings in CUDA's runtime
    device = tvm.cuda(0) if spec["device"] == "cuda" else tvm.cpu()
    machines = {name: machine(loaded[name], device) for name in spec["executables"]}
    tokens, weights = make_inputs(spec)
    allowed, answer = tolerance_and_answer(tokens, weights, spec["heads"], spec["dtype"])
    placed = [tvm.runtime.tensor(array, device) for array in (tokens, *weights.values())]
    calls = {name: functools.partial(module["forward"], *placed) for name, module in machines.items()}
    errors = {name: np.abs(call().numpy()[0] - answer).max() for name, call in calls.items()}
    for name, error in errors.items():
        print(f"{name:<12} largest error {error:.2e}, {'within' if error <= allowed else 'beyond'} the {allowed:.2e} that are allowed")
    function, given = attention_inside(machines["ours"], calls["ours"])
    *tensors, scale, _, out, lse = given
    calls["inside"] = functools.partial(function, *given)
    calls["bare kernel"] = functools.partial(loaded["attention"]["flash_attention_forward"], *tensors, out, lse, scale)
    taken = timed(calls, device, rounds)
    for name, (middle, least, most) in taken.items():
        print(f"{name:<12}{middle * 1e3:10.3f} ms  ({least * 1e3:.3f} to {most * 1e3:.3f})")
    told = [f"{taken[name][0] / taken['ours'][0]:.1f}x as fast as {name}" for name in spec["executables"] if name != "ours"]
    print(f"ours is {', '.join(told)}; attention inside takes {taken['inside'][0] / taken['bare kernel'][0]:.3f} of the bare kernel's time")
    if not errors["ours"] <= allowed:
        raise RunError(f"errors of at most {allowed:.2e} were wanted, found {errors['ours']:.2e}: do not use it")


def timed(calls, device, rounds):
    """{name: (median, least, most) seconds} of calls that take turns, in a new order each round."""
    taken, order, rng = {name: [] for name in calls}, list(calls), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            taken[name].append(seconds(calls[name], device))
    return {name: (statistics.median(some), min(some), max(some)) for name, some in taken.items()}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.examples.relax_run", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="what relax_block.py wrote")
    parser.add_argument("--rounds", type=int, default=5, help="turns that the executables take")
    args = parser.parse_args(arguments)
    try:
        run(args.folder, args.rounds)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
