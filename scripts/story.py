"""What a tuning log tells, gathered for people: candidates, limits of the chip, the winner with its loop nest, peers of benchmarks.

All of it comes from the log's files and the sources: nothing here asks for the device that was tuned.
"""
import re
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tvm
from tvm import s_tir

from schedules import backward, build
from schedules.arch import CpuArch, cuda_arch
from schedules.nest import loop_nest
from schedules.plan import PlanError
from schedules.roofline import limits_of, work_of
from schedules.tuning.log import MEASURED, RUN, DamagedLog, LogError, Outcome, check_run, read_json, shape_of
from schedules.tuning.records import log_at
from te_defs.workload import Shape

#: What differs between refusals for one and the same reason: the numbers in it.
_NUMBER = re.compile(r"[-+]?\d[\w.+-]*")
#: What says of which shape a row of a benchmark is.
_CASE = ("length", "batch", "heads")


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried: its number in the order of the log, from 1 on, the family and plan, and what came of it."""

    number: int
    family: str
    plan: object
    outcome: Outcome


@dataclass(frozen=True)
class Part:
    """A function of the winner: the name of its family, rows of its budget (empty where it is not known), its loop nest."""

    name: str
    budget: tuple
    nest: str


@dataclass(frozen=True)
class Peer:
    """A contestant of a benchmark: its row there, how many times as fast ours of that run was, and the run's date and contestant."""

    row: dict
    ratio: float
    ours: str
    date: str


@dataclass(frozen=True)
class Story:
    """One log.

    slug        name of the device's folder
    subject     what was tuned (schedules.tuning.subjects)
    run         run.json; None where no session has come to an end
    arch        row of schedules.arch; None for a CPU whose facts the log lacks
    shape       te_defs.workload.Shape that was timed
    candidates  Candidates in the order in which they were measured
    benches     {file name: content} of the benchmarks of the device; None for content that cannot be read
    """

    slug: str
    subject: object
    run: dict | None
    arch: object
    shape: Shape
    candidates: tuple
    benches: dict = field(default_factory=dict)

    @property
    def best(self):
        """What run.json says of the best plan; None where it names none."""
        return self.run and self.run.get("best")

    @property
    def device(self):
        """The device's name, for people."""
        return self.run["device"].get("name", self.slug) if self.run else self.slug

    @cached_property
    def passed(self):
        """Candidates that passed, the fastest first."""
        return tuple(sorted((it for it in self.candidates if it.outcome.seconds is not None), key=lambda it: it.outcome.seconds))

    @property
    def timed(self):
        """Whether the log says when each candidate was known."""
        return bool(self.candidates) and all(it.outcome.after is not None for it in self.candidates)

    @cached_property
    def refusals(self):
        """[[Candidate]] of those refused for one reason each, the commonest first."""
        found = {}
        for candidate in self.candidates:
            if candidate.outcome.refused is not None:
                found.setdefault(_NUMBER.sub("#", candidate.outcome.refused), []).append(candidate)
        return sorted(found.values(), key=len, reverse=True)

    @cached_property
    def work(self):
        return work_of(self.subject, self.shape)

    @cached_property
    def limits(self):
        """schedules.roofline.Limits of the chip; empty where no peak is written down."""
        peak = getattr(self.arch, "peak", None)
        return limits_of(peak, self.work) if peak else ()

    def tflops(self, seconds):
        return self.work.operations / seconds / 1e12

    @cached_property
    def key(self):
        """(name of the family, plan) of the winner; None where there is none, or none that today's families have."""
        return self.subject.key_of(self.best["family"], self.best["plan"]) if self.best else None

    def is_winner(self, candidate):
        """Whether a candidate is the winner, of gradients one of its functions."""
        return self.key is not None and (candidate.family, candidate.plan) in self.subject.split(self.key).values()

    @cached_property
    def parts(self):
        """Parts of the winner; empty where there is none that today's families have."""
        return tuple(self._part(*own) for own in self.subject.split(self.key).values()) if self.key else ()

    def _part(self, name, plan):
        workload, member, rows = self.subject.workload, self.subject.members()[name], ()
        sch = s_tir.Schedule(tvm.IRModule({"main": member.declare(workload, plan)}), debug_mask=0)
        if self.arch is not None:
            try:
                rows = member.budget(workload, self.arch, plan).rows
            except PlanError:
                pass  # of sources with a larger budget: `stale` says that these differ
        return Part(name, rows, loop_nest(build.staged(sch, member, plan)))

    @cached_property
    def stale(self):
        """Why the winner is not of the sources as they are; None where it is, or where there is no winner."""
        if not self.best:
            return None
        if self.key is None:
            return f"{self.best['family']} has no plan with these fields any more"
        changed = self.subject.declaration_of(self.key, self.arch) != self.best["declaration"]
        return "the declaration has changed since it was measured" if changed else None

    @property
    def peers(self):
        """Peers at each length, from the latest benchmark of each, in the order of length and speed."""
        return self._benchmarks[0]

    @property
    def unread(self):
        """Names of benchmarks that are not what scripts.bench writes: no reason to tell nothing of the log itself."""
        return self._benchmarks[1]

    @cached_property
    def _benchmarks(self):
        latest, unread = {}, []
        for name, data in self.benches.items():
            try:
                for peer in [peer for bench in data.get("runs", [data]) for peer in self._peers_of(bench)]:  # of a file all or none
                    place = tuple(peer.row[size] for size in (*_CASE, "contestant"))
                    if place not in latest or latest[place].date <= peer.date:
                        latest[place] = peer
            except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
                unread.append(name)
        return sorted(latest.values(), key=lambda it: (*(it.row[size] for size in _CASE), it.row["ms"], it.row["contestant"])), unread

    def _peers_of(self, bench):
        """Those in one run of scripts.bench, with ours among them; none where it is of another device or another pass."""
        if bench["device"] != self.device or _order_of(bench["command"]) != self.subject.order:
            return
        rows = [row for row in bench["rows"] if row["workload"] == self.subject.workload.name]
        for row in rows:
            case = {it["contestant"]: it for it in rows if all(it[size] == row[size] for size in _CASE)}
            ours = "tuned" if "tuned" in case else "default"
            yield Peer({**row, "ms": float(row["ms"]), "tflops": float(row["tflops"])}, row["ms"] / case[ours]["ms"], ours, bench["date"])

    def is_shape_of(self, peer):
        """Whether a benchmark's row is of the shape that was tuned at."""
        shape, row = self.shape, peer.row
        return (shape.q_len == shape.kv_len == row["length"] and shape.q_heads == shape.kv_heads
                and (shape.batch, shape.q_heads) == (row["batch"], row["heads"]))


