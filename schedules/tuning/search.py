"""The loop of a tuning session: propose plans, build them while the last ones are measured, keep what was found, let the best duel."""
import concurrent.futures
import statistics
from dataclasses import dataclass, replace

import numpy as np
from tvm.s_tir import meta_schedule as ms

from schedules.tuning.features import KnobFeatures, token
from schedules.tuning.last_round import TICK, Times, Winner, last_round, left_until, past, ranked
from schedules.tuning.log import Outcome
from schedules.tuning.proposals import Proposals
from schedules.tuning.reasons import LOST, OUT_OF_TIME, told
from schedules.tuning.task import Task

#: Plans in the last round, which are measured in turns.
FINALISTS = 5
#: Plans that a turn of a space proposes, at least: MetaSchedule's search costs as much as several builds.
BATCH = 8
#: Plans in a row without a gain of more than this part after which the search ends. Had one in twenty of what is left been better, so many
#: drawn at random would have shown it with a probability of 95 %, and what the search picks is better than random.
PATIENCE, GAIN = 60, 0.005
#: So many times as many plans as there are build processes are under way: some are built, some wait to be measured.
AHEAD = 2
#: Plans of earlier sessions that are built again, best first, until one passes.
REBUILT = 3


class TuneError(RuntimeError):
    """A session that cannot go on, or found nothing; the message is one sentence."""


@dataclass(frozen=True)
class Limits:
    """When a session ends: after so many new plans, or so many seconds; None is no limit. The last round counts into the seconds."""

    trials: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Progress:
    """State of a session: plans built in it, those refused, the best (family name, plan) with its seconds, and time gone and left."""

    tried: int
    refused: int
    best: tuple | None
    best_seconds: float | None
    elapsed: float
    left: float | None


@dataclass(frozen=True)
class Host:
    """What a session asks of whoever runs it.

    clock   function that returns seconds
    stop    function that returns True once the session shall end early
    report  function that is called with a Progress after each plan
    save    function that is called now and then to keep what is known
    """

    clock: object
    stop: object
    report: object
    save: object


