"""Several kernels in one artefact: which of them serves a call, what is said about it, and that they can be linked together.

The choice is tested with host functions that return their number instead of launching anything, on tensors that claim to be on GPUs of any
kind. No GPU is needed but for the last test.
"""
import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import tvm_ffi

from schedules.arch import arch_of_capability, cuda_arch
from schedules.artefact.cases import check_cases
from schedules.artefact.export import ExportError, compile_entry, export_artefact, read_manifest
from schedules.artefact.manifest import describe
from schedules.artefact.variant import variant_of
from schedules.build import kernel_names
from schedules.lowering.cuda_compile import CompiledKernel, cuda_compiler
from schedules.lowering.toolkit import run_c_compiler
from schedules.plan import Calls
from te_defs.workload import Workload
from tests.stand_in_kernel import CPU, named, on_cpu, on_cuda, variant

ROOT = Path(__file__).parent.parent
WORKLOAD = Workload(16, 8, "float32")
#: Compute capabilities of the GPUs that the tests pretend to have, by device number; TVM tells none of the last.
CAPABILITIES = ("7.5", "8.0", "8.9", "9.0", "9.1", "10.0", "12.1", None)
GPU = {text: number for number, text in enumerate(CAPABILITIES)}
ATTRIBUTE = "runtime.GetDeviceAttr"
#: Size of the head of a TVM object, after which a tensor's DLTensor starts.
OBJECT_BYTES = 24


def code_for(name, *archs, **limits):
    """Variant that claims to hold device code for these architectures; its host functions come from `link_numbers`."""
    return variant(None, cuda_arch(archs[0]), [CompiledKernel(b"", archs, (), ())], name, **limits)


#: Libraries of `link_numbers` as bytes, each linked once.
LINKED = {}


def link_numbers(variants, folder, workload=WORKLOAD):
    """flash_attention_forward of a workload over host functions that return their place, or minus their place for scales below zero; of a
    library of its own, since a library keeps what it has asked and said."""
    key, library = (repr(variants), workload), folder / "numbers.so"
    if key not in LINKED:
        link(variants, folder, workload, library)
        LINKED[key] = library.read_bytes()
    library.unlink(missing_ok=True)  # the loader knows an inode again
    library.write_bytes(LINKED[key])
    return tvm_ffi.load_module(str(library)).flash_attention_forward


def link(variants, folder, workload, library):
    """Compile and link what `link_numbers` loads."""
    body = "(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) { result->type_index = kTVMFFIInt; result->v_int64 = "
    functions = [f"int __tvm_ffi_{name}{body}{sign * place}; return 0; }}"
                 for place in range(1, len(variants) + 1) for name, sign in zip(kernel_names(place), (1, -1))]
    source = folder / "numbers.c"
    source.write_text("\n".join(["#include <tvm/ffi/c_api.h>", *functions, ""]))
    entry = compile_entry(workload, variants, folder)
    includes = [f"-I{path}" for path in (tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())]
    run_c_compiler(["-shared", "-fPIC", "-x", "c", *includes, str(source), "-x", "none", str(entry), "-o", str(library)])


@pytest.fixture(params=["{}", "{}        "], ids=["in_the_value", "object"])
def asked(request):
    """The device numbers whose capability an artefact has asked for, while TVM tells those of CAPABILITIES.

    TVM's CUDA runtime tells even short texts as objects; a text from Python is one from its eighth character on.
    """
    devices, real = [], tvm_ffi.get_global_func(ATTRIBUTE)

    def tell(kind, device, attribute):
        assert (kind, attribute) == (2, 4)
        devices.append(device)
        return CAPABILITIES[device] and request.param.format(CAPABILITIES[device])
    tvm_ffi.register_global_func(ATTRIBUTE, tell, override=True)
    yield devices
    tvm_ffi.register_global_func(ATTRIBUTE, real, override=True)


