"""Suites: one budget over many subjects goes where the gain is, whatever fails or ends it, and nothing is measured twice."""
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedules import registry
from schedules.arch import cpu_arch, cuda_arch
from schedules.buckets import bucket_at
from schedules.tuning import log, rounds, runner
from schedules.tuning.last_round import Times
from schedules.tuning.log import Outcome
from schedules.tuning.reasons import LOST
from schedules.tuning.rounds import Contender, Rounds
from schedules.tuning.search import Host, Limits, TuneError
from schedules.tuning.suites import SUITES, Entry, Suite
from scripts import cli
from te_defs.workload import Shape
from tests import fake_tuner, stand_in
from tests.commands import command
from tests.fake_tuner import FakeBuilder, FakeRunner

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class PlantedSession:
    """A search whose n-th plan takes `seconds(n)`, and `each` seconds to measure; plan 0 is the default one, and the first are seeds."""

    default = "planted", 0

    def __init__(self, clock, seconds, each=1.0, plans=10_000, known=None, last_round=1.0):
        self.clock, self.at, self.each, self.plans, self.known = clock, seconds, each, plans, {} if known is None else known
        self.tried, self.ended_early, self.last_round = 0, False, last_round

    @property
    def searches(self):
        return {None: self}

    @property
    def exhausted(self):
        return len(self.known) >= self.plans

    def seeds(self):
        return list(range(len(self.known), 4))

    def course(self):
        passed = [outcome.seconds for outcome in self.known.values()]
        return [min(passed[:n]) for n in range(1, len(passed) + 1)]

    def search(self, limits, times, begun):
        while not self.exhausted and (limits.trials is None or self.tried < limits.trials) and not rounds.past(times.build, self):
            self.clock.now += self.each
            number = len(self.known)
            self.known["planted", number] = Outcome(self.at(number), after=(number + 1) * self.each)
            self.tried += 1

    @property
    def host(self):
        return SimpleNamespace(clock=self.clock)




def improving(number):
    """Half a per cent with each plan."""
    return 0.995**number


def flat(number):
    return 1.0


class Planted:
    """Rounds over planted sessions, by name."""

    def __init__(self, clock, sessions, seconds=None, trials=None, weights=None, stop=lambda: False, ready=()):
        self.clock, self.sessions, self.told, self.finished, self.settled = clock, sessions, [], [], []
        contenders = [Contender(name, (weights or {}).get(name, 1), session, lambda name=name: self.settled.append(name),
                                lambda times, name=name: self.finish(name, times), name in ready) for name, session in sessions.items()]
        self.contenders = {contender.name: contender for contender in contenders}
        self.rounds = Rounds(contenders, Host(clock, stop, None, None), Limits(trials, seconds), 1.0, self.told.append, (TuneError,))

    def finish(self, name, times):
        assert times.end is None or self.clock.now <= times.end
        self.clock.now += self.sessions[name].last_round
        self.finished.append(name)

    def seconds(self):
        return {name: contender.seconds for name, contender in self.contenders.items()}


def planted(seconds=None, each=None, **more):
    clock = Clock()
    sessions = {name: PlantedSession(clock, at, **(each or {}).get(name, {})) for name, at in (("gains", improving), ("flat", flat))}
    made = Planted(clock, sessions, seconds, **more)
    made.rounds.run()
    return made


