"""Finding a CUDA compiler, standing in for the driver, and what nvcc makes of CUDA C++. No GPU is needed."""
import ctypes
import os
import pickle
import stat

import pytest
import tvm
import tvm_ffi

from schedules.lowering import toolkit as tk
from schedules.lowering.cuda_compile import CompileError, CudaOptions, compile_cuda, cuda_compiler
from schedules.lowering.toolkit import (
    ToolkitError, build_stub_driver, driver_version, find_toolkit, preload, require_driver, run_c_compiler)

SIMPLE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
#: 128 accumulators that all live across a barrier, and 1 KiB of static shared memory.
CROWDED = """
extern "C" __global__ void crowded(float* x, int n) {
  __shared__ float shared[256];
  float sums[128];
  for (int i = 0; i < 128; ++i) sums[i] = x[i * 256 + threadIdx.x];
  for (int step = 0; step < n; ++step) {
    shared[threadIdx.x] = sums[step & 1];
    __syncthreads();
    for (int i = 0; i < 128; ++i) sums[i] = sums[i] * shared[(i + step) & 255] + sums[(i + 1) & 127];
    __syncthreads();
  }
  for (int i = 0; i < 128; ++i) x[i * 256 + threadIdx.x] = expf(sums[i]);
}
"""


@pytest.fixture(scope="module")
def toolkit():
    try:
        return find_toolkit(os.environ)
    except ToolkitError as error:
        pytest.skip(str(error))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without any CUDA: no toolkit in the usual place and no wheels."""
    monkeypatch.setattr(tk, "SYSTEM_TOOLKIT", str(tmp_path / "none"))
    monkeypatch.setattr(tk, "_pip_folders", list)


def fake_nvcc(home, version):
    """An nvcc in `home`/bin that answers as one of this version would."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\necho '#$ TOP={home}/bin/..' >&2\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc


class TestFindToolkit:
    def test_no_compiler_at_all(self, bare):
        with pytest.raises(ToolkitError, match=r"needs nvcc 13\.0 or later, found none: install flashtir\[cuda\] with pip"):
            find_toolkit({})

    def test_names_what_is_too_old(self, bare, tmp_path):
        nvcc = fake_nvcc(tmp_path, "12.4.131")
        with pytest.raises(ToolkitError, match=rf"needs nvcc 13\.0 or later, found {nvcc} of version 12\.4\.131: install"):
            find_toolkit({"CUDA_HOME": str(tmp_path)})

    def test_names_what_does_not_run(self, bare, tmp_path):
        fake_nvcc(tmp_path, "13.0.88").write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(ToolkitError, match="that does not run"):
            find_toolkit({"CUDA_HOME": str(tmp_path)})

    def test_newer_toolkit_behind_an_old_one_is_taken(self, bare, tmp_path):
        fake_nvcc(tmp_path / "old", "12.9.86")
        new = fake_nvcc(tmp_path / "new", "13.2.11")
        found = find_toolkit({"CUDA_HOME": str(tmp_path / "old"), "PATH": str(new.parent)})
        assert (found.nvcc, found.version, found.origin) == (str(new), (13, 2, 11), "installed")

    def test_cuda_path_comes_before_the_path(self, bare, tmp_path):
        named, other = fake_nvcc(tmp_path / "named", "13.0.1"), fake_nvcc(tmp_path / "other", "13.1.1")
        assert find_toolkit({"CUDA_PATH": str(tmp_path / "named"), "PATH": str(other.parent)}).nvcc == str(named)

    def test_a_script_on_the_path_leads_to_its_toolkit(self, bare, tmp_path):
        real = fake_nvcc(tmp_path / "cuda", "13.0.88")
        (tmp_path / "cuda" / "lib64").mkdir()
        (tmp_path / "cuda" / "lib64" / tk.CUDART).touch()
        script = tmp_path / "bin" / "nvcc"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        script.chmod(0o755)
        found = find_toolkit({"PATH": str(script.parent)})
        assert (found.nvcc, found.cudart) == (str(real), str(tmp_path / "cuda" / "lib64" / tk.CUDART))

    def test_pip_is_the_last_resort(self, bare, monkeypatch, tmp_path):
        wheel = fake_nvcc(tmp_path / "cu13", "13.0.88")
        monkeypatch.setattr(tk, "_pip_folders", lambda: [tmp_path / "cu13"])
        fake_nvcc(tmp_path / "old", "11.8.89")
        found = find_toolkit({"CUDA_HOME": str(tmp_path / "old")})
        assert (found.nvcc, found.origin) == (str(wheel), "pip")

    def test_travels_to_worker_processes(self, bare, tmp_path):
        fake_nvcc(tmp_path, "13.0.88")
        found = find_toolkit({"CUDA_HOME": str(tmp_path)})
        assert pickle.loads(pickle.dumps(found)) == found
        assert str(found) == f"nvcc 13.0.88 (installed, {tmp_path}/bin/nvcc)"


