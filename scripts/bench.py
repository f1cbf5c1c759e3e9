"""Compare the default plan, the tuned plan and, where it is installed, PyTorch: on this machine, all in turns in one run.

    python -m scripts.bench --workload d128_f16_causal --lengths 1024 4096 16384 --markdown
    python -m scripts.bench --workload d128_f16_causal --lengths 16384 --peers --milliseconds 200

What is timed are artefacts as `scripts.export` writes them, after they passed their check cases.
"""
import datetime
import functools
import importlib.util
import itertools
import json
import shlex
import sys
import tempfile
from pathlib import Path

import tvm
import tvm_ffi

from schedules.artefact.cases import check_cases
from schedules.artefact.export import ExportError
from schedules.buckets import Bucket
from schedules.tuning.log import LogError
from schedules.tuning.subjects import subject_of
from scripts import cli, options, peers
from scripts.contest import Contestant, TorchData, TvmData, contest, summary
from scripts.kernels import Planned, answer, answer_gradients, build_artefacts, cuda_toolkit, default_gradients
from te_defs import reference
from te_defs.workload import standard_shape

#: What "None" of the options means, on a GPU and on a CPU.
SIZES = {kind: {"lengths": lengths, "tokens": options.TOKENS[kind], "hidden": options.HIDDEN[kind], "milliseconds": milliseconds}
         for kind, lengths, milliseconds in (("cuda", (1024, 4096, 16384), 12), ("cpu", (512, 1024), 100))}
OURS = ("default", "tuned")


class WrongKernel(ExportError):
    """A kernel that fails its checks: no number of it is worth anything."""


def load_checked(name, workload, device, path, gradients=False):
    """The module of an artefact; WrongKernel where one of its variants fails a check case, whatever calls that is for.

    gradients  whether they are checked too
    """
    module, kind = tvm.runtime.load_module(str(path)), device.arch.kind
    manifest = json.loads(module["flash_attention_manifest"]())
    variants = [functools.partial(module["flash_attention_forward_variant"], number) for number in range(len(manifest["variants"]))]
    device = tvm.runtime.device(kind, 0)
    cases = check_cases(workload, gradients=gradients)
    for case, forward in itertools.product(cases, variants):
        found = answer(forward, (case.q, case.k, case.v), case.scale, case.arguments, device)
        complaint = reference.mismatch(*found, case.out, case.lse, case.out_tolerance, case.lse_tolerance)
        if complaint:
            raise WrongKernel(f"the {name} plan of {workload.name} fails check case {case.name}: {complaint}: mend its schedule first")
    for case in cases if gradients else ():
        wanted = case.gradients
        inputs = wanted.dout, case.q, case.k, case.v, *case.rounded
        for number in range(len(manifest["backward"]["variants"])):
            call = functools.partial(module["flash_attention_backward_variant"], number)
            found = answer_gradients(call, inputs, case.scale, case.arguments, device)
            complaint = reference.backward_mismatch(found, (wanted.dq, wanted.dk, wanted.dv), wanted.tolerances, case.lse)
            if complaint:
                raise WrongKernel(f"the gradients of {workload.name} fail check case {case.name}: {complaint}: mend their schedule first")
    return module


def our_plans(args, device, workload):
    """{"default": (Planneds, ()), "tuned": (Planneds, ())}, the tuned ones where there is a record, one for each bucket of lengths; where
    gradients are timed with their Gradients last, default and tuned, behind one and the same forward pass. Prints a line of each plan."""
    family, plan = options.default_plan(args, device, workload)
    default = [Planned(family.NAME, plan)]
    try:
        if args.backward:
            plans = {"default": (default, [default_gradients(workload, device.arch, args.backward)])}
            plans["tuned"] = default, options.tuned_gradients(args, device, workload)
        else:
            plans = {"default": (default, ())}
            plans["tuned"] = options.tuned_plans(args, device, workload), ()
    except LogError as error:
        print(f"no tuned plan: {error}")
    for name, those in plans.items():
        for it in contested(those):
            what, at = "backward " if args.backward else "", f" at {it.bucket}" if len(contested(those)) > 1 else ""
            print(f"{workload.name} {what}{name}{at}: family {it.family}, {it.plan}", flush=True)
    return plans


def contested(plans):
    """Of (Planneds, Gradients) what is timed."""
    forward, gradients = plans
    return gradients or forward


def our_kernels(args, device, workloads, folder):
    """({workload: {"default": module, "tuned": module}}, {workload: tuned Planneds}), built side by side by processes of their own and
    checked."""
    plans = {(workload, name): plan for workload in workloads for name, plan in our_plans(args, device, workload).items()}
    jobs = [(forward, workload, device.arch, folder / f"{workload.name}-{name}.so", gradients)
            for (workload, name), (forward, gradients) in plans.items()]
    paths = dict(zip(plans, build_artefacts(jobs)))
    cuda_toolkit(device.arch)
    kernels = {workload: {} for workload in workloads}
    for (workload, name), path in paths.items():
        kernels[workload][name] = load_checked(name, workload, device, path, bool(args.backward))
    return kernels, {workload: contested(those) for (workload, name), those in plans.items() if name == "tuned"}


