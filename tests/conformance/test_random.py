"""Random calls against the reference: shapes, masks, types, scales and data that nobody would have thought of."""
import pytest

from te_defs.random_calls import (DIMS, forward_problem, gradient_problem, judged, random_call, workloads_of, workloads_of_gradients,
                                  workloads_with_lengths)
from te_defs.workload import Workload
from tests.numbers import run

pytestmark = pytest.mark.slow

#: Calls of an artefact; of a family on llvm, where an unscheduled kernel takes a second. Those with lengths of their own are fewer.
COUNT, COUNT_ON_LLVM = 2000, 25
COUNT_WITH_LENGTHS, COUNT_WITH_LENGTHS_ON_LLVM = 400, 15
COUNT_OF_GRADIENTS = 100


def test_random_calls(engine, request):
    make_calls(engine, request, workloads_of, COUNT if engine.whole else COUNT_ON_LLVM)


def test_random_calls_with_lengths(engine, request):
    make_calls(engine, request, workloads_with_lengths, COUNT_WITH_LENGTHS if engine.whole else COUNT_WITH_LENGTHS_ON_LLVM)


def make_calls(engine, request, drawn_from, count):
    drawn_from = drawn_from(engine.arch.kind)
    workloads = [it for it in drawn_from if engine.declines(it) is None]
    if not workloads:
        pytest.skip(f"{engine.name} declines all of them: {engine.declines(drawn_from[0])}")
    if not engine.whole:  # one of its types and a third of the rest will do: each takes seconds to compile
        workloads = [it for it in workloads if (it.head_dim, it.dtype) == (64, workloads[0].dtype)][::3]

    def complaint(number):
        call = random_call(number, workloads)
        (inputs, right), forward = forward_problem(call), engine.forward(call.workload)
        options = call.rounded_scale, call.arguments, engine.device, call.storage, call.given_lengths(), engine.whole
        runs = [run(forward, call.workload, inputs, *options) for _ in range(2)]
        return call, judged(runs, right)
    ask(request, engine, count, complaint)


def test_random_calls_for_gradients(gradients, request):
    workloads = workloads_of_gradients(gradients.arch.kind, lambda it: gradients.declines(it) is None)
    if not workloads:
        pytest.skip(f"{gradients.name} declines all of them: {gradients.declines(Workload(*DIMS[0]))}")

    def complaint(number):
        call = random_call(number, workloads)
        (given, dlse), right = gradient_problem(call)
        found = gradients.backward(call.workload)(*given, call.rounded_scale, (*call.arguments, *call.given_lengths()), dlse, call.storage)
        return call, judged([found], right)
    ask(request, gradients, COUNT_OF_GRADIENTS, complaint)


def ask(request, engine, count, complaint):
    """Make the calls of the first numbers, or of the one that is asked for; `complaint` gives the call of a number and what is wrong."""
    only, failures = request.config.getoption("--case"), []
    for number in range(count) if only is None else [only]:
        call, sentence = complaint(number)
        if sentence is not None:
            failures.append(f"{call}: {sentence}")
    assert failures == [], f"{len(failures)} of {count} calls of {engine.name} are wrong; make one again with --case"
