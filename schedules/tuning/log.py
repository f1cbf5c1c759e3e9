"""A tuning log on disk: tuning_logs/<gpu>/<workload>/ with what was measured, MetaSchedule's database of the best, and run.json.

    measured.json                  every plan that was built, with its seconds or the reason why it was refused: what a resumed run skips
    database_workload.json         MetaSchedule's JSON database: the symbolic declaration of the best plan,
    database_tuning_record.json    and the traces of the few best plans of that declaration
    run.json                       device, target, the best plan with its figures, and each session with seed, versions and commit

A folder holds what was timed at one shape. Further lengths of a workload have folders beside it: <workload>@512x512, queries and keys.

Each file is complete under its name at all times. measured.json is written after each plan, the others when a session ends.
"""
import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path

from schedules.buckets import bucket_at, bucket_named
from schedules.plan import plan_of
from schedules.tuning.reasons import of_schema_1
from te_defs.workload import Shape

#: What is written, and what is read: files of schema 1 have reasons without a kind, and neither spreads nor proofs.
SCHEMA, SCHEMAS = 2, (1, 2)
MEASURED, RUN = "measured.json", "run.json"
SCRATCH = ".writing-"
DATABASE = ("database_workload.json", "database_tuning_record.json")


class LogError(RuntimeError):
    """A tuning log that cannot be used; the message is one sentence."""


class DamagedLog(LogError):
    """A file of a log that is not what the tuner writes."""


class NotWritten(LogError, OSError):
    """A file of a log that could not be written; the one before it is as it was."""


class ForeignLog(LogError):
    """A log of another GPU, target, workload or shape."""


@dataclass(frozen=True)
class Outcome:
    """What is known of a plan: seconds a call, or the reason why it was refused (schedules.tuning.reasons); registers and bytes of spills
    per thread; (most - least) / median of its seconds; whether it passed the large set of inputs, None where it was not asked; and after
    how many seconds of tuning, all sessions together, it was known."""

    seconds: float | None = None
    refused: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    spread: float | None = None
    proven: bool | None = None
    after: float | None = None


