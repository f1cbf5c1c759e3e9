"""What CUDA C++ needs to become a kernel: a compiler, the runtime library, the driver library. TVM's wheel has none of them.

The compiler is nvcc 13.0 or later: that of an installed toolkit where it fits, else that of pip (the project's `cuda` extra). nvcc and not
NVRTC, since both places then hold the same program, it makes one fatbin of several architectures, and it tells registers and spills.

TVM compiles CUDA source while it builds only if its CUDA runtime is loaded, which in turn asks for libcudart.so.13 and libcuda.so.1.
Without them it says nothing and leaves the *source* in the module. `preload` therefore loads both, and where the machine has no driver,
it builds a stand-in for libcuda.so.1 that can do nothing but be linked to.
"""
import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: The first toolkit that covers sm_75 to sm_120, and the one whose runtime library TVM 0.27 is linked to.
MINIMUM = (13, 0)
CUDART = "libcudart.so.13"
DRIVER = "libcuda.so.1"
SYSTEM_TOOLKIT = "/usr/local/cuda"
REMEDY = "install flashtir[cuda] with pip, or name a CUDA 13 toolkit in CUDA_HOME"

#: Driver functions that TVM 0.27's CUDA runtime is linked to (nm -D --undefined-only libtvm_runtime_cuda.so).
_DRIVER_CALLS = ("cuDeviceGetName", "cuFuncSetAttribute", "cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload",
                 "cuTensorMapEncodeTiled")
_STUB_SOURCE = """\
/* A stand-in for the NVIDIA driver: enough to load TVM's CUDA runtime on a machine that only compiles. */
int cuDriverGetVersion(int *version) { *version = 0; return 0; }
int cuGetErrorName(int error, const char **text) { (void)error; *text = "no driver (stub)"; return 0; }
int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }
""" + "".join(f"int {name}(void) {{ return 100; /* CUDA_ERROR_NO_DEVICE */ }}\n" for name in _DRIVER_CALLS)


class ToolkitError(RuntimeError):
    """A part of CUDA or of the C compiler is missing or too old; the message is one sentence that says which."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler that fits. Plain strings, so that it can be sent to worker processes.

    nvcc     path of the program
    version  as it prints it: (13, 0, 88)
    origin   "installed" or "pip"
    cudart   path of its libcudart.so.13, None where the loader has to find one
    """

    nvcc: str
    version: tuple
    origin: str
    cudart: str | None = None

    def __str__(self):
        return f"nvcc {'.'.join(map(str, self.version))} ({self.origin}, {self.nvcc})"


def find_toolkit(environ):
    """The first CUDA compiler that fits, in the order CUDA_PATH, CUDA_HOME, PATH, /usr/local/cuda, pip.

    environ  the environment to search by: CUDA_PATH, CUDA_HOME and PATH are read
    Raises ToolkitError, which names every compiler that was found and why it does not fit.
    """
    misfits = []
    for origin, nvcc in _candidates(environ):
        found = _probe(nvcc, origin)
        if isinstance(found, Toolkit):
            return found
        misfits.append(found)
    raise ToolkitError(f"compiling for CUDA needs nvcc {_dotted(MINIMUM)} or later, found {'; '.join(misfits) or 'none'}: {REMEDY}")


def _candidates(environ):
    """(origin, path) of every nvcc in sight, each file once."""
    homes = [environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if environ.get(name)]
    paths = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    folders = [*(os.path.join(home, "bin") for home in homes), *paths, os.path.join(SYSTEM_TOOLKIT, "bin")]
    places = [("installed", folder) for folder in folders] + [("pip", str(wheel / "bin")) for wheel in _pip_folders()]
    seen = set()
    for origin, folder in places:
        nvcc = os.path.realpath(os.path.join(folder, "nvcc"))
        if nvcc not in seen and os.access(nvcc, os.X_OK) and os.path.isfile(nvcc):
            seen.add(nvcc)
            yield origin, nvcc


