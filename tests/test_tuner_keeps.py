"""What a tuner keeps, whatever ends it, and how it uses its time: kills, full disks, torn files, honest turns, hints from other devices."""
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tvm.s_tir import meta_schedule as ms

from schedules.arch import CUDA_ARCHS
from schedules.lowering.toolkit import run_c_compiler
from schedules.tuning import log, reasons, run_worker, search
from schedules.tuning.last_round import Winner
from schedules.tuning.log import Outcome
from schedules.tuning.search import Limits
from schedules.tuning.sensors import Sensors, summary
from schedules.tuning.subjects import ForwardPass, subject_named
from scripts import tuner
from tests import fake_tuner, stand_in
from tests.commands import command
from tests.fake_tuner import ARCH, SHAPE, SLUG, WORKLOAD, Clock, FakeBuilder, FakeRunner, outcome_of, session, spaces

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "tuning_logs"
FAMILIES = {"stand_in": stand_in}


def place(root):
    return log.Log(root, SLUG, ForwardPass(WORKLOAD), ARCH)


def plans(count):
    """{key: Outcome} of some plans."""
    return {("stand_in", spaces()[0].seed.but(spare=spare)): Outcome(1e-3 + spare, None, 8, 0, 0.01, True) for spare in range(count)}


@pytest.fixture
def written(tmp_path):
    """A log of 20 plans, and these."""
    made, known = place(tmp_path), plans(20)
    made.write_measured(known, {"a space": "a hash"}, SHAPE)
    return made, known


