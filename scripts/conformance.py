"""Make random calls of our kernels, and of PyTorch's, and say who answers what rightly.

    python -m scripts.conformance --against torch
    python -m scripts.conformance --target cpu --call 1234

A call is drawn from its number alone: masks, lengths, groups of heads, types, scales and data. What is right, one function decides for
all (te_defs/reference.py); of PyTorch only the output is asked, not the LSE.
Exit codes: 0 ours are all right, 1 some are not, 2 wrong arguments.
"""
import argparse
import concurrent.futures
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
import tvm

from schedules import registry
from schedules.tuning.subjects import subject_of
from scripts import cli, options
from scripts.kernels import Planned, answer, build_artefact, cuda_toolkit
from te_defs.masks import MASKS
from te_defs.random_calls import judged, random_call, wanted, workloads_of

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
#: Wrong answers of one contestant that are told in full.
TOLD = 3
#: What a call has to do with, as rows of the table: a call stands in every row that holds.
FEATURES = {
    **{f"mask {name}": lambda call, name=name: call.workload.mask == name for name in MASKS},
    "softcap": lambda call: call.workload.score == "softcap",
    "ALiBi or a bias": lambda call: call.workload.score in ("alibi", "bias"),
    "sinks": lambda call: call.workload.sink,
    "grouped heads": lambda call: call.shape.q_heads > call.shape.kv_heads,
    "more queries than keys": lambda call: call.shape.q_len > call.shape.kv_len > 0,
    "no keys": lambda call: call.shape.kv_len == 0,
    "no queries, or no batch": lambda call: call.shape.q_len * call.shape.batch == 0,
    "rows that see no key": lambda call: call.rows_without_keys(),
    "scale of zero": lambda call: call.scale == 0,
    "negative scale": lambda call: call.scale < 0,
    "scores of thousands": lambda call: call.data == "large",
    "equal scores": lambda call: call.data == "equal",
    "views with strides": lambda call: call.storage != "contiguous",
    "denormal inputs": lambda call: call.data == "tiny",
    "all calls": lambda call: True,
}


@dataclass(frozen=True)
class Answerer:
    """Who is asked: a name, and a function (call, inputs) -> [(out, lse) of each run], lse None where it gives none; an exception of it is
    a refusal."""

    name: str
    answers: Callable


def ours(functions, device):
    """Answerer of exported functions by workload."""
    def answers(call, inputs):
        return [answer(functions[call.workload], inputs, call.rounded_scale, call.arguments, device, call.storage) for _ in range(2)]
    return Answerer("ours", answers)


def of_torch(kind):
    """Answerers of PyTorch's two ways to attention; none where it is not installed."""
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return []
    warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")

    def added(score, q, k):
        """What a modification adds to each score, of those that add."""
        zeros = np.zeros((*q.shape[:3], k.shape[2]), np.float32)
        return torch.from_numpy(score.applied(zeros, zeros.shape[2:])).to(kind)

    def sdpa(q, k, v, call, keep, score):
        if call.workload.sink or call.workload.score == "softcap":
            raise NotImplementedError("it takes masks and what is added to scores")
        options = {"full": {}, "causal_top_left": {"is_causal": True}}.get(call.workload.mask, {"attn_mask": keep})
        if score is not None:
            options = {"attn_mask": added(score, q, k).masked_fill(~keep, float("-inf")).to(q.dtype)}
        grouped = call.shape.q_heads != call.shape.kv_heads
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=call.rounded_scale, enable_gqa=grouped, **options)

    def flex(q, k, v, call, keep, score):
        if call.workload.sink:
            raise NotImplementedError("it has no sinks")
        modified = None
        if call.workload.score == "softcap":
            modified = lambda s, b, h, i, j: float(score.cap) * torch.tanh(s / float(score.cap))  # noqa: E731
        elif score is not None:
            extra = added(score, q, k)
            modified = lambda s, b, h, i, j: s + extra[b, h, i, j]  # noqa: E731
        blocks = None if call.workload.mask == "full" else create_block_mask(
            lambda b, h, i, j: keep[i, j], None, None, call.shape.q_len, call.shape.kv_len, device=kind)
        grouped = call.shape.q_heads != call.shape.kv_heads
        return flex_attention(q, k, v, block_mask=blocks, score_mod=modified, scale=call.rounded_scale, enable_gqa=grouped)

    def answers_by(attention):
        def answers(call, inputs):
            dtype, (mask, score, _) = getattr(torch, call.workload.dtype), call.workload.modifiers(call.arguments)
            q, k, v = (torch.from_numpy(x.astype(np.float32)).to(kind, dtype).transpose(1, 2) for x in inputs)
            keep = torch.from_numpy(mask.visible(call.shape.q_len, call.shape.kv_len).copy()).to(kind)
            with torch.no_grad():
                out = attention(q, k, v, call, keep, score)
            return [(out.transpose(1, 2).float().cpu().numpy().astype(inputs[0].dtype), None)]
        return answers
    return [Answerer("PyTorch SDPA", answers_by(sdpa)), Answerer("FlexAttention", answers_by(flex))]


