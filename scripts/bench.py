"""Compare the default plan, the tuned plan and, where it is installed, PyTorch: on this machine, all in turns in one run.

    python -m scripts.bench --workload d128_f16_causal --lengths 1024 4096 16384 --markdown

What is timed are artefacts as `scripts.export` writes them, after they passed their check cases.
"""
import concurrent.futures
import datetime
import importlib.util
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi

from schedules.artefact.cases import check_cases
from schedules.artefact.export import ExportError
from schedules.tuning.log import LogError
from scripts import cli, options
from scripts.contest import Contestant, TorchData, TvmData, contest, summary
from scripts.kernels import build_artefact, cuda_toolkit
from te_defs import reference
from te_defs.workload import flops, standard_shape

#: What "None" of the options means, on a GPU and on a CPU.
SIZES = {kind: {"lengths": lengths, "tokens": options.TOKENS[kind], "hidden": options.HIDDEN[kind], "milliseconds": milliseconds}
         for kind, lengths, milliseconds in (("cuda", (1024, 4096, 16384), 12), ("cpu", (512, 1024), 100))}
OURS = ("default", "tuned")


class WrongKernel(ExportError):
    """A kernel that fails its checks: no number of it is worth anything."""


def load_checked(name, workload, device, path):
    """The exported function of an artefact; WrongKernel where it fails a check case."""
    forward = tvm.runtime.load_module(str(path))["flash_attention_forward"]
    device = tvm.runtime.device(device.arch.kind, 0)
    for case in check_cases(workload):
        out, lse = np.full(case.out.shape, np.nan, np.float32).astype(case.q.dtype), np.full(case.lse.shape, np.nan, np.float32)
        tensors = [tvm.runtime.tensor(array, device) for array in (case.q, case.k, case.v, out, lse)]
        forward(*tensors, case.scale)
        complaint = reference.mismatch(tensors[3].numpy(), tensors[4].numpy(), case.out, case.lse, case.out_tolerance)
        if complaint:
            raise WrongKernel(f"the {name} plan of {workload.name} fails check case {case.name}: {complaint}: mend its schedule first")
    return forward


def our_plans(args, device, workload):
    """{"default": (family, plan), "tuned": (family, plan)}, the tuned one where there is a record; with a line about each."""
    plans = {"default": options.default_plan(args, device, workload)}
    try:
        plans["tuned"] = options.tuned_plan(args, device, workload)[:2]
    except LogError as error:
        print(f"no tuned plan: {error}")
    for name, (family, plan) in plans.items():
        print(f"{workload.name} {name}: family {family.NAME}, {plan}", flush=True)
    return plans


def our_kernels(args, device, workloads, folder):
    """{workload: {"default": function, "tuned": function}}, built side by side by processes of their own and checked."""
    plans = {(workload, name): plan for workload in workloads for name, plan in our_plans(args, device, workload).items()}
    jobs = [(family.NAME, workload, plan, device.arch, folder / f"{workload.name}-{name}.so")
            for (workload, name), (family, plan) in plans.items()]
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        paths = dict(zip(plans, pool.map(build_artefact, *zip(*jobs))))
    cuda_toolkit(device.arch)
    kernels = {workload: {} for workload in workloads}
    for (workload, name), path in paths.items():
        kernels[workload][name] = load_checked(name, workload, device, path)
    return kernels


def compare(args, device, kernels, workload, length):
    """Rows of one workload and length, a dict for each contestant."""
    shape = standard_shape(workload, length, args.tokens, args.hidden)
    data = (TorchData if importlib.util.find_spec("torch") else TvmData)(workload, shape, device.kind, args.seed)
    scale = workload.head_dim**-0.5
    contestants = [Contestant(name, lambda forward=forward: forward(*data.tensors, scale)) for name, forward in kernels.items()]
    times = contest([*contestants, *data.peers(workload)], data, args.rounds, args.milliseconds, args.rest, args.seed)
    return [{"workload": workload.name, "length": length, "batch": shape.batch, "heads": shape.q_heads, "contestant": name, **figures}
            for name, figures in summary(times, flops(workload, shape)).items()]


