"""Tune workloads on this machine: MetaSchedule searches, every candidate is proved right before it is timed, the best go to tuning_logs/.

    python -m scripts.tune --workload d128_f16_causal d128_f16_full --minutes 3
    python -m scripts.tune --workload d64_f32_full --target cpu --trials 40 --dry-run
    python -m scripts.tune --workload d128_f16_full --backward any-order --minutes 2
    python -m scripts.tune --suite llm --minutes 30
    python -m scripts.tune --workload d128_f16_full --lengths 512 4096 1x16384
    python -m scripts.tune --workload d128_f16_full --rpc 10.0.0.1:9190 --key h200 --target sm_90a

With --lengths each is tuned for itself, in a log of its own; scripts.export puts the plans of all into one artefact.
With --rpc, what is built here is measured by the workers of a fleet (scripts.fleet), several at a time.
A second run goes on where the first one ended. Exit codes: 0 done, 1 failed or interrupted, 2 wrong arguments.
"""
import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import tvm
import tvm_ffi
import xgboost

from schedules.buckets import Bucket, bucket_at, nearest
from schedules.lowering.toolkit import find_toolkit
from schedules.tuning.builder import PoolBuilder
from schedules.tuning.fleet import Fleet
from schedules.tuning.log import Log, locked
from schedules.tuning.nearest import Machine, nearest_records, start_plans
from schedules.tuning.records import NoRecord
from schedules.tuning.reasons import told
from schedules.tuning.results import champion_of, conclude
from schedules.tuning.run_worker import Setting
from schedules.tuning.runner import GatedRunner
from schedules.tuning.search import PATIENCE, Host, Limits, TuneError
from schedules.tuning.several import session_of
from schedules.tuning.subjects import subject_of
from schedules.tuning.suites import SUITES
from scripts import cli, options, remote, suite, tuner
from scripts.report import write_report
from te_defs.workload import standard_shape

#: Length that is timed by default.
LENGTH = {"cuda": 4096, "cpu": 1024}
MINUTES = 3.0
#: Threads of MetaSchedule's search: beyond these, Python's lock is what they wait for. One on a CPU, which makes draws repeatable.
SEARCH_THREADS = {"cuda": 8, "cpu": 1}
#: Seconds that are kept back to write the log, and the largest part of a session that this may be.
LOG_SECONDS, LOG_SHARE = 3.0, 0.05
#: Seconds between progress lines, unless there is a new best plan.
LINE_SECONDS = 5.0


@dataclass(frozen=True)
class Tools:
    """What all workloads of a run share: the device, MetaSchedule's builder and runner, limits, seed, a commit to note, when to stop, the
    number of build processes, and whose workers measure."""

    device: cli.Device
    builder: PoolBuilder
    runner: GatedRunner
    limits: Limits
    seed: int
    commit: str | None
    stop: object
    workers: int
    fleet: Fleet | None


def make_parser():
    parser = options.parser("tune", __doc__)
    options.add_what(parser, several=True)
    options.add_backward(parser, "tune the gradients instead")
    parser.add_argument("--suite", default=None, help="tune the workloads and gradients of a suite, which share --minutes by what is "
                        f"expected of them: {', '.join(f'{name} for {each.kind}' for name, each in SUITES.items())}")
    parser.add_argument("--trials", type=_positive(int), help="end after so many new candidates a workload and length; None: no limit")
    parser.add_argument("--minutes", type=_positive(float),
                        help=f"end after so many minutes a workload and length, or a suite; None: {MINUTES:g} for each, or no limit with "
                        "--trials")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--length", type=_positive(int), help="query and key rows of the shape that is timed; None: "
                        + ", ".join(f"{length} on {kind}" for kind, length in LENGTH.items()))
    shapes.add_argument("--lengths", type=options.lengths, nargs="+", default=None, help="several of them, one after the other, "
                        "each query and key rows or query rows x key rows, such as 512 4096 1x16384; None: --length")
    options.add_logs(parser)
    remote.add_fleet(parser)
    parser.add_argument("--family", default=None, help="search the plans of this family only; None: of all that take the workload, "
                        "gradients: of the first that does")
    parser.add_argument("--seed", type=options.seed, default=0, help="of all draws")
    parser.add_argument("--workers", type=_positive(int), help="build processes; None: one a core")
    parser.add_argument("--commit", help="noted in run.json; None: that of the git checkout")
    parser.add_argument("--dry-run", action="store_true",
                        help="print target, families, spaces, the first plan's budget and the limits, and stop")
    return parser


