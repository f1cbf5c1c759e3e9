"""The second way into an artefact, flash_attention_backward: gradients by the cpu family, what it refuses, and calls without rows."""
import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from numpy.lib.stride_tricks import as_strided

from schedules import backward
from schedules.arch import cpu_arch, cuda_arch
from schedules.artefact.cases import check_cases
from schedules.artefact.export import ExportError, export_artefact
from schedules.artefact.manifest import describe
from schedules.artefact.variant import variant_of
from schedules.families import cpu_backward, mma_backward
from schedules.outputs import only
from schedules.registry import NoSchedule
from scripts.kernels import build_gradients
from te_defs import reference
from te_defs.flash_attention_backward import attention_delta, attention_dk_dv, attention_dq
from te_defs.workload import Shape, Workload
from tests.backward import Called, problem, verdict
from tests.stand_in_kernel import on_cpu

HERE = cpu_arch("znver3", 256, 2)
WORKLOAD = Workload(32, 16, "float32", "causal")
PACKED = replace(WORKLOAD, lengths="packed")
NAMES = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv")


def exported_module(workload, folder):
    """An artefact whose forward pass is a stand-in."""
    variants, gradients = [on_cpu(replace(workload, lengths="uniform"))], [kernel.variant for kernel in build_gradients(workload, HERE)]
    path = folder / "gradients.so"
    export_artefact(variants, workload, path, describe(workload, variants, None, gradients), (), gradients)
    return tvm_ffi.load_module(str(path))


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return exported_module(WORKLOAD, tmp_path_factory.mktemp("backward"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return exported_module(PACKED, tmp_path_factory.mktemp("packed"))


@pytest.fixture
def call():
    """Arguments that are right, by name; outputs hold NaN."""
    given, _, _ = problem(WORKLOAD, Shape(2, 4, 2, 9, 13), 0.5)
    outputs = [np.full_like(array, np.nan) for array in given[1:4]]
    return dict(zip(NAMES, (*given, *outputs)))


def untouched(call):
    return all(np.isnan(call[name]).all() for name in ("dq", "dk", "dv"))


class TestNumbers:
    @pytest.mark.parametrize("shape", [Shape(1, 2, 2, 64, 64), Shape(2, 6, 2, 37, 70), Shape(1, 2, 1, 70, 33), Shape(1, 70, 7, 3, 50)],
                             ids=str)
    @pytest.mark.parametrize("scale", [0.2, -0.3, 0.0])
    def test_against_the_reference(self, module, shape, scale):
        assert verdict(Called(module, WORKLOAD), WORKLOAD, shape, scale) is None

    @pytest.mark.parametrize("shape", [Shape(2, 6, 2, 37, 70), Shape(1, 2, 1, 70, 33), Shape(1, 2, 2, 5, 0)], ids=str)
    def test_through_the_lse(self, module, shape):
        assert verdict(Called(module, WORKLOAD), WORKLOAD, shape, 0.2, through_lse=True) is None

    def test_packed_through_the_lse(self, packed):
        lengths = np.array([0, 5, 5, 40], np.int32), np.array([0, 20, 20, 33], np.int32), 35
        assert verdict(Called(packed, PACKED), PACKED, Shape(1, 4, 2, 40, 33), 0.3, (), lengths, through_lse=True) is None

    def test_packed_sequences(self, packed):
        lengths = np.array([0, 5, 5, 40], np.int32), np.array([0, 20, 20, 33], np.int32), 35
        assert verdict(Called(packed, PACKED), PACKED, Shape(1, 4, 2, 40, 33), 0.3, (), lengths) is None

    def test_the_check_cases_carry_right_gradients(self, module):
        for case in check_cases(WORKLOAD, gradients=True):
            wanted = case.gradients
            given = wanted.dout, case.q, case.k, case.v, *case.rounded
            found = Called(module, WORKLOAD)(*map(np.ascontiguousarray, given), case.scale)
            answers = wanted.dq, wanted.dk, wanted.dv
            assert reference.backward_mismatch(found, answers, wanted.tolerances, case.lse) is None, case.name

    @pytest.mark.parametrize("convert", [tvm.runtime.tensor, tvm_ffi.from_dlpack], ids=["tvm", "ffi"])
    def test_tensors_of_several_libraries(self, module, call, convert):
        tensors = [convert(array) for array in call.values()]
        module.flash_attention_backward(*tensors, 0.5)
        module.flash_attention_backward(*call.values(), 0.5)
        for tensor, name in zip(tensors[6:], NAMES[6:]):
            np.testing.assert_array_equal(np.from_dlpack(tensor), call[name])

    def test_memory_that_pytorch_lends(self, module, call):
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        tensors = [torch.from_numpy(array.copy()) for array in call.values()]
        module.flash_attention_backward(*tensors, 0.5)
        module.flash_attention_backward(*call.values(), 0.5)
        for tensor, name in zip(tensors[6:], NAMES[6:]):
            np.testing.assert_array_equal(tensor.numpy(), call[name])


class TestViews:
    """Views give the same bits as contiguous tensors, and nothing beside them is written."""

    @pytest.fixture
    def wanted(self, module, call):
        module.flash_attention_backward(*call.values(), 0.5)
        return [call[name].copy() for name in NAMES[6:]]

    def check(self, module, call, views, wanted):
        outputs = [np.full_like(array, np.nan) for array in wanted]
        module.flash_attention_backward(*{**call, **dict(zip(NAMES[6:], outputs)), **views}.values(), 0.5)
        for name, output, array in zip(NAMES[6:], outputs, wanted):
            np.testing.assert_array_equal(views.get(name, output), array)

    @pytest.mark.parametrize("names", [("dout",), ("q",), ("out", "dq"), ("k", "v", "dk", "dv"), NAMES], ids="-".join)
    def test_heads_outside(self, module, call, wanted, names):
        views = {name: np.ascontiguousarray(call[name].swapaxes(1, 2)).swapaxes(1, 2) for name in names if name != "lse"}
        for name in set(names) & set(NAMES[6:]):
            views[name][:] = np.nan
        self.check(module, call, views, wanted)

    def test_slices_of_one_tensor(self, module, call, wanted):
        of_keys = np.full((2, 13, 2, 2, 32), np.nan, np.float32)  # dk and dv of one projection, [batch, keys, heads, k or v, channels]
        views = {"dk": of_keys[..., 0, :], "dv": of_keys[..., 1, :16]}
        self.check(module, call, views, wanted)
        assert np.isnan(of_keys[..., 1, 16:]).all()

    @pytest.mark.parametrize("axis", range(3), ids=["batch", "queries", "heads"])
    def test_stride_zero(self, module, call, axis):
        call["dout"] = np.ascontiguousarray(np.broadcast_to(call["dout"].take([0], axis), call["dout"].shape))
        module.flash_attention_backward(*call.values(), 0.5)
        one = call["dout"].take([0], axis)
        strides = [0 if it == axis else stride for it, stride in enumerate(one.strides)]
        self.check(module, call, {"dout": as_strided(one, call["dout"].shape, strides)}, [call[name].copy() for name in NAMES[6:]])


class TestWithoutRows:
    """Who is not there adds nothing: what is there gets zeros."""

    @pytest.mark.parametrize("shape, zero", [
        (Shape(2, 4, 2, 5, 0), "dq"), (Shape(2, 4, 2, 0, 5), "dk dv"), (Shape(2, 0, 2, 3, 5), "dk dv"), (Shape(2, 0, 0, 3, 5), ""),
        (Shape(0, 4, 2, 3, 5), ""), (Shape(2, 4, 2, 0, 0), "")], ids=str)
    def test_zeros(self, module, shape, zero):
        sizes = {"q": (shape.batch, shape.q_len, shape.q_heads, 32), "k": (shape.batch, shape.kv_len, shape.kv_heads, 32),
                 "v": (shape.batch, shape.kv_len, shape.kv_heads, 16), "out": (shape.batch, shape.q_len, shape.q_heads, 16)}
        sizes |= {"dout": sizes["out"], "lse": (shape.batch, shape.q_heads, shape.q_len), **{f"d{name}": sizes[name] for name in "qkv"}}
        call = {name: np.full(sizes[name], np.nan if name in NAMES[6:] else -np.inf if name == "lse" else 1, np.float32) for name in NAMES}
        module.flash_attention_backward(*call.values(), 0.5)
        assert [name for name in NAMES[6:] if call[name].size] == zero.split()
        assert all((call[name] == 0).all() for name in zero.split())

    def test_sequences_without_queries_or_keys(self, packed):
        lengths = np.array([0, 0, 4, 4], np.int32), np.array([0, 3, 3, 6], np.int32), 4
        assert verdict(Called(packed, PACKED), PACKED, Shape(1, 2, 1, 4, 6), 0.3, (), lengths) is None


def big(shape):
    return np.ones(shape, np.float32)


class TestRefused:
    @pytest.mark.parametrize("change, error, message", [
        (lambda call: {"lse": None}, TypeError, "lse is None, wanted a tensor"),
        (lambda call: {"lse": call["lse"][:, :, :-1].copy()}, ValueError, "lse.shape[2] is 8, wanted 9 as q.shape[1]"),
        (lambda call: {"lse": call["lse"].astype(np.float64)}, TypeError, "lse has dtype float64, wanted float32"),
        (lambda call: {"lse": call["lse"].swapaxes(1, 2)}, ValueError, "lse.shape[1] is 9, wanted 4 as q.shape[2]"),
        (lambda call: {"dout": call["dout"].astype(np.float16)}, TypeError, "dout has dtype float16, wanted float32"),
        (lambda call: {"dout": big((2, 9, 4, 32))}, ValueError, "dout.shape[3] is 32, wanted 16"),
        (lambda call: {"dout": as_strided(np.ones(1, np.float32), (2, 9, 4, 16), (0, 0, 0, 0))}, ValueError,
         "dout has stride 0 in dimension 3"),
        (lambda call: {"out": big((2, 9, 2, 16))}, ValueError, "out.shape[2] is 2, wanted 4 as q.shape[2]"),
        (lambda call: {"dk": big((2, 13, 4, 32))}, ValueError, "dk.shape[2] is 4, wanted 2 as k.shape[2]"),
        (lambda call: {"dq": call["q"]}, ValueError, "dq shares memory with q, wanted outputs of their own"),
        (lambda call: {"dk": call["k"]}, ValueError, "dk shares memory with k, wanted outputs of their own"),
        (lambda call: {"dv": call["dk"].reshape(-1)[:832].reshape(2, 13, 2, 16)}, ValueError, "dv shares memory with dk"),
        (lambda call: {"k": big((2, 13, 3, 32)), "v": big((2, 13, 3, 16)), "dk": big((2, 13, 3, 32)), "dv": big((2, 13, 3, 16))},
         ValueError, "q has 4 heads and k has 3"),
    ], ids=lambda it: it if isinstance(it, str) else "")
    def test_names_the_argument_and_writes_nothing(self, module, call, change, error, message):
        wrong = {**call, **change(call)}
        with pytest.raises(error) as caught:
            module.flash_attention_backward(*wrong.values(), 0.5)
        assert str(caught.value).startswith(f"flash_attention_backward: {message}")
        assert untouched(call)

    @pytest.mark.parametrize("make, message", [
        (lambda call: call["lse"][:, :-1].copy(), "dlse.shape[1] is 3, wanted 4 as lse.shape[1]"),
        (lambda call: call["lse"].astype(np.float64), "dlse has dtype float64, wanted float32"), (lambda call: 1.0, "dlse is a float"),
        (lambda call: call["dq"].reshape(-1)[:72].reshape(2, 4, 9), "dq shares memory with dlse")], ids=range(4))
    def test_gradients_of_the_lse(self, module, call, make, message):
        with pytest.raises((TypeError, ValueError)) as caught:
            module.flash_attention_backward(*call.values(), 0.5, make(call))
        assert str(caught.value).startswith(f"flash_attention_backward: {message}") and untouched(call)

    def test_no_gradient_of_the_lse(self, module, call):
        module.flash_attention_backward(*call.values(), 0.5, None)
        assert not untouched(call)

    @pytest.mark.parametrize("scale, message", [(np.inf, "scale is inf"), ("1", "scale is text or bytes")])
    def test_scales(self, module, call, scale, message):
        with pytest.raises((TypeError, ValueError)) as caught:
            module.flash_attention_backward(*call.values(), scale)
        assert message in str(caught.value) and untouched(call)

    def test_argument_count(self, module, call):
        with pytest.raises(TypeError, match="found 9 arguments, wanted 10: dout, q, k, v, out, lse, dq, dk, dv, scale"):
            module.flash_attention_backward(*call.values())

    def test_most_keys_of_a_packed_sequence(self, packed):
        given, _, _ = problem(WORKLOAD, Shape(1, 2, 1, 6, 8), 0.5)
        tensors = [array[0] for array in (*given, *(np.empty_like(array) for array in given[1:4]))]
        begins = np.array([0, 6], np.int32), np.array([0, 8], np.int32)
        with pytest.raises(ValueError, match="max_k is 7, wanted 8 or more, the keys of the longest sequence"):
            packed.flash_attention_backward(*tensors, 0.5, *begins, 6, 7)


def test_functions_for_a_gradient_each(tmp_path):
    """dK and dV by a function each, as a family for a GPU has them: plain functions stand in for these."""
    both = attention_dk_dv(WORKLOAD, 32, 16)
    functions = [*(attention_delta(WORKLOAD, through_lse) for through_lse in (False, True)), only(both, "dK"),
                 attention_dq(WORKLOAD, 32, 16), only(both, "dV")]
    names = filter(None, backward.function_names(False, apart=True))
    mod = tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in zip(names, functions)})
    plans = backward.ApartPlans(*[cpu_backward.default_plan("dq", WORKLOAD, HERE)] * 3)
    variants, gradients = [on_cpu(WORKLOAD)], [variant_of(tvm.compile(mod, HERE.target()), cpu_backward, HERE, plans)]
    export_artefact(variants, WORKLOAD, tmp_path / "apart.so", describe(WORKLOAD, variants, None, gradients), (), gradients)
    call = Called(tvm_ffi.load_module(str(tmp_path / "apart.so")), WORKLOAD)
    for shape in (Shape(2, 6, 2, 37, 70), Shape(1, 2, 1, 0, 33), Shape(1, 2, 2, 5, 0)):
        assert verdict(call, WORKLOAD, shape, 0.2, through_lse=True) is None