class Log:
    """The log of one workload, or of its gradients, on one device.

    root      folder of all logs
    slug      name of the device, such as nvidia-h200
    subject   what is tuned (schedules.tuning.subjects)
    arch      row of schedules.arch that kernels are lowered for
    bucket    schedules.buckets.Bucket of its folder's name; None for the workload's first log, which may be of any shape
    """

    def __init__(self, root, slug, subject, arch, bucket=None):
        self.name = subject.name if bucket is None else f"{subject.name}@{bucket}"
        self.path = Path(root) / slug / self.name
        self.slug, self.subject, self.arch, self.bucket = slug, subject, arch, bucket
        self.torn = None  # how many plans `read_measured` found in a file that is torn

    def read_run(self):
        """run.json as a dict, None where there is none; ForeignLog where it names another device or target."""
        run = read_json(self.path / RUN)
        if run is not None:
            check_run(self.path / RUN, run)
            for what, found, wanted in (("device", run["device"]["slug"], self.slug), ("target", run["arch"], self.arch.name),
                                        ("workload", run["workload"], self.subject.name)):
                if found != wanted:
                    raise ForeignLog(f"{self.path / RUN} must be of {what} {wanted}, found {found}: use another --logs folder")
            found = bucket_at(shape_of(run["shape"]))
            if self.bucket not in (None, found):
                raise ForeignLog(f"{self.path / RUN} must be timed at {self.bucket}, as its folder says, found {found}: rename the folder")
        return run

    def read_bucket(self):
        """The Bucket of what is timed; None where nothing was measured so far."""
        head = _read_lines(self.path / MEASURED)[0] or self.read_run()
        try:
            return None if head is None else bucket_at(shape_of(head.get("shape")))
        except (AttributeError, TypeError, ValueError) as error:
            raise DamagedLog(f"{self.path / MEASURED} must have the shape that was timed, found another form ({error!r}): restore or "
                             "delete it") from error

    def read_measured(self, families, shape):
        """({(family name, plan): Outcome}, {structure: declaration hash}); both empty where there is no file.

        families  modules by name, for the classes of their plans
        shape     te_defs.workload.Shape that is timed now; ForeignLog where the log's is another
        """
        path = self.path / MEASURED
        data, self.torn = _read_lines(path)
        if data is None:
            return {}, {}
        if data.get("schema") not in SCHEMAS:
            raise ForeignLog(f"{path} must be of schema {' or '.join(map(str, SCHEMAS))}, found {data.get('schema')!r}: use the version of "
                             "the tuner that wrote it, or another --logs folder")
        earlier, data["schema"] = data["schema"] == 1, SCHEMA
        told, wanted = ([each.get(name) for name in ("schema", "workload", "arch", "shape")]
                        for each in (data, {**self._head(), "shape": data_of(shape)}))
        if told != wanted:
            raise ForeignLog(f"{path} must be of {wanted}, found {told}: name that --length, or another --logs folder")
        outcomes = {}
        try:
            for family, values, *outcome in data["plans"]:
                if family in families:
                    plan = plan_of(families[family].PLAN, dict(zip(data["fields"][family], values)))
                    if plan is not None:
                        outcomes[family, plan] = _sound(Outcome(*outcome), earlier)
            return outcomes, dict(data["declarations"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedLog(f"{path} must list plans and outcomes, found something else ({error!r}): delete the file") from error

    def write_measured(self, outcomes, declarations, shape):
        """Keep the outcomes, one line each."""
        head = {**self._head(), "shape": data_of(shape), "declarations": declarations,
                "fields": {family: [field.name for field in fields(plan)] for family, plan in outcomes}}
        lines = [json.dumps([family, list(astuple(plan)), *_trimmed(astuple(outcome))]) for (family, plan), outcome in outcomes.items()]
        write_text(self.path / MEASURED, json.dumps(head)[:-1] + ', "plans": [\n' + ",\n".join(lines) + "\n]}\n")

    def _head(self):
        return {"schema": SCHEMA, "workload": self.subject.name, "arch": self.arch.name}

    def write_run(self, run):
        write_text(self.path / RUN, json.dumps({"schema": SCHEMA, **run}, indent=2) + "\n")

    def check_database(self):
        """DamagedLog where a line of the database is not what MetaSchedule writes. (MetaSchedule itself would end the process.)"""
        for name, kind in zip(DATABASE, (str, int)):  # the hash of a workload, or the number of one
            path = self.path / name
            for number, line in enumerate(_lines(path), 1):
                try:
                    entry = json.loads(line)
                    sound = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], kind)
                except (ValueError, RecursionError):
                    sound = False
                if not sound:
                    raise DamagedLog(f"{path} must hold one record a line, found line {number} damaged: restore the file, or delete "
                                     "both database files and tune again")


def bucket_in(name):
    """The Bucket that the name of a log's folder ends with; None where it ends with none, DamagedLog where that is no bucket."""
    _, at, text = name.partition("@")
    try:
        return bucket_named(text) if at else None
    except ValueError as error:
        raise DamagedLog(f"the folder of a log must be named like fwd_d64_dv64_f16_full@512x512, found {name}: {error}") from error


#: What run.json must hold: the type of each entry, and of those of the best plan.
_RUN_FORM = {"schema": int, "workload": str, "arch": str, "device": dict, "shape": dict, "sessions": list}
_BEST_FORM = {"family": str, "plan": dict, "seconds": float, "declaration": str}