def _positive(kind):
    def convert(text):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"a number above 0 is wanted, found {text}")
        return value
    convert.__name__ = kind.__name__
    return convert


def run(args):
    """The command; an exit code, or an error that `cli.main` turns into one."""
    # Signals first of all: TVM would lose an exception of Ctrl-C in a function that it calls.
    with tuner.stoppable() as asked, remote.fleet_of(args) as fleet:
        return tune_all(args, lambda: asked() or fleet is not None and fleet.lost is not None, fleet)


def tune_all(args, stop, fleet):
    """Resolve the arguments and tune one workload after the other, until `stop()`."""
    logs = cli.log_folder(args.logs)
    device = cli.find_device(args.target) if fleet is None else remote.device_of(fleet, args.target)
    entries = suite.entries_of(args, device) if args.suite is not None else ()
    subjects = [entry.subject for entry in entries] or [
        subject_of(options.uniform(options.workload_of(text, device)), args.backward) for text in args.workload]
    minutes = args.minutes or (None if args.trials else MINUTES * max(len(entries), 1))
    limits = Limits(args.trials, None if minutes is None else 60 * minutes)
    usual = Bucket(*2 * (args.length or LENGTH[device.kind],))
    buckets = list(dict.fromkeys(args.lengths or [usual]))
    timed = {"lengths": list(map(str, buckets))} if args.lengths else {"length": usual.q_len}
    timed |= {"suite": args.suite} if entries else {}
    workers = args.workers or len(os.sched_getaffinity(0))
    cli.echo(command="tune", target=device.arch.name, device=device.description, workload=[subject.name for subject in subjects],
             trials=args.trials, minutes=minutes, **timed, family=args.family, logs=logs, seed=args.seed, workers=workers,
             dry_run=args.dry_run)
    tasks = [suite.attempted(lambda: task_of(args, logs, device, entry.subject, usual, usual, entry.shape)) for entry in entries] or [
        task_of(args, logs, device, subject, bucket, usual) for subject in subjects for bucket in buckets]
    if args.dry_run:
        for number, task in enumerate(tasks):
            print(f"{entries[number].title} is not tuned: {task}") if isinstance(task, Exception) else describe(device, limits, *task)
        return
    if device.slug is None:
        raise cli.UsageError(f"tuning needs the device itself, found {device.description}: run on such a machine, or use --target auto")
    with tuner.processes(device, workers, fleet) as (builder, runner):
        tools = Tools(device, builder, runner, limits, args.seed, args.commit, stop, workers, fleet)
        runs = [partial(suite.tune_suite, args.suite, tools, entries, tasks, Sitting, writing(limits, len(entries)))] if entries else [
            partial(tune, tools, *task) for task in tasks]
        for run_one in runs:
            run_one()
            if stop():
                why = fleet and fleet.lost or "interrupted"
                raise cli.Interrupted(f"{why}: what was tuned so far is kept in {logs / device.slug}, the same command goes on there")


def task_of(args, logs, device, subject, bucket, usual, shape=None):
    """(Log, parts, shape) of what is tuned at a bucket. Of --lengths, the one that the workload's first log is of goes on there, or where
    there is no log the one that it would be of without --lengths; others have a folder of their own, and so have shapes of a suite."""
    log = Log(logs, device.slug or "<device>", subject, device.arch)
    timed = log.read_bucket() if args.lengths else None
    if args.lengths and bucket != (timed or usual):
        log = Log(logs, log.slug, subject, device.arch, bucket)
    if shape is not None:
        log = Log(logs, log.slug, subject, device.arch, bucket_at(shape))
    parts = subject.parts(options.families_of(args.family, subject, device.arch), device.arch)
    tokens, hidden = options.TOKENS[device.kind], options.HIDDEN[device.kind]
    return log, parts, shape or standard_shape(subject.workload, bucket.q_len, tokens, hidden, bucket.kv_len)