class TestDriver:
    @pytest.fixture(autouse=True)
    def no_driver(self):
        if driver_version() is not None:
            pytest.skip("this machine has an NVIDIA driver, which the stub never replaces")

    def test_stub_is_built_once(self, tmp_path):
        path = build_stub_driver(tmp_path / "made")
        written = path.stat().st_mtime_ns
        assert build_stub_driver(tmp_path / "made") == path
        assert path.stat().st_mtime_ns == written
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    def test_stub_says_that_there_is_no_device(self, tmp_path):
        stub = ctypes.CDLL(str(build_stub_driver(tmp_path)))
        text = ctypes.c_char_p()
        assert stub.cuModuleLoadData() == 100
        assert (stub.cuGetErrorName(100, ctypes.byref(text)), text.value) == (0, b"no driver (stub)")

    def test_preload_brings_in_tvms_cuda_runtime(self, toolkit, tmp_path):
        assert preload(toolkit, tmp_path) is None
        assert tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None
        assert preload(toolkit) is None, "a second call finds the stub in place"
        assert not tvm.cuda(0).exist

    def test_a_kernel_cannot_be_run(self):
        with pytest.raises(ToolkitError, match=r"needs an NVIDIA driver for CUDA 13\.0 or later, found none: update the driver"):
            require_driver()


