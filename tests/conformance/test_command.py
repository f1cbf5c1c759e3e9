"""The command that asks us and others the same random calls."""
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from schedules import backward
from schedules.arch import cuda_arch
from schedules.registry import takers
from scripts import conformance
from scripts.kernels import build_artefact
from te_defs import reference
from te_defs.random_calls import forward_problem, gradient_problem, judged, random_call, wanted, workloads_of, workloads_of_gradients
from tests.commands import ROOT, command

WORKLOADS = workloads_of("cpu")
#: Calls that stand in every row of the table.
CALLS = [random_call(number, WORKLOADS) for number in range(40)]


def exact(call, inputs):
    out, lse = reference.forward(call.workload, *inputs, call.rounded_scale, call.arguments)
    return [(out.astype(inputs[0].dtype), lse.astype(np.float32))]


def unmasked(call, inputs):
    """The commonest mistake of all."""
    full, others = replace(call.workload, mask="full"), call.arguments[len(call.shape.mask):]
    out, lse = reference.forward(full, *inputs, call.rounded_scale, others)
    return [(out.astype(inputs[0].dtype), lse.astype(np.float32))]


def unstable(call, inputs):
    (out, lse), = exact(call, inputs)
    return [(out, lse), (np.nextafter(out.astype(np.float32), np.float32(9)).astype(out.dtype), lse)]


def output_alone(call, inputs):
    return [(out, None) for out, _ in exact(call, inputs)]


def exact_gradients(call, inputs):
    _, (answers, _) = gradient_problem(call)
    return [[answer.astype(inputs[0][0].dtype) for answer in answers]]


def without_dlse(call, inputs):
    """Gradients of whoever forgets that of the LSE."""
    given, _ = inputs
    gradients = reference.backward(call.workload, *given, call.rounded_scale, call.arguments, call.given_lengths())
    return [[gradient.astype(given[0].dtype) for gradient in gradients]]