def describe(device, limits, log, parts, shape):
    """Print what a run would do: target, who takes the workload, the spaces, the first plans' budgets, limits and folder."""
    print(f"{log.name} on {device.description}, lowered for {device.arch.name}")
    reasons = log.subject.declines(device.arch)
    width = max(10, *(len(name) + 1 for name in reasons))
    for name, reason in reasons.items():
        print(f"  {name:<{width}}{'takes it' if reason is None else 'declines: ' + reason}")
    spaces = [space for spaces in parts.values() for space in spaces]
    fitting = [len(space.fitting_plans()) for space in spaces]
    for space, count in zip(spaces, fitting):
        print(f"  space {space.name}: {count} of {space.size} plans fit")
    total = sum(space.size for space in spaces)
    print(f"  {sum(fitting)} of {total} plans in {len(spaces)} spaces fit ({100 * sum(fitting) // total} %)")
    for first, *_ in parts.values():
        print(f"  first plan: {first.family.NAME} {first.seed}\n{first.family.budget(first.workload, device.arch, first.seed).table()}")
    print(f"  timed at {shape}")
    print(f"  limits: {limits.trials or 'no'} trials, {'no' if limits.seconds is None else f'{limits.seconds / 60:g}'} minutes")
    print(f"  log: {log.path}")


def tune(tools, log, parts, shape):
    """One session: resume the log, search, keep. TuneError where nothing passed; after a stop it returns early."""
    begun = time.monotonic()
    with locked(log.path):
        sitting = Sitting(tools, log, parts, shape)
        sitting.settle()
        try:
            winner = sitting.session.run(left(tools.limits, time.monotonic() - begun))
        except TuneError:
            if tools.stop():
                return
            sitting.tell_of_refusals()
            raise
        sitting.conclude(winner, {"seconds": round(time.monotonic() - begun, 1)})


class Sitting:
    """A session with its log, which must be locked: what it has is read, and what is found is kept.

    tools, log, shape  as of `tune`; parts: {part: spaces}
    run                run.json as it was, None where there was none
    session            what searches
    """

    def __init__(self, tools, log, parts, shape):
        self.tools, self.log, self.shape, self.run = tools, log, shape, log.read_run()
        champion = champion_of(self.run, log.subject)
        first = {} if champion is not None else lent_plans(log, parts, shape, tools.device)
        log.check_database()
        known, declarations = log.read_measured(log.subject.members(), shape)
        if log.torn is not None:
            print(f"{log.name}: the file of measured plans is torn behind {log.torn} of them, which count; the others are tried again",
                  flush=True)
        if known:
            print(f"{log.name}: resuming {log.path}, which has {len(known)} plans", flush=True)
        host = Host(time.monotonic, tools.stop, Lines(log.subject, shape).show, lambda: log.write_measured(known, declarations, shape))
        self.session = session_of(log.subject, parts, champion, shape, tools.builder, tools.runner, host,
                                  known, declarations, first, seed=tools.seed, threads=SEARCH_THREADS[tools.device.kind],
                                  alone=tools.device.kind == "cpu" and tools.fleet is None)

    def settle(self):
        """Tell the runner what it measures from now on."""
        self.tools.runner.setting = Setting(self.tools.device.kind, self.log.subject, self.shape)

    @property
    def measured(self):
        """How the best of earlier sessions became that, None where there is none."""
        return ((self.run or {}).get("best") or {}).get("measured")

    def tell_of_refusals(self):
        """Write why each plan was refused, where nothing else can be told."""
        if self.session.known:
            write_report(self.log.path)

    def conclude(self, winner, about):
        """Keep a Winner with facts of the session, and say how it went."""
        tools, log, shape, session, known = self.tools, self.log, self.shape, self.session, self.session.known
        if winner.measured == "search" and self.measured == "duel":
            winner = None  # interrupted: the plan that won the last duel stays until another one wins
        driver = tools.fleet.facts["driver"] if tools.fleet else cli.nvidia_driver(tools.device)
        device = {"slug": tools.device.slug, "name": tools.device.description, "driver": driver}
        if tools.device.gpu is not None:
            device["sms"] = tools.device.gpu.sms
        conclude(log, session, shape, self.run, winner, device, {**about, **_about(tools)})
        name = log.name
        print(f"{name}: the whole story is in {write_report(log.path)}", flush=True)
        if session.ended_early:
            print(f"{name}: the search has ended since its last {PATIENCE} plans brought no gain; run it again to go on", flush=True)
        if any(outcome.refused for outcome in known.values()):
            print(f"{name}: refused {told(known.values())}", flush=True)
        if winner is not None:
            family, plan = winner.key
            print(f"{name}: best of {len(known)} plans by {winner.measured}: {speed(log.subject, shape, winner.seconds)}, {family} {plan}",
                  flush=True)
            print(f"{name}: {gain(winner, session.default)}", flush=True)


