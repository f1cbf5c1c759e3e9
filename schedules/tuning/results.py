"""What a session leaves behind: the database of the best plan's space, and run.json."""
from dataclasses import asdict, fields

from schedules.tuning.database import write_database
from schedules.tuning.log import data_of
from te_defs.workload import flops


def champion_of(run, families):
    """(family name, plan) of the best in run.json, None where there is none, or none that today's families have."""
    best = None if run is None else run.get("best")
    family = families.get(best["family"]) if best else None
    if family is None or set(best["plan"]) != {field.name for field in fields(family.PLAN)}:
        return None
    return best["family"], family.PLAN(**best["plan"])


def conclude(log, session, shape, run, winner, device, about):
    """Write the database and then run.json, which names the best plan.

    log      the workload's Log
    session  the Session that has ended
    run      run.json as it was, None where there was none
    winner   its Winner, or None: what run.json says of the best stays as it is
    device   facts of the device as plain data; its `slug` is the log's
    about    facts of the session as plain data: seed, versions, commit
    """
    best = None if run is None else run.get("best")
    if winner is not None:
        (family, plan), space = winner.key, session.space_of(winner.key)
        write_database(log.path, space, [(seconds, key[1]) for seconds, key in winner.ranking if space.owns(*key)], shape)
        best = {"family": family, "plan": asdict(plan), "seconds": winner.seconds,
                "gflops": round(flops(log.workload, shape) / winner.seconds / 1e9, 1), "measured": winner.measured,
                "largest_error": winner.error, "registers": winner.outcome.registers, "spill_bytes": winner.outcome.spill_bytes,
                "declaration": session.declarations[space.name]}
    refused = sum(outcome.refused is not None for outcome in session.known.values())
    log.write_run({
        "workload": log.workload.name, "arch": log.arch.name, "device": device, "shape": data_of(shape), "best": best,
        "trials": len(session.known), "refused": refused,
        "sessions": [*(run or {}).get("sessions", ()), {"trials": session.tried, "refused": session.refused, **about}]})
