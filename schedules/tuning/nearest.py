"""What a device that nothing was tuned on takes instead: the record of the nearest one, which is told apart from its own at any time.

A GPU borrows from GPUs of the same architecture, a CPU from those of the same instruction set whose vectors are as wide. The plan is held
against the machine that borrows it: one that does not fit there is passed over, with its reason, and the next nearest is asked.
"""
import statistics
from dataclasses import dataclass, fields
from pathlib import Path

from schedules.arch import CUDA_ARCHS, CpuArch, Gpu, gpu_named
from schedules.plan import PlanError
from schedules.registry import NoSchedule
from schedules.tuning.log import RUN, DamagedLog, Log, LogError, check_run, data_of, read_json, shape_of
from schedules.tuning.records import NoRecord, Record, log_at, logs_of, one_a_bucket, record_in
from te_defs.workload import WorkloadError

#: Plans of a lender that a search here begins with, of each part of what is tuned.
BEST = 4


@dataclass(frozen=True)
class Machine:
    """A device, as far as it matters for who is near.

    slug  name of its folder of tuning logs
    arch  row of schedules.arch that kernels for it are lowered for
    gpu   schedules.arch.Gpu; None for a CPU, and for a GPU of which no more is known
    """

    slug: str
    arch: object
    gpu: Gpu | None = None

    def lends(self, other):
        """Whether plans of this one are plans for the other."""
        if self.arch.kind == "cuda" or other.arch.kind == "cuda":
            return self.arch == other.arch
        return (self.arch.machine, self.arch.vector_bits) == (other.arch.machine, other.arch.vector_bits)

    def distance(self, other):
        """What orders machines by how near they are; what is not known is far."""
        if self.arch.kind == "cpu":
            return abs(self.arch.cores - other.arch.cores), self.arch.name != other.arch.name, other.slug
        return *(_gap(self.gpu, other.gpu, fact) for fact in ("sms", "memory_gbytes")), other.slug


def _gap(one, other, fact):
    values = [getattr(gpu, fact, None) for gpu in (one, other)]
    return float("inf") if None in values else abs(values[0] - values[1])


@dataclass(frozen=True)
class Borrowed:
    """A record of another machine.

    record       schedules.tuning.records.Record: its plan is one for the machine that borrows it, its seconds and run are the lender's
    lender       name of the device that it was measured on
    date         when, as YYYY-MM-DD
    passed_over  sentences: the reason of each log that is nearer and was not taken
    log          the lender's Log
    """

    record: Record
    lender: str
    date: str
    passed_over: tuple
    log: Log


def nearest_records(logs_root, subject, here):
    """The Borrowed records for a Machine, one for each bucket of lengths, all of one device; NoRecord, with the reasons of those that were
    passed over, where no other one lends any."""
    passed_over, lenders = [], {}
    for folder in sorted(path for pattern in ("", "@*") for path in Path(logs_root).glob(f"*/{subject.name}{pattern}")):
        if folder.parent.name != here.slug:
            try:
                lender = machine_of(folder)
            except LogError as error:
                passed_over.append(_passed(folder, error))
                continue
            if lender is not None and lender.lends(here):
                lenders.setdefault(lender.slug, lender)
    for lender in sorted(lenders.values(), key=here.distance):
        found = []
        for log in logs_of(logs_root, lender.slug, subject, lender.arch):
            try:
                found.append((record_in(log, here.arch), log))
            except LogError as error:
                passed_over += [_passed(log.path, error)] if log.path.exists() else []
        if found:
            return [Borrowed(record, lender.slug, date_of(record.run), tuple(passed_over), log)
                    for record, log in one_a_bucket(found, lambda it: it[0])]
    raise NoRecord("; ".join([f"no device like {here.slug} lends one of {subject.name}", *passed_over]))


def _passed(folder, error):
    return f"{folder.parent.name} is passed over: {error}"


def machine_of(folder):
    """The Machine of a log's folder; None where there is no run.json. DamagedLog where it does not say what machine it is of."""
    path = folder / RUN
    run = read_json(path)
    if run is None:
        return None
    check_run(path, run)
    name, device = run["arch"], run["device"]
    if name in CUDA_ARCHS:
        sms = device.get("sms")
        return Machine(folder.parent.name, CUDA_ARCHS[name], gpu_named(folder.parent.name, name, sms if type(sms) is int else None))
    try:
        arch = CpuArch(**device["cpu"])
        if not all(type(getattr(arch, field.name)) is field.type for field in fields(arch)):
            raise TypeError("a fact of another type")
    except (KeyError, TypeError) as error:
        raise DamagedLog(f"{path} must say what CPU it is of, found {device}: tune again there") from error
    return Machine(folder.parent.name, arch)