class Session:
    """One session of tuning the forward pass of one workload, or one part of its gradients.

    name          of what is tuned
    spaces        schedules.space.Spaces: the alternatives
    shape         te_defs.workload.Shape that is timed
    builder       PoolBuilder
    runner        GatedRunner, its setting set
    host          Host
    known         {(family name, plan): Outcome} of earlier sessions; grows
    declarations  {name of a space: structural hash of its declaration}, of the plans in `known`; grows
    champion      key of the best plan of earlier sessions, which the last round includes; None where there is none
    hints         keys of plans to try before others: what was best on another device
    seed          of all draws
    threads       of MetaSchedule's search
    alone         nothing is built while a kernel is measured: for CPU kernels
    """

    def __init__(self, name, spaces, shape, builder, runner, host, known, declarations, *, champion=None, hints=(), seed=0,
                 threads=1, alone=False):
        self.name, self.spaces, self.known, self.declarations, self.champion, self.seed = name, spaces, known, declarations, champion, seed
        self.builder, self.runner, self.host, self.alone = builder, runner, host, alone
        np.random.seed(seed)  # an untrained XGBModel draws from NumPy's global state
        model = ms.cost_model.XGBModel(extractor=KnobFeatures(spaces), num_warmup_samples=12, verbose_eval=0, num_tuning_cores=threads)
        self.tasks = [Task(space, shape, model, known, seed + number, threads) for number, space in enumerate(spaces)]
        first = *([champion] if champion else []), *hints
        self._proposals = Proposals(self.tasks, known, first, self.space_of, not alone)
        self.tried = self.refused = self.fruitless = 0  # fruitless: how many plans in a row brought no gain
        self.exhausted, self._fresh = False, True  # whether nothing is left to try; whether there was no `search` yet
        self._reference = None, None  # (key, artefact) of the best plan, which others are timed in turn with
        self._owners, self._batch = {}, None  # the future of plans to try next, which outlives a part of the search

    def run(self, limits):
        """Search within the limits, then duel; the Winner, which is never below the default plan. TuneError where no plan passes, or the
        default plan was not measured. After a stop there is no duel, and none where the time is up before the default plan is built."""
        begun = self.host.clock()
        times = Times.of(begun, limits.seconds)
        self.search(limits, times, begun)
        return self.finish(times)

    def search(self, limits, times, begun):
        """Search until the trials or the time to build and measure are over, a time that counts from `begun`. It can be taken up again by
        another call, also after searches of other sessions: what it has learnt and its best kernel are at hand."""
        self._begun, self._limits, self._since = begun, limits, self.host.clock()
        self._earlier = max((outcome.after or 0.0 for outcome in self.known.values()), default=0.0)
        self.builder.spaces = self.spaces
        self.runner.left = lambda: self._left(times)
        self.runner.prepare()
        if self._fresh:
            self._drop_stale()
        self._fresh = False
        if self._reference[1] is None:
            self._rebuild_best(times)
        else:
            self._compare_with(self._reference[0])
        self._search(times)
        self.runner.best = None, None  # nothing of this search is left for the next one
        if not self.host.stop():
            self._note_declarations()
        if self.known:
            self.host.save()

    def finish(self, times):
        """End the search for good: the Winner of the last round, where that can be held; TuneError as of `leader`."""
        self.put_away()
        return (None if self.host.stop() or self.uncompared else self._duel(times)) or self.leader()

    def put_away(self):
        """Remove the best plan's artefact: the search is not taken up again."""
        self._refer_to(None, None)

    @property
    def searches(self):
        """{part: Session} of those that can be taken up apart: this one alone."""
        return {None: self}

    def _left(self, times):
        """Seconds that a measurement may take: until the search has to end, or the session where nothing has passed yet."""
        return left_until(times.measure if self.ranking() else times.end, self.host)

    def _drop_stale(self):
        """Forget what earlier sessions found of declarations that have changed since, or that nothing is on record of."""
        today = self.builder.declarations([space for space in self.spaces if space.name in self.declarations])
        for key in list(self.known):
            space = self.space_of(key)
            if space is not None and (space.name not in today or today[space.name] != self.declarations[space.name]):
                del self.known[key]
        self.declarations.update(today)

    def _note_declarations(self):
        """Put on record what plans that could not be built are of, too: the others have told themselves."""
        tried = {space.name: space for space in map(self.space_of, self.known) if space and space.name not in self.declarations}
        self.declarations.update(self.builder.declarations(list(tried.values())))

    def _rebuild_best(self, times):
        """Build the best plan of earlier sessions again, since others are timed in turn with it. What fails today is refused."""
        for key in self.ranking()[:REBUILT]:
            if self.host.stop():
                return
            future = self.builder.begin_plan(self.space_of(key), key[1], whole=True)
            while concurrent.futures.wait([future], TICK).not_done:
                if self.host.stop() or past(times.build, self.host):
                    return
            outcome, path = self._outcome(future, self.space_of(key), None)
            if outcome is None:
                return
            if outcome.refused is None:
                self.known[key] = replace(self.known[key], proven=True)
                return self._refer_to(key, path)
            self.known[key] = replace(outcome, after=self.known[key].after)

    def _refer_to(self, key, path):
        """Put the artefact of the best plan in the place of the one before it."""
        before, self._reference = self._reference[1], (key, path)
        self._compare_with(key)  # at once: a fleet measures plans before they are asked for
        if before is not None:
            self.builder.discard(before)

    def _compare_with(self, best):
        """Tell the runner what plans are timed in turn with."""
        seconds = None if best is None else self.known[best].seconds
        self.runner.best = seconds, self._reference[1] if self._reference[0] == best else None

    def leader(self):
        """The Winner by the search's measurements alone, which were in turns with the best so far, at first the default plan. TuneError
        where no plan has passed, none has been proved, or there is nothing to compare the best with."""
        tried = [outcome for key, outcome in self.known.items() if self.space_of(key)]
        if tried and not self.proven():
            refused = sum(outcome.refused is not None for outcome in tried)
            raise TuneError(f"no plan of {self.name} has {'been proved' if self.ranking() else 'passed'} so far, found {refused} of "
                            f"{len(tried)} refused: {told(tried)}")
        if self.uncompared:
            missing = "default plan" if self.default in self.uncompared else "best plan of earlier sessions"
            raise TuneError(f"the best plan of {self.name} must be compared with the {missing}, found that the time was up before that was "
                            "measured, so none is put on record: run the same command again with more --minutes, which goes on there")
        # What every artefact has without a log needs no proof to stay: it may have been slower than the best of its moment.
        ranking = [key for key in self.ranking() if self.known[key].proven or key == self.default]
        return Winner("search", tuple((self.known[key].seconds, key) for key in ranking), self.known[ranking[0]], {})

    @property
    def uncompared(self):
        """Keys of what the best must be compared with and that is not known so far: of the default plan and the champion."""
        return [key for key in dict.fromkeys((self.default, self.champion)) if key and key not in self.known and self.space_of(key)]

    @property
    def ended_early(self):
        """Whether the search ended since no gain was expected any more."""
        return self.fruitless >= PATIENCE

    def proven(self):
        """Of `ranking` those that passed the large set of inputs too."""
        return [key for key in self.ranking() if self.known[key].proven]

    def ranking(self):
        """Keys of all plans that passed, the fastest first; those of spaces that are no longer there do not count."""
        passed = (key for key, outcome in self.known.items() if outcome.seconds is not None and self.space_of(key) is not None)
        return sorted(passed, key=lambda key: self.known[key].seconds)

    def _search(self, times):
        pending, ended = {}, False  # future -> (task, plan)
        while True:
            ended = ended or self.host.stop() or past(times.build, self.host) or self.ended_early
            taken = {task.key(plan) for task, plan in pending.values()}
            if not ended and self._batch is None and len(pending) <= self._few(taken):
                self._batch = self._proposals.begin(self._room(taken), taken)
            if not ended and self._batch is not None and self._batch.done():
                plans, room, self._batch = self._batch.result(), self._room(taken), None
                ended = not plans and not pending
                self.exhausted = ended and room > 0
                for task, plan in plans[:max(room, 0)]:  # of a search that goes on, whose last part may have had more
                    pending[self.builder.begin(token(task.space, plan).mod)] = task, plan
            first = [future for future, (task, plan) in pending.items() if task.key(plan) == self.default]
            if ended:
                pending = {future: entry for future, entry in pending.items() if future in first or not future.cancel()}
                if self.host.stop() or past(times.measure, self.host) or not pending:
                    break
            done = self._done(pending, first)
            for future in [future for future in pending if future in done]:  # in their order, or draws would not be repeatable
                self._measure(future, *pending.pop(future))
                if self.host.stop() or past(times.measure, self.host):
                    break

    def _done(self, pending, first):
        """Futures of plans that are built, after a moment where there are none: all or none where nothing is built while a kernel is
        measured, else those of `first` while there are some, since others take turns with the default plan, however soon they are built."""
        if self.alone:
            done, others = concurrent.futures.wait(pending, TICK, concurrent.futures.ALL_COMPLETED)
            return () if others else done
        wanted = first or [*pending, *filter(None, [self._batch])]
        return concurrent.futures.wait(wanted, TICK, concurrent.futures.FIRST_COMPLETED).done

    def _few(self, taken):
        """How many plans are so few under way that others are proposed."""
        alone = self.alone or self.builder.eager and self.default in taken
        return 0 if alone else AHEAD * self.builder.workers

    def _room(self, taken):
        """How many plans the next batch may have beside the keys in `taken`; whatever the trials, what the best must be compared with."""
        if self.builder.eager and self.default not in self.known:
            return 1
        count = max(self.builder.workers, BATCH)
        if self._limits.trials is not None:
            count = min(count, self._limits.trials - self.tried - len(taken))
        return max(count, len({*self.uncompared} - taken))

    def seeds(self, taken=()):
        """[(task, plan)] that a search begins with and that are neither known nor among `taken` keys."""
        return self._proposals.seeds(taken)

    def _measure(self, future, task, plan):
        """Gate and time what a future has built, and note the outcome."""
        key, best = task.key(plan), (self.ranking() or [None])[0]
        outcome, path = self._outcome(future, task.space, best)
        if outcome is None:
            return
        self.known[key] = replace(outcome, after=round(self._earlier + self.host.clock() - self._since, 1))
        self.tried += 1
        self.refused += outcome.refused is not None
        if outcome.refused is None:
            gain = best is None or outcome.seconds < (1 - GAIN) * self.known[best].seconds
            self.fruitless = 0 if gain else self.fruitless + 1
            if self.ranking()[0] == key:
                self._refer_to(key, path)
            else:
                self.builder.discard(path)
        else:
            self.fruitless += 1
        self.host.save()  # first of all: what has been told of is kept
        self.host.report(self.progress())

    def _outcome(self, future, space, best):
        """(Outcome, artefact where it passed) of what a future has built of a space, timed in turn with the `best`; (None, None) where the
        time is up. TuneError where the device is lost."""
        built = self.builder.result(future)
        if built.error_msg is not None:
            return Outcome(refused=_sentence(built.error_msg)), None
        path = str(built.artifact_path)
        facts = self.builder.built[path]
        self.declarations[space.name] = facts.declaration
        self._compare_with(best)
        result = self.runner.run([ms.runner.RunnerInput(path, space.arch.kind, [])])[0].result()
        if result.error_msg is not None:
            self.builder.discard(path)
            if result.error_msg.startswith(LOST):
                raise TuneError(result.error_msg)
            refused = _sentence(result.error_msg)
            return (None if refused == OUT_OF_TIME else Outcome(None, refused, facts.registers, facts.spill_bytes)), None
        found = self.runner.found.pop(path)
        seconds = statistics.median(float(x) for x in result.run_secs)
        return Outcome(seconds, None, facts.registers, facts.spill_bytes, round(found["spread"], 4), found["proven"] or None), path

    def course(self):
        """Seconds of the best so far after each plan that is known, in the order in which they were measured; None as long as none had
        passed."""
        found, best = [], None
        for key, outcome in self.known.items():
            if self.space_of(key) is not None:
                best = min(filter(None, (best, outcome.seconds)), default=None)
                found.append(best)
        return found

    def progress(self):
        """Where the session stands."""
        ranking = self.ranking()
        elapsed = self.host.clock() - self._begun
        left = None if self._limits.seconds is None else max(self._limits.seconds - elapsed, 0.0)
        return Progress(self.tried, self.refused, ranking[0] if ranking else None, self.known[ranking[0]].seconds if ranking else None,
                        elapsed, left)

    def _duel(self, times):
        """Winner among the best few, measured in turns; None where a stop came first, or the end of the time."""
        while finalists := self._finalists():
            of_spaces = {key: (self.space_of(key), key[1]) for key in finalists}
            found = last_round(of_spaces, self.builder, self.runner, self.host, self.seed, times)
            if found is None:
                return None
            scores, failures = found
            for key, why in failures.items():  # those that fail now, with their twin, are refused for good
                self.known[key] = replace(self.known[key], seconds=None, refused=_sentence(why))
            if scores:
                ranking = ranked(scores)
                self.known.update({key: replace(self.known[key], proven=True) for key in scores})
                return Winner("duel", ranking, self.known[ranking[0][1]], scores)
        return None

    def _finalists(self):
        """The default plan, which a winner must beat, the champion of earlier sessions, too, and the fastest few by the search's
        measurements."""
        ranking = self.ranking()
        return [key for key in dict.fromkeys((self.default, self.champion, *ranking[:FINALISTS])) if key in ranking]

    @property
    def default(self):
        """Key of the default plan."""
        return self.tasks[0].key(self.spaces[0].seed)

    def kept(self, winner):
        """[(space, [(seconds, plan)], the best first)] of what a database shall hold."""
        space = self.space_of(winner.key)
        return [(space, [(seconds, key[1]) for seconds, key in winner.ranking if space.owns(*key)])]

    def declaration(self, winner):
        """What the winner is of, as text."""
        return self.declarations[self.space_of(winner.key).name]

    def space_of(self, key):
        """The space that a (family name, plan) belongs to; None where it has gone since the plan was measured."""
        if key not in self._owners:
            self._owners[key] = next((space for space in self.spaces if space.owns(*key)), None)
        return self._owners[key]


def _sentence(text):
    """The first line of a reason, short enough for the log."""
    if text is None:
        return None
    lines = str(text).strip().splitlines() or [""]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")[:200]
