"""The best plan on record, for whoever builds a kernel. A record counts for its own device and target only; there is no nearest match."""
from dataclasses import dataclass, fields
from pathlib import Path

import tvm
import tvm_ffi

from schedules import registry
from schedules.plan import Plan
from schedules.space import spaces_of
from schedules.tuning.log import RUN, DamagedLog, ForeignLog, Log, LogError, read_json, shape_of
from te_defs.workload import Shape, Workload

__all__ = ["DamagedLog", "ForeignLog", "LogError", "NoRecord", "Record", "StaleRecord", "best_record", "declaration_of", "read_runs"]


class NoRecord(LogError):
    """Nothing has been tuned for this device, target and workload."""


class StaleRecord(LogError):
    """A record of a kernel that the sources no longer describe."""


@dataclass(frozen=True)
class Record:
    """The best plan of a workload on one device.

    family   name of the schedule's family
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


def best_record(logs_root, gpu_slug, workload, arch):
    """The Record in <logs_root>/<gpu_slug>/<workload>.

    gpu_slug  name of the device, such as nvidia-h200
    arch      row of schedules.arch that the caller builds for
    Raises NoRecord, StaleRecord, ForeignLog (another device or target) or DamagedLog, each with one sentence.
    """
    log = Log(logs_root, gpu_slug, workload, arch)
    run = log.read_run()
    best = None if run is None else run.get("best")
    if best is None:
        raise NoRecord(f"a record of {workload.name} for {gpu_slug} was wanted, found none in {log.path}: run "
                       f"python -m scripts.tune --workload {workload.name}")
    log.check_database()
    family = {family.NAME: family for family in registry.FAMILIES}.get(best["family"])
    if family is None:
        raise _stale(log, f"there is no family {best['family']} any more")
    if set(best["plan"]) != {field.name for field in fields(family.PLAN)}:
        raise _stale(log, f"plans of {family.NAME} have other fields than {', '.join(best['plan'])}")
    plan = family.PLAN(**best["plan"])
    if not any(space.owns(family.NAME, plan) and space.fits(plan) for space in spaces_of([family], workload, arch)):
        raise _stale(log, f"{family.NAME} offers no plan {plan}")
    if best["declaration"] != declaration_of(family, workload, plan):
        raise _stale(log, "the declaration has changed since")
    return Record(workload, family.NAME, plan, best["seconds"], shape_of(run["shape"]), arch, run)


def _stale(log, why):
    return StaleRecord(f"the record in {log.path} must be of the sources as they are, found that {why}: tune again")


def declaration_of(family, workload, plan):
    """Structural hash of a plan's symbolic declaration, as text: what a record is of."""
    return str(tvm_ffi.structural_hash(tvm.IRModule({"main": family.declare(workload, plan)})))


def read_runs(logs_root):
    """[(folder, run.json as a dict)] of all logs under a root, by name; LogError where there is no such folder."""
    root = Path(logs_root)
    if not root.is_dir():
        raise LogError(f"a folder of tuning logs was wanted, found none at {root}: name one with --logs")
    return [(path.parent, read_json(path)) for path in sorted(root.glob(f"*/*/{RUN}"))]
