"""The kernels of a backward pass, from workload to runtime module: delta, the functions that a family schedules, and those that make the
gradients of tensors behind the scale, which are the same beside every family of a kind of device."""
from dataclasses import dataclass, fields, replace
from functools import partial

from schedules.build import compiled
from schedules.families import (
    cpu_backward, cpu_operand_gradients, delta, dq_cast, mma_backward, mma_fused_backward, mma_operand_gradients, operand_gradients,
    simt_backward, wgmma_backward, wgmma_fused_backward, wgmma_ordered_backward)
from schedules.plan import Plan, fitting
from schedules.registry import NoSchedule
from te_defs.operand_gradients import dtype_of, require_gradient
from te_defs.workload import SINK

#: By the order in which dQ is summed, in order of preference: the first family that does not decline is the default. In order, two runs
#: give the same bits.
IN_ORDER, ANY_ORDER = "in-order", "any-order"
FAMILIES = {IN_ORDER: (wgmma_ordered_backward, wgmma_backward, mma_backward, simt_backward, cpu_backward),
            ANY_ORDER: (wgmma_fused_backward, mma_fused_backward)}
#: Those whose gradients all come from one function, which adds dQ to float32 sums in memory.
ADDING = (wgmma_ordered_backward, *FAMILIES[ANY_ORDER])
#: Who schedules gradients of tensors behind the scale, in order of preference.
OPERAND_FAMILIES = (mma_operand_gradients, operand_gradients, cpu_operand_gradients)


class _OfRoles:
    """A plan for each of some functions, the roles of a family that sums in order."""

    @classmethod
    def roles(cls):
        """Names of the functions."""
        return tuple(field.name for field in fields(cls))

    def by_role(self):
        """{name of the function: its plan}."""
        return {role: getattr(self, role) for role in self.roles()}

    def but(self, **changes):
        """These plans with some of them changed."""
        return replace(self, **changes)

    def on(self, arch):
        """These plans as another machine of their kind takes them."""
        return self.but(**{role: plan.on(arch) for role, plan in self.by_role().items()})

    def values(self):
        """{"role.field": value}, as records have it."""
        return {f"{role}.{field}": value for role, plan in self.by_role().items() for field, value in plan.values().items()}

    def __str__(self):
        return "; ".join(f"{role}: {plan}" for role, plan in self.by_role().items())


@dataclass(frozen=True)
class Plans(_OfRoles):
    """Those of the two functions that most families have."""

    dk_dv: Plan
    dq: Plan


@dataclass(frozen=True)
class ApartPlans(_OfRoles):
    """Those of a function for each gradient, which a family with APART may want of a workload."""

    dk: Plan
    dq: Plan
    dv: Plan


@dataclass(frozen=True)
class Operands:
    """Gradients of tensors behind the scale.

    names   of these, in the order of a call
    family  the module that schedules them
    plan    its Plan: q_tile queries and kv_tile keys are summed by a block
    blocks  where the tiles of an operand are fewer, their sums are made in parts
    """

    names: tuple = ()
    family: object = None
    plan: Plan | None = None
    blocks: int = 0

    def workspace_bytes(self, workload, name):
        """Most bytes of parts that a call may need for one of them: as many parts as blocks, and one more of each tile."""
        axes = next(argument.kind.axes for argument in workload.arguments if argument.name == name)
        tile = (self.plan.q_tile if "N" in axes else 1) * (self.plan.kv_tile if "M" in axes else 1)
        return 0 if name == SINK.name else 4 * 2 * self.blocks * tile


def adds(family):
    """Whether a family adds dQ to sums in memory."""
    return family in ADDING


def takes_turns(family):
    """Whether it does so in a fixed order."""
    return adds(family) and family in FAMILIES[IN_ORDER]


def function_names(adds, place=1, apart=False):
    """Symbols of the functions in this place of an artefact: for delta, without and with a gradient of the LSE, for dK and dV, and for dQ;
    where a family adds for dK, dV and sums of dQ, for dQ from these, and for the zeros that they start from. Of gradients that are `apart`
    for dK, for dQ, none for zeros, and for dV."""
    kinds = ("fused", "dq_cast", "dq_zeros") if adds else ("dk", "dq", None, "dv") if apart else Plans.roles()
    suffix = "" if place == 1 else f"_variant{place}"
    return tuple(name and f"attention_backward_{name}{suffix}" for name in ("delta", "delta_through_lse", *kinds))