@pytest.fixture
def forward(asked, tmp_path):
    """Of three variants: one for a single chip, one for many with tighter limits, one for an old chip with wide ones."""
    return link_numbers([code_for("special", "sm_90a"), code_for("general", "sm_80", "sm_89", "sm_90", "sm_120", MAX_ELEMENTS=2**40 - 1),
                         code_for("old", "sm_75", ALIGNMENT=4)], tmp_path)


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_int64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("dtype", ctypes.c_int32), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p)]


def claim(shape, device, address, strides=None):
    """A float32 tensor that claims to have this shape and to be at an address of a GPU, compact without strides; nobody may read it."""
    tensor = tvm_ffi.from_dlpack(np.zeros((1,) * len(shape), "float32"))
    head = DLTensor.from_address(tensor.__chandle__() + OBJECT_BYTES)
    head.data, head.device_type, head.device_id = address, tvm_ffi.DLDeviceType.kDLCUDA, device
    for axis, size in enumerate(shape):
        head.shape[axis] = size
    if strides is None:
        head.strides = None
    for axis, stride in enumerate(strides or ()):
        ctypes.cast(head.strides, ctypes.POINTER(ctypes.c_int64))[axis] = stride
    return tensor


def call(forward, capability, kv_len=7, q_len=5, misplaced=0, scale=1.0, **strides):
    """Call it on a GPU of this capability; k starts `misplaced` bytes past a multiple of 16, tensors that are named have strides."""
    shapes = ((3, q_len, 4, 16), (3, kv_len, 2, 16), (3, kv_len, 2, 8), (3, q_len, 4, 8), (3, 4, q_len))
    # Far apart, since outputs must not share memory.
    starts = (1 << 50, (2 << 50) + misplaced, 3 << 50, 4 << 50, 5 << 50)
    tensors = (claim(shape, GPU[capability], start, strides.get(name))
               for name, shape, start in zip(("q", "k", "v", "out", "lse"), shapes, starts))
    return forward(*tensors, scale)


