"""What a build process does: from a plan to a .so with the symbolic kernel, the one that is measured and exported.

The candidates that MetaSchedule holds have fixed shapes, since its search key cannot be symbolic. They are never built: their decisions are
applied again to the symbolic declaration.
"""
import signal
from contextlib import nullcontext
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import s_tir

from schedules import build
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.lowering.toolkit import preload
from schedules.plan import PlanError

#: What this process keeps: the toolkit, and the JSON text of declarations by family, workload and structure (parsing one takes a second).
_toolkit = None
_declared = {}


@dataclass(frozen=True)
class Job:
    """One kernel to build.

    space   schedules.space.Space that the plan belongs to
    plan    the plan, all integers
    path    where the .so goes
    whole   with the twin for scales below zero, if an artefact has one
    """

    space: object
    plan: object
    path: str
    whole: bool = False


@dataclass(frozen=True)
class Built:
    """What came of a Job.

    path         where the .so is
    declaration  structural hash of the symbolic declaration
    registers    of a CUDA kernel, per thread; likewise the bytes that it spills
    """

    path: str
    declaration: str
    registers: int | None = None
    spill_bytes: int | None = None


def start(toolkit, stub_folder):
    """Prepare the process. Ctrl-C is for the main process, which ends this one.

    toolkit      Toolkit that compiles CUDA; None for CPU kernels
    stub_folder  where the stand-in for a missing driver goes
    """
    global _toolkit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _toolkit = toolkit
    if toolkit is not None:
        preload(toolkit, stub_folder)


def make(job):
    """Built of a Job, or one sentence that says why not: not every exception survives the way to the main process."""
    try:
        return _make(job)
    except Exception as error:  # whatever is wrong with one candidate, the next one gets its turn
        return f"{type(error).__name__}: {error}"


def declaration(space):
    """Structural hash of a space's declaration, as text."""
    return _declared_text(Job(space, space.seed, ""), negative_scale=False)[1]


def _make(job):
    family, arch = job.space.family, job.space.arch
    mod = _scheduled(job, negative_scale=False)
    twin = _scheduled(job, negative_scale=True) if job.whole and True in build.signs(job.space.workload) else None
    compiler = nullcontext()
    if arch.kind == "cuda":
        compiler = cuda_compiler(_toolkit, (arch.name,), CudaOptions(**family.compiler_options(job.plan)))
    with compiler as log:
        module = build.build(mod, family, arch, twin)
    build.runtime_module(module).export_library(job.path)
    _, declared = _declared_text(job, negative_scale=False)
    if log is None:
        return Built(job.path, declared)
    spilled, most = log.last.most("spill_store_bytes"), getattr(family, "MAX_SPILL_BYTES", None)
    if most is not None and spilled > most:
        raise PlanError(f"a plan of {family.NAME} may spill {most} bytes, found {spilled}: choose smaller tiles")
    return Built(job.path, declared, log.last.most("registers"), spilled)


def _scheduled(job, negative_scale):
    """The symbolic module after the family's stages. The schedule starts from a copy, since it can change what it starts from."""
    text, _ = _declared_text(job, negative_scale)
    return build.staged(s_tir.Schedule(tvm.ir.load_json(text), debug_mask=0), job.space.family, job.plan).mod


def _declared_text(job, negative_scale):
    """The declaration as JSON text, and its structural hash."""
    space = job.space
    key = (space.family.NAME, space.workload, space.structure(job.plan), negative_scale)
    if key not in _declared:
        # What is built takes views with strides where the family's artefacts do; what a record names is the plain declaration.
        def declare(strided):
            return tvm.IRModule({"main": build.declared(space.family, space.workload, job.plan, negative_scale, strided)})
        plain = declare(False)
        built = declare(True) if build.strided_of(space.family)[0] else plain
        _declared[key] = tvm.ir.save_json(built), str(tvm_ffi.structural_hash(plain))
    return _declared[key]
