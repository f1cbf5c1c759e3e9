"""Measure what a call of an artefact costs the host, beside PyTorch's own attention.

    python -m scripts.examples.overhead build/attention.so

Tensors are of one row, so that next to nothing is computed. On a GPU calls are only issued while the clock runs; on a CPU their kernel is
in the figures, but for those of a call without queries, which the artefact checks and has nothing to do for.
"""
import argparse
import random
import statistics
import sys
import time

import torch

from scripts.examples.artefact import ArtefactError, load
from scripts.examples.pytorch import load_attention

#: Calls that are timed at once: fewer than a GPU's queue takes before it makes the host wait.
CALLS = 200


def tensors_of(manifest, queries):
    """q, k, v, out, lse of one batch entry, head and key."""
    workload, device = manifest["workload"], manifest["variants"][0]["target"]["kind"]
    q, k, v = (torch.randn(1, rows, 1, channels, device=device, dtype=getattr(torch, workload["dtype"])) for rows, channels in (
        (queries, workload["head_dim"]), (1, workload["head_dim"]), (1, workload["value_dim"])))
    return q, k, v, q.new_empty(1, queries, 1, workload["value_dim"]), q.new_empty(1, 1, queries, dtype=torch.float32)


def by_pytorch(q, k, v):
    """PyTorch's attention of the same tensors; one row sees its one key, whatever the mask."""
    return torch.nn.functional.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


def contenders(path):
    """{what a call is: the call}"""
    module, manifest = load(path)
    attention, forward = load_attention(path), module.flash_attention_forward
    ready, empty = tensors_of(manifest, 1), tensors_of(manifest, 0)
    compiled, compiled_pytorch = torch.compile(attention), torch.compile(by_pytorch)
    launch = {"a launch alone, of a kernel that does nothing": lambda: torch.cuda._sleep(0)} if torch.cuda.is_available() else {}
    return {**launch,
            "the artefact, tensors ready, no queries": lambda: forward(*empty, 1.0),
            "the artefact, tensors ready": lambda: forward(*ready, 1.0),
            "the operator": lambda: attention(*ready[:3], 1.0),
            "PyTorch's attention": lambda: by_pytorch(*ready[:3]),
            "the operator under torch.compile": lambda: compiled(*ready[:3], 1.0),
            "PyTorch's attention under torch.compile": lambda: compiled_pytorch(*ready[:3])}


def host_seconds(call):
    """Seconds that a call takes the host, over CALLS of them."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - start
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds / CALLS


def measure(calls, rounds):
    """{what: [seconds, ...]} of some calls, in turns of random order, after one round that does not count."""
    order, found = list(calls), {name: [] for name in calls}
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for name in order:
            seconds = host_seconds(calls[name])
            if number:
                found[name].append(seconds)
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.examples.overhead", description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("artefact", help="the .so that scripts.export wrote")
    parser.add_argument("--rounds", type=int, default=30, help=f"measurements, of {CALLS} calls each")
    args = parser.parse_args(argv)
    try:
        with torch.no_grad():
            found = measure(contenders(args.artefact), args.rounds)
    except ArtefactError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'microseconds of the host a call':<42} median    least     most")
    for name, seconds in found.items():
        print(f"{name:<40}" + "".join(f"{1e6 * of(seconds):9.2f}" for of in (statistics.median, min, max)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