class TestChoice:
    @pytest.mark.parametrize("capability, place", [("7.5", 3), ("8.0", 2), ("8.9", 2), ("9.0", 1), ("9.1", 2), ("12.1", 2)])
    def test_by_the_device_without_a_word(self, forward, capfd, capability, place):
        assert call(forward, capability) == place
        assert call(forward, capability, scale=-1.0) == -place
        assert capfd.readouterr() == ("", "")

    def test_each_device_is_asked_about_once(self, forward, asked):
        assert [call(forward, capability) for capability in ("8.0", "9.0", "8.0", "9.0", "8.0")] == [2, 1, 2, 1, 2]
        assert asked == [GPU["8.0"], GPU["9.0"]]

    @pytest.mark.parametrize("rows", [2**25, 10**9])
    def test_tensors_of_2_to_the_31_elements_and_more(self, forward, rows):
        assert call(forward, "8.0", kv_len=rows) == call(forward, "8.0", q_len=rows) == call(forward, "9.0", q_len=rows) == 2

    def test_a_better_variant_that_is_passed_over_is_named_once_for_each_reason(self, forward, capfd):
        assert [call(forward, "9.0", kv_len=2**25) for _ in range(3)] == [2, 2, 2]
        assert capfd.readouterr().err == ("flash_attention_forward: special for sm_90a cannot take this call (k has 2^31 elements or more, "
                                          "wanted fewer): using general for sm_80\n")
        assert call(forward, "9.0") == 1
        assert capfd.readouterr().err == ""

    def test_alignment(self, asked, tmp_path, capfd):
        forward = link_numbers([code_for("strict", "sm_80"), code_for("lax", "sm_80", ALIGNMENT=4)], tmp_path)
        assert [call(forward, "8.0"), call(forward, "8.0", misplaced=4), call(forward, "8.0", misplaced=8)] == [1, 2, 2]
        assert capfd.readouterr().err == ("flash_attention_forward: strict for sm_80 cannot take this call (k starts 4 bytes past a "
                                          "multiple of 16, wanted data aligned to 16 bytes): using lax for sm_80\n")

    @pytest.mark.parametrize("q_len, place", [(64, 2), (128, 2), (129, 1), (4096, 1)])
    def test_by_the_tiles_of_a_call_without_a_word(self, asked, tmp_path, capfd, q_len, place):
        """The tests' calls have 12 heads over all batch entries: 24 tiles of 64 rows up to 128 queries, 36 from there on."""
        wide, small = code_for("wide", "sm_90a"), code_for("small", "sm_90a")
        forward = link_numbers([replace(wide, serves=Calls(tiles=25, rows=64)), small, code_for("old", "sm_80")], tmp_path)
        assert call(forward, "9.0", q_len=q_len) == place and call(forward, "8.0", q_len=q_len) == 3
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("q_len, place", [(2, 2), (1536, 2), (1537, 1)])
    def test_by_the_length_of_a_call(self, asked, tmp_path, q_len, place):
        long, short = code_for("long", "sm_90a"), code_for("short", "sm_90a")
        assert call(link_numbers([replace(long, serves=Calls(queries=1537)), short], tmp_path), "9.0", q_len=q_len) == place

    def test_code_without_room_on_later_minors(self, asked, tmp_path):
        """A plan for the shared memory of 8.0 is not given to 8.9, which has less; the next variant is."""
        wide = replace(code_for("wide", "sm_80"), portable=False)
        forward = link_numbers([wide, code_for("narrow", "sm_80")], tmp_path)
        assert [call(forward, capability) for capability in ("8.0", "8.9")] == [1, 2]

    def test_a_variant_of_one_s_own_choice(self, asked, tmp_path):
        """Each can be reached, whatever calls it is for, but not on a device that it has no code for."""
        large = replace(code_for("large", "sm_90a"), serves=Calls(tiles=1000, rows=64))
        link_numbers([large, code_for("small", "sm_90a"), code_for("old", "sm_80")], tmp_path)
        chosen = tvm_ffi.load_module(str(tmp_path / "numbers.so")).flash_attention_forward_variant
        assert [call(partial(chosen, number), capability) for number, capability in enumerate(("9.0", "9.0", "8.0"))] == [1, 2, 3]
        with pytest.raises(ValueError, match="q is on cuda:1 of compute capability 8.0, wanted a device that runs code for"):
            call(partial(chosen, 0), "8.0")
        for number in (-1, 3, 1.0, None):
            with pytest.raises(ValueError, match="the first argument is no variant of this artefact, wanted an int from 0 to 2"):
                call(partial(chosen, number), "9.0")

    def test_nothing_is_said_of_a_call_that_is_refused_or_empty(self, forward, capfd):
        with pytest.raises(TypeError, match="scale is text"):
            call(forward, "9.0", kv_len=2**25, scale="x")
        assert call(forward, "9.0", q_len=0, kv_len=2**25) is None
        assert capfd.readouterr().err == ""