class TestBudget:
    def test_goes_where_the_gain_is(self):
        spent = planted(1000).seconds()
        assert spent["gains"] > 2 * spent["flat"] > 0

    def test_goes_where_the_user_spends_his_time(self):
        """What gains half a per cent a plan is worth less than hope where it stands for next to nothing."""
        spent = planted(1000, weights={"gains": 0.001}).seconds()
        assert spent["flat"] > 2 * spent["gains"] > 0

    def test_goes_to_the_one_that_is_tuned_quickly(self):
        clock = Clock()
        sessions = {name: PlantedSession(clock, lambda number: 0.999**number, each) for name, each in (("quick", 1.0), ("slow", 10.0))}
        made = Planted(clock, sessions, 1000)
        made.rounds.run()
        assert made.seconds()["quick"] > 2 * made.seconds()["slow"]

    def test_leaves_what_has_ceased_to_gain(self):
        def early(number):
            return 0.9**min(number, 30)
        clock = Clock()
        sessions = {"early": PlantedSession(clock, early), "late": PlantedSession(clock, lambda number: improving(max(number - 60, 0)))}
        made = Planted(clock, sessions, 2000)
        made.rounds.run()
        order = list(dict.fromkeys(told.split(":")[0] for told in made.told[2:]))
        assert order == ["early", "late"] and made.seconds()["late"] > 2 * made.seconds()["early"]

    def test_equal_ones_share_it(self):
        clock = Clock()
        sessions = {name: PlantedSession(clock, flat) for name in "abc"}
        made = Planted(clock, sessions, 600)
        made.rounds.run()
        assert max(made.seconds().values()) - min(made.seconds().values()) <= rounds.SLICE + 2

    def test_begins_with_first_plans_of_all_within_equal_shares(self):
        made = planted(1000)
        assert made.told[:2] == ["gains: next, for 474 s, its first plans", "flat: next, for 944 s, its first plans"]
        made = planted(100, each={"gains": {"each": 40.0}})
        assert made.sessions["flat"].tried >= 1, "one that is slow leaves time for the others"

    @pytest.mark.parametrize("seconds", [10, 60, 600])
    def test_is_kept_to_with_all_last_rounds(self, seconds):
        made = planted(seconds)
        assert made.clock.now <= seconds and sorted(made.finished) == ["flat", "gains"]
        assert sum(made.seconds().values()) == made.clock.now

    def test_says_why_the_next_one_is_next(self):
        assert "gains: next, for 30 s, it gained 1.5 % by its last 3 plans and had 4 s so far" in planted(1000).told

    def test_ends_where_nothing_is_left_to_try(self):
        made = planted(10_000, each={name: {"plans": 50} for name in ("gains", "flat")})
        assert [session.tried for session in made.sessions.values()] == [50, 50] and made.clock.now < 110
        assert made.finished == ["gains", "flat"]

    def test_one_that_has_ended_has_its_last_round_at_once(self):
        made = planted(1000, each={"flat": {"plans": 10}})
        assert made.finished == ["flat", "gains"] and made.sessions["gains"].tried > 500

    @pytest.mark.parametrize("trials", [2, 7])
    def test_trials_are_of_each(self, trials):
        made = planted(trials=trials)
        assert [session.tried for session in made.sessions.values()] == [trials, trials] and len(made.finished) == 2

    def test_a_stop_ends_slices_and_keeps_what_there_is(self):
        made = planted(1000, stop=lambda: True)
        assert made.told == [] and sorted(made.finished) == ["flat", "gains"]

    def test_the_runner_is_told_whose_turn_it_is_before_each_step(self):
        made = planted(200)
        turns = [told.split(":")[0] for told in made.told] + made.finished
        assert made.settled == turns


class TestFailures:
    @pytest.mark.parametrize("where", ["search", "finish"])
    def test_one_that_fails_does_not_end_the_others(self, where):
        clock = Clock()
        sessions = {name: PlantedSession(clock, improving) for name in ("bad", "good")}
        made = Planted(clock, sessions, 300)

        def fail(*_):
            clock.now += 1
            raise TuneError("planted")
        if where == "search":
            sessions["bad"].search = fail
        else:
            made.contenders["bad"].finish = fail
        made.rounds.run()
        assert {name: str(error) for name, error in made.rounds.failed.items()} == {"bad": "planted"}
        assert made.finished == ["good"] and made.seconds()["good"] > 100

    def test_a_device_that_is_gone_ends_all(self):
        clock = Clock()
        sessions = {name: PlantedSession(clock, improving) for name in ("first", "second")}

        def lose(*_):
            raise TuneError(f"{LOST}, found none")
        sessions["first"].search = lose
        with pytest.raises(TuneError, match=LOST):
            Planted(clock, sessions, 300).rounds.run()
        assert sessions["second"].tried == 0


class TestResumed:
    def test_what_earlier_runs_spent_and_gained_counts(self):
        clock = Clock()
        first = {"gains": PlantedSession(clock, improving), "flat": PlantedSession(clock, flat)}
        Planted(clock, first, 300).rounds.run()
        again = {name: PlantedSession(clock, session.at, known=session.known) for name, session in first.items()}
        before = {name: len(session.known) for name, session in first.items()}
        made = Planted(clock, again, 300)
        assert [search.spent for search in made.rounds._searches] == [before["gains"], before["flat"]]
        made.rounds.run()
        assert made.told[0].startswith("gains: next, for 30 s, it gained 11.3 % by its last 24 plans")
        assert all(len(session.known) == before[name] + session.tried for name, session in again.items())

    def test_one_without_new_plans_keeps_the_last_round_that_it_had(self):
        made = planted(1000, each={"flat": {"plans": 0}}, ready=("flat",))
        assert made.finished == ["gains"]

    def test_time_is_kept_back_for_last_rounds_that_are_held_only(self):
        """Of a minute in which one of four comes to a slice, a quarter of what last rounds may take is too little for its own."""
        clock = Clock()
        sessions = {name: PlantedSession(clock, flat, plans=0) for name in ("a", "b", "c")}
        sessions["gains"] = PlantedSession(clock, improving)
        made, given = Planted(clock, sessions, 60, ready=tuple(sessions)), []
        made.contenders["gains"].finish = lambda times: given.append(times.end - clock.now)
        made.rounds.run()
        assert given == [60 * rounds.DUEL_SHARE - 1] and made.finished == []


