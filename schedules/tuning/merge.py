"""Logs of one device and workload from several machines, put together. What is told apart by nothing but the machine is one record.

A plan counts once, by the fewest seconds; one that any of them found wrong is refused, since a kernel that is wrong at times is wrong. The
best of the logs stays, one that won a last round before others: the next session has the best few of all in its last round anyway.
"""
import json
from dataclasses import dataclass, replace

from schedules.plan import plan_of
from schedules.tuning.build_worker import declaration
from schedules.tuning.database import RECORDS
from schedules.tuning.log import DATABASE, MEASURED, RUN, ForeignLog, Log, LogError, data_of, read_json, shape_of, write_text
from schedules.tuning.reasons import WRONG, counts, kind_of
from schedules.tuning.results import champion_of

#: Versions that figures depend on, as sessions in run.json name them.
VERSIONS = ("tvm", "tvm_ffi", "nvcc")


@dataclass(frozen=True)
class Source:
    """What one log holds: run.json as a dict, and what `Log.read_measured` gives."""

    log: Log
    run: dict
    known: dict
    declarations: dict

    @property
    def shape(self):
        return shape_of(self.run["shape"])


def read(log):
    """Source of a Log; LogError where it is damaged, foreign, or holds plans that the sources do not have."""
    run = log.read_run()
    if run is None:
        raise LogError(f"{log.path} must have a {RUN}, found none, so that its versions are not known: end a session of tune there first")
    log.check_database()
    members = log.subject.members()
    for family, names in (read_json(log.path / MEASURED) or {}).get("fields", {}).items():
        if family not in members or plan_of(members[family].PLAN, dict.fromkeys(names, 0)) is None:
            raise ForeignLog(f"{log.path / MEASURED} must hold plans of the sources as they are, found {family} with {', '.join(names)}: "
                             "tune again")
    return Source(log, run, *log.read_measured(members, shape_of(run["shape"])))


def check(sources, versions):
    """ForeignLog, which names the log, where the Sources are not of one version, shape and declaration, and of today's.

    versions  {name: version} of this installation
    """
    first = sources[0]
    wanted = dict(versions)
    today = _declarations(first.log, set().union(*(source.declarations for source in sources)))
    for source in sources:
        path = source.log.path
        for name in VERSIONS:
            for found in {session.get("versions", {}).get(name) for session in source.run["sessions"]}:
                if found != wanted.setdefault(name, found):
                    raise ForeignLog(f"{path} must be of {name} {wanted[name]}, found {found}: tune again")
        if source.shape != first.shape:
            raise ForeignLog(f"{path} must be timed at {first.shape} as {first.log.path}, found {source.shape}: tune with that --length")
        for space, found in source.declarations.items():
            if found != today.setdefault(space, found):
                raise ForeignLog(f"{path} must be of the declaration as it is, found that of {space} to be another one: tune again")
        champion = champion_of(source.run, source.log.subject)
        if source.run.get("best") and (champion is None or source.run["best"]["declaration"]
                                       != source.log.subject.declaration_of(champion, source.log.arch)):
            raise ForeignLog(f"{path} must have a best plan of the sources as they are, found {source.run['best']['family']} "
                             f"{source.run['best']['plan']} of others: tune again")


def _declarations(log, names):
    """{name: structural hash} of today's spaces that have one of the names."""
    subject, arch = log.subject, log.arch
    spaces = (space for family in subject.takers(arch) for part in subject.parts((family,), arch).values() for space in part)
    return {space.name: declaration(space) for space in spaces if space.name in names}


def merge(sources, target):
    """Write the Sources together as the Log `target`; the Source whose best plan stays, None where each log's was refused by another."""
    known = {}
    for source in sources:
        for key, outcome in source.known.items():
            chosen, other = sorted((known.get(key, outcome), outcome), key=_first)
            known[key] = replace(chosen, proven=chosen.proven or other.proven) if chosen.refused is None else chosen
    best = min((source for source in sources if _stands(source, known)), key=_best_first, default=None)
    ordered = sorted(sources, key=lambda source: source is not best)
    declarations = {name: found for source in sources for name, found in source.declarations.items()}
    sessions = {json.dumps(session, sort_keys=True): session for source in sources for session in source.run["sessions"]}
    target.write_measured(known, declarations, sources[0].shape)
    for name, lines in zip(DATABASE, _joined([source.log.path for source in ordered])):
        if lines:
            write_text(target.path / name, "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    target.write_run({
        **{name: value for name, value in ordered[0].run.items() if name != "schema"}, "shape": data_of(sources[0].shape),
        "best": best and best.run["best"], "trials": len(known), "refused": sum(each.refused is not None for each in known.values()),
        "reasons": counts(known.values()),
        "sessions": sorted(sessions.values(), key=lambda session: session.get("date", ""))})
    return best


def _first(outcome):
    """Order in which outcomes of one plan count: wrong, then passed by seconds, then refused for what may be of one machine alone."""
    if outcome.refused is not None:
        return (0 if kind_of(outcome.refused) == WRONG else 2), 0.0
    return 1, outcome.seconds


def _stands(source, known):
    """Whether a log's best plan is one that no log refused."""
    key = champion_of(source.run, source.log.subject)
    own = [] if key is None else source.log.subject.split(key).values()
    return key is not None and all(known[part].refused is None for part in own if part in known)


def _best_first(source):
    best = source.run["best"]
    return best.get("measured") != "duel", best["seconds"]


def _joined(folders):
    """Lines of both database files: each declaration once, with the best few of its records. The first record of what the first folder has
    stays the first, since run.json names it."""
    declarations, records = {}, {}
    for folder in folders:
        stored, lines = ([json.loads(line) for line in (folder / name).read_text().splitlines()] if (folder / name).exists() else []
                         for name in DATABASE)
        mine = sorted(((stored[index][0], record) for index, record in lines), key=lambda it: _seconds(it[1]))
        least = {name: _seconds(kept[0]) for name, kept in records.items()}
        for name, record in mine:
            kept = records.setdefault(name, [])
            if all(record[0] != other[0] for other in kept) and _seconds(record) >= least.get(name, 0.0):
                kept.append(record)
        declarations |= {line[0]: line for line in stored if line[0] not in declarations}
    numbers = {name: number for number, name in enumerate(declarations)}
    return list(declarations.values()), [[numbers[name], record] for name in numbers
                                         for record in sorted(records.get(name, ()), key=_seconds)[:RECORDS]]


def _seconds(record):
    """Of a record, [trace, seconds of each repeat, target, arguments]."""
    return sum(record[1]) / len(record[1])