def ask(answerers, calls):
    """({(feature, name): Counter of right, wrong and refused}, {name: [(number of a call, sentence about what was wrong or refused)]})."""
    found, told = {}, {answerer.name: [] for answerer in answerers}
    for call in calls:
        inputs, rows = call.inputs(), [feature for feature, holds in FEATURES.items() if holds(call)]
        right = (_, lse_answer), _ = wanted(call, inputs)
        for answerer in answerers:
            try:
                runs = [(out, lse_answer.astype(np.float32) if lse is None else lse) for out, lse in answerer.answers(call, inputs)]
                complaint = judged(runs, right)
                verdict = RIGHT if complaint is None else WRONG
            except Exception as error:  # each refuses in its own way
                verdict, complaint = REFUSED, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            if complaint is not None:
                told[answerer.name].append((call.number, f"{call}: {verdict}, {complaint}"))
            for feature in rows:
                found.setdefault((feature, answerer.name), Counter())[verdict] += 1
    return found, told


def table(found, names):
    """Markdown: a row for each feature that occurred, a column for each name with how many of its calls were right."""
    lines = [["", *names], ["---"] * (1 + len(names))]
    for feature in FEATURES:
        if any((feature, name) in found for name in names):
            lines.append([feature, *(_cell(found.get((feature, name), Counter())) for name in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(counts):
    others = [f"{counts[verdict]} {verdict}" for verdict in (WRONG, REFUSED) if counts[verdict]]
    return f"{counts[RIGHT]} of {sum(counts.values())}" + "".join(f", {text}" for text in others)


@dataclass(frozen=True)
class Job:
    """The calls of one workload, for a process of its own; `family` and `plan` are what the artefact at `path` is built of."""

    family: str
    workload: object
    plan: object
    device: object
    path: Path
    calls: tuple
    against: bool

    def asked(self):
        """What `ask` finds."""
        build_artefact([Planned(self.family, self.plan)], self.workload, self.device.arch, self.path)
        cuda_toolkit(self.device.arch)
        functions = {self.workload: tvm.runtime.load_module(str(self.path))["flash_attention_forward"]}
        kind = self.device.kind
        return ask([ours(functions, tvm.runtime.device(kind, 0)), *(of_torch(kind) if self.against else ())], self.calls)


def ask_side_by_side(jobs):
    """What `ask` finds for each job, by as many processes as there are cores, each of which computes with one."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(Job.asked, jobs))


def merged(results):
    """(counts, sentences in the order of calls) of all that `ask` has found."""
    found, told = {}, {}
    for counts, sentences in results:
        for key, counter in counts.items():
            found.setdefault(key, Counter()).update(counter)
        for name, some in sentences.items():
            told.setdefault(name, []).extend(some)
    return found, {name: [sentence for _, sentence in sorted(some)] for name, some in told.items()}


def jobs(args, device, calls, folder):
    """Jobs of calls: of each workload its own, by the default plan of the family that takes it."""
    for workload in sorted({call.workload for call in calls}, key=lambda it: it.name):
        family = options.families_of(args.family, subject_of(workload), device.arch)[0]
        yield Job(family.NAME, workload, family.default_plan(workload, device.arch), device, folder / f"{workload.name}.so",
                  tuple(call for call in calls if call.workload == workload), bool(args.against))


def make_parser():
    parser = options.parser("conformance", __doc__)
    parser.add_argument("--target", default="auto", help="auto: the GPU of this machine, else its CPU; or cpu")
    parser.add_argument("--family", default=None, help="family of our kernels; None: the first that takes the workload")
    parser.add_argument("--against", nargs="*", choices=["torch"], default=[], help="who is asked too, as far as it is installed")
    parser.add_argument("--calls", type=_count, default=2000, help="how many calls are made")
    parser.add_argument("--call", type=int, default=None, help="make the call of this number only")
    return parser


def _count(text):
    if not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"a number of calls from 1 to 999999 is wanted, found {text}")
    return int(text)


def run(args):
    device = cli.find_device(args.target)
    if device.slug is None:
        raise cli.UsageError(f"calls need a device that is there, found {device.description}: use --target auto")
    cli.echo(**{**vars(args), "command": "conformance", "target": device.description})
    taken = [workload for workload in workloads_of(device.kind)
             if any(reason is None and args.family in (None, name) for name, reason in registry.declines(workload, device.arch).items())]
    if not taken:
        raise cli.UsageError(f"--family must take one of the workloads, found that {args.family} takes none: name another one")
    calls = [random_call(number, taken) for number in (range(args.calls) if args.call is None else [args.call])]
    if args.against and importlib.util.find_spec("torch") is None:
        print("torch is left out: it is not installed")
    with tempfile.TemporaryDirectory() as folder:
        found, told = merged(ask_side_by_side(list(jobs(args, device, calls, Path(folder)))))
    names = list(told)
    print(table(found, names), end="\n\n")
    for name in names:
        for sentence in told[name][:TOLD]:
            print(f"{name}, {sentence}")
    return cli.FAILED if told["ours"] else cli.DONE


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
