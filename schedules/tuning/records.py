"""The best plan on record, for whoever builds a kernel. A record counts for its own device and target; who has none may borrow one by
schedules.tuning.nearest."""
from dataclasses import dataclass
from pathlib import Path

from schedules.buckets import bucket_at
from schedules.build import declaration_of
from schedules.plan import Plan
from schedules.tuning.log import MEASURED, RUN, DamagedLog, ForeignLog, Log, LogError, bucket_in, read_json, shape_of
from schedules.tuning.subjects import subject_named, subject_of
from te_defs.workload import Shape, Workload

__all__ = ["DamagedLog", "ForeignLog", "LogError", "NoRecord", "Record", "StaleRecord", "best_records", "declaration_of", "log_at",
           "logs_of", "read_runs", "record_in"]


class NoRecord(LogError):
    """Nothing has been tuned for this device, target and workload."""


class StaleRecord(LogError):
    """A record of a kernel that the sources no longer describe."""


@dataclass(frozen=True)
class Record:
    """The best plan of a workload, or of its gradients, on one device.

    family   name of the schedule's family
    plan     its Plan; of gradients what schedules.backward.default_plans would be
    seconds  of one call at `shape`, from the last duel
    arch     row of schedules.arch that it was lowered for
    run      the whole of run.json
    """

    workload: Workload
    family: str
    plan: Plan
    seconds: float
    shape: Shape
    arch: object
    run: dict

    @property
    def bucket(self):
        """The schedules.buckets.Bucket that it is for."""
        return bucket_at(self.shape)


def log_at(folder, arch):
    """The Log whose folder this is; WorkloadError or DamagedLog where its name says nothing."""
    return Log(folder.parent.parent, folder.parent.name, subject_named(folder.name), arch, bucket_in(folder.name))


def logs_of(logs_root, gpu_slug, subject, arch):
    """The Logs of a subject on a device: the first, which needs not be there, then those of further buckets, smaller ones first."""
    folders = Path(logs_root, gpu_slug).glob(f"{subject.name}@*")
    further = (log_at(folder, arch) for folder in folders if any((folder / name).exists() for name in (RUN, MEASURED)))
    return [Log(logs_root, gpu_slug, subject, arch), *sorted(further, key=lambda log: log.bucket.size)]


def best_records(logs_root, gpu_slug, workload, arch, order=None):
    """[Record, ...] of a workload, or of its gradients in an order (schedules.backward.FAMILIES): one for each bucket that was tuned, as
    `logs_of` orders them.

    gpu_slug  name of the device, such as nvidia-h200
    arch      row of schedules.arch that the caller builds for
    Raises NoRecord where there is none, StaleRecord, ForeignLog (another device or target) or DamagedLog where any of them cannot be used,
    each with one sentence.
    """
    found, missing = [], []
    for log in logs_of(logs_root, gpu_slug, subject_of(workload, order), arch):
        try:
            found.append(record_in(log, arch))
        except NoRecord as error:
            missing.append(error)
    if not found:
        raise missing[0]
    return one_a_bucket(found, lambda record: record)


def one_a_bucket(found, record_of):
    """Of some things that `record_of` tells the Record of, those with the fewest seconds of their bucket, in their order."""
    best = {}
    for it in sorted(found, key=lambda it: record_of(it).seconds):
        best.setdefault(record_of(it).bucket, it)
    return [it for it in found if it in best.values()]


def record_in(log, arch):
    """The Record in a Log, for kernels that are lowered for a row of schedules.arch: the log's own, or that of a machine that borrows it.

    Raises as `best_records` does, StaleRecord too where the family declines, or has no room for the plan on that machine.
    """
    subject, run = log.subject, log.read_run()
    workload, order = subject.workload, subject.order
    best = None if run is None else run.get("best")
    if best is None:
        what = "" if order is None else f" --backward {order}"
        remedy = (f"run python -m scripts.tune --workload {workload.name}{what}, or use --plan default" if workload.lengths == "uniform"
                  else "use --plan default, since tune takes uniform lengths alone")
        raise NoRecord(f"a record of {subject.name} for {log.slug} was wanted, found none in {log.path}: {remedy}")
    log.check_database()
    if best["family"] not in subject.families():
        raise _stale(log, f"there is no family {best['family']} any more")
    key = subject.key_of(best["family"], best["plan"])
    if key is None:
        raise _stale(log, f"plans of {best['family']} have other fields than {', '.join(best['plan'])}")
    family, plan = key
    reason = subject.declines(arch)[family]
    if reason is not None:
        raise _stale(log, f"{family} declines: {reason}")
    if arch != log.arch:
        plan = plan.on(arch)
    if not subject.offers((family, plan), arch):
        raise _stale(log, f"{family} offers no plan {plan} on {arch.name}")
    if best["declaration"] != subject.declaration_of(key, arch):
        raise _stale(log, "the declaration has changed since")
    return Record(workload, family, plan, best["seconds"], shape_of(run["shape"]), arch, run)


def _stale(log, why):
    return StaleRecord(f"the record in {log.path} must be of the sources as they are, found that {why}: tune again")


def read_runs(logs_root):
    """[(folder, run.json as a dict)] of all logs under a root, by name; LogError where there is no such folder."""
    root = Path(logs_root)
    if not root.is_dir():
        raise LogError(f"a folder of tuning logs was wanted, found none at {root}: name one with --logs")
    return [(path.parent, read_json(path)) for path in sorted(root.glob(f"*/*/{RUN}"))]