def labelled(rows, tuned, length):
    """The rows of a workload and length, that of the tuned plans with the device that they are borrowed from, if they are, and where there
    are several with the lengths that the one which such calls take was tuned at."""
    if not tuned:
        return rows
    taken = options.taken(tuned, Bucket(length, length))
    labels = {"borrowed_from": taken.measured["device"]} if "borrowed_for" in taken.measured else {}
    labels |= {"tuned_at": str(taken.bucket)} if len(tuned) > 1 else {}
    return [{**row, **labels} if row["contestant"] == "tuned" else row for row in rows]


def compare(args, device, kernels, workload, length):
    """(rows, sentences) of one workload and length: a dict for each contestant, and who was left out and why."""
    shape = standard_shape(workload, length, args.tokens, args.hidden)
    torch_is_here = importlib.util.find_spec("torch") is not None
    data = (TorchData if torch_is_here else TvmData)(workload, shape, device.kind, args.seed, bool(args.backward))
    behind = workload.head_dim**-0.5, *data.arguments
    ours = [Contestant(name, functools.partial(module["flash_attention_forward"], *data.tensors, *behind))
            for name, module in kernels.items()]
    ours[-1].call()  # so that O holds our result, which the peers' are compared with
    if args.backward:
        dout, *gradients = data.gradients
        ours = [Contestant(name, functools.partial(module["flash_attention_backward"], dout, *data.tensors, *gradients, *behind))
                for name, module in kernels.items()]
        ours[-1].call()
    invited = peers.named(args.peers) if args.peers is not None else peers.BY_DEFAULT[device.kind] if torch_is_here else ()
    theirs, left_out = peers.admit(invited, workload, data, args.backward)
    turns = contest([*ours, *theirs], data, args.rounds, args.milliseconds, args.rest, args.seed)
    operations = subject_of(workload, args.backward).operations(shape)
    figures = judged(summary(turns, operations), workload, peak_for(device, workload))
    case = {"workload": workload.name, "length": length, "batch": shape.batch, "heads": shape.q_heads}
    return [{**case, "contestant": name, **entry} for name, entry in figures.items()], left_out


def peak_for(device, workload):
    """schedules.arch.Peak that the workload can be held against; None where it is not known, or where tensor cores do not take the type."""
    return device.arch.peak if device.kind == "cuda" and workload.dtype != "float32" else None


def judged(figures, workload, peak):
    """The figures with what each contestant's speed comes to: that of ours over it, and its shares of the chip's two limits."""
    best = figures.get("tuned", figures["default"])
    bound = peak and peak.exp_bound_tflops(workload.head_dim, workload.value_dim)
    return {name: {**entry, "ours_over_this": entry["ms"] / best["ms"], "of_peak": peak and entry["tflops"] / peak.tensor_tflops,
                   "of_exp_bound": peak and entry["tflops"] / bound} for name, entry in figures.items()}


def circumstances(device, contestants):
    """Where, when and with what the numbers of these contestants were measured."""
    versions = {"tvm": tvm.__version__, "tvm-ffi": tvm_ffi.__version__}
    if importlib.util.find_spec("torch"):
        import torch
        versions["torch"] = torch.__version__
    versions.update(peers.versions(contestants))
    return {"device": device.description, "driver": cli.nvidia_driver(device), "versions": versions,
            "date": datetime.date.today().isoformat(), "command": shlex.join(["python", "-m", "scripts.bench", *sys.argv[1:]])}


def _unit(rows):
    """(unit of speed, how many of it a TFLOP/s is)"""
    return ("TFLOP/s", 1) if max(row["tflops"] for row in rows) >= 1 else ("GFLOP/s", 1e3)


def _case(row):
    """Workload and shape of a row, as cells of a table."""
    return row["workload"], f"{row['batch']} x {row['heads']} x {row['length']}"