class TestViews:
    """Strides of q [3, 5, 4, 16] and the others in elements of four bytes."""

    BHND = (320, 16, 80, 1)

    @pytest.fixture
    def forward(self, asked, tmp_path):
        """Of one kernel that takes all tensors, on one chip, and on others of one for contiguous tensors with a twin for views."""
        return link_numbers([code_for("special", "sm_90a", strided=True, MAX_ELEMENTS=2**40 - 1), code_for("plain", "sm_80", "sm_90"),
                             code_for("twin", "sm_80", "sm_90", strided=True)], tmp_path)

    @pytest.mark.parametrize("capability, places", [("8.0", (2, 3)), ("9.0", (1, 1))])
    def test_a_kernel_of_their_own_serves_without_a_word(self, forward, capfd, capability, places):
        assert (call(forward, capability), call(forward, capability, q=self.BHND)) == places
        assert call(forward, capability, scale=-1.0, out=(160, 8, 40, 1)) == -places[1]
        assert call(forward, capability, k=(0, 32, 0, 1)) == places[1], "expanded"
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("capability, strides, message", [
        ("8.0", dict(q=(330, 66, 16, 1)), "q has stride 330 in dimension 0, wanted a multiple of 4, which is 16 bytes: pass a copy"),
        ("9.0", dict(v=(4200, 600, 2**31, 1)), "v has stride 2147483648 in dimension 2, wanted less than 2^31: pass a copy"),
        ("8.0", dict(q=(2**30, 64, 16, 1)), "q spans 2^31 elements or more, wanted fewer: split the batch or the heads over several calls"),
    ], ids=["multiple", "stride", "span"])
    def test_one_sentence_says_why_none_serves(self, forward, capfd, capability, strides, message):
        with pytest.raises(ValueError) as caught:
            call(forward, capability, **strides)
        assert str(caught.value) == f"flash_attention_forward: {message}" and capfd.readouterr().err == ""

    def test_a_better_one_that_cannot_is_named(self, asked, tmp_path, capfd):
        forward = link_numbers([code_for("strict", "sm_80", strided=True), code_for("lax", "sm_80", strided=True, ALIGNMENT=4)], tmp_path)
        assert call(forward, "8.0", q=(330, 66, 16, 1)) == 2
        assert capfd.readouterr().err == ("flash_attention_forward: strict for sm_80 cannot take this call (q has stride 330 in dimension "
                                          "0, wanted a multiple of 4, which is 16 bytes): using lax for sm_80\n")

    def test_batch_entries_may_be_far_apart(self, forward):
        assert call(forward, "9.0", q=(2**34, 64, 16, 1)) == 1

    def test_where_all_kernels_are_for_contiguous_tensors(self, asked, tmp_path):
        with pytest.raises(ValueError, match="q has stride 80 in dimension 2, wanted 16: pass a contiguous tensor"):
            call(link_numbers([code_for("plain", "sm_80")], tmp_path), "8.0", q=self.BHND)


class TestRefused:
    @pytest.mark.parametrize("capability, wrong, message", [
        ("10.0", {}, "q is on cuda:5 of compute capability 10.0, wanted a device that runs code for sm_90a, sm_80, sm_89, sm_90, sm_120, "
                     "sm_75: export for its architecture too"),
        ("7.5", {"kv_len": 2**25}, "k has 2^31 elements or more, wanted fewer: split the batch or the heads over several calls"),
        ("9.0", {"misplaced": 2}, "k starts 2 bytes past a multiple of 16, wanted data aligned to 16 bytes: pass a copy"),
        ("8.0", {"q_len": 10**9 + 1}, "q.shape[1] is 1000000001, wanted at most 10^9: split it over several calls"),
        ("9.0", {"kv_len": 2**57}, "k has 2^63 elements or more, wanted fewer: split the batch or the heads over several calls"),
    ], ids=["device", "size", "alignment", "axis", "overflow"])
    def test_one_sentence_says_why_no_variant_serves(self, forward, capfd, capability, wrong, message):
        with pytest.raises(ValueError) as caught:
            call(forward, capability, **wrong)
        assert str(caught.value) == f"flash_attention_forward: {message}"
        assert capfd.readouterr().err == ""

    def test_one_variant_on_a_device_that_it_has_no_code_for(self, asked, tmp_path):
        forward = link_numbers([code_for("alone", "sm_90a")], tmp_path)
        assert call(forward, "9.0") == 1
        with pytest.raises(ValueError, match="q is on cuda:1 of compute capability 8.0, wanted a device that runs code for sm_90a: export"):
            call(forward, "8.0")

    def test_a_device_that_tvm_tells_nothing_of(self, forward):
        with pytest.raises(RuntimeError, match="the compute capability of cuda:7 was wanted, found none"):
            call(forward, None)


@pytest.fixture(scope="module")
def two_on_cpu(tmp_path_factory):
    """Artefact of two real kernels; the first takes q of 960 elements and no more."""
    variants = [on_cpu(WORKLOAD, MAX_ELEMENTS=3 * 5 * 4 * 16), on_cpu(WORKLOAD, place=2, factor=10)]
    path = tmp_path_factory.mktemp("cpu") / "two.so"
    return export_artefact(variants, WORKLOAD, path, describe(WORKLOAD, variants), ())[0]


