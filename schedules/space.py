"""The space of plans: which fields MetaSchedule draws, and how a scheduled module tells what was drawn.

A family's `tile_choices` are structural alternatives: each fixes the tiles, and with them the declaration, and is one Space. Within a
Space the fields that the family lists as `knobs` are drawn. A draw is an instruction of the schedule's trace, so a value that was drawn
may only flow into other instructions; what a stage branches on is structural.
"""
import itertools
from dataclasses import dataclass, fields

from schedules.build import staged
from schedules.plan import Plan, PlanError, fitting
from te_defs.workload import Workload

#: Annotations of the root block by which a scheduled module carries its decisions.
PREFIX = "flashtir."


@dataclass(frozen=True)
class Space:
    """All plans that share one structure.

    family    module under schedules.families
    workload  te_defs.workload.Workload
    arch      row of schedules.arch
    seed      plan of the family that the space is built around: it fits, and its fields that are no knobs are those of every plan
    knobs     ((field, candidates), ...): the fields that are drawn, and integers to choose from; the seed's value is among them
    """

    family: object
    workload: Workload
    arch: object
    seed: Plan
    knobs: tuple

    @classmethod
    def around(cls, family, workload, arch, seed):
        """The space that the family's knobs open around a plan."""
        knobs = tuple((field, tuple(candidates)) for field, candidates in family.knobs(workload, arch, seed).items())
        for field, candidates in knobs:
            if getattr(seed, field) not in candidates:
                raise PlanError(f"{family.NAME}.knobs must offer the value of each seed, found {field}={getattr(seed, field)} "
                                f"outside {candidates}: correct the family")
        return cls(family, workload, arch, seed, knobs)

    @property
    def size(self):
        """Number of plans, those that do not fit included."""
        count = 1
        for _, candidates in self.knobs:
            count *= len(candidates)
        return count

    def plans(self):
        """All plans, in the order of the candidates."""
        names = [field for field, _ in self.knobs]
        for values in itertools.product(*(candidates for _, candidates in self.knobs)):
            yield self.seed.but(**dict(zip(names, values)))

    def fits(self, plan):
        """Whether the family's budget has room for the plan."""
        return bool(fitting([plan], self.family.budget, self.workload, self.arch))

    def fitting_plans(self):
        """The plans that fit."""
        return fitting(self.plans(), self.family.budget, self.workload, self.arch)

    def owns(self, family_name, plan):
        """Whether a plan of the family with that name belongs to this space."""
        if family_name != self.family.NAME:
            return False
        drawn = dict(self.knobs)
        return all(getattr(plan, field.name) in drawn.get(field.name, (getattr(self.seed, field.name),)) for field in fields(plan))

    def structure(self, plan):
        """The fields that no draw changes, as a tuple: plans with equal ones share a declaration."""
        drawn = {field for field, _ in self.knobs}
        return tuple(getattr(plan, field.name) for field in fields(plan) if field.name not in drawn)

    @property
    def name(self):
        """The structure in words: family, then the fields that no draw changes."""
        drawn = {field for field, _ in self.knobs}
        fixed = " ".join(f"{field.name}={getattr(self.seed, field.name)}" for field in fields(self.seed) if field.name not in drawn)
        return f"{self.family.NAME} {fixed}"


def spaces_of(families, workload, arch):
    """The spaces of several families, each family's default plan first; plans that an earlier space holds open none of their own."""
    spaces = []
    for family in families:
        for seed in (family.default_plan(workload, arch), *family.tile_choices(workload, arch)):
            if not any(space.owns(family.NAME, seed) for space in spaces):
                spaces.append(Space.around(family, workload, arch, seed))
    return tuple(spaces)


def draw(sch, space, chosen=None):
    """A plan whose knobs are random variables of the schedule; the root block of the module is annotated with every field.

    chosen  plan of the space whose values the draws take; at random where it is None
    """
    drawn = {}
    for field, candidates in space.knobs:
        if len(candidates) > 1:
            decision = None if chosen is None else candidates.index(getattr(chosen, field))
            drawn[field] = sch.sample_categorical(list(candidates), [1 / len(candidates)] * len(candidates), decision=decision)
    plan = space.seed.but(**drawn)
    root = sch.get_sblock("root")
    for key, value in carried(space, plan).items():
        sch.annotate(root, key, value)
    return plan


def carried(space, plan):
    """The annotations that say what a module is: its workload, its family and every field of its plan."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {f"{PREFIX}{key}": value for key, value in {"workload": space.workload.name, "family": space.family.NAME, **values}.items()}


def schedule_in(sch, space, chosen=None):
    """Draw a plan and apply the family's stages to it: the design space that MetaSchedule samples."""
    staged(sch, space.family, draw(sch, space, chosen))


def decisions(mod):
    """What `draw` wrote on a scheduled module: the name of the workload, the name of the family, and the plan's fields as a dict."""
    found = {str(key)[len(PREFIX):]: value for key, value in mod["main"].body.block.annotations.items() if str(key).startswith(PREFIX)}
    return str(found.pop("workload")), str(found.pop("family")), {field: int(value) for field, value in found.items()}
