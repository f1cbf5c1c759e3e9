"""Gradients of tensors behind the scale through flash_attention_backward of a CPU's artefact: what they are, and what is refused."""
import ctypes
import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi

from schedules.arch import cpu_arch
from schedules.artefact.cases import check_cases, write_cases
from schedules.artefact.export import export_artefact
from schedules.artefact.manifest import describe
from schedules.families import cpu_operand_gradients
from schedules.lowering.toolkit import run_c_compiler
from scripts import export
from scripts.cli import UsageError
from scripts.kernels import build_gradients
from te_defs.workload import Shape, Workload, make_arguments
from tests import commands
from tests.backward import problem
from tests.operands import Called, verdict
from tests.stand_in_kernel import on_cpu

HERE = cpu_arch("znver3", 256, 2)
WORKLOAD, PACKED = (Workload.parse(f"fwd_d16_dv8_{name}") for name in ("f32_causal+bias+sink", "bf16_full+alibi+packed"))
NAMES = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "scale", "bias", "sink", "dlse", "dbias", "dsink")
OUTPUTS = ("dq", "dk", "dv", "dbias", "dsink")


def exported(workload, folder, operands):
    """(module, path) of an artefact whose forward pass is a stand-in."""
    variants = [on_cpu(replace(workload, lengths="uniform"))]
    gradients = [kernel.variant for kernel in build_gradients(workload, HERE, operands=operands)]
    path, _ = export_artefact(variants, workload, folder / "gradients.so", describe(workload, variants, None, gradients), (), gradients)
    return tvm_ffi.load_module(str(path))


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return exported(WORKLOAD, tmp_path_factory.mktemp("operands"), ["sink", "bias"])


def call_of(shape, single=""):
    """Arguments that are right, by name; outputs hold NaN."""
    arguments = make_arguments(WORKLOAD, shape, 0, single)
    given, *_ = problem(WORKLOAD, shape, 0.5, arguments)
    outputs = [np.full_like(array, np.nan) for array in (*given[1:4], *arguments)]
    return dict(zip(NAMES, (*given, *outputs[:3], 0.5, *arguments, None, *outputs[3:])))


@pytest.fixture
def call():
    return call_of(Shape(2, 4, 2, 9, 13), "H")


