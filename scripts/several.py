"""Several workloads in one artefact: which they are, whether all can be there, and that they are built side by side."""
import concurrent.futures
import multiprocessing
import os
import tempfile
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from schedules.artefact.export import ExportError
from schedules.artefact.several import export_part, export_several, shares_of
from schedules.tuning.suites import PRESETS_SUITE, SUITES
from scripts import cli, options
from scripts.choices import order_of
from scripts.kernels import contents, cuda_toolkit
from scripts.suite import require_kind
from te_defs.workload import PRESETS

#: What leaves one workload of several out, and is told of all.
REASONS = (*cli.USAGE_ERRORS, *cli.FAILURES)


def workloads_of(args, device):
    """(workloads of --workload or --all, each once, those of which --backward means gradients); UsageError where one is named twice, or the
    suite goes with something else."""
    if args.all is None:
        workloads = [options.workload_of(text, device) for text in args.workload]
        twice = [it.name for number, it in enumerate(workloads) if it in workloads[:number]]
        if twice:
            raise cli.UsageError(f"--workload must name each workload once, found {twice[0]} again: leave it out")
        return workloads, workloads
    if args.workload != ["auto"]:
        raise cli.UsageError(f"--all names the workloads itself, found --workload {' '.join(args.workload)} too: leave one out")
    if args.all == PRESETS_SUITE:  # for any device
        return [*PRESETS.values()], [*PRESETS.values()]
    require_kind("--all", args.all, device)
    subjects = [entry.subject for entry in SUITES[args.all].entries]
    with_gradients = [it.workload for it in subjects if it.order]
    if with_gradients and not args.backward:
        print(f"the gradients of suite {args.all} are left out: add --backward for them", flush=True)
    return list(dict.fromkeys(it.workload for it in subjects)), with_gradients


def orders_of(args, device, workloads, with_gradients):
    """The Order of each workload; ExportError with the names of all that cannot be in the artefact, whose reasons are printed, or where
    functions of two would have the same name."""
    shares_of(workloads)
    orders, missing = [], []
    for workload in workloads:
        try:
            orders.append(order_of(args, device, workload, workload in with_gradients))
        except REASONS as error:
            missing.append(workload.name)
            print(f"{workload.name}: {error}", flush=True)
    if missing:
        raise ExportError(f"{len(workloads)} workloads were wanted in one artefact, found that {len(missing)} of them cannot be there, as "
                          f"told above ({', '.join(missing)}): name the others with --workload")
    return orders


def build_part(order, share, folder, seed):
    """(Part of an Order in an empty folder, figures of its kernels), with check cases drawn from `seed`."""
    folder.mkdir()
    kernels, gradients = order.build(share)
    part = export_part(**contents(kernels, order.workload, seed, gradients, share), folder=folder, share=share)
    return part, [line for kernel in (*kernels, *gradients) for line in kernel.figures()]


def write_several(orders, path, seed):
    """Build the Orders of several workloads, side by side by processes of their own, and write their artefact; the paths of its files.
    Prints the figures of each workload's kernels."""
    cuda_toolkit(orders[0].choices[0].arch)  # device code of the parts is read back here
    parts, workers = [], min(len(orders), len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, str(number)) for number in range(len(orders))]
        jobs = orders, shares_of([order.workload for order in orders]), folders, [seed] * len(orders)
        try:
            with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                for order, (part, figures) in zip(orders, pool.map(build_part, *jobs)):
                    parts.append(part)
                    print("\n".join([f"{order.workload.name}: built", *(f"  {line}" for line in figures)]), flush=True)
        except BrokenProcessPool as error:
            raise ExportError(f"{workers} processes were to build {len(orders)} workloads, found that one ended before its time: free "
                              "memory or disk, or allow fewer cores by taskset") from error
        return export_several(parts, path)
