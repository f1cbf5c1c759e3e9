"""From a built module to files that ship: the checked entry, the manifest, the check cases, and loading without a compiler.

The kernel of most tests is the stand-in of tests/stand_in_kernel.py. No GPU is needed.
"""
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from numpy.lib.stride_tricks import as_strided as strided

from schedules.arch import cuda_arch
from schedules.artefact import export
from schedules.artefact.cases import CHECK_SHAPES, check_cases, write_cases
from schedules.artefact.export import ExportError, export_artefact, read_manifest
from schedules.artefact.manifest import describe
from schedules.build import KERNEL, NEGATIVE_SCALE_KERNEL
from schedules.lowering.cuda_compile import cuda_compiler
from schedules.lowering.toolkit import ToolkitError, driver_version, find_toolkit, preload
from te_defs.naive import naive_attention
from te_defs.workload import Workload
from tests.stand_in_kernel import on_cpu, on_cuda, stand_in, variant

ROOT = Path(__file__).parent.parent
WORKLOAD = Workload(16, 8, "float32")
B, N, H, M, G = 3, 5, 4, 7, 2
SHAPES = {"q": (B, N, H, 16), "k": (B, M, G, 16), "v": (B, M, G, 8), "out": (B, N, H, 8), "lse": (B, H, N)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Path of a stand-in's artefact on the CPU."""
    path = tmp_path_factory.mktemp("artefact") / "stand_in.so"
    return export_artefact([on_cpu(WORKLOAD)], WORKLOAD, path, {"note": "stand-in"}, ())[0]


@pytest.fixture(scope="module")
def forward(exported):
    return tvm_ffi.load_module(str(exported)).flash_attention_forward


@pytest.fixture
def call():
    """Arguments that are right; outputs hold NaN."""
    rng = np.random.default_rng(0)
    arguments = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
    return {**arguments, "out": np.full(SHAPES["out"], np.nan, "float32"), "lse": np.full(SHAPES["lse"], np.nan, "float32"), "scale": 0.5}


def untouched(arguments):
    return np.isnan(arguments["out"]).all() and np.isnan(arguments["lse"]).all()


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


class TestAccepted:
    @pytest.mark.parametrize("convert", [lambda x: x, tvm.runtime.tensor, tvm_ffi.from_dlpack], ids=["numpy", "tvm", "ffi"])
    @pytest.mark.parametrize("scale", [0.5, -2, 0, np.float32(0.25)])
    def test_tensors_and_scales(self, forward, call, convert, scale):
        arguments = [convert(array) for array in list(call.values())[:5]]
        assert forward(*arguments, scale) is None
        np.testing.assert_array_equal(np.from_dlpack(arguments[3]), np.float32(scale) * call["q"][..., :8])
        np.testing.assert_array_equal(np.from_dlpack(arguments[4]), np.full(SHAPES["lse"], -M if scale < 0 else M, "float32"))

    def test_torch_tensors_with_no_data(self, forward):
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        arguments = {name: torch.ones([0 if size == M else size for size in shape]) for name, shape in SHAPES.items()}
        assert arguments["k"].data_ptr() == 0
        forward(*arguments.values(), 1.0)
        assert (arguments["lse"] == 0).all()

    def test_strides_of_an_axis_of_size_one_do_not_matter(self, forward):
        q, out, lse = strided(np.ones(64, "float32"), (2, 1, 1, 16), (64, 12, 20, 4)), ones(2, 1, 1, 8), ones(2, 1, 1)
        forward(q, ones(2, 3, 1, 16), ones(2, 3, 1, 8), out, lse, 3.0)
        assert (out == 3).all() and (lse == 3).all()

    @pytest.mark.parametrize("empty", [B, N, H], ids=["batch", "queries", "heads"])
    def test_nothing_to_write(self, forward, empty):
        sizes = {B: B, N: N, H: H, M: M, G: G, 16: 16, 8: 8, empty: 0}
        arguments = [np.ones([sizes[size] for size in shape], "float32") for shape in (*list(SHAPES.values())[:4], (B, H, N))]
        assert forward(*arguments, 1.0) is None

    def test_no_keys(self, forward, call):
        forward(*{**call, "k": np.ones((B, 0, G, 16), "float32"), "v": np.ones((B, 0, G, 8), "float32")}.values())
        assert (call["lse"] == 0).all()

    def test_a_slice_that_starts_off_the_vector_width(self, forward, call):
        call["q"] = np.concatenate([np.zeros(3, "float32"), call["q"].ravel()])[3:].reshape(SHAPES["q"])
        forward(*call.values())
        np.testing.assert_array_equal(call["out"], 0.5 * call["q"][..., :8])


def big(shape):
    """A compact float32 array of this shape as far as its strides tell; there is no memory behind it."""
    return strided(np.zeros(1, "float32"), shape, np.cumprod([4, *shape[:0:-1]])[::-1])


def misplaced(shape):
    """An array that starts two bytes past a multiple of four."""
    return np.ndarray(shape, "float32", buffer=bytearray(4 * int(np.prod(shape)) + 4), offset=2)


REFUSED = {
    "none": ({"q": None}, TypeError, "q is None, wanted a tensor"),
    "text": ({"v": "values"}, TypeError, "v is text or bytes, wanted a tensor"),
    "list": ({"lse": [1.0]}, TypeError, "lse is ffi.Array, wanted a tensor"),
    "rank": ({"k": ones(B, M, 16)}, ValueError, "k has 3 dimensions, wanted 4: [batch, keys, key_heads, head_dim]"),
    "dtype": ({"q": ones(B, N, H, 16, dtype="float16")}, TypeError, "q has dtype float16, wanted float32"),
    "lse dtype": ({"lse": ones(B, H, N, dtype="int32")}, TypeError, "lse has dtype int32, wanted float32"),
    "head dim": ({"q": ones(B, N, H, 8)}, ValueError, "q.shape[3] is 8, wanted 16, which this artefact was built for"),
    "key dim": ({"k": ones(B, M, G, 8)}, ValueError, "k.shape[3] is 8, wanted 16"),
    "value dim": ({"v": ones(B, M, G, 16)}, ValueError, "v.shape[3] is 16, wanted 8"),
    "batch": ({"k": ones(B + 1, M, G, 16)}, ValueError, "k.shape[0] is 4, wanted 3 as q.shape[0]"),
    "keys": ({"v": ones(B, M + 1, G, 8)}, ValueError, "v.shape[1] is 8, wanted 7 as k.shape[1]"),
    "key heads": ({"v": ones(B, M, 4, 8)}, ValueError, "v.shape[2] is 4, wanted 2 as k.shape[2]"),
    "out rows": ({"out": ones(B, N + 1, H, 8)}, ValueError, "out.shape[1] is 6, wanted 5 as q.shape[1]"),
    "lse order": ({"lse": ones(B, N, H)}, ValueError, "lse.shape[1] is 5, wanted 4 as q.shape[2]"),
    "group": ({"k": ones(B, M, 3, 16), "v": ones(B, M, 3, 8)}, ValueError, "q has 4 heads and k has 3, wanted a multiple"),
    "no group": ({"k": ones(B, M, 0, 16), "v": ones(B, M, 0, 8)}, ValueError, "q has 4 heads and k has 0, wanted a multiple"),
    "strides": ({"q": ones(B, H, N, 16).swapaxes(1, 2)}, ValueError, "q has stride 80 in dimension 2, wanted 16: pass a contiguous tensor"),
    "broadcast": ({"v": strided(ones(8), SHAPES["v"], (0, 0, 0, 4))}, ValueError, "v has stride 0 in dimension 2, wanted 8"),
    "alignment": ({"v": misplaced(SHAPES["v"])}, ValueError, "v starts 2 bytes past a multiple of 4, wanted data aligned to 4 bytes"),
    "size": ({"k": big((B, 2**22, 2**4, 16)), "v": big((B, 2**22, 2**4, 8))}, ValueError, "k has 2^31 elements or more, wanted fewer"),
    "far too large": ({"k": big((B, 2**54, 2, 16)), "v": big((B, 2**54, 2, 8))}, ValueError, "k has 2^31 elements or more"),
    "scale text": ({"scale": "0.5"}, TypeError, "scale is text or bytes, wanted a number"),
    "scale bool": ({"scale": True}, TypeError, "scale is a bool, wanted a number"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale is nan, wanted a number whose product with log2(e) is finite"),
    "scale too large": ({"scale": 3e38}, ValueError, "scale is 3e+38, wanted a number whose product with log2(e) is finite"),
}


class TestRefused:
    @pytest.mark.parametrize("change, error, message", REFUSED.values(), ids=list(REFUSED))
    def test_names_the_argument_and_writes_nothing(self, forward, call, change, error, message):
        with pytest.raises(error) as caught:
            forward(*{**call, **change}.values())
        assert str(caught.value).startswith("flash_attention_forward: " + message)
        assert untouched(call)

    @pytest.mark.parametrize("count", [0, 5, 7])
    def test_argument_count(self, forward, call, count):
        with pytest.raises(TypeError, match=f"found {count} arguments, wanted 6: q, k, v, out, lse, scale"):
            forward(*[*call.values(), 1][:count])
        assert untouched(call)

    @pytest.mark.parametrize("written, read", [("out", "q"), ("out", "v"), ("lse", "k"), ("lse", "out")])
    def test_outputs_that_share_memory(self, forward, call, written, read):
        other = call[read].reshape(-1)
        storage = np.zeros(other.size + call[written].size, "float32")
        call[read] = storage[:other.size].reshape(SHAPES[read])
        call[written] = storage[other.size - 1:-1].reshape(SHAPES[written])
        with pytest.raises(ValueError, match=f"{written} shares memory with {read}, wanted outputs of their own"):
            forward(*call.values())
        assert not storage.any()

    def test_neighbours_in_memory_are_apart(self, forward, call):
        storage = np.ones(call["q"].size + call["out"].size, "float32")
        call.update(q=storage[:call["q"].size].reshape(SHAPES["q"]), out=storage[call["q"].size:].reshape(SHAPES["out"]))
        forward(*call.values())
        assert (call["out"] == 0.5).all()

    def test_main_is_checked_too(self, exported):
        with pytest.raises(TypeError, match="flash_attention_forward: found 0 arguments"):
            tvm_ffi.load_module(str(exported)).main()

    def test_the_kernel_cannot_be_reached_past_the_checks(self, exported):
        assert not tvm_ffi.load_module(str(exported)).implements_function(KERNEL)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_each_type_is_taken_and_others_are_named(tmp_path, dtype):
    workload = replace(WORKLOAD, dtype=dtype)
    path, _ = export_artefact([on_cpu(workload)], workload, tmp_path / "typed.so", {}, ())
    forward = tvm_ffi.load_module(str(path)).flash_attention_forward
    arguments = [tvm.runtime.empty(shape, "float32" if name == "lse" else dtype) for name, shape in SHAPES.items()]
    forward(*arguments, 1.0)
    assert (arguments[4].numpy() == M).all()
    with pytest.raises(TypeError, match=f"out has dtype int8, wanted {dtype}"):
        forward(*arguments[:3], tvm.runtime.empty(SHAPES["out"], "int8"), arguments[4], 1.0)


class TestExport:
    def test_manifest_comes_back(self, tmp_path):
        variants = [replace(on_cpu(WORKLOAD), measured={"note": 'quotes " \\ and ünïcode\n'})]
        manifest = describe(WORKLOAD, variants)
        path, _ = export_artefact(variants, WORKLOAD, tmp_path / "m.so", manifest, ())
        found = read_manifest(path)
        assert found == json.loads(json.dumps(manifest)) and found["schema"] == 3
        assert found["workload"]["name"] == WORKLOAD.name and found["variants"][0]["plan"] == {"q_tile": 64, "kv_tile": 32}
        assert found["variants"][0]["target"] == {"kind": "cpu", "lowered_for": "znver4", "archs": []}
        assert (found["variants"][0]["max_elements"], found["variants"][0]["alignment"]) == (2**31 - 1, 4)

    def test_function_of_another_name(self, tmp_path):
        module = tvm.compile(stand_in(WORKLOAD).with_attr("global_symbol", "other"), "llvm")
        with pytest.raises(ExportError, match=f"with a function {KERNEL} is needed"):
            export_artefact([variant(module)], WORKLOAD, tmp_path / "x.so", {}, ())
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("step", ["compile_entry", "read_manifest", "write_cases"])
    def test_a_failure_leaves_what_was_there(self, tmp_path, monkeypatch, step):
        path, cases = tmp_path / "kept.so", tmp_path / "kept.check.npz"
        path.write_text("old artefact")
        cases.write_text("old cases")

        def fail(*_):
            raise ToolkitError("made to fail")
        monkeypatch.setattr(export, step, fail)
        with pytest.raises(ToolkitError, match="made to fail"):
            export_artefact([on_cpu(WORKLOAD)], WORKLOAD, path, {}, ())
        assert (path.read_text(), cases.read_text()) == ("old artefact", "old cases")
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept.check.npz", "kept.so"]

    def test_a_full_disk_is_told_and_leaves_what_was_there(self, tmp_path, monkeypatch):
        """The most bytes that a file may have stand in for it. Nothing but what stays is made there: LLVM, which ends the process where it
        cannot write, makes its files elsewhere."""
        path, cases, write = tmp_path / "kept.so", tmp_path / "kept.check.npz", export.write_library
        path.write_text("old artefact")
        made = check_cases(WORKLOAD)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def on_a_full_disk(library, modules, objects, scratch):
            assert not any(place.is_relative_to(tmp_path) for place in (scratch, *objects)) and library.is_relative_to(tmp_path)
            write(library, modules, objects, scratch)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
        monkeypatch.setattr(export, "write_library", on_a_full_disk)
        try:
            with pytest.raises(ExportError, match=f"{path} and {cases.name} were to be written, found: File too large: make room there"):
                export_artefact([on_cpu(WORKLOAD)], WORKLOAD, path, {}, made)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_text() == "old artefact" and list(tmp_path.iterdir()) == [path]

    def test_a_folder_that_cannot_be_is_told(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ExportError, match="it.check.npz were to be written, found: Not a directory: make room there, or"):
            export_artefact([on_cpu(WORKLOAD)], WORKLOAD, tmp_path / "file" / "new" / "it.so", {}, ())

    def test_a_linker_that_fails_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(export, "compile_entry", lambda *_: tmp_path / "missing.o")
        with pytest.raises(ToolkitError, match=r"failed: .*missing\.o"):
            export_artefact([on_cpu(WORKLOAD)], WORKLOAD, tmp_path / "x.so", {}, ())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(workload, file, CheckCases) of a type that NumPy does not have."""
    workload = Workload(32, 16, "bfloat16", "causal")
    path = tmp_path_factory.mktemp("cases") / "bf16.check.npz"
    cases = check_cases(workload)
    write_cases(path, workload, cases)
    return workload, path, cases


class TestCases:
    def test_read_with_numpy_alone(self, written):
        workload, path, cases = written
        with np.load(path) as file:
            index = json.loads(str(file["index"]))
            assert index["workload"] == workload.name and index["dtype"] == "bfloat16"
            assert [entry["name"] for entry in index["cases"]] == list(CHECK_SHAPES)
            assert file["ragged.q"].dtype == np.uint16 and file["ragged.out"].dtype == np.float64
            np.testing.assert_array_equal(file["ragged.q"], cases[1].q.view(np.uint16))
            np.testing.assert_array_equal(file["few_keys.lse"], cases[4].lse)

    def test_cover_what_breaks_kernels(self, written):
        _, _, cases = written
        by_name = {case.name: case for case in cases}
        assert np.isneginf(by_name["few_keys"].lse).any() and np.isfinite(by_name["few_keys"].lse).any()
        assert by_name["no_keys"].k.size == 0 and np.isneginf(by_name["no_keys"].lse).all()
        assert by_name["no_batch"].out.size == 0
        assert by_name["negative_scale"].scale < 0 and by_name["zero_scale"].scale == 0

    def test_same_seed_same_bytes(self, written, tmp_path):
        workload, path, _ = written
        write_cases(tmp_path / "again.npz", workload, check_cases(workload))
        assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()


#: What a user's machine does: TVM's runtime and NumPy, nothing of ours. Prints one line for each case and one for a refused call.
RUNTIME_ONLY = """
import json, sys
import numpy as np, tvm, tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
forward, wrong = module.flash_attention_forward, []
with np.load(sys.argv[2]) as file:
    for case in json.loads(str(file["index"]))["cases"]:
        q, k, v, answer, lse_answer = (file[f"{case['name']}.{name}"] for name in ("q", "k", "v", "out", "lse"))
        out, lse = np.full(answer.shape, np.nan, q.dtype), np.full(lse_answer.shape, np.nan, "float32")
        arguments = [tvm.runtime.tensor(x) for x in (q, k, v, out, lse)]
        forward(*arguments, case["scale"])
        out, lse = arguments[3].numpy().astype(float), arguments[4].numpy().astype(float)
        dead = np.isneginf(lse_answer)
        bound = case["lse_tolerance"] * np.maximum(abs(lse_answer[~dead]), 1)
        right = (abs(out - answer) <= case["out_tolerance"]).all() and (abs(lse[~dead] - lse_answer[~dead]) <= bound).all()
        if not (right and np.isneginf(lse[dead]).all()):
            wrong.append(case["name"])
try:
    forward(*arguments[:5], "x")
except TypeError as error:
    refusal = str(error)
ours = sorted(name for name in sys.modules if name.split(".")[0] in ("te_defs", "schedules", "scripts"))
print(json.dumps([wrong, refusal, ours, "libtvm_compiler" in open("/proc/self/maps").read(), str(module.flash_attention_manifest())]))
"""


def in_fresh_process(code, *arguments, **environ):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300)


def test_without_tvms_runtime_a_call_is_refused(exported):
    """tvm_ffi alone loads an artefact, whose kernel would call through pointers that the runtime fills in."""
    done = in_fresh_process("""if True:
        import sys
        import numpy as np, tvm_ffi
        tensors = [np.ones(shape, np.float32) for shape in ((1, 2, 2, 16), (1, 2, 2, 16), (1, 2, 2, 8), (1, 2, 2, 8), (1, 2, 2))]
        tvm_ffi.load_module(sys.argv[1]).flash_attention_forward(*tensors, 0.5)""", exported)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "RuntimeError: flash_attention_forward: TVM's runtime was wanted, found that it was not there when this artefact was loaded: "
        "load libtvm_runtime.so (import tvm does), then the artefact")


def test_runs_where_no_compiler_is(tmp_path):
    workload = Workload(32, 16, "float16", "causal")
    functions = {name: naive_attention(workload).with_attr("global_symbol", name) for name in (KERNEL, NEGATIVE_SCALE_KERNEL)}
    module = tvm.compile(tvm.IRModule(functions), "llvm")
    files = export_artefact([variant(module)], workload, tmp_path / "naive.so", {"kind": "test"}, check_cases(workload))
    done = in_fresh_process(RUNTIME_ONLY, *files, TVM_USE_RUNTIME_LIB="1", PYTHONSAFEPATH="1", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    wrong, refusal, ours, compiler, manifest = json.loads(done.stdout)
    assert wrong == []
    assert refusal == "flash_attention_forward: scale is text or bytes, wanted a number"
    assert (ours, compiler, json.loads(manifest)) == ([], False, {"kind": "test"})


CUDA_WORKLOAD = Workload(64, 64, "float16")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(artefact, CompileLog) of the stand-in for two CUDA architectures."""
    try:
        toolkit = find_toolkit(os.environ)
    except ToolkitError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cuda")
    preload(toolkit, folder / "stub")
    arch = cuda_arch("sm_80")
    with cuda_compiler(toolkit, ("sm_80", "sm_90a")) as log:
        module = tvm.tirx.build(on_cuda(CUDA_WORKLOAD), arch.target())
    variants = [variant(module, arch, log.kernels)]
    return export_artefact(variants, CUDA_WORKLOAD, folder / "cuda.so", describe(CUDA_WORKLOAD, variants, toolkit), ())[0], log


class TestCuda:
    def test_device_code_is_inside_and_source_is_not(self, built):
        path, log = built
        content = path.read_bytes()
        assert log.last.archs == ("sm_80", "sm_90a") and log.last.image in content
        assert b"__global__" not in content and b"#include" not in content

    def test_manifest_tells_what_the_kernels_take(self, built):
        versions, found = read_manifest(built[0])["versions"], read_manifest(built[0])["variants"][0]
        assert found["target"] == {"kind": "cuda", "lowered_for": "sm_80", "archs": ["sm_80", "sm_90a"]}
        kernels = sorted((entry["arch"], entry["kernel"]) for entry in found["kernels"])
        names = [f"{name}_kernel{number}" for name in (KERNEL, NEGATIVE_SCALE_KERNEL) for number in ("", "_1")]
        assert kernels == sorted((arch, name) for arch in ("sm_80", "sm_90a") for name in names)
        assert all(entry["registers"] > 0 for entry in found["kernels"]) and versions["nvcc"].startswith("13.")

    def test_tensors_of_another_device_are_refused(self, built):
        forward = tvm_ffi.load_module(str(built[0])).flash_attention_forward
        arguments = [np.zeros((1, 2, 1, 64), "float16")] * 4 + [np.zeros((1, 1, 2), "float32")]
        with pytest.raises(ValueError, match="flash_attention_forward: q is on cpu, wanted a tensor on a cuda device"):
            forward(*arguments, 1.0)

    def test_source_alone_is_refused(self, tmp_path):
        """Without preload TVM keeps the source and says nothing; the export must."""
        if driver_version() is not None:
            pytest.skip("with an NVIDIA driver TVM loads its CUDA runtime by itself")
        code = ("from tests.test_artefact import *\n"
                "arch = cuda_arch('sm_80')\n"
                "module = variant(tvm.tirx.build(on_cuda(CUDA_WORKLOAD), arch.target()), arch)\n"
                "export_artefact([module], CUDA_WORKLOAD, sys.argv[1], {}, ())")
        done = in_fresh_process(code, tmp_path / "x.so", PYTHONPATH=str(ROOT))
        assert "ExportError: the module carries cuda source and no device code: call toolkit.preload before it is built" in done.stderr
        assert list(tmp_path.iterdir()) == []