def circumstances(device):
    """Where, when and with what the numbers were measured."""
    versions = {"tvm": tvm.__version__, "tvm-ffi": tvm_ffi.__version__}
    if importlib.util.find_spec("torch"):
        import torch
        versions["torch"] = torch.__version__
    return {"device": device.description, "driver": cli.nvidia_driver(device), "versions": versions,
            "date": datetime.date.today().isoformat(), "command": shlex.join(["python", "-m", "scripts.bench", *sys.argv[1:]])}


def table(rows, markdown=False):
    """One line a workload and length: our milliseconds, everybody's speed, and that of the tuned plan over that of the others."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    unit, factor = ("TFLOP/s", 1) if max(row["tflops"] for row in rows) >= 1 else ("GFLOP/s", 1e3)
    best = "tuned" if "tuned" in names else "default"
    cells = [["workload", "batch x heads x length", *(f"{name} ms" for name in names if name in OURS),
              *(f"{name} {unit}" for name in names),
              *(f"{best} / {name}" for name in names if name != best)]]
    for case in dict.fromkeys((row["workload"], row["batch"], row["heads"], row["length"]) for row in rows):
        at = {row["contestant"]: row for row in rows if (row["workload"], row["batch"], row["heads"], row["length"]) == case}
        cells.append([case[0], " x ".join(map(str, case[1:])), *(f"{at[name]['ms']:.3f}" for name in names if name in OURS),
                      *(f"{factor * at[name]['tflops']:.3g}" if name in at else "-" for name in names),
                      *(f"{at[name]['ms'] / at[best]['ms']:.2f}x" if name in at else "-" for name in names if name != best)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [[cell.rjust(width) for cell, width in zip(line, widths)] for line in cells]
    if not markdown:
        return "\n".join("  ".join(line) for line in lines)
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_parser():
    parser = options.parser("bench", __doc__)
    options.add_what(parser, several=True)
    options.add_logs(parser)
    parser.add_argument("--family", default=None, help="family of the default plan; None: the first that takes the workload")
    def size(name):
        return "None: " + ", ".join(f"{sizes[name]} on {kind}" for kind, sizes in SIZES.items()).replace("(", "").replace(")", "")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="sequence lengths; " + size("lengths"))
    parser.add_argument("--tokens", type=int, default=None, help="batch x length, at least one sequence; " + size("tokens"))
    parser.add_argument("--hidden", type=int, default=None, help="heads x head dimension; " + size("hidden"))
    parser.add_argument("--milliseconds", type=float, default=None, help="about how long a measurement takes; " + size("milliseconds"))
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each contestant; the median counts")
    parser.add_argument("--rest", type=float, default=0.02, help="seconds of rest before each measurement")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of the data and of the order of turns")
    parser.add_argument("--json", type=Path, default=None, help="write all figures and circumstances to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


def run(args):
    device = cli.find_device(args.target)
    if device.slug is None:
        raise cli.UsageError(f"a benchmark needs a device that is there, found {device.description}: use --target auto")
    for name, value in SIZES[device.kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min([args.rounds, args.tokens, args.hidden, *args.lengths]) < 1 or not 0 < args.milliseconds < 1e6 or not 0 <= args.rest < 1e6:
        raise cli.UsageError("--rounds, --tokens, --hidden, --lengths and --milliseconds must be positive: correct them")
    if args.json and not args.json.parent.is_dir():
        raise cli.UsageError(f"--json must be a file in a folder that exists, found {str(args.json)!r}: correct the path")
    workloads = [options.workload_of(text, device) for text in args.workload]
    cli.echo(**{**vars(args), "command": "bench", "workload": [workload.name for workload in workloads], "target": device.description})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workload, kernels in our_kernels(args, device, workloads, Path(folder)).items():
            for length in args.lengths:
                rows += compare(args, device, kernels, workload, length)
    told = circumstances(device)
    print(table(rows, args.markdown))
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    print(f"\n{told['device']}{', driver ' + told['driver'] if told['driver'] else ''}, {versions}, {told['date']}; "
          f"medians of {args.rounds} rounds in random order: {told['command']}")
    if args.json:
        args.json.write_text(json.dumps({**told, "rounds": args.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
