"""The database that is kept: MetaSchedule's JSON format, the declaration of the best plan, a few records, compact.

Records stand under the static form of the declaration, MetaSchedule's search key; their traces apply to the symbolic form as they are.
As MetaSchedule writes it, a declaration takes 500 KB and names the source files of this machine.
"""
import base64
import json
import os
import struct
import tempfile

from tvm import s_tir
from tvm.s_tir import meta_schedule as ms

from schedules.space import schedule_in
from schedules.tuning.forms import copy_of, schedule_static, static_form, symbolic_form
from schedules.tuning.log import DATABASE, write_text

#: Plans of the best one's space that are kept.
RECORDS = 2


def write_database(folder, kept, shape):
    """Replace the database in `folder` by the records of the best plans of some spaces.

    kept    [(schedules.space.Space, [(seconds, plan)], the best first)], one for each part of what was tuned
    shape   te_defs.workload.Shape that was timed
    """
    with tempfile.TemporaryDirectory() as scratch:
        database = ms.database.JSONDatabase(work_dir=scratch)
        for space, plans in kept:
            static = static_form(symbolic_form(space), space.workload, shape)
            workload, arguments = database.commit_workload(static), ms.arg_info.ArgInfo.from_entry_func(static, False)
            for seconds, plan in plans[:RECORDS]:
                sch = schedule_static(static)
                schedule_in(sch, space, plan)
                database.commit_tuning_record(ms.database.TuningRecord(
                    sch.trace.simplified(True), workload, [seconds], space.arch.target(), arguments))
        for name, shorten in zip(DATABASE, (_shorten_workload, _shorten_record)):
            with open(os.path.join(scratch, name)) as file:
                lines = [json.dumps(shorten(json.loads(line)), separators=(",", ":")) for line in file]
            write_text(folder / name, "".join(f"{line}\n" for line in lines))


def _shorten_workload(line):
    """[hash, base64 of a length and JSON text]: the text without white space and without source positions, which the hash ignores."""
    structural_hash, packed = line
    graph = json.loads(base64.b64decode(packed)[8:])
    nodes = graph["nodes"]
    assert nodes[0]["type"] == "None", "the JSON graph of TVM 0.27 starts with its null node"
    for node in nodes:
        if isinstance(node.get("data"), dict) and "span" in node["data"]:
            node["data"]["span"] = 0
    graph["nodes"] = [{"type": "None"} if node["type"] in ("ir.Span", "ir.SourceName") else node for node in nodes]
    text = json.dumps(graph, separators=(",", ":")).encode()
    return [structural_hash, base64.b64encode(struct.pack("<Q", len(text)) + text).decode()]


def _shorten_record(line):
    """[workload index, [[instructions, decisions], seconds, target, arguments]]: index maps are JSON texts inside of instructions."""
    for instruction in line[1][0][0]:
        for part in instruction[1:]:
            for index, value in enumerate(part):
                if isinstance(value, str) and value.startswith("{\n"):
                    part[index] = json.dumps(json.loads(value), separators=(",", ":"))
    return line


def replay(folder, space, shape):
    """[(TuningRecord, Schedule)] of the records in `folder` for a space, the best first: each trace applied to the symbolic form.

    shape  te_defs.workload.Shape that was timed
    Nothing comes back where the database has another declaration: it was written by other sources.
    """
    symbolic = symbolic_form(space)
    static = static_form(symbolic, space.workload, shape)
    database = ms.database.JSONDatabase(work_dir=str(folder), allow_missing=False)
    if not database.has_workload(static):
        return []
    found = []
    for record in database.get_top_k(database.commit_workload(static), RECORDS):
        sch = s_tir.Schedule(copy_of(symbolic), debug_mask=0)
        record.trace.apply_to_schedule(sch, remove_postproc=False)
        found.append((record, sch))
    return found
