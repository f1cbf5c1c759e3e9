"""The functions of a gradient that have plans, each in the form in which schedules.space and the tuner know a family."""
from dataclasses import dataclass
from functools import partial

from schedules import backward
from schedules.build import declaration_of
from schedules.plan import plan_of


@dataclass(frozen=True)
class Part:
    """One of them.

    family  module of schedules.backward.FAMILIES
    role    name of the function among those of the family's plans; None: all that the family schedules, one where it adds dQ up
    """

    family: object
    role: str | None = None

    @property
    def NAME(self):
        return self.family.NAME if self.role is None else f"{self.family.NAME}.{self.role}"

    @property
    def PLAN(self):
        return self.family.PLAN

    @property
    def STAGES(self):
        """The family's stages, as functions of a schedule and a plan."""
        role = self.role or self.family.ROLE
        return tuple(partial(_stage_of, stage, self.family, role) for stage in self.family.STAGES)

    def _named(self):
        """What functions of the family are told first."""
        return () if backward.adds(self.family) else (self.role,)

    def decline(self, workload, arch):
        return self.family.decline(workload, arch)

    def default_plan(self, workload, arch):
        return self.family.default_plan(*self._named(), workload, arch)

    def tile_choices(self, workload, arch):
        return self.family.tile_choices(*self._named(), workload, arch)

    def knobs(self, workload, arch, plan):
        return self.family.knobs(*self._named(), workload, arch, plan)

    def budget(self, workload, arch, plan):
        return self.family.budget(*self._named(), workload, arch, plan)

    def declare(self, workload, plan):
        return self.family.declare(*self._named(), workload, plan)

    def plans(self, workload, arch, plan):
        """What the whole gradient is built with where this function has a plan: the others have the family's seeds."""
        return plan if self.role is None else backward.default_plans(self.family, workload, arch).but(**{self.role: plan})

    def declaration(self, workload, arch, plan):
        """What a measurement of the plan is of, as text: the declarations of all functions, and the plans of those that have the seeds."""
        parts = parts_of(self.family, workload)
        plans = self.plans(workload, arch, plan)
        if backward.adds(self.family):
            return declaration_of(self, workload, plans)
        told = {part.role: declaration_of(part, workload, plans.by_role()[part.role]) for part in parts}
        seeds = "" if self.role is None else "; ".join(f"{role}: {it}" for role, it in plans.by_role().items() if role != self.role)
        return " ".join(filter(None, (*(f"{role}:{text}" for role, text in told.items()), seeds)))


def _stage_of(stage, family, role, sch, plan):
    return stage(sch, plan, family.role_of(role, plan))


def parts_of(family, workload):
    """The Parts of a family whose plans are searched one after the other."""
    if backward.adds(family):
        return (Part(family),)
    return tuple(Part(family, role) for role in backward.kind_of(family, workload).roles())


def plans_of(family, workload, values):
    """Plans from what their `values` said; None where the family's have other fields."""
    kind = backward.kind_of(family, workload)
    if backward.adds(family):
        return plan_of(kind, values)
    told = {role: {} for role in kind.roles()}
    for name, value in values.items():
        role, _, field = name.partition(".")
        told.setdefault(role, {})[field] = value
    plans = {role: plan_of(family.PLAN, each) for role, each in told.items()}
    return None if None in plans.values() or set(plans) != set(kind.roles()) else kind(**plans)
