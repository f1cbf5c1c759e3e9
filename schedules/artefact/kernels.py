"""The kernels of an artefact: those that plans come to, for all calls that it is to serve."""
from contextlib import nullcontext
from dataclasses import dataclass, replace

from schedules import build, registry
from schedules.arch import CUDA_ARCHS
from schedules.artefact.variant import Tuned, Variant, variant_of
from schedules.buckets import Bucket
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import Calls, Plan, fitting


@dataclass(frozen=True)
class Kernel:
    """A built plan.

    variant  its runtime module, with registers, spills and what it can serve
    toolkit  Toolkit that compiled it; None on a CPU
    """

    variant: Variant
    toolkit: object

    def figures(self):
        """One line a kernel and architecture: registers per thread, spills, static shared memory."""
        return [f"{entry.kernel} on {entry.arch}: {entry.registers} registers, {entry.spill_store_bytes} bytes of spills, "
                f"{entry.static_smem_bytes} bytes of static shared memory"
                for kernel in self.variant.kernels for entry in kernel.resources]


def compiler(toolkit, arch, archs, options):
    """A context that compiles for an architecture, or for all of `archs`, and gives the log, with a family's options for it; one that gives
    None where there is no Toolkit, for a CPU."""
    return nullcontext() if toolkit is None else cuda_compiler(toolkit, archs or (arch.name,), CudaOptions(**options))


def portable(arch, fits):
    """Whether all later minors of an architecture have room for a kernel; fits tells that of a row."""
    return all(fits(row) for row in CUDA_ARCHS.values()
               if arch.kind == "cuda" and row.capability[0] == arch.capability[0] and not row.exact)


@dataclass(frozen=True)
class Planned:
    """A plan that kernels are built of: name of its family, Plan, and figures for the manifest, with where they come from, or None."""

    family: str
    plan: Plan
    measured: dict | None = None

    @property
    def bucket(self):
        """The schedules.buckets.Bucket that it was measured at; None where it was not."""
        return self.measured and Bucket(self.measured["shape"]["q_len"], self.measured["shape"]["kv_len"])

    @property
    def tuned(self):
        return Tuned(self.bucket, self.family, self.plan, self.measured)


def merged(plans, kinds_of):
    """[(kind of kernel, its Tuneds), ...]: what each of some Planned wants of an artefact, in an order that is the order of each. What
    several of them want stands once. A single one has no calls to leave to others, and no Tuned.

    kinds_of  function from a Planned to what it wants, best first
    """
    found = []
    for it in plans:
        place = len(found)
        for kind in reversed(kinds_of(it)):
            same = next((number for number in reversed(range(place)) if found[number][0] == kind), None)
            if same is None:
                found.insert(place, (kind, ()))
            else:
                place = same
            found[place] = kind, (*found[place][1], *((it.tuned,) if len(plans) > 1 else ()))
    return found


def build_kernel(family, workload, plan, arch, toolkit, archs=(), measured=None, place=1, serves=None, tuned=()):
    """Kernel of a plan, lowered for `arch`; with `archs`, device code of all these in one fatbin.

    toolkit   Toolkit that compiles it, with TVM's CUDA runtime loaded by toolkit.preload; None for a CPU
    measured  figures for the manifest, with where they come from
    place     among the variants of its artefact, counted from 1
    serves    the calls that it is for; None: all that the kernel for contiguous tensors takes
    tuned     Tuneds of the lengths that it is for; none: any
    Raises CompileError where nvcc refuses the code.
    """
    serves = serves or Calls(strided=build.strided_of(family)[0])
    with compiler(toolkit, arch, archs, family.compiler_options(plan)) as log:
        module = build.build_plan(family, workload, plan, arch, place, serves.strided, serves.packed)
    runs_later = portable(arch, lambda row: fitting([plan], family.budget, workload, row))
    variant = variant_of(module, family, arch, plan, log.kernels if log else (), measured, serves, runs_later)
    return Kernel(replace(variant, tuned=tuned), toolkit)


def kinds_of_kernels(workload, arch, planned, alone=True):
    """[(family, plan, Calls), ...] of an artefact of a Planned: the kernel for few queries of grouped heads, where a family has one, the
    plan's own, and those that the family has for calls that it does not suit; where views with strides have kernels of their own, these
    come last.

    alone  whether no other lengths were tuned, so that the family has a word on those
    """
    family, plan = registry.family_named(planned.family), planned.plan
    tuned_at = () if planned.measured is None else (planned.bucket.q_len if alone else None,)
    plans = getattr(family, "further_plans", lambda *_: [(plan, Calls())])(workload, arch, plan, *tuned_at)
    kinds = [(family, entry, replace(serves, strided=strided)) for strided in build.strided_of(family) for entry, serves in plans]
    packer = registry.packer(workload, arch)
    if packer is None:
        return kinds
    packed = packer.packed_plan(workload, arch)
    return [(packer, packed, Calls(rows=packed.q_tile, strided=True, packed=True)), *kinds]


def build_kernels(plans, workload, arch, toolkit, archs=(), place=1):
    """Kernels of an artefact of some Planned, from this place on; of several, each serves calls with lengths that are nearest its own."""
    def figures(family, plan, serves):
        own = (it.measured for it in plans if (it.family, it.plan) == (family.NAME, plan))
        return next(own, None) if serves.strided == build.strided_of(family)[0] and not serves.packed else None
    found = merged(plans, lambda it: kinds_of_kernels(workload, arch, it, len(plans) == 1))
    return [build_kernel(family, workload, plan, arch, toolkit, archs, figures(family, plan, serves), number, serves, tuned)
            for number, ((family, plan, serves), tuned) in enumerate(found, place)]
