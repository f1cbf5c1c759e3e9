"""Random calls against the reference: shapes, masks, types, scales and data that nobody would have thought of."""
import pytest

from te_defs.random_calls import judged, random_call, wanted, workloads_of
from tests.numbers import run

pytestmark = pytest.mark.slow

#: Calls of an artefact; of a family on llvm, where an unscheduled kernel takes a second.
COUNT, COUNT_ON_LLVM = 2000, 25


def test_random_calls(engine, request):
    workloads = [it for it in workloads_of(engine.arch.kind) if engine.declines(it) is None]
    if not workloads:
        pytest.skip(f"{engine.name} declines all of them: {engine.declines(workloads_of(engine.arch.kind)[0])}")
    only, count = request.config.getoption("--case"), COUNT if engine.whole else COUNT_ON_LLVM
    if not engine.whole:  # one of its types will do
        workloads = [it for it in workloads if (it.head_dim, it.dtype) == (64, workloads[0].dtype)]
    failures = []
    for number in range(count) if only is None else [only]:
        call = random_call(number, workloads)
        inputs, forward = call.inputs(), engine.forward(call.workload)
        options = call.rounded_scale, call.arguments, engine.device, call.storage
        runs = [run(forward, call.workload, inputs, *options) for _ in range(2)]
        complaint = judged(runs, wanted(call, inputs))
        if complaint is not None:
            failures.append(f"{call}: {complaint}")
    assert failures == [], f"{len(failures)} of {count} calls of {engine.name} are wrong; make one again with --case"