def _order_of(command):
    """In which order the gradients of a `scripts.bench` were summed; None of a forward pass."""
    words = shlex.split(command)
    if "--backward" not in words:
        return None
    behind = words[words.index("--backward") + 1:][:1]
    return behind[0] if behind and behind[0] in backward.FAMILIES else backward.IN_ORDER


def read_story(folder):
    """The Story of the log in <logs>/<device>/<what was tuned>.

    LogError where there is none or it is damaged, WorkloadError or ArchError where today's sources do not know what its names say.
    """
    folder = Path(folder)
    run, measured = read_json(folder / RUN), read_json(folder / MEASURED)
    if run is None and measured is None:
        raise LogError(f"a tuning log was wanted, found neither {RUN} nor {MEASURED} in {folder}: name one that scripts.tune has written")
    if run is not None:
        check_run(folder / RUN, run)
    try:
        head = run or measured
        arch, shape = _arch_of(head), shape_of(head["shape"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedLog(f"{folder / RUN if run else folder / MEASURED} must name a target and a shape, found something else ({error!r}): "
                         "restore or delete it") from error
    log = log_at(folder, arch or _Named(head["arch"]))
    known, _ = log.read_measured(log.subject.members(), shape)
    entries = list(known.items())
    if all(outcome.after is not None for _, outcome in entries):
        entries.sort(key=lambda entry: entry[1].after)
    candidates = tuple(Candidate(number, *key, outcome) for number, (key, outcome) in enumerate(entries, 1))
    return Story(log.slug, log.subject, log.read_run(), arch, shape, candidates, _benches(folder.parent))


@dataclass(frozen=True)
class _Named:
    """An architecture of which no more than the name is known."""

    name: str


def _arch_of(head):
    """The row of schedules.arch that a log's head names: of a CPU what the device says of itself; None where it says nothing."""
    if head["arch"].startswith("sm_"):
        return cuda_arch(head["arch"])
    facts = head.get("device", {}).get("cpu")
    return facts and CpuArch(**facts)


def _benches(folder):
    """{file name: content} of what scripts.bench has written into the device's folder; None for content that is no JSON object."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_json(path)
        except DamagedLog:
            data = None
        if data is None or {"rows", "runs"} & set(data):
            found[path.name] = data
    return found
