"""The tuner at work: the gate, worker processes, MetaSchedule's search over a space, and the loop of a session."""
import importlib.util
import itertools
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from schedules import build
from schedules.lowering.toolkit import run_c_compiler
from schedules.tuning import gate, log, records, runner
from schedules.tuning.builder import PoolBuilder
from schedules.tuning.features import KnobFeatures, token
from schedules.tuning.processes import Worker
from schedules.tuning.proposals import Proposals
from schedules.tuning.run_worker import Setting
from schedules.tuning.runner import GatedRunner
from schedules.tuning.search import Limits, TuneError
from schedules.tuning.subjects import ForwardPass
from schedules.tuning.task import Task
from te_defs import reference
from te_defs.workload import Shape
from tests import stand_in
from tests.fake_tuner import SHAPE, WORKLOAD, Clock, FakeBuilder, FakeRunner, outcome_of, session, spaces
from tests.stand_in import UNSCHEDULABLE, WRONG, StandInPlan

pytestmark = pytest.mark.slow

CPU = tvm.cpu()


@pytest.fixture(scope="module")
def gate_cases():
    return gate.cases(ForwardPass(WORKLOAD), CPU)


def by_reference(change=lambda out, lse: None):
    """A kernel that computes with NumPy and lets `change` spoil what it writes."""
    def kernel(q, k, v, out, lse, scale):
        exact, exact_lse = reference.forward(WORKLOAD, q.numpy(), k.numpy(), v.numpy(), scale)
        exact, exact_lse = exact.astype(np.float32), exact_lse.astype(np.float32)
        change(exact, exact_lse)
        out.copyfrom(exact)
        lse.copyfrom(exact_lse)
    return kernel


class TestGate:
    def test_a_right_kernel_passes(self, gate_cases):
        assert gate.check(by_reference(), gate_cases, CPU, by_reference()) < 1e-6

    def test_the_cases_are_ragged_and_have_rows_without_keys(self, gate_cases):
        lses = [reference.forward(WORKLOAD, *(x.numpy() for x in case.inputs), case.behind[0])[1] for case in gate_cases]
        assert any(np.isneginf(lse).any() and not np.isneginf(lse).all() for lse in lses)
        assert {case.negative for case in gate_cases} == {True, False}

    @pytest.mark.parametrize("change, message", [
        (lambda out, lse: out.__iadd__(0.01), "error 1.00e-02 exceeds"),
        (lambda out, lse: lse.__imul__(1.1), "LSE is .* where .* is right"),
        (lambda out, lse, by=itertools.cycle((1, 1 + 2**-23)): out.__imul__(np.float32(next(by))), "two runs on the same inputs differ"),
    ])
    def test_a_wrong_kernel_is_refused(self, gate_cases, change, message):
        with pytest.raises(gate.Refused, match=message):
            gate.check(by_reference(change), gate_cases, CPU)

    def test_the_twin_is_judged_too(self, gate_cases):
        with pytest.raises(gate.Refused, match="N = 199"):
            gate.check(by_reference(), gate_cases, CPU, by_reference(lambda out, lse: out.__iadd__(1)))

    def test_what_is_not_written_is_no_answer(self, gate_cases):
        with pytest.raises(gate.Refused, match="is nan where"):
            gate.check(lambda *arguments: None, gate_cases, CPU)

    def test_nothing_is_written_past_the_end(self):
        output = gate.Output((2, 3), np.float32, CPU)
        output.tensor()
        output._whole.copyfrom(np.zeros(6 + gate.GUARD, np.float32))
        with pytest.raises(gate.Refused, match="past the end of an output"):
            output.numpy()


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    made = PoolBuilder(1, None, None, tmp_path_factory.mktemp("artefacts"))
    made.spaces = spaces()
    yield made
    made.close()


@pytest.fixture(scope="module")
def device_runner():
    made = GatedRunner("cpu", None)
    made.setting = Setting("cpu", ForwardPass(WORKLOAD), SHAPE)
    yield made
    made.close()


def built(builder, plan, whole=False):
    space = next(space for space in builder.spaces if space.owns("stand_in", plan))
    return builder.result(builder.begin(token(space, plan).mod, whole))


def measured(device_runner, path):
    return device_runner.run([ms.runner.RunnerInput(str(path), "cpu", [])])[0].result()