def lent_plans(log, parts, shape, device):
    """{part: keys of the best plans of the nearest device that has a log of what is tuned, at the nearest lengths}, which is said. They are
    candidates like others: nothing that was measured elsewhere counts here."""
    here = Machine(device.slug, device.arch, device.gpu)
    try:
        lent = nearest_records(log.path.parent.parent, log.subject, here)
    except NoRecord:
        return {}
    by_bucket = {it.record.bucket: it for it in lent}
    found = by_bucket[nearest(by_bucket, shape.q_len, shape.kv_len)]
    for sentence in found.passed_over:
        print(sentence)
    plans = start_plans(found, parts)
    count = sum(map(len, plans.values()))
    print(f"{log.name}: the search begins with {count} plans that were best on {found.lender}, {found.date}", flush=True)
    return plans


def left(limits, spent):
    """Limits without the seconds that are spent, and those that the log takes to be written."""
    if limits.seconds is None:
        return limits
    return replace(limits, seconds=max(limits.seconds - spent - writing(limits), 0.0))


def writing(limits, logs=1):
    """Seconds that are kept back to write each of some logs."""
    return 0.0 if limits.seconds is None else min(LOG_SECONDS, LOG_SHARE * limits.seconds / logs)


def gain(winner, default):
    """What the last round says of the winner and the default plan, for people."""
    told = {key: f"{1e3 * it.seconds:.4f} ms ({1e3 * it.least:.4f} to {1e3 * it.most:.4f})" for key, it in winner.scores.items()}
    if default not in told:
        return "not measured beside the default plan"
    if winner.key == default:
        return f"the default plan stays: {told[default]}"
    return (f"{winner.scores[default].seconds / winner.seconds:.3f}x as fast as the default plan in the last round: {told[winner.key]} "
            f"against {told[default]}")


def speed(subject, shape, seconds):
    """Milliseconds and floating-point operations a second, for people."""
    rate = subject.operations(shape) / seconds
    return f"{1e3 * seconds:.4f} ms, " + (f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s")


class Lines:
    """Progress lines: one for each new best, else one every few seconds."""

    def __init__(self, subject, shape):
        self.subject, self.shape, self._best, self._last = subject, shape, None, float("-inf")

    def show(self, progress):
        if progress.best == self._best and progress.elapsed - self._last < LINE_SECONDS:
            return
        self._best, self._last = progress.best, progress.elapsed
        best = "none right so far"
        if progress.best is not None:
            family, plan = progress.best
            best = f"best {speed(self.subject, self.shape, progress.best_seconds)}, {family} {plan}"
        left = "" if progress.left is None else f", {progress.left:.0f} s left"
        print(f"[{progress.elapsed:.0f} s{left}] {progress.tried} tried, {progress.refused} refused, {best}", flush=True)


def _about(tools):
    """The session for run.json."""
    commit = tools.commit
    if commit is None and shutil.which("git"):
        found = subprocess.run(["git", "-C", str(cli.ROOT), "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
        commit = found.stdout.strip() if found.returncode == 0 else None
    packages = {package.__name__: package.__version__ for package in (tvm, tvm_ffi, np, xgboost)}
    versions = {"python": platform.python_version(), **packages}
    if tools.device.kind == "cuda":
        versions["nvcc"] = ".".join(map(str, find_toolkit(os.environ).version))
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "seed": tools.seed,
            "workers": tools.workers, "versions": versions, "commit": commit, **(tools.fleet.about() if tools.fleet else {})}


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
