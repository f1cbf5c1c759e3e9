"""Make random calls of our kernels, and of PyTorch's, and say who answers what rightly.

    python -m scripts.conformance --against torch
    python -m scripts.conformance --target cpu --call 1234
    python -m scripts.conformance --backward any-order --family wgmma_fused_backward

A call is drawn from its number alone, and what the family takes: masks, lengths, groups of heads, types, scales and data. What is right,
one function decides for all (te_defs/reference.py); of PyTorch only the output is asked, not the LSE. With --backward the calls are for
dQ, dK and dV, of ours alone; in order two of each must give the same bits, as two of the forward pass must.
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

from schedules import backward, registry
from schedules.tuning.subjects import subject_of
from scripts import cli, options
from scripts.kernels import Gradients, Planned, answer, answer_gradients, behind_scale, build_artefact, cuda_toolkit
from te_defs.masks import MASKS
from te_defs.random_calls import forward_problem, gradient_problem, judged, random_call, workloads_of, workloads_of_gradients

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
#: The same of calls for gradients.
FEATURES_OF_GRADIENTS = {
    "lengths of keys": lambda call: call.workload.lengths == "keys",
    "packed sequences": lambda call: call.workload.lengths == "packed",
    "a gradient of the LSE": lambda call: call.through_lse,
    **FEATURES,
}


@dataclass(frozen=True)
class Answerer:
    """Who is asked: a name, and a function (call, inputs) -> [(out, lse) or (dq, dk, dv) of each run], None for what it does not give; an
    exception of it is a refusal."""

    name: str
    answers: Callable


def ours(functions, device):
    """Answerer of exported functions by workload."""
    def answers(call, inputs):
        return [answer(functions[call.workload], inputs, call.rounded_scale, call.arguments, device, call.storage) for _ in range(2)]
    return Answerer("ours", answers)


def our_gradients(functions, device, times):
    """Answerer of exported functions for gradients by workload, each of which is called so many times."""
    def answers(call, inputs):
        given, dlse = inputs
        behind = behind_scale(call.workload, (*call.arguments, *call.given_lengths()), dlse)
        where = device, call.storage, call.workload.lengths == "packed"
        return [answer_gradients(functions[call.workload], given, call.rounded_scale, behind, *where) for _ in range(times)]
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


def ask(answerers, calls, features, problem):
    """({(feature, name): Counter of right, wrong and refused}, {name: [(number of a call, sentence about what was wrong or refused)]}).

    features  FEATURES or FEATURES_OF_GRADIENTS
    problem   function of a call: (inputs of an Answerer, what is wanted, as `judged` takes it)
    """
    found, told = {}, {answerer.name: [] for answerer in answerers}
    for call in calls:
        rows = [feature for feature, holds in features.items() if holds(call)]
        inputs, right = problem(call)
        for answerer in answerers:
            try:
                runs = [[part if given is None else given for given, part in zip(run, right[0])] for run in answerer.answers(call, inputs)]
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
    for feature in FEATURES_OF_GRADIENTS:
        if any((feature, name) in found for name in names):
            lines.append([feature, *(_cell(found.get((feature, name), Counter())) for name in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(counts):
    others = [f"{counts[verdict]} {verdict}" for verdict in (WRONG, REFUSED) if counts[verdict]]
    return f"{counts[RIGHT]} of {sum(counts.values())}" + "".join(f", {text}" for text in others)


@dataclass(frozen=True)
class Job:
    """The calls of one workload, for a process of its own; the artefact at `path` is built of `planned` and, where there are some, of the
    Gradients that are then asked for."""

    planned: Planned
    gradients: Gradients | None
    workload: object
    device: object
    path: Path
    calls: tuple
    against: bool

    def asked(self):
        """What `ask` finds."""
        gradients, kind = self.gradients, self.device.kind
        build_artefact([self.planned], self.workload, self.device.arch, self.path, [gradients] if gradients else ())
        cuda_toolkit(self.device.arch)
        module, here = tvm.runtime.load_module(str(self.path)), tvm.runtime.device(kind, 0)
        if gradients:
            functions, times = {self.workload: module["flash_attention_backward"]}, 2 if gradients.order == backward.IN_ORDER else 1
            return ask([our_gradients(functions, here, times)], self.calls, FEATURES_OF_GRADIENTS, gradient_problem)
        us = ours({self.workload: module["flash_attention_forward"]}, here)
        return ask([us, *(of_torch(kind) if self.against else ())], self.calls, FEATURES, forward_problem)


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
    """Jobs of calls: of each workload its own, by the default plan of the family that takes it; where that makes gradients, beside the
    forward pass of the first that takes it."""
    for workload in sorted({call.workload for call in calls}, key=lambda it: it.name):
        family, gradients = options.families_of(args.family, subject_of(workload, args.backward), device.arch)[0], None
        if args.backward:
            gradients = Gradients(family.NAME, backward.default_plans(family, workload, device.arch), order=args.backward)
            family = registry.takers(workload, device.arch)[0]
        yield Job(Planned(family.NAME, family.default_plan(workload, device.arch)), gradients, workload, device,
                  folder / f"{workload.name}.so", tuple(call for call in calls if call.workload == workload), bool(args.against))


def workloads_taken(args, device):
    """What the calls are drawn from, of what --family takes, or any family; UsageError where that is nothing."""
    families = backward.FAMILIES[args.backward] if args.backward else registry.FAMILIES

    def takes(workload):
        return any(family.decline(workload, device.arch) is None for family in families if args.family in (None, family.NAME))
    if args.backward:
        found = workloads_of_gradients(device.kind, takes, dealt=False)
    else:
        found = [workload for workload in workloads_of(device.kind) if takes(workload)]
    if not found and args.family is None:
        raise cli.UsageError(f"gradients {args.backward} want a GPU with tensor cores, found {device.description}: use --backward "
                             f"{backward.IN_ORDER}")
    if not found:
        raise cli.UsageError(f"--family must take one of the workloads, found that {args.family} takes none: name another one of "
                             f"{', '.join(family.NAME for family in families)}")
    return found


def make_parser():
    parser = options.parser("conformance", __doc__)
    parser.add_argument("--target", default="auto", help="auto: the GPU of this machine, else its CPU; or cpu")
    options.add_backward(parser, "make calls for gradients")
    parser.add_argument("--family", default=None, help="family of our kernels, of gradients with --backward; None: the first that takes "
                        "the workload")
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
    if args.backward and args.against:
        raise cli.UsageError("--against goes with the forward pass, since PyTorch's SDPA could be asked one in six of the calls for "
                             f"gradients, found it with --backward {args.backward}: leave one of them out")
    cli.echo(**{**vars(args), "command": "conformance", "target": device.description})
    taken = workloads_taken(args, device)
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
