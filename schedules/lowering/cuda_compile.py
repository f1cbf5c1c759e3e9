"""CUDA C++ to device code, with what the compiler says about it: registers, spills, warnings.

`compile_cuda` is the one place where nvcc runs. `cuda_compiler` puts it in place of TVM's own compile callback, which guesses the toolkit
from the environment, compiles for one architecture only and throws the resource figures away.
"""
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tvm_ffi

from schedules.lowering.toolkit import ToolkitError

_ARCH = re.compile(r"sm_\d+[af]?")
_CALLBACK = "tvm_callback_cuda_compile"


class CompileError(RuntimeError):
    """nvcc refused the code. The message is its first complaint, `log` all that it printed."""

    def __init__(self, message, log=""):
        super().__init__(message, log)
        self.log = log

    def __str__(self):
        return self.args[0]


@dataclass(frozen=True)
class CudaOptions:
    """How nvcc compiles.

    register_level  ptxas --register-usage-level, 0 to 10: how freely it spends registers to run faster; 10 is what TVM uses, 5 ptxas' own
    max_registers   most registers per thread, None for no limit of our own
    fast_math       --use_fast_math: approximate exp2, division and square root, and denormals flushed to zero
    extra           further nvcc arguments
    """

    register_level: int = 10
    max_registers: int | None = None
    fast_math: bool = True
    extra: tuple = ()


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes on one architecture, by ptxas: registers per thread, bytes per thread on the stack and in spills, static
    shared memory per block in bytes."""

    arch: str
    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """Device code and its figures.

    image      a cubin for one architecture, a fatbin for several
    archs      the architectures that it holds
    resources  one KernelResources for each kernel of each architecture
    warnings   what nvcc and ptxas warn of, such as serialised wgmma (C75xx), each once
    """

    image: bytes
    archs: tuple
    resources: tuple
    warnings: tuple

    def most(self, figure):
        """Largest value of one figure, such as "registers", over kernels and architectures."""
        return max(getattr(entry, figure) for entry in self.resources)


def compile_cuda(code, archs, toolkit, options=CudaOptions()):
    """Compile CUDA C++ for one or several architectures.

    code     CUDA C++ source text
    archs    architectures as nvcc spells them: ("sm_80", "sm_90a")
    toolkit  Toolkit of `find_toolkit`
    Raises CompileError where nvcc refuses the code, ValueError where an architecture is misspelt.
    """
    wrong = [arch for arch in archs if not _ARCH.fullmatch(arch)]
    if wrong or not archs:
        raise ValueError(f"architectures are spelt like sm_80 or sm_90a, found {', '.join(map(repr, wrong)) or 'none'}: correct the target")
    kind = "cubin" if len(archs) == 1 else "fatbin"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(code)
        # Run inside the folder: a path of a temporary folder in the arguments would find its way into the image.
        done = subprocess.run(_command(kind, archs, toolkit, options), cwd=folder, capture_output=True, text=True)
        log = done.stderr + done.stdout
        if done.returncode:
            raise CompileError(f"nvcc cannot compile for {', '.join(archs)}: {_complaint(log)}", log)
        image = Path(folder, f"kernel.{kind}").read_bytes()
    return CompiledKernel(image, tuple(archs), _resources(log), _warnings(log))


def _command(kind, archs, toolkit, options):
    targets = [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in archs]
    ptxas = f"-Xptxas=-v,--register-usage-level={options.register_level}"
    # TVM leaves variables behind that nothing uses (177) and prints constants with the digits of a double (1046).
    return [toolkit.nvcc, f"-{kind}", "-O3", "-std=c++17", *targets, ptxas, "-diag-suppress=177,1046",
            *(["-use_fast_math"] if options.fast_math else []),
            *([f"-maxrregcount={options.max_registers}"] if options.max_registers else []),
            *options.extra, "-o", f"kernel.{kind}", "kernel.cu"]


def _complaint(log):
    lines = [line.strip() for line in log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    return lines[0] if lines else log.strip()[-300:] or "it says nothing"


def _warnings(log):
    """Each warning once, whatever the number of lines that it is about."""
    telling = (line for line in log.splitlines() if re.search(r"\bwarning( #[\w-]+)?\s*:|\(C\d{4}\)", line))
    return tuple(dict.fromkeys(re.sub(r"^kernel\.cu\(\d+\): ", "", line.strip()) for line in telling))


def _resources(log):
    """KernelResources from ptxas -v. Its lines come in this order; those of device functions that were not inlined stand between:

        Compiling entry function 'K' for 'sm_80'
        Function properties for K
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        Used 12 registers, used 1 barriers, 1024 bytes smem
    """
    found, kernel, arch, described = [], None, None, None
    memory = (0, 0, 0)
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel, arch = entry.groups()
        elif function := re.search(r"Function properties for (\w+)", line):
            described = function[1]
        elif sizes := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            memory = tuple(map(int, sizes.groups())) if described == kernel else memory
        elif used := re.search(r"Used (\d+) registers", line):
            smem = re.search(r"(\d+) bytes smem", line)
            found.append(KernelResources(arch, kernel, int(used[1]), *memory, int(smem[1]) if smem else 0))
    return tuple(found)


@dataclass
class CompileLog:
    """CompiledKernels of one `cuda_compiler` block, in the order in which TVM asked for them."""

    kernels: list = field(default_factory=list)
    error: CompileError | None = None

    @property
    def last(self):
        """The latest CompiledKernel, None where nothing was compiled yet."""
        return self.kernels[-1] if self.kernels else None


@contextmanager
def cuda_compiler(toolkit, archs, options=CudaOptions()):
    """Let TVM compile CUDA with this toolkit, these architectures and options inside the block; yields a CompileLog.

    A module that is built inside holds one image for all `archs`, whatever architecture its Target names (lowering follows the Target, so
    the first and least of the architectures belongs there). `preload` must have run. A CompileError leaves the block as it is, where TVM
    would turn it into a RuntimeError. Blocks nest; the callback that was there before is put back.
    """
    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise ToolkitError("TVM's CUDA runtime is not loaded, so TVM would keep source instead of device code: call preload first")
    log = CompileLog()

    def compile_and_record(code):
        try:
            log.kernels.append(compile_cuda(str(code), archs, toolkit, options))
        except CompileError as error:
            log.error = error
            raise
        return log.last.image

    previous = tvm_ffi.get_global_func(_CALLBACK, allow_missing=True)
    tvm_ffi.register_global_func(_CALLBACK, compile_and_record, override=True)
    try:
        yield log
    except RuntimeError:
        if log.error is not None:
            raise log.error from None
        raise
    finally:
        if previous is not None:
            tvm_ffi.register_global_func(_CALLBACK, previous, override=True)
