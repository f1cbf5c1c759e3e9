"""What a session leaves behind: the database of the best plan's space or spaces, and run.json."""
from dataclasses import asdict

from schedules.tuning.database import write_database
from schedules.tuning.log import data_of
from schedules.tuning.reasons import counts


def champion_of(run, subject):
    """(family name, plan) of the best in run.json, None where there is none, or none that today's families have."""
    best = None if run is None else run.get("best")
    return subject.key_of(best["family"], best["plan"]) if best else None


def conclude(log, session, shape, run, winner, device, about):
    """Write the database and then run.json, which names the best plan.

    log      the workload's Log
    session  the Session, or Sessions, that has ended
    run      run.json as it was, None where there was none
    winner   its Winner, or None: what run.json says of the best stays as it is
    device   facts of the device as plain data; its `slug` is the log's
    about    facts of the session as plain data: seed, versions, commit
    """
    best = None if run is None else run.get("best")
    if winner is not None:
        (family, plan), score = winner.key, winner.score
        write_database(log.path, session.kept(winner), shape)
        best = {"family": family, "plan": plan.values(), "seconds": winner.seconds,
                "gflops": round(log.subject.operations(shape) / winner.seconds / 1e9, 1), "measured": winner.measured,
                "largest_error": score and score.error, "registers": winner.outcome.registers, "spill_bytes": winner.outcome.spill_bytes,
                "declaration": session.declaration(winner), **_against(winner, session.default)}
    refused = sum(outcome.refused is not None for outcome in session.known.values())
    if log.arch.kind == "cpu":
        device = {**device, "cpu": asdict(log.arch)}  # facts that no row of schedules.arch has
    log.write_run({
        "workload": log.subject.name, "arch": log.arch.name, "device": device, "shape": data_of(shape), "best": best,
        "trials": len(session.known), "refused": refused,
        "reasons": counts(session.known.values()),
        "sessions": [*(run or {}).get("sessions", ()), {"trials": session.tried, "refused": session.refused, **about}]})


def _against(winner, default):
    """Seconds of the winner and of the default plan in the last round, least and most, and what the GPU's sensors said."""
    of_default = winner.scores.get(default)
    return {name: {"median": score.seconds, "least": score.least, "most": score.most, **score.sensors}
            for name, score in (("last_round", winner.score), ("default_plan", of_default)) if score}
