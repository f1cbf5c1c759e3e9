"""Random calls against the reference: shapes, masks, types, scales and data that nobody would have thought of."""
import numpy as np
import pytest

from te_defs import reference
from tests.conformance.cases import all_workloads, case
from tests.numbers import run

pytestmark = pytest.mark.slow

#: Calls of an artefact; of a family on llvm, where an unscheduled kernel takes a second.
COUNT, COUNT_ON_LLVM = 2000, 60
#: What the CPU is asked: every mask and type, and head dimensions that no vector divides for one.
ON_CPU = all_workloads(dims=((64, 64),)) + all_workloads(dims=((40, 72),), dtypes=("float32",))


def complaint_about(engine, call):
    """None where an engine answers a Case rightly, twice with the same bits; else one sentence."""
    forward = engine.forward(call.workload)
    inputs, scale = call.inputs(), float(np.float32(call.scale * call.workload.head_dim**-0.5))
    runs = [run(forward, call.workload, inputs, scale, call.shape.mask, engine.device) for _ in range(2)]
    if any(first.tobytes() != second.tobytes() for first, second in zip(*runs)):
        return "two runs differ"
    answer, lse_answer = reference.forward(call.workload, *inputs, scale, call.shape.mask)
    bounds = reference.tolerances(call.workload, *inputs, scale, call.shape.mask, (answer, lse_answer))
    return reference.mismatch(*runs[0], answer, lse_answer, *bounds)


def test_random_calls(engine, request):
    workloads = [it for it in (ON_CPU if engine.arch.kind == "cpu" else all_workloads()) if engine.declines(it) is None]
    if not workloads:
        pytest.skip(f"{engine.name} declines all of them: {engine.declines(all_workloads()[0])}")
    only, count = request.config.getoption("--case"), COUNT if engine.whole else COUNT_ON_LLVM
    if not engine.whole:  # one of its types will do
        workloads = [it for it in workloads if (it.head_dim, it.dtype) == (64, workloads[0].dtype)]
    failures = []
    for number in range(count) if only is None else [only]:
        call = case(number, workloads)
        complaint = complaint_about(engine, call)
        if complaint is not None:
            failures.append(f"{call}: {complaint}")
    assert failures == [], f"{len(failures)} of {count} calls of {engine.name} are wrong; run one again with --case"
