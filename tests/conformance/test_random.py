"""Random calls against the reference: shapes, masks, types, scales and data that nobody would have thought of."""
import pytest

from te_defs.random_calls import judged, random_call, wanted, workloads_of, workloads_with_lengths
from tests.numbers import run

pytestmark = pytest.mark.slow

#: Calls of an artefact; of a family on llvm, where an unscheduled kernel takes a second. Those with lengths of their own are fewer.
COUNT, COUNT_ON_LLVM = 2000, 25
COUNT_WITH_LENGTHS, COUNT_WITH_LENGTHS_ON_LLVM = 400, 15


def test_random_calls(engine, request):
    make_calls(engine, request, workloads_of, COUNT if engine.whole else COUNT_ON_LLVM)


def test_random_calls_with_lengths(engine, request):
    make_calls(engine, request, workloads_with_lengths, COUNT_WITH_LENGTHS if engine.whole else COUNT_WITH_LENGTHS_ON_LLVM)


def make_calls(engine, request, drawn_from, count):
    drawn_from = drawn_from(engine.arch.kind)
    workloads = [it for it in drawn_from if engine.declines(it) is None]
    if not workloads:
        pytest.skip(f"{engine.name} declines all of them: {engine.declines(drawn_from[0])}")
    only = request.config.getoption("--case")
    if not engine.whole:  # one of its types and a third of the rest will do: each takes seconds to compile
        workloads = [it for it in workloads if (it.head_dim, it.dtype) == (64, workloads[0].dtype)][::3]
    failures = []
    for number in range(count) if only is None else [only]:
        call = random_call(number, workloads)
        inputs, forward = call.inputs(), engine.forward(call.workload)
        options = call.rounded_scale, call.arguments, engine.device, call.storage, call.given_lengths(), engine.whole
        runs = [run(forward, call.workload, inputs, *options) for _ in range(2)]
        complaint = judged(runs, wanted(call, inputs))
        if complaint is not None:
            failures.append(f"{call}: {complaint}")
    assert failures == [], f"{len(failures)} of {count} calls of {engine.name} are wrong; make one again with --case"
