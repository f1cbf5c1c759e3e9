"""What a build process does: from a plan to a .so with the symbolic kernel, the one that is measured and exported, or with all kernels of
a gradient and the checked call of an artefact around them.

The candidates that MetaSchedule holds have fixed shapes, since its search key cannot be symbolic. They are never built: their decisions are
applied again to the symbolic declaration.
"""
import signal
from contextlib import nullcontext
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import s_tir

from schedules import backward, build
from schedules.artefact.export import export_gradients
from schedules.artefact.variant import gradient_variant
from schedules.backward_parts import Part
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.lowering.toolkit import preload
from schedules.plan import PlanError
from schedules.tuning.reasons import NOT_BUILT, SPILLS, reason

#: What this process keeps: the toolkit, and the JSON text of declarations by family, workload and structure (parsing one takes a second).
_toolkit = None
_declared = {}


class Spilled(PlanError):
    """A plan that keeps more in memory, for want of registers, than its family allows."""


@dataclass(frozen=True)
class Job:
    """One kernel to build.

    space   schedules.space.Space that the plan belongs to
    plan    the plan, all integers
    path    where the .so goes
    whole   with the twin for scales below zero, if an artefact has one; gradients are whole at any time
    """

    space: object
    plan: object
    path: str
    whole: bool = False


@dataclass(frozen=True)
class Built:
    """What came of a Job.

    path         where the .so is
    declaration  structural hash of the symbolic declaration; of a gradient those of all functions
    registers    of a CUDA kernel, per thread, of a gradient the most of all; likewise the bytes that it spills
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
    """Built of a Job, or the reason why not: not every exception survives the way to the main process."""
    try:
        return _make(job)
    except Spilled as error:
        return reason(SPILLS, error)
    except Exception as error:  # whatever is wrong with one candidate, the next one gets its turn
        return reason(NOT_BUILT, f"{type(error).__name__}: {error}")


def declaration(space):
    """Structural hash of a space's declaration, as text, or several; "none" where it cannot be declared."""
    try:
        return _declaration(Job(space, space.seed, ""))
    except Exception:  # whatever it is, its plans are refused for it
        return "none"


def _make(job):
    log, family = (_gradients if isinstance(job.space.family, Part) else _forward)(job)
    if log is None:
        return Built(job.path, _declaration(job))
    spilled, most = log.last.most("spill_store_bytes"), getattr(family, "MAX_SPILL_BYTES", None)
    if most is not None and spilled > most:
        raise Spilled(f"a plan of {family.NAME} may spill {most} bytes, found {spilled}: choose smaller tiles")
    return Built(job.path, _declaration(job), log.last.most("registers"), spilled)


def _forward(job):
    """Build a kernel of the forward pass; the CompileLog, None on a CPU, and the family."""
    family = job.space.family
    mod = _scheduled(job, negative_scale=False)
    twin = _scheduled(job, negative_scale=True) if job.whole and True in build.signs(job.space.workload) else None
    with _compiling(job.space.arch, family.compiler_options(job.plan)) as log:
        module = build.build(mod, family, job.space.arch, twin)
    build.runtime_module(module).export_library(job.path)
    return log, family


def _gradients(job):
    """The same of whole gradients."""
    family, workload, arch = job.space.family.family, job.space.workload, job.space.arch
    plans, strided = job.space.family.plans(workload, arch, job.plan), family.STRIDED[0]
    with _compiling(arch, backward.compiler_options(family, plans)) as log:
        module = backward.build(family, workload, plans, arch, strided=strided)
    made = gradient_variant(module, family, arch, plans, strided, kernels=log.kernels if log else ())
    export_gradients([made], workload, job.path)
    return log, family


def _compiling(arch, options):
    """Context that compiles CUDA kernels with a family's options and gives the log; one that gives None for a CPU."""
    return nullcontext() if arch.kind != "cuda" else cuda_compiler(_toolkit, (arch.name,), CudaOptions(**options))


def _declaration(job):
    """What a measurement of the job is of, as text."""
    space, key = job.space, ("declaration", job.space.family.NAME, job.space.workload, job.space.structure(job.plan))
    if not isinstance(space.family, Part):
        return _declared_text(job, negative_scale=False)[1]
    if key not in _declared:
        _declared[key] = space.family.declaration(space.workload, space.arch, job.plan)
    return _declared[key]


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