class TestCpu:
    """Two real kernels, linked from two modules of generated host code."""

    @pytest.mark.parametrize("kv_len, factor", [(7, 1), (31, 10)])
    @pytest.mark.parametrize("scale", [0.5, -2.0])
    def test_each_computes(self, two_on_cpu, kv_len, factor, scale):
        forward = tvm_ffi.load_module(str(two_on_cpu)).flash_attention_forward
        q, k, v = np.ones((3, 5, 4, 16), "float32"), np.ones((3, kv_len, 2, 16), "float32"), np.ones((3, kv_len, 2, 8), "float32")
        out, lse = np.zeros((3, 5, 4, 8), "float32"), np.zeros((3, 4, 5), "float32")
        forward(q, k, v, out, lse, scale)
        assert (out == scale).all() and (lse == np.sign(scale) * factor * kv_len).all()

    def test_no_kernel_can_be_reached_past_the_checks(self, two_on_cpu):
        module = tvm_ffi.load_module(str(two_on_cpu))
        assert not any(module.implements_function(name) for place in (1, 2) for name in kernel_names(place))

    def test_manifest_lists_both_in_order(self, two_on_cpu):
        assert [variant["max_elements"] for variant in read_manifest(two_on_cpu)["variants"]] == [960, 2**31 - 1]

    def test_run_tells_of_a_refused_call_in_one_sentence(self, tmp_path):
        variants = [on_cpu(WORKLOAD, MAX_ELEMENTS=1)]
        path, _ = export_artefact(variants, WORKLOAD, tmp_path / "small.so", describe(WORKLOAD, variants), check_cases(WORKLOAD))
        done = subprocess.run([sys.executable, "-m", "scripts.run", path], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr == (
            "error: the artefact refuses check case even: flash_attention_forward: q has 2^1 elements or more, wanted fewer: "
            "split the batch or the heads over several calls\n")

    def test_variants_of_the_wrong_place_or_kind(self, tmp_path):
        with pytest.raises(ExportError, match="a module with a function attention_forward_variant2 is needed, found none"):
            export_artefact([on_cpu(WORKLOAD)] * 2, WORKLOAD, tmp_path / "x.so", {}, ())
        host = tvm.compile(named(WORKLOAD), "llvm")
        with pytest.raises(ExportError, match="for one kind of device, found cpu and cuda: make an artefact for each"):
            kernels = [CompiledKernel(b"", ("sm_80",), (), ())]
            second = variant(tvm.compile(named(WORKLOAD, 2), "llvm"), cuda_arch("sm_80"), kernels)
            export_artefact([on_cpu(WORKLOAD), second], WORKLOAD, tmp_path / "x.so", {}, ())
        with pytest.raises(ExportError, match="a CUDA variant says what its code runs on, found that stand-in for sm_80 does not"):
            export_artefact([variant(host, cuda_arch("sm_80"))], WORKLOAD, tmp_path / "x.so", {}, ())
        assert list(tmp_path.iterdir()) == []


def built_for(toolkit, archs, place, **how):
    """(Variant, CompileLog) of the stand-ins for CUDA, lowered for the first architecture."""
    arch = cuda_arch(archs[0])
    with cuda_compiler(toolkit, archs) as log:
        module = tvm.tirx.build(on_cuda(WORKLOAD, place, how.pop("factor", 1)), arch.target())
    return variant(module, arch, log.kernels, **how), log


@pytest.fixture(scope="module")
def two_on_cuda(toolkit, tmp_path_factory):
    """(artefact, CompileLogs) of a variant for one chip and one for others."""
    variants, logs = zip(built_for(toolkit, ("sm_90a",), 1), built_for(toolkit, ("sm_80", "sm_89"), 2))
    path = tmp_path_factory.mktemp("cuda") / "two.so"
    return export_artefact(variants, WORKLOAD, path, describe(WORKLOAD, variants, toolkit), ())[0], logs


class TestCuda:
    def test_device_code_of_both_is_inside_under_names_of_its_own(self, two_on_cuda):
        path, logs = two_on_cuda
        content, module = path.read_bytes(), tvm_ffi.load_module(str(path))
        assert all(log.last.image in content for log in logs)
        assert [part.kind for part in module.imports] == ["cuda", "cuda"]
        for place in (1, 2):
            holders = [part.implements_function(f"{name}_kernel") for name in kernel_names(place) for part in module.imports]
            assert sorted(holders) == [False, False, True, True]

    def test_manifest(self, two_on_cuda):
        first, second = read_manifest(two_on_cuda[0])["variants"]
        assert first["target"] == {"kind": "cuda", "lowered_for": "sm_90a", "archs": ["sm_90a"]}
        assert second["target"] == {"kind": "cuda", "lowered_for": "sm_80", "archs": ["sm_80", "sm_89"]}
        assert {entry["arch"] for entry in second["kernels"]} == {"sm_80", "sm_89"}
        assert all("variant2" in entry["kernel"] for entry in second["kernels"])
        assert (first["alignment"], first["max_elements"]) == (16, 2**31 - 1)

    def test_the_device_decides_before_anything_is_launched(self, two_on_cuda, asked):
        forward = tvm_ffi.load_module(str(two_on_cuda[0])).flash_attention_forward
        with pytest.raises(ValueError, match="q is on cuda:0 of compute capability 7.5, wanted a device that runs code for sm_90a, sm_80"):
            call(forward, "7.5")


@pytest.mark.gpu
def test_both_run_on_a_gpu(toolkit, tmp_path, capfd):
    arch = arch_of_capability(*map(int, str(tvm.cuda(0).compute_version).split(".")))
    variants = [built_for(toolkit, (arch.name,), 1, MAX_ELEMENTS=3 * 5 * 4 * 16)[0], built_for(toolkit, (arch.name,), 2, factor=10)[0]]
    forward = tvm_ffi.load_module(str(export_artefact(variants, WORKLOAD, tmp_path / "two.so", {}, ())[0])).flash_attention_forward
    for kv_len, factor in ((7, 1), (31, 10), (7, 1), (31, 10)):
        shapes = ((3, 5, 4, 16), (3, kv_len, 2, 16), (3, kv_len, 2, 8), (3, 5, 4, 8), (3, 4, 5))
        tensors = [tvm.runtime.tensor(np.ones(shape, "float32"), tvm.cuda(0)) for shape in shapes]
        forward(*tensors, 0.5)
        assert (tensors[3].numpy() == 0.5).all() and (tensors[4].numpy() == factor * kv_len).all()
    assert capfd.readouterr().err.count("cannot take this call (k has 961 elements or more, wanted fewer)") == 1


class TestLimits:
    def test_families_state_them(self):
        plain, wide = SimpleNamespace(NAME="plain"), SimpleNamespace(NAME="wide", MAX_ELEMENTS=2**40 - 1, ALIGNMENT=128)
        limits = [(it.max_elements, it.alignment) for it in (variant_of(None, family, arch, None) for family in (plain, wide)
                                                             for arch in (cuda_arch("sm_80"), CPU))]
        assert limits == [(2**31 - 1, 16), (2**31 - 1, 4), (2**40 - 1, 128), (2**40 - 1, 128)]

    @pytest.mark.parametrize("code, capability, runs", [
        ("sm_80", (8, 0), True), ("sm_80", (8, 9), True), ("sm_89", (8, 6), False), ("sm_80", (9, 0), False), ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True), ("sm_90a", (9, 1), False), ("sm_120", (12, 1), True), ("sm_100a", (10, 0), True)])
    def test_what_device_code_runs_on(self, code, capability, runs):
        assert cuda_arch(code).serves(capability) == runs

    def test_json_is_plain(self):
        json.dumps(describe(WORKLOAD, [code_for("any", "sm_80")]))
