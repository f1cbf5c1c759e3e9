"""The command that asks us and others the same random calls."""
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scripts import conformance
from te_defs import reference
from te_defs.random_calls import judged, random_call, wanted, workloads_of
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


def refusing(call, inputs):
    raise NotImplementedError("only full\n  attention")


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
        return conformance.merged([conformance.ask(answerers, CALLS[some]) for some in (slice(0, None, 2), slice(1, None, 2))])

    def test_counts_by_what_a_call_has_to_do_with(self):
        found, told = self.ask(exact, unmasked, refusing)
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
                            lambda jobs: [conformance.ask([conformance.Answerer("ours", unmasked)], job.calls) for job in jobs])
        assert conformance.run(conformance.make_parser().parse_args(["--target", "cpu", "--calls", "20"])) == 1
        assert "ours, call " in capsys.readouterr().out