def declines(workload, arch, order=IN_ORDER):
    """Reason of each family by name; None for a family that takes the workload on this architecture."""
    return {family.NAME: family.decline(workload, arch) for family in FAMILIES[order]}


def takers(workload, arch, order=IN_ORDER):
    """The families that take the workload, in order of preference; NoSchedule, with the reason of each, where there is none."""
    reasons = declines(workload, arch, order)
    found = tuple(family for family in FAMILIES[order] if reasons[family.NAME] is None)
    if not found:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        other = f", or {IN_ORDER}" if order != IN_ORDER and None in declines(workload, arch).values() else ""
        raise NoSchedule(f"a schedule for the gradients of {workload.name}, {order}, on {arch.name} was wanted, every family declined "
                         f"({listed}): choose another target or workload{other}")
    return found


def taker(workload, arch, order=IN_ORDER):
    """The first of them."""
    return takers(workload, arch, order)[0]


def family_named(order, name):
    """The family module of a name, as a record carries it."""
    return next(family for family in FAMILIES[order] if family.NAME == name)


def kind_of(family, workload):
    """Class of a family's plans for a workload: Plans or ApartPlans, or that of the one function of a family that adds."""
    if adds(family):
        return family.PLAN
    return ApartPlans if getattr(family, "apart", lambda _: False)(workload) else Plans


def default_plans(family, workload, arch):
    """A family's seeds, as `kind_of` says."""
    if adds(family):
        return family.default_plan(workload, arch)
    kind = kind_of(family, workload)
    return kind(*(family.default_plan(role, workload, arch) for role in kind.roles()))


def compiler_options(family, plans):
    """What the CUDA compiler is asked for: one call of it makes all functions."""
    return family.compiler_options(plans if adds(family) else next(iter(plans.by_role().values())))


def fit(family, workload, plans, arch, operands=Operands()):
    """Whether an architecture has room for plans, and for that of Operands."""
    budgets = [(family.budget, plans)] if adds(family) else [(partial(family.budget, role), it) for role, it in plans.by_role().items()]
    if operands.names:
        budgets.append((operands.family.budget, operands.plan))
    return all(fitting([plan], budget, workload, arch) for budget, plan in budgets)


def build(family, workload, plans, arch, place=1, strided=False):
    """The functions of gradients, `compiled`."""
    parts = [delta.schedule(workload, arch, strided, through_lse) for through_lse in (False, True)]
    if adds(family):
        parts += [family.schedule(workload, plans, strided=strided), dq_cast.schedule(workload, plans, strided),
                  dq_cast.zeros(workload, plans, takes_turns(family))]
    else:
        parts += [family.schedule(role, workload, plan, strided=strided) for role, plan in plans.by_role().items()]
    names = filter(None, function_names(adds(family), place, isinstance(plans, ApartPlans)))
    return compiled({name: sch.mod["main"] for name, sch in zip(names, parts)}, family, arch)


def operands(workload, names, arch):
    """The Operands of a workload on an architecture; WorkloadError where a name has no gradient, PlanError where no plan fits."""
    for name in names:
        require_gradient(workload, name)
    names = tuple(argument.name for argument in workload.arguments if argument.name in names)
    if not names:
        return Operands()
    family = next(family for family in OPERAND_FAMILIES if family.decline(workload, arch) is None)
    return Operands(names, family, family.default_plan(workload, arch), family.BLOCKS)


def operand_function_names(workload, names, place=1):
    """Symbols of the functions for these operands, three each: that sums it whole, in its own type, that sums it in parts, in float32,
    which may be the same, and that adds these up; the sink has but one."""
    suffix = "" if place == 1 else f"_variant{place}"

    def named(name, part):
        return f"attention_backward_d_{name}{part}{suffix}"
    return tuple(symbol for name in names for symbol in (
        (named(name, ""), None, None) if name == SINK.name else
        (named(name, ""), named(name, "" if dtype_of(workload, name) == "float32" else "_parts"), named(name, "_fold"))))


def build_operands(workload, operands, arch, place=1, strided=False):
    """The functions of Operands, `compiled`."""
    functions, family = {}, operands.family
    for name in operands.names:
        whole, parts, fold = operand_function_names(workload, (name,), place)
        if name == SINK.name:
            functions[whole] = family.sink(workload)
            continue
        for symbol, dtype in {whole: dtype_of(workload, name), parts: "float32"}.items():
            functions[symbol] = family.schedule(workload, name, operands.plan, dtype, strided=strided)
        functions[fold] = family.fold(workload, name)
    return compiled({symbol: sch.mod["main"] for symbol, sch in functions.items()}, family, arch)
