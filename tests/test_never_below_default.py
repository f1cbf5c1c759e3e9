"""Tuning never ends below the default plan: it is measured first, whatever is built first, and what was not compared with it is no best."""
import concurrent.futures
import json

import pytest

from schedules import registry
from schedules.tuning import log, records, runner, search
from schedules.tuning.log import Outcome
from schedules.tuning.results import conclude
from schedules.tuning.proposals import Proposals
from schedules.tuning.rounds import Contender, Rounds
from schedules.tuning.search import Host, Limits, TuneError
from schedules.tuning.subjects import ForwardPass
from scripts import cli, export, options
from tests import fake_tuner, stand_in, test_tune_backward
from tests.commands import command
from tests.fake_tuner import ARCH, SHAPE, SLUG, WORKLOAD, FakeBuilder, FakeRunner, session, spaces
from tests.stand_in import StandInPlan

pytestmark = pytest.mark.slow

DEFAULT = "stand_in", spaces()[0].seed
OTHERS = [("stand_in", plan) for plan in spaces()[0].fitting_plans() if plan != DEFAULT[1]]
#: Seconds of a session that has time for all that is tried here, and by which the time is up.
LONG, OVER = 10**6, 10**7
WHY = "must be compared with the default plan, found that the time was up before that was measured, so none is put on record: run the same"


class Clock(fake_tuner.Clock):
    """Ends what is being built once its time has come."""

    def __init__(self):
        super().__init__()
        self.building = []  # (when it is done, future, result)

    def __call__(self):
        now = super().__call__()
        for entry in [entry for entry in self.building if entry[0] <= now]:
            self.building.remove(entry)
            entry[1].set_result(entry[2])
        return now


class DefaultLast:
    """A builder that takes long for the default plan (plans), and no time for others."""

    def __init__(self, clock, default=DEFAULT[1], slow=20, **more):
        super().__init__(**more)
        self.clock, self.default, self.slow = clock, default, slow

    def begin_plan(self, space, plan, whole=False):
        done = super().begin_plan(space, plan, whole)
        if whole or done.result() != self.default or not self.slow:
            return done
        future = concurrent.futures.Future()
        self.clock.building.append((self.clock.now + self.slow, future, done.result()))
        return future


class Builder(DefaultLast, FakeBuilder):
    pass


class EagerBuilder(Builder):
    eager = True


class GradientBuilder(DefaultLast, test_tune_backward.Builder):
    pass


class EndOfTime:
    """A runner after some of whose measurements the time is up."""

    def __init__(self, clock, fit, **more):
        super().__init__(**more)
        self.clock, self.fit = clock, fit

    def run(self, inputs):
        found = super().run(inputs)
        self.fit -= 1
        self.clock.now += OVER if self.fit == 0 else 0
        return found


class Runner(EndOfTime, FakeRunner):
    pass


class GradientRunner(EndOfTime, test_tune_backward.Runner):
    pass


@pytest.fixture(autouse=True)
def no_real_time(monkeypatch):
    monkeypatch.setattr(search, "TICK", 0.0)
    monkeypatch.setattr(search, "Proposals", lambda *about: Proposals(*about[:-1], apart=False))


@pytest.fixture(params=[False, True], ids=["default is slow", "default is best"])
def best_is_default(request, monkeypatch):
    """Whether what is measured says that no plan is faster than the default plan."""
    if request.param:
        monkeypatch.setattr(fake_tuner, "outcome_of", lambda plan: Outcome(1e-3 if plan == DEFAULT[1] else 2e-3))
    return request.param


def forward(fit, builder=Builder, slow=20, late=True, known=None, champion=None):
    clock = Clock()
    return session(builder(clock, slow=slow), Runner(clock, fit, late=late, refuse=lambda plan: False), known=known, clock=clock,
                   champion=champion)


def check(winner, made, best_is_default):
    seconds = {key: outcome.seconds for key, outcome in made.known.items()}
    assert winner.key in seconds and seconds[winner.key] == min(seconds.values())
    assert (winner.key == DEFAULT) == (seconds[DEFAULT] == min(seconds.values())) and (winner.key == DEFAULT or not best_is_default)


