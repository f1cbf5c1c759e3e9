"""The last round of a tuning: the best few, built whole and measured in turns."""
import concurrent.futures
import statistics
from dataclasses import dataclass, field

from schedules.tuning.log import Outcome

#: Seconds that are kept back for it, and the largest part of a session that this may be.
DUEL_SECONDS, DUEL_SHARE = 25.0, 0.35
#: Of these, what the search may still take to measure what it has built, and what building may take of the round.
SEARCH_PART, BUILD_PART = 0.3, 0.5
#: Seconds between looks at the clock while builds are waited for.
TICK = 0.2


@dataclass(frozen=True)
class Score:
    """Seconds of a call in the last round: median, least and most; the largest error in the gate; and medians of what the GPU's sensors
    said meanwhile (schedules.tuning.sensors)."""

    seconds: float
    least: float
    most: float
    error: float
    sensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Winner:
    """The best plan.

    measured  how: "duel" or "search"
    ranking   ((seconds a call, (family name, plan)), ...) of all that were measured alike, the best first
    outcome   what the search found of it
    scores    {key: Score} of a duel
    """

    measured: str
    ranking: tuple
    outcome: Outcome
    scores: dict

    @property
    def seconds(self):
        return self.ranking[0][0]

    @property
    def key(self):
        return self.ranking[0][1]

    @property
    def score(self):
        """Its Score; None without a duel."""
        return self.scores.get(self.key)


@dataclass(frozen=True)
class Times:
    """Points of time of a session, on the host's clock; all None without a limit.

    build    the search begins nothing from here on
    measure  the search measures nothing from here on
    ready    who is not built takes no part in the last round
    end      the last round is over
    """

    build: float | None = None
    measure: float | None = None
    ready: float | None = None
    end: float | None = None

    @classmethod
    def of(cls, begun, seconds):
        if seconds is None:
            return cls()
        end, reserve = begun + seconds, min(DUEL_SECONDS, DUEL_SHARE * seconds)
        return cls(end - reserve, end - (1 - SEARCH_PART) * reserve, end - (1 - SEARCH_PART) * BUILD_PART * reserve, end)

    @classmethod
    def of_last_round(cls, begun, seconds):
        """Those of a last round alone."""
        return cls() if seconds is None else cls(begun, begun, begun + BUILD_PART * seconds, begun + seconds)


def past(moment, host):
    """Whether a point of time is over; None never is."""
    return moment is not None and host.clock() >= moment


def left_until(moment, host):
    """Seconds until a point of time, one at least; None where there is no limit."""
    return None if moment is None else max(moment - host.clock(), 1.0)


def last_round(finalists, builder, runner, host, seed, times=Times()):
    """({key: Score}, {key: why it is refused}) of finalists {key: (space, plan)}; None where a stop came first, or the time was up.

    Who is not built in time takes no part, but the first, which all are compared with, must.
    """
    futures = {key: builder.begin_plan(space, plan, whole=True) for key, (space, plan) in finalists.items()}
    while concurrent.futures.wait(futures.values(), TICK).not_done and not past(times.ready, host):
        if host.stop():
            break
    built = {key: builder.result(future) for key, future in futures.items() if not future.cancel() and future.done()}
    if host.stop() or next(iter(finalists)) not in built:
        return None
    paths = {key: str(result.artifact_path) for key, result in built.items() if result.error_msg is None}
    failures = {key: result.error_msg for key, result in built.items() if result.error_msg is not None}
    found = runner.duel(list(paths.values()), seed, lambda: left_until(times.end, host)) if paths else ()
    for path in paths.values():
        builder.discard(path)
    if found is None:
        return None
    scores = {}
    for key, entry in zip(paths, found):
        if "refused" in entry:
            failures[key] = entry["refused"]
        else:
            scores[key] = Score(statistics.median(entry["seconds"]), min(entry["seconds"]), max(entry["seconds"]), entry["error"],
                                entry.get("sensors", {}))
    return scores, failures


def ranked(scores):
    """((seconds, key), ...) of Scores by key, the best first."""
    return tuple(sorted(((score.seconds, key) for key, score in scores.items()), key=lambda entry: entry[0]))