def test_no_c_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: None)
    with pytest.raises(ToolkitError, match=r"a C compiler is needed to build an artefact, found none of g\+\+, gcc, clang"):
        build_stub_driver(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("telling", ["/usr/bin/ld: final link failed: No space left on device", "it.c:3:1: error: unknown type name 'floa'",
                                     "/usr/bin/ld: cannot find it.o: No such file or directory", "it.o: undefined reference to `main'"])
def test_a_c_compiler_that_fails_is_quoted_where_it_tells_why(monkeypatch, tmp_path, telling):
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\ncat >&2 <<'end'\nin the function main:\n{telling}\ncollect2: error: ld returned 1 exit status\nend\n"
                        "exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: str(compiler))
    with pytest.raises(ToolkitError) as caught:
        run_c_compiler([])
    assert str(caught.value) == f"{compiler} failed: {telling}"


class TestCompile:
    def test_one_architecture_gives_a_cubin(self, toolkit):
        kernel = compile_cuda(SIMPLE, ("sm_90a",), toolkit)
        assert kernel.image[:4] == b"\x7fELF"
        assert [(entry.arch, entry.kernel) for entry in kernel.resources] == [("sm_90a", "twice")]
        assert kernel.warnings == ()

    def test_several_architectures_give_one_fatbin(self, toolkit):
        kernel = compile_cuda(SIMPLE, ("sm_75", "sm_80", "sm_120"), toolkit)
        assert kernel.image[:4] == b"\x50\xed\x55\xba"
        assert sorted(entry.arch for entry in kernel.resources) == ["sm_120", "sm_75", "sm_80"]
        assert kernel.archs == ("sm_75", "sm_80", "sm_120")

    def test_headers_that_tvm_includes(self, toolkit):
        code = "#include <cuda.h>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <mma.h>\n" + SIMPLE
        assert compile_cuda(code, ("sm_80",), toolkit).most("registers") > 0

    def test_same_code_gives_the_same_bytes(self, toolkit):
        assert compile_cuda(SIMPLE, ("sm_80",), toolkit) == compile_cuda(SIMPLE, ("sm_80",), toolkit)

    def test_figures_of_a_crowded_kernel(self, toolkit):
        roomy = compile_cuda(CROWDED, ("sm_80",), toolkit).resources[0]
        tight = compile_cuda(CROWDED, ("sm_80",), toolkit, CudaOptions(max_registers=64)).resources[0]
        assert roomy.static_smem_bytes == tight.static_smem_bytes == 1024
        assert roomy.registers > 128 and roomy.spill_store_bytes == 0
        assert tight.registers <= 64 and tight.spill_store_bytes > 0 and tight.spill_load_bytes > 0
        assert tight.stack_bytes >= 4 * 32

    def test_fast_math_and_extra_arguments_reach_nvcc(self, toolkit):
        code = SIMPLE.replace("*= 2.0f", "/= EXTRA")
        options = CudaOptions(extra=("-DEXTRA=x[1]",))
        exact = CudaOptions(extra=options.extra, fast_math=False, register_level=5)
        assert compile_cuda(code, ("sm_80",), toolkit, options).image != compile_cuda(code, ("sm_80",), toolkit, exact).image

    def test_warnings_are_kept(self, toolkit):
        code = SIMPLE.replace("{", "{ int idle; idle = 1;")
        kernel = compile_cuda(code + code.replace("twice", "again"), ("sm_80",), toolkit)
        assert kernel.warnings == ('warning #550-D: variable "idle" was set but never used',)

    def test_refused_code(self, toolkit):
        with pytest.raises(CompileError, match=r'cannot compile for sm_80: kernel.cu\(1\): error: identifier "y" is undefined') as caught:
            compile_cuda(SIMPLE.replace("2.0f", "y"), ("sm_80",), toolkit)
        assert "twice" in caught.value.log or "error detected" in caught.value.log
        assert pickle.loads(pickle.dumps(caught.value)).log == caught.value.log

    @pytest.mark.parametrize("archs", [(), ("90a",), ("sm_80", "compute_90")])
    def test_misspelt_architecture(self, archs):
        with pytest.raises(ValueError, match="architectures are spelt like sm_80 or sm_90a, found"):
            compile_cuda(SIMPLE, archs, toolkit=None)


class TestCudaCompiler:
    CALLBACK = "tvm_callback_cuda_compile"

    @pytest.fixture(autouse=True)
    def loaded(self, toolkit, tmp_path_factory):
        preload(toolkit, tmp_path_factory.mktemp("stub"))

    def test_tvm_compiles_through_it(self, toolkit):
        with cuda_compiler(toolkit, ("sm_80", "sm_90a")) as log:
            assert log.last is None
            image = tvm.get_global_func(self.CALLBACK)(SIMPLE)
        assert bytes(image) == log.last.image
        assert log.last.archs == ("sm_80", "sm_90a")

    def test_blocks_nest_and_leave_nothing_behind(self, toolkit):
        with cuda_compiler(toolkit, ("sm_80",)) as outer:
            with cuda_compiler(toolkit, ("sm_90a",)) as inner:
                tvm.get_global_func(self.CALLBACK)(SIMPLE)
            tvm.get_global_func(self.CALLBACK)(SIMPLE)
        assert [kernel.archs for log in (outer, inner) for kernel in log.kernels] == [("sm_80",), ("sm_90a",)]

    def test_refused_code_leaves_as_it_is(self, toolkit):
        with pytest.raises(CompileError, match="identifier"), cuda_compiler(toolkit, ("sm_80",)):
            tvm.get_global_func(self.CALLBACK)("int f() { return y; }")

    def test_other_errors_pass_through(self, toolkit):
        with pytest.raises(RuntimeError, match="unrelated"), cuda_compiler(toolkit, ("sm_80",)):
            raise RuntimeError("unrelated")

    def test_needs_the_cuda_runtime(self, toolkit, monkeypatch):
        monkeypatch.setattr(tvm_ffi, "get_global_func", lambda name, allow_missing=False: None)
        with pytest.raises(ToolkitError, match="call preload first"), cuda_compiler(toolkit, ("sm_80",)):
            pass