@pytest.mark.parametrize("fit", range(1, 14))
class TestWhenTheTimeEnds:
    @pytest.mark.parametrize("late", [False, True], ids=["last round", "search"])
    @pytest.mark.parametrize("builder", [Builder, EagerBuilder])
    def test_the_forward_pass(self, fit, builder, late, best_is_default):
        made = forward(fit, builder, late=late)
        winner = made.run(Limits(seconds=LONG))
        assert next(iter(made.known)) == DEFAULT and made.tried == fit and winner.measured == ("search" if late else "duel")
        check(winner, made, best_is_default)

    def test_gradients(self, fit):
        clock, default = Clock(), test_tune_backward.DEFAULT
        made = test_tune_backward.sessions(GradientRunner(clock, fit, late=True), GradientBuilder(clock, default), clock)
        winner = made.run(Limits(seconds=LONG))
        plans = [made._together({name.split(".")[1]: plan}) for name, plan in made.known]
        assert winner.measured == "search" and plans[0] == default and winner.seconds == min(
            test_tune_backward.seconds_of(it) for it in plans) and (winner.key[1] != default) == (fit > 1)

    def test_a_suite(self, fit, best_is_default):
        made = forward(fit)
        found, clock = [], made.host.clock
        contender = Contender("it", 1, made, lambda: None, lambda times: found.append(made.finish(times)))
        Rounds([contender], Host(clock, lambda: False, None, None), Limits(seconds=LONG), 1.0, print, (TuneError,)).run()
        assert next(iter(made.known)) == DEFAULT and made.tried == fit
        check(*found, made, best_is_default)

    def test_a_log_that_has_no_default_plan(self, fit, best_is_default):
        """As sessions left them that measured what was built first. The best on record is built again, and the default plan is next."""
        known = {OTHERS[0]: Outcome(1.5e-3, proven=True), OTHERS[1]: Outcome(5e-3, proven=True)}
        made = forward(fit + 1, known=known, champion=OTHERS[0])
        winner = made.run(Limits(seconds=LONG))
        assert list(known)[2] == DEFAULT and made.tried == fit
        check(winner, made, best_is_default)


class TestNoBest:
    @pytest.mark.parametrize("known", [{}, {OTHERS[0]: Outcome(1e-6, proven=True)}], ids=["new", "a log without the default plan"])
    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("builder", [Builder, EagerBuilder])
    def test_where_the_default_plan_is_not_built_in_time(self, known, late, builder):
        made, before = forward(0, builder, slow=OVER, late=late, known=dict(known)), dict(known)
        with pytest.raises(TuneError, match=f"^the best plan of {WORKLOAD.name} {WHY} command again with more --minutes"):
            made.run(Limits(seconds=60))
        assert made.known == before, "what is built sooner is not measured before"
        assert not any(whole for _, whole in made.builder.begun[1:]), "there is no last round without it"

    def test_of_gradients(self):
        clock = Clock()
        made = test_tune_backward.sessions(GradientRunner(clock, 0), GradientBuilder(clock, test_tune_backward.DEFAULT, OVER), clock)
        with pytest.raises(TuneError, match=WHY):
            made.run(Limits(seconds=60))
        assert made.known == {}

    def test_of_the_part_of_gradients_that_was_not_compared(self):
        known = {("cpu_backward.dq", test_tune_backward.DEFAULT.dq.but(unroll=4)): Outcome(1e-9, proven=True)}
        made = test_tune_backward.sessions(test_tune_backward.Runner(late=True), known=known, clock=Clock())
        made.sessions["dq"].search = lambda *arguments: None  # there was no time for it
        winner = made.run(Limits(trials=6))
        assert winner.seconds > 1e-9 and winner.key[1].dq == test_tune_backward.DEFAULT.dq

    def test_in_a_suite(self):
        made, told = forward(0, slow=OVER), []
        contender = Contender("it", 1, made, lambda: None, made.finish)
        shared = Rounds([contender], Host(made.host.clock, lambda: False, None, None), Limits(seconds=60), 1.0, told.append, (TuneError,))
        shared.run()
        assert WHY in str(shared.failed["it"])

    def test_where_the_best_on_record_was_not_measured(self):
        """It would be put out of its place unseen, by whatever the session had time for."""
        made = forward(1, champion=OTHERS[0])
        with pytest.raises(TuneError, match="must be compared with the best plan of earlier sessions"):
            made.run(Limits(seconds=LONG))
        assert list(made.known) == [DEFAULT]