def refusing(call, inputs):
    raise NotImplementedError("only full\n  attention")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Folder of artefacts that several tests ask."""
    return tmp_path_factory.mktemp("kept")


class TestCalls:
    def test_are_drawn_from_their_number_alone(self):
        again = random_call(7, WORKLOADS)
        assert again == CALLS[7] and all(np.array_equal(a, b) for a, b in zip(again.inputs(), CALLS[7].inputs()))
        assert len(set(CALLS)) == len(CALLS)

    def test_are_of_every_kind(self):
        calls = [random_call(number, WORKLOADS) for number in range(400)]
        assert all(any(holds(call) for call in calls) for holds in conformance.FEATURES.values())
        assert {call.workload for call in calls} == set(WORKLOADS)
        assert max(call.shape.batch * call.shape.q_heads * call.shape.q_len * call.shape.kv_len for call in calls) <= 120_000

    def test_judge(self):
        call = next(call for call in CALLS if call.workload.dtype == "float32" and call.rows_without_keys() is False and call.shape.q_len
                    and call.shape.batch and call.shape.kv_len)
        right = wanted(call, call.inputs())
        assert judged(exact(call, call.inputs()), right) is None
        assert judged(unstable(call, call.inputs()), right) == "two runs differ"


class TestTable:
    def ask(self, *functions):
        answerers = [conformance.Answerer(function.__name__, function) for function in functions]
        return conformance.merged([conformance.ask(answerers, CALLS[some], conformance.FEATURES, forward_problem)
                                   for some in (slice(0, None, 2), slice(1, None, 2))])

    def test_counts_by_what_a_call_has_to_do_with(self):
        found, told = self.ask(exact, unmasked, output_alone, refusing)
        assert found["all calls", "output_alone"] == Counter(right=40)
        assert found["all calls", "exact"] == Counter(right=40) and told["exact"] == []
        assert found["mask full", "unmasked"][conformance.WRONG] == 0 < found["mask causal", "unmasked"][conformance.WRONG]
        assert found["all calls", "refusing"] == Counter(refused=40)
        assert [sentence.split(":")[0] for sentence in told["refusing"]] == [f"call {number}" for number in range(40)]
        assert all(sentence.endswith("refused, NotImplementedError: only full attention") for sentence in told["refusing"])

    def test_is_markdown(self):
        found, _ = self.ask(exact, unmasked, refusing)
        lines = conformance.table(found, ["exact", "unmasked", "refusing"]).splitlines()
        assert lines[:2] == ["|  | exact | unmasked | refusing |", "| --- | --- | --- | --- |"]
        assert lines[-1].startswith("| all calls | 40 of 40 | ") and lines[-1].endswith(" wrong | 0 of 40, 40 refused |")


class TestCommand:
    def test_one_call(self):
        """In a process of its own, since it starts others."""
        done = subprocess.run([sys.executable, "-m", "scripts.conformance", "--target", "cpu", "--call", "12"], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "| all calls | 1 of 1 |" in done.stdout

    @pytest.mark.parametrize("arguments, message", [
        (("--calls", "0"), "a number of calls from 1 to 999999 is wanted, found 0"), (("--family", "mma"), "found that mma takes none"),
        (("--target", "sm_90a"), "calls need a device that is there"), (("--against", "jax"), "invalid choice: 'jax'")])
    def test_what_cannot_be_meant(self, arguments, message):
        complaints = command("conformance", "--target", "cpu", *arguments, code=2).stderr
        assert message in complaints and "Traceback" not in complaints

    def test_a_wrong_answer_of_ours_is_a_failure(self, monkeypatch, capsys):
        monkeypatch.setattr(conformance, "ask_side_by_side",
                            lambda jobs: [conformance.ask([conformance.Answerer("ours", unmasked)], job.calls, conformance.FEATURES,
                                                          forward_problem) for job in jobs])
        assert conformance.run(conformance.make_parser().parse_args(["--target", "cpu", "--calls", "20"])) == 1
        assert "ours, call " in capsys.readouterr().out


class TestCallsForGradients:
    CPU = workloads_of_gradients("cpu", lambda it: True, dealt=False)

    def test_are_of_every_kind(self):
        calls = [random_call(number, self.CPU) for number in range(400)]
        assert all(any(holds(call) for call in calls) for holds in conformance.FEATURES_OF_GRADIENTS.values())
        assert {call.workload for call in calls} == set(self.CPU) > set(workloads_of_gradients("cpu", lambda it: True))

    def test_rows_without_keys_are_told_by_each_batch_entry(self):
        for call in (random_call(number, self.CPU) for number in range(100)):
            lse = reference.forward(replace(call.workload, sink=False), *call.inputs(), call.rounded_scale,
                                    call.arguments[:len(call.arguments) - call.workload.sink], call.given_lengths())[1]
            assert call.rows_without_keys() == bool(np.any(np.isneginf(lse))), call

    @pytest.mark.parametrize("order, family", [(order, family) for order, families in backward.FAMILIES.items() for family in families],
                             ids=lambda it: getattr(it, "NAME", it))
    def test_have_plans_of_every_family(self, order, family):
        """The commands of a GPU, as far as they go without one."""
        arch = cuda_arch("sm_90a")
        taken = workloads_of_gradients("cuda", lambda it: family.decline(it, arch) is None, dealt=False)
        assert all(takers(it, arch) and backward.default_plans(family, it, arch) for it in taken)
        assert taken or family.NAME == "cpu_backward"

    def test_exact_ones_are_right(self):
        calls = [random_call(number, self.CPU) for number in range(40)]
        answerers = [conformance.Answerer(function.__name__, function) for function in (exact_gradients, without_dlse)]
        found, _ = conformance.ask(answerers, calls, conformance.FEATURES_OF_GRADIENTS, gradient_problem)
        assert found["all calls", "exact_gradients"] == Counter(right=40)
        through_lse, anything = (found[row, "without_dlse"][conformance.WRONG] for row in ("a gradient of the LSE", "all calls"))
        assert anything == through_lse > 9


class TestBackwardCommand:
    def test_some_calls(self):
        done = subprocess.run([sys.executable, "-m", "scripts.conformance", "--target", "cpu", "--backward", "--calls", "2"], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "| all calls | 2 of 2 |" in done.stdout and '"backward": "in-order"' in done.stdout

    @pytest.mark.parametrize("arguments, message", [
        (("any-order",), "gradients any-order want a GPU with tensor cores, found "), (("sideways",), "invalid choice: 'sideways'"),
        (("--family", "simt_backward"), "found that simt_backward takes none: name another one of wgmma_ordered_backward, "),
        (("any-order", "--family", "cpu_backward"), "found that cpu_backward takes none: name another one of wgmma_fused_backward, "),
        (("--against", "torch"), "--against goes with the forward pass")])
    def test_what_cannot_be_meant(self, arguments, message):
        complaints = command("conformance", "--target", "cpu", "--backward", *arguments, code=2).stderr
        assert message in complaints and "Traceback" not in complaints

    @pytest.fixture
    def asked(self, kept, monkeypatch, capsys):
        """Function of the command's arguments: (exit code, what it prints), of this process, which builds an artefact once."""
        def build(plans, workload, arch, path, gradients):
            once = kept / path.name
            if not once.exists():
                build_artefact(plans, workload, arch, once, gradients)
            shutil.copy(once, path)

        def ask(*arguments):
            code = conformance.run(conformance.make_parser().parse_args(["--target", "cpu", "--backward", *arguments]))
            return code, capsys.readouterr().out
        monkeypatch.setattr(conformance, "build_artefact", build)
        monkeypatch.setattr(conformance, "ask_side_by_side", lambda jobs: [job.asked() for job in jobs])
        return ask

    @pytest.mark.parametrize("name, gradient", [("dQ", 0), ("dK", 1), ("dV", 2)])
    def test_a_wrong_gradient_is_found_and_its_call_named(self, name, gradient, asked, monkeypatch):
        """By the number that makes the call again, which is right without the fault."""
        answer = conformance.answer_gradients

        def wrong(*arguments):
            found = answer(*arguments)
            found[gradient].flat[-1:] += found[gradient].dtype.type(1)
            return found
        with monkeypatch.context() as patch:
            patch.setattr(conformance, "answer_gradients", wrong)
            code, told = asked("--calls", "1")
        assert code == 1 and "| all calls | 0 of 1, 1 wrong |" in told
        number, said = re.search(r"ours, call (\d+): (.*)", told).groups()
        assert f"wrong, {name}[" in said
        code, told = asked("--call", number)
        assert code == 0 and "| all calls | 1 of 1 |" in told

    def test_bits_of_a_second_call_that_differ_are_told(self, asked, monkeypatch):
        answer, calls = conformance.answer_gradients, []

        def unsteady(*arguments):
            calls.append(arguments)
            dq, dk, dv = answer(*arguments)
            return [dq, dk, np.nextafter(dv.astype(np.float32), np.float32(9)).astype(dv.dtype) if len(calls) == 2 else dv]
        monkeypatch.setattr(conformance, "answer_gradients", unsteady)
        code, told = asked("--call", "0")
        assert code == 1 and "wrong, two runs differ" in told and len(calls) == 2