class TestNumbers:
    @pytest.mark.parametrize("name", ["bias", "sink"])
    @pytest.mark.parametrize("shape, single", [
        (Shape(2, 6, 2, 37, 70), ""), (Shape(2, 4, 2, 150, 140), "BH"), (Shape(1, 2, 1, 70, 200), "N"), (Shape(2, 3, 1, 130, 33), "BHNM"),
        (Shape(1, 2, 2, 5, 0), "M"), (Shape(1, 2, 2, 0, 5), "BN"), (Shape(0, 2, 2, 3, 4), "BH"), (Shape(2, 0, 0, 3, 4), "BH")], ids=str)
    def test_against_the_reference(self, module, name, shape, single):
        arguments = make_arguments(WORKLOAD, shape, 1, single)
        assert verdict(Called(module, WORKLOAD, name, ("bias", "sink")), WORKLOAD, name, shape, -0.3, arguments) is None

    def test_packed_sequences(self, tmp_path):
        module, shape = exported(PACKED, tmp_path, ["slopes"]), Shape(1, 4, 2, 40, 33)
        lengths, arguments = (np.array([0, 5, 5, 38], np.int32), np.array([0, 20, 20, 33], np.int32), 33), make_arguments(PACKED, shape, 1)
        assert verdict(Called(module, PACKED, "slopes", ("slopes",)), PACKED, "slopes", shape, 0.3, arguments, lengths) is None

    def test_others_are_the_same_whoever_is_asked_for(self, module, call):
        module.flash_attention_backward(*call.values())
        wanted = {name: call[name].copy() for name in OUTPUTS}
        for left_out in (("dlse", "dbias", "dsink"), ("dbias", "dsink"), ("dsink",), ()):
            for name in OUTPUTS:
                call[name][...] = np.nan
            module.flash_attention_backward(*[value for name, value in call.items() if name not in left_out])
            for name in set(OUTPUTS) - set(left_out):
                np.testing.assert_array_equal(call[name], wanted[name])
            assert all(np.isnan(call[name]).all() for name in set(OUTPUTS) & set(left_out))
        call["dbias"] = None
        module.flash_attention_backward(*call.values())
        np.testing.assert_array_equal(call["dsink"], wanted["dsink"])

    def test_memory_that_pytorch_lends(self, module, call):
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        tensors = {name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for name, value in call.items()}
        module.flash_attention_backward(*tensors.values())
        module.flash_attention_backward(*call.values())
        for name in OUTPUTS:
            np.testing.assert_array_equal(tensors[name].numpy(), call[name])

    def test_autograd_finds_the_same(self, module, call):
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        q, k, v, bias, sink = (torch.from_numpy(call[name]).double().requires_grad_() for name in ("q", "k", "v", "bias", "sink"))
        heads = [x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
        hidden = torch.ones(9, 13, dtype=torch.bool).triu(13 - 9 + 1)
        scores = (0.5 * heads[0] @ heads[1].mT + bias).masked_fill(hidden, -torch.inf)
        shares = torch.cat((scores, sink[None, :, None, None].expand(2, 4, 9, 1)), dim=-1).softmax(-1)[..., :-1]
        (shares @ heads[2]).transpose(1, 2).backward(torch.from_numpy(call["dout"]).double())
        module.flash_attention_backward(*call.values())
        for name, wanted in (("dbias", bias), ("dsink", sink), ("dq", q), ("dk", k), ("dv", v)):
            np.testing.assert_allclose(call[name], wanted.grad.numpy(), rtol=1e-4, atol=1e-5)

    def test_the_check_cases_are_judged_by_all_gradients(self, module, tmp_path):
        write_cases(tmp_path / "check.npz", WORKLOAD, check_cases(WORKLOAD, gradients=True, operands=("bias", "sink")))
        run = commands.imported("run")
        index, arrays = run.read_cases(tmp_path / "check.npz", WORKLOAD.name)
        (case,) = (case for case in index["cases"] if case["name"] == "grouped")
        assert list(case["operand_tolerances"]) == ["dbias", "dsink"]
        backward = tvm.runtime.convert(module.flash_attention_backward)
        assert all(run.check_gradients(backward, case, arrays, tvm.cpu())[1] is None for case in index["cases"])
        arrays["grouped.dsink"][0] += 2 * case["operand_tolerances"]["dsink"]
        assert run.check_gradients(backward, case, arrays, tvm.cpu())[1].startswith("dsink is off by")


#: Memory in place of TVM's pool, which has none for pieces of so many bytes or a multiple, and says so by an exception, as TVM does.
POOL = """
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
extern "C" {
int64_t refused = INT64_MAX;
std::atomic<int> held;  // by the threads of a kernel
void *take(int, int, uint64_t bytes, int, int) {
  if (bytes % refused == 0) throw std::bad_alloc();
  ++held;
  return malloc(bytes);
}
int give(int, int, void *data) { return --held, free(data), 0; }
}"""


def test_what_a_call_allocates_goes_back_where_there_is_no_more(tmp_path):
    """There is none for delta, of the size of the LSE, or, once delta is there, for the parts of a bias. Kernels allocate, too."""
    exported(WORKLOAD, tmp_path, ["sink", "bias"])
    (tmp_path / "pool.cc").write_text(POOL)
    run_c_compiler(["-x", "c++", "-shared", "-fPIC", str(tmp_path / "pool.cc"), "-lstdc++", "-o", str(tmp_path / "pool.so")])
    pool, module = ctypes.CDLL(str(tmp_path / "pool.so")), tvm_ffi.load_module(str(tmp_path / "gradients.so"))
    artefact = ctypes.CDLL(str(tmp_path / "gradients.so"))
    for hook, function in (("Alloc", pool.take), ("Free", pool.give)):
        ctypes.c_void_p.in_dll(artefact, f"__TVMBackend{hook}Workspace").value = ctypes.cast(function, ctypes.c_void_p).value
    refused, held, call = ctypes.c_int64.in_dll(pool, "refused"), ctypes.c_int.in_dll(pool, "held"), call_of(Shape(2, 4, 2, 151, 140), "BH")
    nothing = refused.value
    for name in ("lse", "dbias"):
        refused.value = call[name].nbytes
        with pytest.raises(RuntimeError, match="bad_alloc"):
            module.flash_attention_backward(*call.values())
        assert held.value == 0, name
    refused.value = nothing
    module.flash_attention_backward(*call.values())
    assert held.value == 0 and not any(np.isnan(call[name]).any() for name in OUTPUTS)


class TestRefused:
    @pytest.mark.parametrize("change, error, message", [
        (lambda call: {"dbias": 1.0}, TypeError, "dbias is a float, wanted a tensor or None"),
        (lambda call: {"dbias": call["dbias"].astype(np.float16)}, TypeError, "dbias has dtype float16, wanted float32"),
        (lambda call: {"dbias": call["dbias"][0]}, ValueError, "dbias has 3 dimensions, wanted 4: BHNM"),
        (lambda call: {"dbias": np.zeros((2, 4, 9, 13), np.float32)}, ValueError, "dbias.shape[1] is 4, wanted 1 as bias.shape[1]"),
        (lambda call: {"dbias": np.zeros((2, 1, 9, 26), np.float32)[..., ::2]}, ValueError, "dbias has stride 2 in dimension 3, wanted 1"),
        (lambda call: {"dsink": np.zeros(2, np.float32)}, ValueError, "dsink.shape[0] is 2, wanted 1 as sink.shape[0]"),
        (lambda call: {"dbias": call["bias"]}, ValueError, "dbias shares memory with bias, wanted outputs of their own"),
        (lambda call: {"dsink": call["sink"]}, ValueError, "dsink shares memory with sink"),
        (lambda call: {"dsink": call["dq"].reshape(-1)[:1]}, ValueError, "dsink shares memory with dq"),
        (lambda call: {"dsink": call["dbias"].reshape(-1)[5:6]}, ValueError, "dsink shares memory with dbias"),
    ], ids=range(10))
    def test_names_the_argument_and_writes_nothing(self, module, call, change, error, message):
        wrong = {**call, **change(call)}
        with pytest.raises(error) as caught:
            module.flash_attention_backward(*wrong.values())
        assert str(caught.value).startswith(f"flash_attention_backward: {message}")
        assert all(np.isnan(call[name]).all() for name in OUTPUTS)

    def test_gradient_of_the_lse_among_them(self, module, call):
        call["dsink"] = call["lse"].copy().reshape(-1)[:1]
        call["dlse"] = call["dsink"].base.reshape(call["lse"].shape)
        with pytest.raises(ValueError, match="dsink shares memory with dlse"):
            module.flash_attention_backward(*call.values())

    def test_more_than_the_artefact_makes(self, module, call):
        with pytest.raises(TypeError, match="found 16 arguments, wanted 12 to 15: dout, .*, sink, dlse, dbias, dsink; gradients of more "
                                            "tensors are made by artefacts that were exported with them"):
            module.flash_attention_backward(*call.values(), None)


def test_the_manifest_names_them(module):
    told = json.loads(str(module.flash_attention_manifest()))["backward"]
    assert told["signature"].endswith("scale, bias, sink, dlse=None, dbias=None, dsink=None)") and told["operands"] == ["bias", "sink"]
    (variant,) = told["variants"]
    assert variant["operands"]["sink"]["workspace_bytes"] == 0 < variant["operands"]["bias"]["workspace_bytes"] <= 2**24
    assert variant["operands"]["bias"]["family"] == cpu_operand_gradients.NAME
    assert set(variant["operands"]["bias"]["plan"]) >= {"q_tile", "kv_tile"}


def test_export_asks_for_backward_too():
    args = export.make_parser().parse_args(["--target", "cpu", "--workload", WORKLOAD.name, "--gradients-of", "bias"])
    with pytest.raises(UsageError, match="--gradients-of goes with --backward, found bias alone: add it"):
        export.run(args)