def date_of(run):
    """Day of the last session in run.json."""
    dates = [session["date"] for session in run["sessions"] if isinstance(session, dict) and isinstance(session.get("date"), str)]
    return dates[-1][:10] if dates else "at an unknown date"


def figures_of(record, slug, subject):
    """What a manifest says of a Record of a subject: what its plan takes, measured where and when."""
    return {"seconds": record.seconds, "shape": data_of(record.shape), "device": slug, "date": date_of(record.run),
            "record": f"{slug}/{subject.name}"}


def start_plans(borrowed, parts):
    """{part: keys (name, plan) that a search begins with}: the lender's best plan, then the fastest few of its search that fit.

    parts  {part: spaces} of the machine that borrows, as `subject.parts`
    """
    subject, record = borrowed.log.subject, borrowed.record
    best = subject.split((record.family, record.plan))
    try:
        known, _ = borrowed.log.read_measured(subject.members(), record.shape)
    except LogError:
        known = {}  # the record alone is sound
    passed = [key for key, outcome in known.items() if outcome.seconds is not None]
    ranked = [(name, plan.on(record.arch)) for name, plan in sorted(passed, key=lambda key: known[key].seconds)]
    return {part: _owned(dict.fromkeys((best[part], *ranked) if part in best else ranked), spaces) for part, spaces in parts.items()}


def _owned(keys, spaces):
    """The first few of some keys that spaces have room for."""
    return [key for key in keys if any(space.owns(*key) and space.fits(key[1]) for space in spaces)][:BEST]


@dataclass(frozen=True)
class Gain:
    """By how much the tuned plan of a log won over the default plan.

    ratio     seconds of the default plan over those of the tuned one
    in_turns  whether they were measured in turns, by a session's last round; else by a single measurement each of its search
    clear     whether they were, and all measurements of the tuned plan are below all of the default plan
    """

    ratio: float
    in_turns: bool
    clear: bool


def told(gains):
    """What Gains of a device say of tuning on one like it."""
    if not gains:
        return "no log there tells of both the tuned and the default plan, so what tuning here would gain is not known"
    ratios = sorted(gain.ratio for gain in gains)
    in_turns, clear = (sum(getattr(gain, name) for gain in gains) for name in ("in_turns", "clear"))
    likely = "which tuning here would likely gain over the default plan" if clear else "so tuning here would likely gain nothing that shows"
    return (f"the tuned plans of {len(gains)} workload{'s' * (len(gains) > 1)} there were {ratios[0]:.3f}x to {ratios[-1]:.3f}x as fast as "
            f"the default plans, {statistics.median(ratios):.3f}x in the median ({in_turns} measured in turns, {clear} of them beyond the "
            f"spread), {likely}; over the borrowed one no gain is on record")


def gains_of(logs_root, slug, order=None):
    """The Gains on a device: of forward passes, or of gradients in an order. A log that does not tell of both plans has none."""
    found = []
    for path in sorted(Path(logs_root).glob(f"{slug}/*/{RUN}")):
        try:
            log = log_at(path.parent, machine_of(path.parent).arch)
            gain = _gain(log) if log.subject.order == order else None
        except (LogError, WorkloadError, NoSchedule, PlanError):
            continue  # a log that is damaged, or of a workload that is not here, says nothing
        found += [gain] if gain is not None else []
    return found


def _gain(log):
    best = log.read_run().get("best") or {}
    tuned, default = (best.get(name) for name in ("last_round", "default_plan"))
    if _sound(tuned) and _sound(default):
        return Gain(default["median"] / tuned["median"], True, tuned["most"] < default["least"])
    return _gain_of_search(log) if log.subject.order is None else None


def _sound(told):
    """Whether it is what run.json says of a plan in the last round."""
    return isinstance(told, dict) and all(isinstance(told.get(name), float) and told[name] > 0 for name in ("median", "least", "most"))


def _gain_of_search(log):
    """By what the search of a forward pass measured, once a plan."""
    shape = shape_of(log.read_run()["shape"])
    known, _ = log.read_measured(log.subject.members(), shape)
    first = log.subject.takers(log.arch)[0]
    default = known.get((first.NAME, first.default_plan(log.subject.workload, log.arch)))
    if default is None or default.seconds is None:
        return None
    return Gain(default.seconds / min(outcome.seconds for outcome in known.values() if outcome.seconds is not None), False, False)