class TestWorkers:
    def test_a_right_plan_is_built_passes_and_is_timed(self, builder, device_runner):
        result = built(builder, StandInPlan(16, 32), whole=True)
        assert result.error_msg is None
        assert builder.built[result.artifact_path].declaration == records.declaration_of(stand_in, WORKLOAD, StandInPlan(16, 32))
        seconds = measured(device_runner, result.artifact_path).run_secs
        assert len(seconds) == 3 and 0 < float(seconds[0]) < 1
        found = device_runner.duel([result.artifact_path] * 2, seed=0)
        assert [len(entry["seconds"]) for entry in found] == [runner.DUEL_ROUNDS] * 2

    def test_the_artefact_is_the_symbolic_kernel(self, builder):
        result = built(builder, StandInPlan(16, 32))
        kernel = tvm.runtime.load_module(str(result.artifact_path))[build.KERNEL]
        inputs = [tvm.runtime.tensor(x) for x in reference.make_inputs(WORKLOAD, Shape(2, 2, 1, 5, 9))]
        out, lse = tvm.runtime.empty((2, 5, 2, 8), "float32"), tvm.runtime.empty((2, 2, 5), "float32")
        kernel(*inputs, out, lse, 0.25)
        exact, _ = reference.forward(WORKLOAD, *(x.numpy() for x in inputs), 0.25)
        assert np.abs(out.numpy() - exact).max() < 1e-5

    def test_a_wrong_plan_is_refused_and_not_timed(self, builder, device_runner):
        result = built(builder, StandInPlan(16, 16, fault=WRONG))
        found = measured(device_runner, result.artifact_path)
        assert found.run_secs is None
        assert "is right: error" in found.error_msg

    def test_a_kernel_at_the_path_of_another_is_judged_as_itself(self, builder, device_runner, tmp_path):
        """The loader would give the first one: a wrong kernel would pass for a right one, with its time. A new process does not."""
        path, found = tmp_path / "kernel.so", []
        for plan in (StandInPlan(16, 32), StandInPlan(16, 16, fault=WRONG)):
            path.unlink(missing_ok=True)
            path.write_bytes(Path(built(builder, plan).artifact_path).read_bytes())
            found.append(measured(device_runner, path))
        assert found[0].error_msg is None
        assert found[1].run_secs is None and found[1].error_msg.startswith("wrong: ") and "is right: error" in found[1].error_msg

    def test_a_plan_that_cannot_be_scheduled_is_refused(self, builder):
        result = built(builder, StandInPlan(16, 16, fault=UNSCHEDULABLE))
        assert result.artifact_path is None
        assert "no such block" in result.error_msg

    @pytest.mark.parametrize("at_load, message", [
        ("abort();", "the kernel crashes"), ("sleep(60);", "not measured within 3 s"), (";", f"Module has no function '{build.KERNEL}'")])
    def test_a_kernel_that_crashes_or_hangs_does_not_stop_the_next(self, builder, device_runner, tmp_path, monkeypatch, at_load, message):
        monkeypatch.setattr(runner, "TIMEOUT", 3)
        monkeypatch.setitem(runner.LATER, "cpu", 3)
        source, library = tmp_path / "bad.c", tmp_path / "bad.so"
        source.write_text(f"#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void load() {{ {at_load} }}\n")
        run_c_compiler(["-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)])
        assert message in measured(device_runner, library).error_msg
        monkeypatch.setattr(runner, "TIMEOUT", 60)
        assert measured(device_runner, built(builder, StandInPlan(16, 32)).artifact_path).error_msg is None


class TestTask:
    def make(self, known=()):
        np.random.seed(0)
        model = ms.cost_model.XGBModel(extractor=KnobFeatures(spaces()), num_warmup_samples=2, verbose_eval=0, num_tuning_cores=1)
        return Task(spaces()[0], SHAPE, model, dict(known), seed=0, threads=1)

    def test_proposes_plans_that_fit_each_once_until_none_is_left(self):
        task, seen = self.make(), []
        while plans := task.propose(3):
            seen += plans
            task.known.update({task.key(plan): outcome_of(plan) for plan in plans})
        assert len(seen) == len(set(seen)) == len(task.fitting) == 8
        assert set(seen) == set(task.fitting)

    def test_what_is_known_or_pending_is_not_proposed(self):
        task = self.make()
        known = {task.key(plan): outcome_of(plan) for plan in task.fitting[:3]}
        task = self.make(known)
        pending = {task.key(plan) for plan in task.fitting[3:5]}
        assert set(task.propose(2, pending)) <= set(task.fitting[5:])

    def test_the_best_plans_become_parents(self):
        task = self.make()
        task.known.update({task.key(plan): outcome_of(plan) for plan in task.fitting[:5]})
        task.propose(1)
        workload = task._database.commit_workload(task.static)
        best = task._database.get_top_k(workload, 1)[0]
        assert float(best.run_secs[0]) == pytest.approx(task.measured()[0][0])

    def test_same_seed_same_proposals(self):
        assert self.make().propose(4) == self.make().propose(4)

    def test_features_tell_plans_and_families_apart(self):
        features = KnobFeatures(spaces())
        rows = {tuple(features.row(token(space, plan).mod)) for space in spaces() for plan in space.fitting_plans()}
        assert len(rows) == sum(len(space.fitting_plans()) for space in spaces())


class TestSession:
    def test_starts_with_every_seed_and_tries_no_plan_twice(self):
        builder = FakeBuilder()
        made = session(builder)
        made.run(Limits(trials=12))
        tried = [plan for plan, whole in builder.begun if not whole]
        assert set(tried[:4]) == {space.seed for space in spaces()}
        assert len(tried) == len(set(tried)) == 12
        assert made.refused == 2, "both seeds with faults"

    def test_goes_on_to_the_end_of_all_spaces(self):
        made = session(runner=FakeRunner(refuse=lambda plan: False))
        winner = made.run(Limits())
        assert len(made.known) == sum(len(space.fitting_plans()) for space in spaces())
        assert winner.measured == "duel" and winner.key[1].lanes == 16 and winner.key[1].spare == 2

    def test_a_resumed_session_tries_new_plans_only(self):
        known, first, second = {}, FakeBuilder(), FakeBuilder()
        session(first, known=known).run(Limits(trials=5))
        session(second, known=known).run(Limits(trials=5))
        tried = [plan for builder in (first, second) for plan, whole in builder.begun if not whole]
        assert len(tried) == len(set(tried)) == 10

    def test_what_was_found_of_another_declaration_is_forgotten(self):
        space = spaces()[0]
        known = {("stand_in", plan): log.Outcome(seconds=1e-9) for plan in space.fitting_plans()}
        made = session(known=known, declarations={space.name: "an old one"})
        made.run(Limits(trials=1))
        assert len(known) == 1

    def test_time_ends_the_search(self):
        made = session(clock=Clock())
        made.run(Limits(seconds=20))
        assert 4 <= made.tried < 14

    @pytest.mark.parametrize("seconds", [20, 70, 200])
    def test_it_ends_in_time(self, seconds):
        clock = Clock()
        session(clock=clock).run(Limits(seconds=seconds))
        assert clock.now <= seconds + 2

    def test_a_duel_that_comes_too_late_leaves_the_search_to_decide(self):
        made = session(runner=FakeRunner(late=True))
        assert made.run(Limits(trials=6)).measured == "search"
        assert made.refused == 2, "nobody is refused for it"

    def test_the_duel_decides_and_the_champion_takes_part(self):
        worst = spaces()[0].seed.but(lanes=4, spare=0)
        made = session(runner=FakeRunner(upset=True, refuse=lambda plan: False), champion=("stand_in", worst))
        assert made.run(Limits()).key[1] == worst

    def test_a_finalist_that_fails_is_refused_for_good(self):
        class Strict(FakeRunner):
            def duel(self, paths, seed, left=None):
                found = super().duel(paths, seed)
                return [{"refused": "twin is wrong"}, *found[1:]]
        made = session(runner=Strict())
        winner = made.run(Limits())
        assert sum(outcome.refused == "twin is wrong" for outcome in made.known.values()) == 1
        assert made.known[winner.key].refused is None

    def test_a_stop_ends_it_without_a_duel(self):
        builder = FakeBuilder()
        made = session(builder, stop=lambda: len(builder.begun) > 4)
        made.run(Limits())
        assert made.run(Limits()).measured == "search"
        assert not any(whole for _, whole in builder.begun)

    def test_says_so_where_nothing_passes(self):
        with pytest.raises(TuneError, match="no plan of fwd_d16_dv8_f32_causal has passed so far, found 4 of 4 refused: 4 wrong"):
            session(runner=FakeRunner(refuse=lambda plan: True)).run(Limits(trials=4))

    def test_a_build_that_fails_is_an_outcome(self):
        made = session(FakeBuilder(fail={spaces()[0].seed}))
        made.run(Limits(trials=4))
        assert made.known["stand_in", spaces()[0].seed].refused == "ValueError: cannot be built"


class Slow:
    """A task whose search takes its time; `begun` is set once it does."""

    def __init__(self, plan):
        self.space, self.plan, self.begun, self.go_on = SimpleNamespace(seed=plan, size=2), plan, threading.Event(), threading.Event()

    def key(self, plan):
        return "slow", plan

    def measured(self):
        return []

    def unknown(self, taken):
        return [self.plan]

    def propose(self, count, taken):
        self.begun.set()
        assert self.go_on.wait(10)
        return ["picked"]


@pytest.mark.parametrize("apart", [True, False])
def test_others_are_measured_while_plans_are_proposed(apart):
    task = Slow("seed")
    made = Proposals([task], {}, (), lambda key: task.space, apart)
    assert made.begin(3, ()).result() == [(task, "seed")] and not task.begun.is_set()
    if not apart:
        task.go_on.set()
    future = made.begin(3, {("slow", "seed")})
    assert task.begun.wait(10) and future.done() is not apart
    task.go_on.set()
    assert future.result(10) == [(task, "picked")]
    assert made.begin(0, ()).result() == []


def test_processes_do_without_pytorch_until_it_is_wanted():
    made = Worker(os.getpid, ())
    assert not made.ask(60, eval, "'torch' in __import__('sys').modules")
    assert made.ask(60, importlib.util.find_spec, "torch") == importlib.util.find_spec("torch")
    made.restart()


def test_nothing_is_left_running(tmp_path):
    made = PoolBuilder(1, None, None, tmp_path)
    made.spaces = spaces()
    begun = time.monotonic()
    future = made.begin(token(spaces()[0], spaces()[0].seed).mod)
    waiting = made.begin(token(spaces()[0], spaces()[0].seed.but(lanes=4)).mod)
    waiting.cancel()
    made.close()
    assert future.done() and time.monotonic() - begun < 60