def check_run(path, run):
    """DamagedLog where the content of a run.json does not have the form that the tuner gives it."""
    best = run.get("best")
    wanted = [(run, name, kind) for name, kind in _RUN_FORM.items()]
    if best is not None:
        wanted += [({"best": best}, "best", dict)]
        wanted += [(best, name, kind) for name, kind in _BEST_FORM.items()] if isinstance(best, dict) else []
    for part, name, kind in wanted:
        if not isinstance(part.get(name), kind):
            raise DamagedLog(f"{path} must have {name!r} of type {kind.__name__}, found {part.get(name)!r}: restore the file or delete it")
    if best is not None and not (0 < best["seconds"] < float("inf") and all(type(value) is int for value in best["plan"].values())):
        raise DamagedLog(f"{path} must have a best plan of whole numbers with its seconds, found {best}: restore the file or delete it")
    if run["schema"] not in SCHEMAS or not isinstance(run["device"].get("slug"), str):
        raise DamagedLog(f"{path} must be of schema {' or '.join(map(str, SCHEMAS))} and name its device, found {run['schema']} and "
                         f"{run['device']}: tune again")
    try:
        bucket_at(shape_of(run["shape"]))
    except (TypeError, ValueError) as error:
        raise DamagedLog(f"{path} must have the shape that was timed, found {run['shape']}: restore the file or delete it") from error


def _read_lines(path):
    """(the object in measured.json, how many of its plans can still be read where it is torn, else None); (None, None) where there is no
    file. DamagedLog where not even its first line can be read."""
    try:
        return read_json(path), None
    except DamagedLog:
        first, *lines = _lines(path) or [""]
        try:
            data = json.loads(f"{first}]}}")
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict) or data.get("plans") != []:
            raise
        for line in lines:
            try:
                data["plans"].append(json.loads(line.rstrip(",")))
            except (ValueError, RecursionError):
                break
        return data, len(data["plans"])


def _sound(outcome, earlier):
    """The outcome, which is of schema 1 where it is `earlier`; ValueError where it is none."""
    if earlier and outcome.refused is not None:
        outcome = replace(outcome, refused=of_schema_1(outcome.refused))
    if not (outcome.seconds is None or isinstance(outcome.seconds, float) and 0 < outcome.seconds < float("inf")):
        raise ValueError(f"seconds {outcome.seconds!r}")
    return outcome


def _trimmed(values):
    values = list(values)
    while values and values[-1] is None:
        values.pop()
    return values


def _lines(path):
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedLog(f"{path} must be readable text, found {error}: restore or delete it") from error


def read_json(path):
    """The object in a file, None where there is no file; DamagedLog where it holds something else."""
    text = "\n".join(_lines(path)) if path.exists() else None
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedLog(f"{path} must be JSON, found {error}: restore or delete it") from error
    if not isinstance(data, dict):
        raise DamagedLog(f"{path} must hold an object, found {type(data).__name__}: restore or delete it")
    return data


def shape_of(data):
    """Shape from what `data_of` made of it; TypeError or ValueError where it is something else."""
    shape = Shape(**{**data, "mask": tuple(data.get("mask", ()))})
    if any(type(size) is not int for size in (*astuple(shape)[:-1], *shape.mask)):
        raise TypeError("sizes are whole numbers")
    return shape


def data_of(shape):
    """A Shape as data for JSON; one whose mask has no arguments says nothing of them."""
    data = asdict(shape)
    return {**data, "mask": list(shape.mask)} if data.pop("mask") else data


def write_text(path, text):
    """Write a file so that nobody ever sees a part of it, not even after a power cut; NotWritten where that fails."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=SCRATCH)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException as error:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise NotWritten(f"{path} must be written, found {error.strerror or error}: make room or choose another --logs folder, and run "
                             "the same command again; what was written before is kept") from error
        raise


@contextmanager
def locked(path):
    """Hold a log's folder for one tuner, made if missing; LogError where another one has it or it cannot be written."""
    import fcntl
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise LogError(f"{path} must be a folder that can be written, found {error.strerror}: choose another --logs folder") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LogError(f"{path} is in use by another tuner: wait for it, or choose another --logs folder") from error
        for left_behind in path.glob(f"{SCRATCH}*"):  # by a tuner that was killed
            left_behind.unlink()
        yield
    finally:
        os.close(handle)
        if made and not any(path.iterdir()):
            path.rmdir()