class TestExport:
    def test_manifest(self, module):
        told = json.loads(str(module.flash_attention_manifest()))["backward"]
        assert told["signature"] == "flash_attention_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, dlse=None)"
        assert told["variants"][0]["workspace_bytes"] == "4 * queries * heads * batch"
        (variant,) = told["variants"]
        assert variant["family"] == cpu_backward.NAME and set(variant["plan"]) == set(backward.Plans.roles())

    def test_without_gradients_there_is_no_such_call(self, tmp_path):
        variant = on_cpu(WORKLOAD)
        path, _ = export_artefact([variant], WORKLOAD, tmp_path / "forward.so", describe(WORKLOAD, [variant]), ())
        module = tvm_ffi.load_module(str(path))
        assert json.loads(str(module.flash_attention_manifest()))["backward"] is None
        with pytest.raises(AttributeError):
            module.flash_attention_backward

    def test_a_function_that_is_missing_is_named(self, tmp_path):
        forward = on_cpu(WORKLOAD)
        with pytest.raises(ExportError, match="attention_backward_delta is needed, found none: build it with schedules.backward.build"):
            export_artefact([forward], WORKLOAD, tmp_path / "none.so", {}, (), [forward])
        assert not list(tmp_path.iterdir())

    def test_who_declines_says_why(self):
        told = r"gradients of .*wgmma_backward: sm_75 has no wgmma.*; simt_backward: .*bfloat16.*; cpu_backward: sm_75 is no CPU"
        with pytest.raises(NoSchedule, match=told):
            backward.taker(replace(WORKLOAD, dtype="bfloat16"), cuda_arch("sm_75"))

    @pytest.mark.parametrize("dtype, remedy", [("float32", "choose another target or workload, or in-order"),
                                               ("bfloat16", "choose another target or workload")])
    def test_another_order_is_offered_where_it_is_served(self, dtype, remedy):
        with pytest.raises(NoSchedule) as caught:
            backward.taker(replace(WORKLOAD, dtype=dtype), cuda_arch("sm_75"), backward.ANY_ORDER)
        assert str(caught.value).endswith(f": {remedy}")

    def test_an_architecture_must_have_room_for_both_plans(self):
        workload, arch, smaller = Workload(128, 128, "float16"), cuda_arch("sm_80"), cuda_arch("sm_86")
        plans = backward.default_plans(mma_backward, workload, arch)
        large = replace(plans, dq=plans.dq.but(q_tile=128, warps=8))
        assert backward.fit(mma_backward, workload, plans, smaller)
        assert backward.fit(mma_backward, workload, large, arch) and not backward.fit(mma_backward, workload, large, smaller)