def _pip_folders():
    """Folders that the CUDA 13 wheels of NVIDIA share; PyTorch's CUDA builds bring some of them too."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(entry) / "cu13" for entry in (spec and spec.submodule_search_locations or ())]


def _probe(nvcc, origin):
    """A Toolkit, or a few words that say why this nvcc cannot be one."""
    try:
        text = _run([nvcc, "--version"]).stdout
        # An nvcc on the PATH may be a script that calls the real one elsewhere: a dry run tells where the toolkit stands.
        top = re.search(r"^#\$ TOP=(.+)$", _run([nvcc, "--dryrun", "-cubin", "any.cu"]).stderr, re.MULTILINE)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{nvcc} that does not run ({error})"
    release = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    if release is None or top is None:
        return f"{nvcc} that tells no version"
    version = tuple(map(int, release.groups()))
    if version < MINIMUM:
        return f"{nvcc} of version {_dotted(version)}"
    home = Path(os.path.realpath(top[1].strip()))
    real = home / "bin" / "nvcc"
    return Toolkit(str(real) if os.access(real, os.X_OK) else nvcc, version, origin, _cudart_in(home))


def _run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def _dotted(version):
    return ".".join(map(str, version))


def _cudart_in(home):
    paths = [home / folder / CUDART for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")]
    return next((str(path) for path in paths if path.is_file()), None)


def preload(toolkit=None, stub_dir=None):
    """Load TVM's CUDA runtime into this process with all that it needs; return the driver's CUDA version, None for the stub.

    Works before and after `import tvm`, and a second call changes nothing. A real driver is always preferred to the stub.

    toolkit   where to look for libcudart.so.13 if the loader knows none; pip's wheels are the last place
    stub_dir  folder that keeps the stub driver, made where it is missing; without it a machine without a driver is refused
    Raises ToolkitError in one sentence where a library is missing or does not fit.
    """
    if not _opens(DRIVER):
        if stub_dir is None:
            raise ToolkitError(f"running CUDA needs an NVIDIA driver, found none ({DRIVER}): install one, or build for another machine")
        ctypes.CDLL(str(build_stub_driver(stub_dir)), ctypes.RTLD_GLOBAL)
    _load_cudart(toolkit)
    _load_tvm_cuda_runtime()
    return driver_version()


def driver_version():
    """(major, minor) of the newest CUDA that this machine's driver runs; None without a driver, or where `preload` put the stub."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    number = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(number))
    return divmod(number.value // 10, 100) if number.value else None


def require_driver():
    """The driver's CUDA version; ToolkitError where there is no driver or it is older than the toolkit that kernels are built with."""
    version = driver_version()
    if version is None or version < MINIMUM:
        found = "none" if version is None else f"one for CUDA {_dotted(version)}"
        raise ToolkitError(f"running a CUDA kernel needs an NVIDIA driver for CUDA {_dotted(MINIMUM)} or later, found {found}: "
                           "update the driver, or use another target")
    return version


def _opens(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _load_cudart(toolkit):
    """Global, so that libtvm_runtime_cuda.so finds it under its name although no loader path leads there.

    The loader is asked first: it knows a copy that another library (PyTorch, say) has already brought in, and a second one would be waste.
    """
    own = [toolkit.cudart] if toolkit is not None and toolkit.cudart else []
    for place in (CUDART, *own, *(str(folder / "lib" / CUDART) for folder in _pip_folders())):
        try:
            return ctypes.CDLL(place, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise ToolkitError(f"the CUDA runtime library {CUDART} is not found: {REMEDY}")


def _load_tvm_cuda_runtime():
    # Imported here: `import tvm` tries to load its CUDA runtime by itself, and can only do so once the libraries above are there.
    import tvm
    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None:
        return
    library = Path(tvm.libinfo.find_libtvm_runtime()).with_name("libtvm_runtime_cuda.so")
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise ToolkitError(f"TVM's CUDA runtime does not load ({error}): update the NVIDIA driver or reinstall apache-tvm") from error


def build_stub_driver(folder):
    """Path of the stub for libcuda.so.1 in `folder`; compiled where it is not there yet, safe against others doing the same."""
    path = Path(folder) / f"libcuda-stub-{hashlib.sha256(_STUB_SOURCE.encode()).hexdigest()[:12]}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        source, library = Path(scratch) / "stub.c", Path(scratch) / "stub.so"
        source.write_text(_STUB_SOURCE)
        # The loader matches a library that is asked for against the soname of those already there, whatever their files are called.
        run_c_compiler(["-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-x", "c", str(source), "-o", str(library)])
        os.replace(library, path)
    return path


def run_c_compiler(arguments):
    """Run the C compiler that TVM links with; ToolkitError with its first complaint where it is missing or fails."""
    from tvm.support import cc
    compiler = cc.get_cc()
    if compiler is None:
        raise ToolkitError("a C compiler is needed to build an artefact, found none of g++, gcc, clang on the PATH: install one")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    if done.returncode:
        telling = [line.strip() for line in done.stderr.splitlines() if re.search("error|undefined|cannot|failed", line)]
        raise ToolkitError(f"{compiler} failed: {telling[0] if telling else done.stderr.strip()[-300:]}")
