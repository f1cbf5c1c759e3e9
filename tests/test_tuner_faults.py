"""Faults that a tuner meets, planted one by one: kernels that are fast and wrong, that hang, crash or trap, a device that is gone, full
disks, torn files, kills. What it must do: say what was wrong, keep what it knows, and go on."""
import concurrent.futures
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from schedules.build import KERNEL
from schedules.space import Space
from schedules.tuning import build_worker, gate, processes, reasons, runner
from schedules.tuning.build_worker import Job
from schedules.tuning.builder import PoolBuilder
from schedules.tuning.log import Outcome
from schedules.tuning.processes import Pool, Worker
from schedules.tuning.run_worker import Setting
from schedules.tuning.runner import GatedRunner
from schedules.tuning.search import Host, Limits, Session, TuneError
from schedules.tuning.subjects import BackwardPass, ForwardPass
from te_defs import reference
from te_defs.workload import Shape, Workload
from tests import fake_tuner, faults, stand_in
from tests.fake_tuner import ARCH, SHAPE, WORKLOAD
from tests.faults import ScriptedWorker
from tests.stand_in import FORGETFUL, HASTY, StandInPlan

pytestmark = pytest.mark.slow

CPU = tvm.cpu()
#: So many keys that a plan which forgets those before the last thousand is much faster.
LONG = Shape(1, 1, 1, 128, 8192)


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    made = PoolBuilder(1, None, None, tmp_path_factory.mktemp("artefacts"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def device_runner():
    made = GatedRunner("cpu", None)
    yield made
    made.close()


def space_of(*faults):
    """A space around the default plan for each fault, with nothing to draw."""
    return tuple(Space(stand_in, WORKLOAD, ARCH, StandInPlan(16, 32, 16, fault=fault), ()) for fault in faults)


def session(builder, device_runner, spaces, shape=SHAPE, known=None, **more):
    device_runner.setting = Setting("cpu", ForwardPass(WORKLOAD), shape)
    host = Host(time.monotonic, lambda: False, report=lambda progress: None, save=lambda: None)
    return Session(WORKLOAD.name, spaces, shape, builder, device_runner, host, {} if known is None else known, {}, alone=True, **more)


class TestNeverWrong:
    def test_a_schedule_that_is_faster_and_wrong_does_not_win(self, builder, device_runner):
        """By a search without the gate, which is what MetaSchedule does, both would."""
        made = session(builder, device_runner, space_of(stand_in.SOUND, HASTY, FORGETFUL), LONG)
        winner = made.run(Limits())
        assert winner.measured == "duel" and winner.key[1].fault == stand_in.SOUND and winner.outcome.proven
        outcomes = {plan.fault: outcome for (_, plan), outcome in made.known.items()}
        assert outcomes[HASTY].refused.startswith("wrong: O[") and outcomes[HASTY].refused.endswith("(N = 77, M = 90)")
        assert outcomes[FORGETFUL].refused.startswith("wrong: ") and outcomes[FORGETFUL].refused.endswith("(N = 40, M = 1500)")
        ungated = {}
        for space in made.spaces:
            module = tvm.runtime.load_module(builder.result(builder.begin_plan(space, space.seed)).artifact_path)
            timer = module.time_evaluator(KERNEL, CPU, number=1, repeat=60)  # some of which nothing else disturbs
            ungated[space.seed.fault] = min(timer(*ForwardPass(WORKLOAD).timed(LONG, CPU)).results)
        assert max(ungated[HASTY], ungated[FORGETFUL]) < ungated[stand_in.SOUND] / 2, "the planted ones are not faster"

    @pytest.mark.parametrize("subject", [ForwardPass(WORKLOAD), ForwardPass(Workload(16, 16, "float16", "window", "alibi", True)),
                                         BackwardPass(WORKLOAD)], ids=lambda it: it.name)
    def test_the_large_set_is_random_and_hard(self, subject):
        made = gate.large_set(subject, CPU, subject.many_tiles[:0])
        assert len(made) == gate.RANDOM_CALLS + len(gate.HARD) and len({case.shape for case in made}) > 20
        before = 1 if isinstance(subject, BackwardPass) else 0  # dout comes first
        q, k = (case.inputs[before:before + 2] for case in made[:1]).__next__()
        assert np.abs(np.einsum("bihc,bjgc->bij", *(x.numpy().astype(np.float64) for x in (q, k)))).max() > 1000, "large scores"
        assert any(case.shape.q_len > case.shape.kv_len for case in made), "rows without keys"
        nothing = [case.shape.batch * case.shape.q_len == 0 for case in made]
        assert any(nothing) == isinstance(subject, BackwardPass), "artefacts launch no kernel where nothing is wanted"
        assert max(case.shape.kv_len for case in made) > max(shape.kv_len for shape, _ in gate.SHAPES)

    @pytest.mark.parametrize("hard, allowed", [(False, 0.99), (True, 1.99)])
    def test_right_gradients_may_be_off_a_little_more_on_hard_inputs_only(self, hard, allowed):
        subject, shape = BackwardPass(Workload(64, 64, "float32", "causal")), Shape(1, 1, 1, 17, 17)
        inputs = reference.make_inputs(subject.workload, shape, 0)
        case = subject.case(shape, 0.125, (), 0, CPU, inputs if hard else None)
        given = [x.numpy() for x in case.inputs[:4]]
        bounds = reference.backward_tolerances(subject.workload, *given, case.answers, 0.125)
        for factor, passes in ((allowed, True), (allowed + 0.02, False)):
            found = [answer.copy() for answer in case.answers]
            found[0].flat[0] += factor * bounds[0]
            assert (case.judge(found) is None) == passes

    def test_a_kernel_that_overflows_at_large_scores_passes_the_ragged_gate_alone(self):
        def careless(q, k, v, out, lse, scale):
            """Without the maximum of a row."""
            s = reference._scores(WORKLOAD, *(x.numpy().astype(np.float32) for x in (q, k)), np.float32(scale), ())
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                p = np.exp(s)
                total = p.sum(axis=-1, keepdims=True)
                out.copyfrom(reference._mean(p / np.where(total == 0, 1, total), v.numpy()).astype(np.float32))
                lse.copyfrom(np.log(total)[..., 0])
        gate.check(careless, gate.cases(ForwardPass(WORKLOAD), CPU), CPU)
        with pytest.raises(gate.Refused, match=r"is nan where|is inf where"):
            gate.check(careless, gate.large_set(ForwardPass(WORKLOAD), CPU), CPU)

    def test_what_was_never_proved_does_not_win_by_the_search(self):
        """The plans of a log of schema 1, and those that come up where the best is refused at last."""
        made = fake_tuner.session(runner=fake_tuner.FakeRunner(late=True))
        made.run(Limits(trials=4))
        key = made.tasks[0].key(made.spaces[0].seed.but(lanes=4))
        made.known[key] = Outcome(seconds=1e-9)
        assert made.ranking()[0] == key and made.leader().key != key and made.leader().outcome.proven
        made.known = {key: Outcome(seconds=1e-9)}
        with pytest.raises(TuneError, match="no plan of .* has been proved so far, found 0 of 1 refused: none"):
            made.leader()


PASSED, PROOF = {"seconds": [1.0, 1.1, 1.2], "error": 1e-7}, {"error": 2e-7}
CRASH, HANG, TRAP = ChildProcessError("gone"), TimeoutError(), RuntimeError("CUDA: an illegal memory access was encountered")


def scripted(*script, served=1, kind="cpu"):
    """A GatedRunner whose process answers by a script."""
    made = GatedRunner(kind, None)
    made._worker, made.setting = ScriptedWorker(*script, served=served), Setting(kind, ForwardPass(WORKLOAD), SHAPE)
    made._suspect = False
    return made


def measured(made, path="0.so"):
    return made.run([ms.runner.RunnerInput(path, "cpu", [])])[0].result()


class TestNeverStuck:
    @pytest.mark.parametrize("fault, reason", [
        (CRASH, "crashes: the kernel crashes its process"), (TRAP, "fails: CUDA: an illegal memory access was encountered")])
    def test_what_breaks_a_process_is_asked_once_more_alone_and_refused(self, fault, reason):
        made = scripted(fault, fault)
        assert measured(made).error_msg == reason
        assert [alone for _, alone, _ in made._worker.asked] == [False, True]
        made = scripted(fault, served=0)
        assert measured(made).error_msg == reason and len(made._worker.asked) == 1, "nobody else can have been at fault"

    @pytest.mark.parametrize("fault", [CRASH, TRAP])
    def test_a_kernel_is_not_refused_for_what_another_left_behind(self, fault):
        assert measured(scripted(fault, PASSED, PROOF)).error_msg is None
        made = scripted(PASSED, fault, PROOF)
        made.best = 2.0, None
        assert measured(made).error_msg is None and made.found["0.so"]["proven"]

    def test_one_that_hangs_is_not_asked_again(self):
        made = scripted(HANG)
        assert measured(made).error_msg == f"hangs: not measured within {runner.TIMEOUT} s" and len(made._worker.asked) == 1

    def test_a_hang_is_short_where_inputs_are_at_hand_and_no_longer_than_what_is_left(self):
        made = scripted(PASSED, PROOF, HANG, True, HANG, True, HANG, kind="cuda")
        for left, said in ((None, None), (None, "hangs: not measured within 10 s"), (None, "hangs: not measured within 60 s"),
                           (4, reasons.OUT_OF_TIME)):
            made.left = lambda: left
            assert measured(made).error_msg == said
        assert [timeout for name, _, timeout in made._worker.asked if name != "answers"] == [60, 60, 10, 60, 4]

    def test_inputs_are_made_while_the_first_kernel_is_built(self):
        made = scripted(None, PASSED, PROOF, kind="cuda")
        made.prepare()
        assert measured(made).error_msg is None
        assert [(name, timeout) for name, _, timeout in made._worker.asked] == [
            ("prepare", runner.TIMEOUT), ("measure", runner.LATER["cuda"]), ("prove", runner.TIMEOUT)]
        made.prepare()
        assert len(made._worker.asked) == 3, "they are at hand"

    @pytest.mark.parametrize("fault", [CRASH, HANG, TRAP])
    def test_no_kernel_is_to_blame_where_inputs_cannot_be_made(self, fault):
        made = scripted(fault, PASSED, PROOF, kind="cuda")
        made.left = lambda: 7.0
        made.prepare()
        assert measured(made).error_msg is None
        (first, _, given), (then, _, left), *_ = made._worker.asked
        assert (first, given, then, left) == ("prepare", 7.0, "measure", 7.0)

    def test_closing_ends_the_making_of_inputs(self):
        made = GatedRunner("cpu", None)
        made.setting = Setting("cpu", ForwardPass(Workload(256, 256, "float32")), Shape(4, 64, 64, 65536, 65536))
        made.prepare()
        begun = time.monotonic()
        made.close()
        assert time.monotonic() - begun < 60 and made._preparing is None, "no longer than a process takes to start"

    def test_the_next_one_is_measured_in_a_new_process_once_the_device_answers(self):
        made = scripted(TRAP, True, PASSED, PROOF, served=0)
        assert measured(made).error_msg is not None and measured(made).error_msg is None
        assert [(name, alone) for name, alone, _ in made._worker.asked] == [
            ("measure", True), ("answers", True), ("measure", False), ("prove", False)]

    def test_a_device_that_is_not_there_refuses_nobody(self):
        made = GatedRunner("cuda", None)
        made.setting = Setting("cuda", ForwardPass(WORKLOAD), SHAPE)
        made._worker = ScriptedWorker(RuntimeError("Traceback ...\nToolkitError: a driver is needed"), served=0)
        assert measured(made).error_msg.startswith(f"{reasons.LOST}, found ToolkitError: a driver is needed: see to")

    @pytest.mark.parametrize("answer, said", [(False, "another number"), (RuntimeError("no CUDA device"), "no CUDA device")])
    def test_a_device_that_is_gone_ends_the_session_and_refuses_nobody_else(self, answer, said):
        made = scripted(CRASH, answer, served=0)
        assert measured(made).error_msg is not None
        lost = f"the device must give back a number that it was sent, found {said}"
        assert measured(made).error_msg.startswith(lost)
        made._suspect, made._worker.script = True, [answer]
        with pytest.raises(TuneError, match=lost):
            made.duel(["0.so"], seed=0)

    def test_a_session_that_loses_its_device_says_so(self):
        class Lost(fake_tuner.FakeRunner):
            def run(self, inputs):
                if len(self.measured) == 2:
                    return [ms.runner.LocalRunnerFuture(None, f"{reasons.LOST}, found none")]
                return super().run(inputs)
        made = fake_tuner.session(runner=Lost())
        with pytest.raises(TuneError, match=f"^{reasons.LOST}, found none$"):
            made.run(Limits(trials=8))
        assert len(made.known) == 2, "the culprit, and who came before it"

    def test_a_finalist_that_breaks_its_process_takes_no_other_with_it(self):
        made = scripted(PROOF, CRASH, CRASH, True, PROOF, [{"seconds": [1.0]}, {"seconds": [2.0]}])
        assert made.duel(["0.so", "1.so", "2.so"], seed=0) == [
            {**PROOF, "seconds": [1.0]}, {"refused": "crashes: the kernel crashes its process"}, {**PROOF, "seconds": [2.0]}]

    def test_finalists_that_only_break_together_are_not_refused(self):
        assert scripted(PROOF, PROOF, CRASH, CRASH).duel(["0.so", "1.so"], seed=0) is None

    def test_a_process_that_lets_no_thread_run_is_ended_from_outside(self, monkeypatch):
        monkeypatch.setattr(processes, "GRACE", 0.5)
        worker = Worker(faults.prepare, ())
        first = worker.ask(60, faults.process_id)
        with pytest.raises(TimeoutError):
            worker.ask(0.5, faults.hang_with_the_lock)
        assert worker.ask(60, faults.process_id) != first
        worker.restart()

    def test_a_build_is_tried_again_once_where_its_process_ends(self, tmp_path):
        pool = Pool(1, 60, faults.prepare, ())
        try:
            assert pool.submit(faults.end_the_first_time, str(tmp_path / "marker")).result() == "done"
            with pytest.raises(ChildProcessError):
                pool.submit(faults.end_the_process).result()
            hanging = pool.submit(faults.hang_with_the_lock)
            while not hanging.running():
                time.sleep(0.01)
            begun = time.monotonic()
        finally:
            pool.close()
        assert time.monotonic() - begun < 30 and hanging.done()

    def test_a_plan_that_spills_is_refused_for_that(self, monkeypatch):
        compiled = SimpleNamespace(last=SimpleNamespace(most={"spill_store_bytes": 16, "registers": 255}.get))
        monkeypatch.setattr(build_worker, "_forward", lambda job: (compiled, SimpleNamespace(NAME="tight", MAX_SPILL_BYTES=8)))
        space, = space_of(stand_in.SOUND)
        assert build_worker.make(Job(space, space.seed, "")) == (
            "spills: a plan of tight may spill 8 bytes, found 16: choose smaller tiles")

    def test_what_cannot_be_built_is_refused_and_counted(self, builder, device_runner):
        made = session(builder, device_runner, space_of(stand_in.UNSCHEDULABLE, HASTY))
        with pytest.raises(TuneError, match=r"found 2 of 2 refused: 1 not built \(ScheduleError: .*\), 1 wrong \(O\[.*\)$"):
            made.run(Limits())
        assert reasons.counts(made.known.values()) == {"not built": 1, "wrong": 1}

    def test_a_full_disk_is_no_reason_to_refuse_a_plan(self, builder):
        future = concurrent.futures.Future()
        future.set_result("not built: CompileError: nvcc fatal: No space left on device")
        with pytest.raises(TuneError, match="must have room for kernels, found its disk full"):
            builder.result(future)

    @pytest.mark.parametrize("text, kind", [
        ("PlanError: a plan of wgmma may spill 0 bytes, found 4: choo", "spills"), ("not measured within 10 s", "hangs"),
        ("the kernel crashes", "crashes"), ("not built within 120 s", "not built"), ("ScheduleError: no such block", "not built"),
        ("O[0, 1, 2, 3] is nan where 0.5 is right: error inf exceeds 1e-3 (N = 77, M = 90)", "wrong"),
        ("two runs on the same inputs differ (N = 77, M = 90)", "wrong"), ("an illegal memory access was encountered", "fails")])
    def test_reasons_of_earlier_logs_get_their_kind(self, text, kind):
        assert reasons.kind_of(reasons.of_schema_1(text)) == kind
        assert reasons.kind_of(reasons.reason(kind, text)) == kind and reasons.kind_of(text) == reasons.OTHER