def test_a_default_plan_that_was_never_proved_is_not_passed_by_a_slower_one():
    """It was measured beside a faster plan, which failed at last."""
    known = {OTHERS[0]: Outcome(4e-4, refused="wrong"), DEFAULT: Outcome(1e-3), OTHERS[1]: Outcome(2e-3, proven=True)}
    assert session(known=known).leader().key == DEFAULT


def test_a_default_plan_that_is_refused_is_no_measure():
    made = session(FakeBuilder(fail={DEFAULT[1]}), FakeRunner(late=True))
    assert made.run(Limits(trials=8)).measured == "search" and made.known[DEFAULT].refused


@pytest.mark.parametrize("champion", [None, OTHERS[0]])
def test_what_the_best_is_compared_with_is_measured_whatever_the_trials(champion):
    for builder in (FakeBuilder(), EagerBuilder(Clock(), slow=0)):
        made = session(builder, FakeRunner(refuse=lambda plan: False), champion=champion)
        made.run(Limits(trials=1))
        assert list(made.known) == [DEFAULT, *([champion] if champion else [])]


def test_where_plans_are_measured_as_soon_as_they_are_built_all_others_are_begun_behind_it():
    """A fleet would measure them beside nothing, at any of its workers."""
    told = []

    class Watching(EagerBuilder):
        def begin(self, mod, whole=False):
            told.append(watched.best[0])
            return super().begin(mod, whole)
    watched = FakeRunner(refuse=lambda plan: False)
    session(Watching(Clock(), slow=0), watched).run(Limits(trials=6))
    assert len(told) == 6 and told[0] is None and None not in told[1:]


@pytest.fixture
def only_stand_in(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))
    monkeypatch.setattr(runner, "DUEL_ROUNDS", 1)


class TestOnRecord:
    def test_a_session_that_is_too_short_leaves_none_and_readers_say_so(self, only_stand_in, tmp_path, capsys):
        what = ["--workload", WORKLOAD.name, "--target", "cpu", "--logs", str(tmp_path)]
        done = command("tune", *what, "--length", "64", "--workers", "1", "--minutes", "0.0001", code=cli.FAILED)
        assert WHY in done.stderr and done.stderr.count("\n") == 1 and not list(tmp_path.glob(f"*/*/{log.RUN}"))
        device, subjects = cli.find_device("cpu"), (ForwardPass(WORKLOAD), test_tune_backward.SUBJECT)
        not_compared = OTHERS[0], ("cpu_backward.dq", test_tune_backward.DEFAULT.dq.but(unroll=4))
        for subject, key in zip(subjects, not_compared):
            log.Log(tmp_path, device.slug, subject, device.arch).write_measured({key: Outcome(1e-9, proven=True)}, {}, SHAPE)
        args = export.make_parser().parse_args([*what, "--backward"])
        with pytest.raises(records.NoRecord, match=f"a record of {WORKLOAD.name} for .* was wanted, found none in .*or use --plan default"):
            options.chosen_plans(args, device, WORKLOAD)
        gradients, = options.chosen_gradients(args, device, WORKLOAD)
        assert gradients.measured is None and "gradients by their default plans: a record of bwd_" in capsys.readouterr().out

    def test_a_best_that_was_never_compared_can_be_read_and_goes_once_it_is(self, only_stand_in, tmp_path):
        place = log.Log(tmp_path, SLUG, ForwardPass(WORKLOAD), ARCH)
        slow = "stand_in", StandInPlan(16, 32, 4)
        made = session(known={slow: Outcome(2e-3, proven=True), DEFAULT: Outcome(3e-3)})
        winner = made.leader()
        made.declarations = {made.space_of(slow).name: records.declaration_of(stand_in, WORKLOAD, slow[1])}
        conclude(place, made, SHAPE, None, winner, {"slug": SLUG}, {"seed": 0})
        record, = records.best_records(tmp_path, SLUG, WORKLOAD, ARCH)
        assert (record.family, record.plan) == slow and json.loads((place.path / log.RUN).read_text())["best"]["measured"] == "search"
        known = {slow: Outcome(2e-3, proven=True)}
        again = session(runner=FakeRunner(late=True), known=known, champion=slow)
        assert again.run(Limits(trials=1)).key == DEFAULT
