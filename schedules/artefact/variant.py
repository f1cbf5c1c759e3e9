"""A variant: one kernel of those that an artefact holds, and which calls it can serve.

An artefact lists its variants best first. A call is served by the first that has code for the device and takes the tensors.
"""
from dataclasses import dataclass, replace

import tvm

from schedules.arch import cuda_arch
from schedules.backward import Operands, adds, takes_turns
from schedules.buckets import Bucket
from schedules.build import runtime_module
from schedules.plan import Calls, Plan

#: Most elements of a tensor for a family that states no MAX_ELEMENTS: it counts in 32 bits.
MAX_ELEMENTS = 2**31 - 1

#: Bytes that tensors must start on a multiple of, for a family that states no ALIGNMENT: 16-byte copies on a GPU; on a CPU what the
#: declaration states for its buffers.
ALIGNMENT = {"cuda": 16, "cpu": 4}


@dataclass(frozen=True)
class Tuned:
    """What was tuned at the lengths of a bucket.

    bucket    schedules.buckets.Bucket
    family    name of the schedule's family
    plan      its Plan
    measured  figures, with where they come from
    """

    bucket: Bucket
    family: str
    plan: Plan
    measured: dict


@dataclass(frozen=True)
class Variant:
    """A built plan as an artefact holds it.

    module        runtime module of `schedules.build.build_plan`, whose functions are named for the variant's place in the artefact
    family        name of the schedule's family
    arch          row of schedules.arch that the kernel was lowered for
    plan          the Plan that it was built with
    kernels       CompiledKernels of the build's CompileLog; none for a CPU kernel
    measured      figures of a benchmark, with where they come from; None where nothing was measured
    max_elements  most elements that a tensor may reach over, from its first to its last in memory, below 2^60
    alignment     bytes that the data of tensors must start on a multiple of, and on a GPU every row
    serves        Calls that it is for; others are left to a later variant
    sum_rows      of gradients, rows of a tile of the float32 memory in which dQ is added up; 0: it is not
    turns         whether beside the sums stands whose turn it is to add, so that their order is fixed
    whole_rows    whether sequences inside tensors are found by the number of a row: with key lengths, batch entries of k and v must then be
                  whole rows apart
    operands      of gradients, the tensors behind the scale that have some, too
    tuned         Tuneds of the buckets whose calls it is for, where the artefact has several; none: it is for calls of any length
    portable      whether later minors of its compute capability have room for it; where not, its code runs on those that it names
    """

    module: tvm.runtime.Module
    family: str
    arch: object
    plan: Plan
    kernels: tuple
    measured: dict | None
    max_elements: int
    alignment: int
    serves: Calls = Calls()
    portable: bool = True
    whole_rows: bool = False
    sum_rows: int = 0
    turns: bool = False
    operands: Operands = Operands()
    tuned: tuple = ()

    @property
    def name(self):
        """What messages call it, such as `mma for sm_80`."""
        return f"{self.family} for {self.arch.name}"

    def is_for(self, bucket):
        """Whether calls that are nearest to a bucket are for it."""
        return not self.tuned or bucket in {it.bucket for it in self.tuned}

    @property
    def archs(self):
        """Names of the architectures that it holds device code of, oldest first; none for a CPU kernel."""
        names = {name for kernel in self.kernels for name in kernel.archs}
        return sorted(names, key=lambda name: (cuda_arch(name).capability, name))


def tuned_of(variants):
    """The Tuneds of an artefact's variants, those of smaller buckets first, each once."""
    return sorted({it.bucket: it for variant in variants for it in variant.tuned}.values(), key=lambda it: it.bucket.size)


def limits_of(family, kind):
    """(most elements of a tensor, alignment in bytes) of a family, which may state MAX_ELEMENTS and ALIGNMENT, on a kind of device."""
    return getattr(family, "MAX_ELEMENTS", MAX_ELEMENTS), getattr(family, "ALIGNMENT", ALIGNMENT[kind])


def variant_of(module, family, arch, plan, kernels=(), measured=None, serves=Calls(), portable=True):
    """Variant of a plan of a family module; the other arguments are fields of Variant, with a module that may be an Executable."""
    return Variant(runtime_module(module), family.NAME, arch, plan, tuple(kernels), measured, *limits_of(family, arch.kind), serves,
                   portable, getattr(family, "WHOLE_ROWS", False))


def gradient_variant(module, family, arch, plans, strided, operands=Operands(), **fields):
    """The same of plans of the backward pass, with these Operands; further arguments are those of `variant_of`."""
    variant = variant_of(module, family, arch, plans, serves=Calls(strided=strided), **fields)
    return replace(variant, sum_rows=plans.q_tile if adds(family) else 0, turns=takes_turns(family), operands=operands)
