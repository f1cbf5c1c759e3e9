"""On a GPU: the numbers of every family through the checked entry of an exported artefact."""
import numpy as np
import pytest
import tvm
import tvm_ffi

from schedules.arch import arch_of_capability
from schedules.artefact.export import export_artefact
from schedules.artefact.variant import variant_of
from schedules.build import build_plan
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.registry import FAMILIES
from te_defs import reference
from te_defs.workload import Shape, Workload
from tests.numbers import RAGGED

pytestmark = pytest.mark.gpu
WORKLOADS = [Workload(d, d, dtype, mask) for d in (64, 128) for dtype in ("float16", "bfloat16", "float32") for mask in ("full", "causal")]
SHAPES = {**RAGGED, "long": (Shape(1, 2, 1, 1000, 1500), 1.0), "odd_group": (Shape(2, 5, 1, 130, 61), 1.0),
          "many_heads": (Shape(70000, 1, 1, 1, 3), 1.0), "negative_scale": (Shape(1, 2, 2, 333, 400), -1.0)}


@pytest.fixture(scope="module")
def arch():
    return arch_of_capability(*map(int, str(tvm.cuda(0).compute_version).split(".")))


@pytest.fixture(scope="module")
def forward(toolkit, arch, tmp_path_factory):
    """Function (family, workload) -> flash_attention_forward of the seed plan's artefact, built once each; skips what is declined."""
    known = {}

    def make(family, workload):
        reason = family.decline(workload, arch)
        if reason is not None:
            pytest.skip(f"{family.NAME} declines: {reason}")
        key = family.NAME, workload
        if key not in known:
            plan = family.default_plan(workload, arch)
            with cuda_compiler(toolkit, (arch.name,), CudaOptions(**family.compiler_options(plan))) as log:
                module = build_plan(family, workload, plan, arch)
            path = tmp_path_factory.mktemp("gpu") / f"{family.NAME}_{workload.name}.so"
            export_artefact([variant_of(module, family, arch, plan, log.kernels)], workload, path, {}, ())
            known[key] = tvm_ffi.load_module(str(path))
        return known[key].flash_attention_forward
    return make


def run(function, workload, inputs, scale):
    """(out, lse) from the GPU; the outputs hold NaN before."""
    q, k, v = inputs
    out = np.full((*q.shape[:3], v.shape[-1]), np.nan, np.float32).astype(reference.numpy_dtype(workload))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)
    arguments = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (q, k, v, out, lse)]
    function(*arguments, scale)
    return arguments[3].numpy(), arguments[4].numpy()


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.NAME != "cpu"], ids=lambda family: family.NAME)
def test_numbers_and_bits(forward, family, workload, case):
    function = forward(family, workload)
    shape, factor = SHAPES[case]
    inputs = reference.make_inputs(workload, shape)
    scale = float(np.float32(factor * workload.head_dim**-0.5))
    answer, lse_answer = reference.forward(workload, *inputs, scale)
    out, lse = run(function, workload, inputs, scale)
    assert reference.mismatch(out, lse, answer, lse_answer, reference.tolerance(workload, *inputs, scale, answer)) is None
    again = run(function, workload, inputs, scale)
    assert out.tobytes() == again[0].tobytes() and lse.tobytes() == again[1].tobytes()


def test_nothing_is_written_on_bad_input(forward, arch):
    workload = WORKLOADS[0]
    function = forward(FAMILIES[0], workload)
    q, k, v = (tvm.runtime.tensor(array, tvm.cuda(0)) for array in reference.make_inputs(workload, Shape(1, 2, 1, 8, 8)))
    out = tvm.runtime.tensor(np.full((1, 8, 2, 64), 7, np.float16), tvm.cuda(0))
    lse = tvm.runtime.tensor(np.full((1, 2, 9), 7, np.float32), tvm.cuda(0))
    with pytest.raises(ValueError, match=r"lse.shape\[2\] is 9, wanted 8"):
        function(q, k, v, out, lse, 0.125)
    assert (out.numpy() == 7).all()
