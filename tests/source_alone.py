"""CUDA for tests that read source, or how kernels are put together: nvcc would take seconds over each."""
import re
from contextlib import contextmanager

import pytest

from schedules.lowering import cuda_compile
from schedules.lowering.cuda_compile import CompiledKernel, KernelResources, cuda_compiler


def kept(code, archs, *_):
    """What stands for `compile_cuda`: the source where device code would be, and figures that say nothing of each kernel."""
    names = dict.fromkeys(re.findall(r"__global__[^;{]*?\b(\w+)\((?!\d)", code))
    figures = tuple(KernelResources(arch, name, 0, 0, 0, 0, 0) for arch in archs for name in names)
    return CompiledKernel(code.encode(), tuple(archs), figures, ())


@contextmanager
def without_nvcc():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_compile, "compile_cuda", kept)
        yield


@contextmanager
def source_alone(toolkit, arch):
    """What is built inside for an architecture (a name) holds its source."""
    with without_nvcc(), cuda_compiler(toolkit, (arch,)):
        yield