class TestSlices:
    """Of real sessions, with builder and runner that make their results up."""

    def test_a_session_that_was_put_aside_goes_on_with_what_it_knows(self):
        clock, told = fake_tuner.Clock(), []
        builders = [FakeBuilder(), FakeBuilder()]
        sessions = [fake_tuner.session(builder, FakeRunner(refuse=lambda plan: False), clock=clock) for builder in builders]
        contenders = [Contender(name, 1, session, lambda: None, session.finish) for name, session in zip("ab", sessions)]
        shared = Rounds(contenders, Host(clock, lambda: False, None, None), Limits(seconds=900), 1.0, told.append, (TuneError,))
        shared.run()
        assert len(told) > 4 and not shared.failed and clock.now <= 900 + 60
        for builder, session in zip(builders, sessions):
            plans = [plan for plan, whole in builder.begun if not whole]
            assert len(set(plans)) == len(plans) == session.tried
            assert sum(whole for _, whole in builder.begun) <= 6, "the best kernel is at hand: only the last round builds anew"
            assert builder.built == {}
            after = [outcome.after for outcome in session.known.values()]
            assert after == sorted(after) and after[-1] < 0.7 * clock.now, "of its own time alone"

    def test_the_second_take_up_compares_with_the_best(self):
        builder, runner = FakeBuilder(), FakeRunner(refuse=lambda plan: False)
        made = fake_tuner.session(builder, runner)
        made.search(Limits(trials=3), Times(), 0.0)
        assert runner.best == (None, None) and len(builder.built) == 1
        made.search(Limits(trials=6), Times(), 0.0)
        assert made.tried == 6 and [whole for _, whole in builder.begun] == [False] * 6
        made.put_away()
        assert builder.built == {}


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
class TestData:
    def test_weights_are_per_cent_or_alike_and_entries_differ(self, suite):
        assert sum(entry.weight for entry in suite.entries) == 100 or {entry.weight for entry in suite.entries} == {1}
        assert len({entry.title for entry in suite.entries}) == len(suite.entries)

    def test_of_those_with_shapes_some_have_few_queries_of_grouped_heads_and_long_keys(self, suite):
        shapes = [entry.shape for entry in suite.entries if entry.shape]
        assert not shapes or any(shape.q_len * 64 <= shape.kv_len and shape.kv_heads < shape.q_heads for shape in shapes)

    def test_each_is_taken_by_a_family(self, suite):
        arch = cuda_arch("sm_90a") if suite.kind == "cuda" else cpu_arch("x86-64-v3", 256, 2)
        assert all(entry.subject.name == entry.name and entry.subject.takers(arch) for entry in suite.entries)


#: Takes moments, with a log of its own for the second entry's lengths.
TINY = Suite("cpu", (Entry("fwd_d16_dv8_f32_causal", 75, Shape(1, 2, 2, 64, 64)), Entry("fwd_d16_dv8_f32_full", 25, Shape(1, 4, 2, 8, 64))))
#: What no family of a CPU takes.
UNTAKEN = Entry("bwd_d16_dv8_f32_causal+any-order", 1)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))
    monkeypatch.setattr(runner, "DUEL_ROUNDS", 2)
    monkeypatch.setitem(SUITES, "tiny", TINY)


def tune(logs, *more, code=cli.DONE):
    return command("tune", "--suite", "tiny", "--target", "cpu", "--workers", "1", "--logs", logs, *more, code=code)


def run_of(entry, logs, file=log.RUN):
    return json.loads((logs / cli.find_device("cpu").slug / entry.title / file).read_text())


def plans_of(entry, logs):
    """[[family, values], ...] on record of an entry."""
    return [plan[:2] for plan in run_of(entry, logs, log.MEASURED)["plans"]]