class TestNeverLost:
    @pytest.mark.parametrize("moment", ["fdopen", "fsync", "chmod", "replace"])
    def test_a_kill_while_a_file_is_written_leaves_the_one_before(self, written, moment):
        made, known = written
        child = os.fork()
        if child == 0:  # dies in the middle of a write
            setattr(os, moment, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
            made.write_measured(plans(40), {}, SHAPE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert made.read_measured(FAMILIES, SHAPE) == (known, {"a space": "a hash"}) and made.torn is None
        with log.locked(made.path):
            assert [path.name for path in made.path.iterdir()] == [log.MEASURED], "what the dead one left behind is cleared away"

    def test_a_kill_of_the_command_loses_no_plan_and_leaves_no_process(self, tmp_path, monkeypatch):
        scratch, other = tmp_path / "scratch", tmp_path / "scratch" / f"{tuner.SCRATCH}of-one-that-runs"
        other.mkdir(parents=True)
        monkeypatch.setenv("TMPDIR", str(scratch))
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        arguments = ["--workload", WORKLOAD.name, "--target", "cpu", "--length", "64", "--workers", "1", "--logs", str(tmp_path / "logs")]
        started = subprocess.Popen([sys.executable, "-m", "scripts.tune", *arguments, "--minutes", "5"], cwd=ROOT, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        while not started.stdout.readline().startswith("["):
            assert started.poll() is None
        children = psutil.Process(started.pid).children(recursive=True)
        started.kill()
        started.wait()
        assert len(children) >= 2 and psutil.wait_procs(children, timeout=20)[1] == []
        left, = set(scratch.iterdir()) - {other}
        os.utime(left, (0, 0))
        path = next(tmp_path.glob(f"logs/*/*/{log.MEASURED}"))
        before = json.loads(path.read_text())["plans"]
        assert len(before) >= 1
        with log.locked(other):
            os.utime(other, (0, 0))
            found = command("tune", *arguments, "--trials", "1", code=0)
        assert list(scratch.iterdir()) == [other]
        assert f"which has {len(before)} plans" in found.stdout
        after = json.loads(path.read_text())["plans"]
        assert [plan[:2] for plan in after[:len(before)]] == [plan[:2] for plan in before], "and none is measured again"
        assert len({json.dumps(plan[:2]) for plan in after}) == len(before) + 1

    def test_every_plan_is_kept_before_the_next_is_built(self):
        saved, made = [], session()
        made.host = fake_tuner.Host(lambda: 0.0, lambda: False, lambda progress: None, lambda: saved.append(len(made.known)))
        made.run(Limits(trials=6))
        assert saved[:6] == [1, 2, 3, 4, 5, 6]

    def test_a_disk_that_is_full_keeps_what_was_written(self, written):
        made, known = written
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
        try:
            with pytest.raises(log.NotWritten, match="measured.json must be written, found .*: make room or choose another --logs folder"):
                made.write_measured(plans(40), {}, SHAPE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert made.read_measured(FAMILIES, SHAPE)[0] == known
        assert [path.name for path in made.path.iterdir()] == [log.MEASURED]

    def test_a_torn_file_gives_all_whole_plans_wherever_it_ends(self, written):
        made, known = written
        path = made.path / log.MEASURED
        text, keys = path.read_text(), list(known)
        begins = text.index("\n") + 1
        ends = list(itertools.accumulate((len(line) + 1 for line in text[begins:].splitlines()[:-1]), initial=begins - 2))[1:]
        for end in range(begins, len(text) - 2, 7):
            path.write_text(text[:end])
            found, declarations = made.read_measured(FAMILIES, SHAPE)
            whole = sum(each <= end for each in ends)
            assert list(found) == keys[:whole] and made.torn == whole and declarations == {"a space": "a hash"}
        path.write_text(text[:begins - 5])
        with pytest.raises(log.DamagedLog):
            made.read_measured(FAMILIES, SHAPE)

    def test_a_session_on_a_torn_log_goes_on(self, written):
        made, _ = written
        known, _ = made.read_measured(FAMILIES, SHAPE)
        tried = dict(known)
        builder = FakeBuilder()
        session(builder, known=known).run(Limits(trials=3))
        assert not {plan for plan, whole in builder.begun if not whole} & {plan for _, plan in tried}

    @pytest.mark.parametrize("noted", [{}, {"a name that spaces had before": "declaration 16"}])
    def test_what_no_declaration_is_on_record_of_is_forgotten(self, noted):
        """Where a field has become a knob, a space has another name: its plans would be trusted unseen."""
        known = {("stand_in", spaces()[0].seed): Outcome(seconds=1e-9), ("stand_in", spaces()[1].seed): Outcome(refused="wrong")}
        made = session(known=known, declarations=noted)
        made.run(Limits(trials=1))
        assert len(known) == 1 and all(outcome.seconds != 1e-9 for outcome in known.values())

    def test_refusals_are_of_a_declaration_too(self):
        made = session(FakeBuilder(fail=[spaces()[1].seed]), FakeRunner(refuse=lambda plan: plan.q_tile != 16 or plan.kv_tile != 32))
        made.run(Limits(trials=4))
        assert set(made.declarations) == {made.space_of(key).name for key in made.known} and len(made.declarations) == 3
        builder, known = FakeBuilder(), dict(made.known)
        session(builder, known=known, declarations={**made.declarations, spaces()[1].name: "another"}).run(Limits(trials=1))
        assert [plan for plan, whole in builder.begun if not whole] == [spaces()[1].seed], "only what it changed for is tried again"

    def test_a_log_of_another_version_is_refused_by_name(self, written):
        made, _ = written
        path = made.path / log.MEASURED
        path.write_text(path.read_text().replace(f'"schema": {log.SCHEMA}', '"schema": 3'))
        with pytest.raises(log.ForeignLog, match="measured.json must be of schema 1 or 2, found 3: use the version of the tuner"):
            made.read_measured(FAMILIES, SHAPE)

    @pytest.mark.parametrize("folder", sorted(path.parent for path in LOGS.glob(f"*/*/{log.MEASURED}")), ids=lambda path: path.name)
    def test_a_log_of_schema_1_is_read_as_it_would_be_written_now(self, folder, tmp_path):
        subject, run = subject_named(folder.name), log.read_json(folder / log.RUN)
        found, declarations = log.Log(LOGS, folder.parent.name, subject, CUDA_ARCHS[run["arch"]]).read_measured(
            subject.members(), shape := log.shape_of(run["shape"]))
        assert len(found) == run["trials"] and set(reasons.counts(found.values())) <= {"spills"}
        again = log.Log(tmp_path, folder.parent.name, subject, CUDA_ARCHS[run["arch"]])
        again.write_measured(found, declarations, shape)
        assert again.read_measured(subject.members(), shape) == (found, declarations)


class Drifting:
    """A kernel on a chip that gets slower with each look."""

    def __init__(self, seconds, chip, kind="cuda"):
        self.seconds, self.chip, self.expected, self.setting = seconds, chip, [], SimpleNamespace(kind=kind)

    def rested(self, look, repeats):
        self.expected.append(look)
        self.chip.append(self)
        return [self.seconds * 1.1 ** len(self.chip)]


class TestHonestTime:
    def test_what_slows_the_best_too_does_not_count(self):
        chip = []
        ours, best = Drifting(3.0, chip), Drifting(4.0, chip)
        found = run_worker._in_turns(ours, 3.0, best, best_seconds=2.0)
        assert sorted(found)[1] == pytest.approx(1.5, rel=0.11) and chip[-1].seconds >= 3.0
        assert chip == [best, ours, ours, best, best, ours] and set(best.expected) == {2.0}

    @pytest.mark.parametrize("kind, seconds, rounds", [("cuda", 3.8, 3), ("cuda", 4.0, 1), ("cpu", 5.0, 3), ("cpu", 9.0, 1)])
    def test_one_that_is_clearly_behind_in_the_first_round_gets_no_others(self, kind, seconds, rounds):
        assert len(run_worker._in_turns(Drifting(seconds, chip := [], kind), 3.0, Drifting(4.0, chip, kind), best_seconds=2.0)) == rounds

    def test_each_plan_is_timed_in_turn_with_the_best_of_its_moment(self):
        turns = []

        class Watching(FakeRunner):
            def run(self, inputs):
                turns.append((str(inputs[0].artifact_path), *self.best))
                return super().run(inputs)
        made = session(builder := FakeBuilder(), Watching(refuse=lambda plan: False))
        made.run(Limits(trials=12))
        best = None, None
        for path, *told in turns:
            assert tuple(told) == best
            seconds = outcome_of(stand_in.StandInPlan(*json.loads(path))).seconds
            best = (seconds, path) if best[0] is None or seconds < best[0] else best
        assert builder.built == {}, "no artefact is left"

    def test_the_best_of_earlier_sessions_is_built_again_and_keeps_its_time(self):
        seed, runner = spaces()[0].seed, FakeRunner(refuse=lambda plan: False)
        known = {("stand_in", seed): Outcome(seconds=2e-9, after=7.5)}
        builder = FakeBuilder()
        session(builder, runner, known=known).run(Limits(trials=2))
        assert builder.begun[0] == (seed, True) and runner.measured[0] == seed
        assert known["stand_in", seed] == Outcome(seconds=2e-9, after=7.5, proven=True)

    def test_a_runner_knows_what_to_compare_with_before_a_plan_is_built(self):
        """A fleet measures a plan as soon as it is built, before `run` asks for it."""
        seed, runner, told = spaces()[0].seed, FakeRunner(refuse=lambda plan: False), []

        class Watching(FakeBuilder):
            def begin(self, mod, whole=False):
                told.append(runner.best)
                return super().begin(mod, whole)
        made = session(Watching(), runner, known={("stand_in", seed): Outcome(seconds=2e-9)})
        made.run(Limits(trials=2))
        assert [seconds for seconds, _ in told] == [2e-9] * 2 and None not in {path for _, path in told}
        assert runner.best == (None, None), "nothing of this search is left for the next one"

    def test_a_plan_of_earlier_sessions_that_is_wrong_today_is_refused(self):
        seed = spaces()[0].seed
        known = {("stand_in", seed): Outcome(seconds=2e-9)}
        session(runner=FakeRunner(refuse=lambda plan: plan == seed), known=known).run(Limits(trials=4))
        assert known["stand_in", seed].refused == "wrong"

    def test_the_last_round_is_of_the_default_plan_and_the_top_five(self):
        made = session(runner=FakeRunner(refuse=lambda plan: False))
        winner = made.run(Limits())
        assert set(winner.scores) == {made.default, *made.ranking()[:5]} and isinstance(winner, Winner)


def library(folder, name, source):
    path = folder / name
    path.with_suffix(".c").write_text(source)
    run_c_compiler(["-x", "c", "-shared", "-fPIC", str(path.with_suffix(".c")), "-o", str(path)])
    return str(path)


NVML = """
int nvmlInit_v2(void) { return %d; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = (void *)bus; return bus[0] != '7'; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *value) { *value = kind == 1 ? 1830 : 0; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *value) { *value = 651400; return 0; }
int nvmlDeviceGetTemperature(void *device, int kind, unsigned *value) { return 3; }
"""
CUDA = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetPCIBusId(char *bus, int size, int device) { bus[0] = '7'; bus[1] = 0; return device; }
"""


class TestSensors:
    def test_tell_clock_and_power_while_something_runs(self, tmp_path):
        sensors = Sensors(library(tmp_path, "nvml.so", NVML % 0), library(tmp_path, "cuda.so", CUDA))
        with sensors.watching() as readings:
            time.sleep(0.05)
        assert len(readings) >= 2 and summary(readings) == {"sm_mhz": 1830, "watts": 651}, "and what one does not tell is left out"

    def test_that_are_not_there_tell_nothing(self, tmp_path):
        deaf = library(tmp_path, "deaf.so", NVML % 9)
        for sensors in (Sensors("libnowhere.so", "libnowhere.so"), Sensors(deaf, library(tmp_path, "cuda.so", CUDA)),
                        Sensors(library(tmp_path, "old.so", "int nothing;"), deaf)):
            with sensors.watching() as readings:
                pass
            assert sensors.read() == {} and summary(readings) == {}


class TestQuick:
    def test_kernels_are_built_while_others_are_measured_but_for_those_of_a_cpu(self):
        class Counting(FakeRunner):
            def run(self, inputs):
                begun.append(len(builder.begun) - len(self.measured))
                return super().run(inputs)
        for alone, least in ((False, 2), (True, 1)):
            begun, builder = [], FakeBuilder(workers=4)
            made = session(builder, Counting())
            made.alone = alone
            made.run(Limits(trials=12))
            assert max(begun[:-1]) > least

    def test_the_search_ends_where_no_gain_is_expected(self, monkeypatch):
        monkeypatch.setattr(search, "PATIENCE", 5)
        made = session(runner=FakeRunner(refuse=lambda plan: plan != spaces()[0].seed))
        assert made.run(Limits()).measured == "duel" and made.ended_early and made.tried < 5 + search.BATCH

    def test_a_kernel_that_hangs_at_the_end_of_the_time_is_not_refused_for_it(self):
        clock = Clock()

        class Hanging(FakeRunner):
            def run(self, inputs):
                if len(self.measured) < 3:
                    return super().run(inputs)
                clock.now += self.left()
                return [ms.runner.LocalRunnerFuture(None, reasons.OUT_OF_TIME)]
        made = session(runner=Hanging(), clock=clock)
        made.run(Limits(seconds=60))
        assert clock.now <= 62 and len(made.known) == 3

    def test_hints_are_tried_behind_the_default_plan(self):
        hint = "stand_in", spaces()[0].seed.but(lanes=4, spare=3)
        made = session(builder := FakeBuilder(), hints=(hint, ("stand_in", stand_in.StandInPlan(8, 8))))
        made.run(Limits(trials=3))
        assert [plan for plan, _ in builder.begun[:2]] == [spaces()[0].seed, hint[1]]
