"""The kernels of a backward pass, from workload to runtime module: delta, the functions that a family schedules, and those that make the
gradients of tensors behind the scale, which are the same beside every family of a kind of device."""
from dataclasses import dataclass
from functools import partial

from schedules.build import compiled
from schedules.families import (
    cpu, cpu_backward, cpu_operand_gradients, delta, dq_cast, mma_backward, operand_gradients, simt, simt_backward, wgmma_backward,
    wgmma_fused_backward)
from schedules.plan import Plan, fitting
from schedules.registry import NoSchedule
from te_defs.operand_gradients import dtype_of, require_gradient
from te_defs.workload import SINK

#: By the order in which dQ is summed, in order of preference: the first family that does not decline is the default. In order, two runs
#: give the same bits; in any order, all gradients come from one function that adds to float32 sums in memory.
IN_ORDER, ANY_ORDER = "in-order", "any-order"
FAMILIES = {IN_ORDER: (wgmma_backward, mma_backward, simt_backward, cpu_backward), ANY_ORDER: (wgmma_fused_backward,)}
#: What a family that sums in order schedules.
ROLES = ("dk_dv", "dq")
#: For each kind of device who schedules gradients of tensors behind the scale, and the family whose pipeline lowers them.
OPERANDS = {"cuda": (operand_gradients, simt), "cpu": (cpu_operand_gradients, cpu)}


@dataclass(frozen=True)
class Plans:
    """A plan for each of the two functions."""

    dk_dv: Plan
    dq: Plan

    def __str__(self):
        return f"dk_dv: {self.dk_dv}; dq: {self.dq}"


@dataclass(frozen=True)
class Operands:
    """Gradients of tensors behind the scale.

    names   of these, in the order of a call
    plan    tiles of queries and keys that a block sums; a CPU's or a simt Plan
    blocks  where the tiles of an operand are fewer, their sums are made in parts
    """

    names: tuple = ()
    plan: Plan | None = None
    blocks: int = 0

    def workspace_bytes(self, workload, name):
        """Most bytes of parts that a call may need for one of them: as many parts as blocks, and one more of each tile."""
        axes = next(argument.kind.axes for argument in workload.arguments if argument.name == name)
        tile = (self.plan.q_tile if "N" in axes else 1) * (self.plan.kv_tile if "M" in axes else 1)
        return 0 if name == SINK.name else 4 * 2 * self.blocks * tile


def adds(family):
    """Whether a family's gradients are summed in any order."""
    return family in FAMILIES[ANY_ORDER]


def function_names(any_order, place=1):
    """Symbols of the functions in this place of an artefact: for delta, without and with a gradient of the LSE, for dK and dV, and for dQ;
    in any order for dK, dV and sums of dQ, for dQ from these, and for the zeros that they start from."""
    names = ("delta", "delta_through_lse", *(("fused", "dq_cast", "dq_zeros") if any_order else ROLES))
    return tuple(f"attention_backward_{name}{'' if place == 1 else f'_variant{place}'}" for name in names)


def taker(workload, arch, order=IN_ORDER):
    """The first family that takes the workload on an architecture; NoSchedule, with the reason of each, where there is none."""
    reasons = {family: family.decline(workload, arch) for family in FAMILIES[order]}
    found = next((family for family, reason in reasons.items() if reason is None), None)
    if found is None:
        listed = "; ".join(f"{family.NAME}: {reason}" for family, reason in reasons.items())
        raise NoSchedule(f"a schedule for the gradients of {workload.name}, {order}, on {arch.name} was wanted, every family declined "
                         f"({listed}): choose another target or workload")
    return found


def default_plans(family, workload, arch):
    """A family's seeds: Plans, or the plan of the one function where dQ is summed in any order."""
    if adds(family):
        return family.default_plan(workload, arch)
    return Plans(*(family.default_plan(role, workload, arch) for role in ROLES))


def fit(family, workload, plans, arch, operands=Operands()):
    """Whether an architecture has room for plans, and for that of Operands."""
    budgets = [(family.budget, plans)] if adds(family) else [(partial(family.budget, role), getattr(plans, role)) for role in ROLES]
    if operands.names:
        budgets.append((OPERANDS[arch.kind][0].budget, operands.plan))
    return all(fitting([plan], budget, workload, arch) for budget, plan in budgets)


def build(family, workload, plans, arch, place=1, strided=False):
    """The functions of gradients, `compiled`."""
    parts = [delta.schedule(workload, arch, strided, through_lse) for through_lse in (False, True)]
    if adds(family):
        parts += [family.schedule(workload, plans, strided=strided), dq_cast.schedule(workload, strided), dq_cast.zeros(workload)]
    else:
        parts += [family.schedule(role, workload, getattr(plans, role), strided=strided) for role in ROLES]
    return compiled({name: sch.mod["main"] for name, sch in zip(function_names(adds(family), place), parts)}, family, arch)


def operands(workload, names, arch):
    """The Operands of a workload on an architecture; WorkloadError where a name has no gradient, PlanError where no plan fits."""
    for name in names:
        require_gradient(workload, name)
    names = tuple(argument.name for argument in workload.arguments if argument.name in names)
    scheduler, _ = OPERANDS[arch.kind]
    return Operands(names, scheduler.default_plan(workload, arch), scheduler.BLOCKS) if names else Operands()


def operand_function_names(names, place=1):
    """Symbols of the functions for these operands, three each: that sums it whole, in its own type, that sums it in parts, and that adds
    these up; the sink has but one."""
    suffix = "" if place == 1 else f"_variant{place}"
    return tuple(f"attention_backward_d_{name}{part}{suffix}" if not part or name != SINK.name else None
                 for name in names for part in ("", "_parts", "_fold"))


def build_operands(workload, operands, arch, place=1, strided=False):
    """The functions of Operands, `compiled`."""
    scheduler, family = OPERANDS[arch.kind]
    parts = []
    for name in operands.names:
        if name == SINK.name:
            parts += [scheduler.sink(workload), None, None]
        else:
            parts += [*(scheduler.schedule(workload, name, operands.plan, dtype, strided=strided)
                        for dtype in (dtype_of(workload, name), "float32")), scheduler.fold(workload, name)]
    symbols = operand_function_names(operands.names, place)
    return compiled({symbol: sch.mod["main"] for symbol, sch in zip(symbols, parts) if symbol}, family, arch)
