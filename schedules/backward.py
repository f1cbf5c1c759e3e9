"""The kernels of a backward pass, from workload to runtime module: delta, and the functions that a family schedules."""
from dataclasses import dataclass

import tvm

from schedules.families import cpu_backward, delta, mma_backward, simt_backward, wgmma_backward
from schedules.plan import Plan
from schedules.registry import NoSchedule

#: In order of preference: the first family that does not decline is the default.
FAMILIES = (wgmma_backward, mma_backward, simt_backward, cpu_backward)
#: What a family schedules.
ROLES = ("dk_dv", "dq")


@dataclass(frozen=True)
class Plans:
    """A plan for each of the two functions."""

    dk_dv: Plan
    dq: Plan

    def __str__(self):
        return f"dk_dv: {self.dk_dv}; dq: {self.dq}"


def function_names(place=1):
    """Symbols of the functions for delta, for dK and dV, and for dQ, in this place of an artefact."""
    suffix = "" if place == 1 else f"_variant{place}"
    return tuple(f"attention_backward_{name}{suffix}" for name in ("delta", *ROLES))


def taker(workload, arch):
    """The first family that takes the workload on an architecture; NoSchedule, with the reason of each, where there is none."""
    reasons = {family: family.decline(workload, arch) for family in FAMILIES}
    found = next((family for family, reason in reasons.items() if reason is None), None)
    if found is None:
        listed = "; ".join(f"{family.NAME}: {reason}" for family, reason in reasons.items())
        raise NoSchedule(f"a schedule for the gradients of {workload.name} on {arch.name} was wanted, every family declined ({listed}): "
                         "choose another target or workload")
    return found


def default_plans(family, workload, arch):
    """A family's seeds."""
    return Plans(*(family.default_plan(role, workload, arch) for role in ROLES))


def build(family, workload, plans, arch, place=1):
    """The three functions, lowered by the family's pipeline and compiled for `arch`, as one runtime module; for CUDA a compiler must be
    installed around the call (schedules.lowering.cuda_compile)."""
    parts = delta.schedule(workload, arch), *(family.schedule(role, workload, getattr(plans, role)) for role in ROLES)
    mod = tvm.IRModule({name: sch.mod["main"].with_attr("global_symbol", name) for name, sch in zip(function_names(place), parts)})
    target = arch.target()
    with target, tvm.transform.PassContext(config=family.CONFIG):
        return tvm.tirx.build(mod, target=target, pipeline=family.PIPELINE)