class TestCommand:
    def test_tunes_all_tells_why_and_goes_on_when_asked_again(self, tiny, tmp_path):
        lines = tune(tmp_path, "--trials", "3").stdout.splitlines()
        assert json.loads(lines[0])["suite"] == "tiny"
        assert [line for line in lines if ": next" in line][:2] == [f"{entry.title}: next, its first plans" for entry in TINY.entries]
        head = next(number for number, line in enumerate(lines) if line.startswith("subject "))
        for entry, line in zip(TINY.entries, lines[head + 1:]):
            assert re.fullmatch(rf"{entry.title} +[\d.]+ +[\d.]+ +\d+\.\d+x \(\d+\.\d+ to \d+\.\d+\) +\d+ %", line)
        index = Path(lines[-1].split(" in ")[-1])
        links = re.findall('href="([^"]+)"', index.read_text())
        assert len(links) == 2 and all((index.parent / link).is_file() for link in links)
        before = {entry: plans_of(entry, tmp_path) for entry in TINY.entries}
        tune(tmp_path, "--trials", "2")
        for entry in TINY.entries:
            run, plans = run_of(entry, tmp_path), plans_of(entry, tmp_path)
            assert [session["suite"] for session in run["sessions"]] == 2 * [{"name": "tiny", "weight": entry.weight}]
            assert [session["trials"] for session in run["sessions"]] == [3, 2] and run["best"]["measured"] == "duel"
            assert plans[:3] == before[entry] and len({json.dumps(plan) for plan in plans}) == 5, "nothing is measured twice"

    def test_one_that_cannot_be_tuned_is_told_at_the_end(self, tiny, tmp_path, monkeypatch):
        monkeypatch.setitem(SUITES, "tiny", Suite("cpu", (UNTAKEN, *TINY.entries)))
        first, second = TINY.entries
        place = log.Log(tmp_path, cli.find_device("cpu").slug, first.subject, cli.find_device("cpu").arch, bucket_at(first.shape))
        place.write_measured({}, {}, replace(first.shape, q_len=65))
        done = tune(tmp_path, "--trials", "1", code=cli.FAILED)
        assert done.stderr.startswith(f"error: 2 of 3 subjects of suite tiny were not tuned: {UNTAKEN.name}: a schedule for ")
        assert f"; {first.title}: {place.path / log.MEASURED} must be of " in done.stderr and done.stderr.count("\n") == 1
        assert len(plans_of(second, tmp_path)) == 1
        done = tune(tmp_path, "--dry-run")
        assert f"{UNTAKEN.name} is not tuned: a schedule for " in done.stdout and f"{second.title} on " in done.stdout

    def test_minutes_are_those_of_all_together(self, tiny, tmp_path):
        said = tune(tmp_path, "--dry-run").stdout
        assert json.loads(said.splitlines()[0])["minutes"] == 6
        begun = time.monotonic()
        tune(tmp_path, "--minutes", "0.4")
        assert time.monotonic() - begun < 24 + 12, "processes start before, and end behind"

    def test_time_that_is_too_short_for_any_plan_is_told(self, tiny, tmp_path):
        done = tune(tmp_path, "--minutes", "0.001", code=cli.FAILED)
        why = "the time was up before its first plan was measured: allow more --minutes"
        assert done.stderr.endswith(f" were not tuned: {'; '.join(f'{entry.title}: {why}' for entry in TINY.entries)}\n")
        assert "href" not in Path(done.stdout.splitlines()[-1].split(" in ")[-1]).read_text(), "there are no reports to link to"

    @pytest.mark.parametrize("arguments, message", [
        (["--suite", "zz"], "--suite is one of llm, cpu, presets, found 'zz': choose one of these"),
        (["--suite", "llm"], "--suite llm is for cuda, found "),
        (["--suite", "cpu", "--workload", "d64_f32_full", "--length", "64"], "found --workload and --length too: leave one out"),
        (["--suite", "cpu", "--backward"], "found --backward too"), (["--suite", "cpu", "--family", "cpu"], "found --family too")])
    def test_what_cannot_be_meant_is_refused(self, arguments, message):
        assert message in command("tune", "--target", "cpu", *arguments, code=cli.USAGE).stderr


def started(logs):
    """The command in a process of its own, once two entries have a plan."""
    code = (f"import sys; from schedules.tuning.suites import *; SUITES['tiny'] = {TINY!r}; from schedules import registry; "
            "from tests import stand_in; registry.FAMILIES = stand_in,; from scripts import cli, tune; "
            "sys.exit(cli.main(tune.run, tune.make_parser().parse_args()))")
    arguments = ["--suite", "tiny", "--target", "cpu", "--workers", "1", "--logs", str(logs), "--minutes", "5"]
    made = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for beginning in (TINY.entries[1].title, "["):
        while not made.stdout.readline().startswith(beginning):
            assert made.poll() is None, made.stderr.read()
    return made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_loses_nothing(number, tmp_path, tiny):
    made = started(tmp_path)
    made.send_signal(number)
    out, complaints = made.communicate(timeout=120)
    before = {entry: plans_of(entry, tmp_path) for entry in TINY.entries}
    if number == signal.SIGINT:
        assert made.returncode == cli.FAILED and complaints.splitlines()[-1].startswith("error: interrupted: what was tuned so far is kept")
        assert "\nsubject " in out and all(run_of(entry, tmp_path)["best"]["measured"] == "search" for entry in TINY.entries)
    tune(tmp_path, "--trials", "2")
    for entry in TINY.entries:
        plans = plans_of(entry, tmp_path)
        assert plans[:len(before[entry])] == before[entry] and len({json.dumps(plan) for plan in plans}) == len(before[entry]) + 2
        assert run_of(entry, tmp_path)["best"]["measured"] == "duel"