def table(rows, markdown=False):
    """One line a workload and length: our milliseconds, everybody's speed, and that of the tuned plan over that of the others."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    unit, factor = _unit(rows)
    best = "tuned" if "tuned" in names else "default"
    borrowed, several = (any(label in row for row in rows) for label in ("borrowed_from", "tuned_at"))
    cells = [["workload", "batch x heads x length", *(f"{name} ms" for name in names if name in OURS),
              *(f"{name} {unit}" for name in names),
              *(f"{best} / {name}" for name in names if name != best), *["tuned on"] * borrowed, *["tuned at"] * several]]
    for case in dict.fromkeys(map(_case, rows)):
        at = {row["contestant"]: row for row in rows if _case(row) == case}
        cells.append([*case, *(f"{at[name]['ms']:.3f}" if name in at else "-" for name in names if name in OURS),
                      *(f"{factor * at[name]['tflops']:.3g}" if name in at else "-" for name in names),
                      *(f"{at[name]['ms'] / at[best]['ms']:.2f}x" if {name, best} <= set(at) else "-" for name in names if name != best),
                      *[at["tuned"].get("borrowed_from", "this device") if "tuned" in at else "-"] * borrowed,
                      *[at["tuned"].get("tuned_at", "one length") if "tuned" in at else "-"] * several])
    return _drawn(cells, markdown)


def peer_table(rows, markdown=False):
    """One line a contestant, workload and length: its speed, that of ours over it, its shares of the limits, SM clock and power."""
    unit, factor = _unit(rows)
    cells = [["workload", "batch x heads x length", "contestant", unit, "ours / this", "of peak", "of exp bound", "MHz", "W"]]
    for row in rows:
        contestant = "".join([row["contestant"], *(f" {word} {row[label]}" for label, word in (("borrowed_from", "on"), ("tuned_at", "at"))
                                                   if label in row)])
        cells.append([*_case(row), contestant, f"{factor * row['tflops']:.3g}", f"{row['ours_over_this']:.2f}x",
                      *("-" if row[share] is None else f"{row[share]:.1%}" for share in ("of_peak", "of_exp_bound")),
                      *("-" if row[reading] is None else f"{row[reading]:.0f}" for reading in ("mhz", "watts"))])
    return _drawn(cells, markdown)


def limits_told(device, workloads):
    """A sentence for each head dimension: what the shares in a table of peers are shares of."""
    sentences = {}
    for workload in workloads:
        peak = peak_for(device, workload)
        if peak:
            bound = peak.exp_bound_tflops(workload.head_dim, workload.value_dim)
            sentences[workload.head_dim, workload.value_dim] = (
                f"d {workload.head_dim}, dv {workload.value_dim}: the peak is {peak.tensor_tflops:.0f} TFLOP/s on {peak.sms} "
                f"multiprocessors at {peak.boost_ghz} GHz, the exp bound {bound:.0f} TFLOP/s")
    return list(sentences.values())


def _drawn(cells, markdown):
    """Lines of cells as a table in plain text or in Markdown."""
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
    options.add_backward(parser, "time the gradients")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="sequence lengths; " + size("lengths"))
    parser.add_argument("--tokens", type=int, default=None, help="batch x length, at least one sequence; " + size("tokens"))
    parser.add_argument("--hidden", type=int, default=None, help="heads x head dimension; " + size("hidden"))
    parser.add_argument("--milliseconds", type=float, default=None, help="about how long a measurement takes; " + size("milliseconds"))
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each contestant; the median counts")
    parser.add_argument("--rest", type=float, default=0.02, help="seconds of rest before each measurement")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of the data and of the order of turns")
    names = [peer.name for peer in peers.FASTEST]
    parser.add_argument("--peers", nargs="*", choices=names, default=None,
                        help=f"compare with these, or without names with {', '.join(names)}, as far as they are installed; show shares "
                             "of the chip's limits, SM clock and power (which a sensor averages: measure for 200 milliseconds or more)")
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
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise cli.UsageError(f"--json must be a file in a folder that exists, found {str(args.json)!r}: correct the path")
    workloads = [options.uniform(options.workload_of(text, device)) for text in args.workload]
    cli.echo(**{**vars(args), "command": "bench", "workload": [workload.name for workload in workloads], "target": device.description})
    rows, left_out = [], {}
    with tempfile.TemporaryDirectory() as folder:
        kernels_of, tuned = our_kernels(args, device, workloads, Path(folder))
        for workload, kernels in kernels_of.items():
            for length in args.lengths:
                found, sentences = compare(args, device, kernels, workload, length)
                rows += labelled(found, tuned.get(workload), length)
                for sentence in sentences:
                    if sentence not in left_out:
                        print(sentence, flush=True)
                    left_out[sentence] = None
    told = circumstances(device, {row["contestant"] for row in rows})
    print((table if args.peers is None else peer_table)(rows, args.markdown), end="\n\n")
    for sentence in () if args.peers is None else limits_told(device, workloads):
        print(sentence)
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    print(f"{told['device']}{', driver ' + told['driver'] if told['driver'] else ''}, {versions}, {told['date']}; "
          f"medians of {args.rounds} rounds in random order: {told['command']}")
    if args.json:
        args.json.write_text(json.dumps({**told, "rounds": args.rounds, "left_out": list(left_out), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
