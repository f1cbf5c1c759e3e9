"""Plans: a schedule's knobs as frozen integers, and the budget that says whether a plan fits the hardware."""
from dataclasses import asdict, dataclass, fields, replace


class PlanError(ValueError):
    """A plan that does not fit: the message says what was wanted, what there is, and shows the budget."""


@dataclass(frozen=True)
class Plan:
    """Knobs of one schedule. Fields are integers, so that a plan can ride on the scheduled function as annotations.

    In a search some fields are MetaSchedule random variables instead; the stages cannot tell.

    q_tile   query rows of a tile (Br)
    kv_tile  key rows of a tile (Bc)
    """

    q_tile: int
    kv_tile: int

    def but(self, **changes):
        """This plan with some fields changed."""
        return replace(self, **changes)

    def values(self):
        """{field: value}, as records and manifests have it."""
        return asdict(self)

    def on(self, arch):
        """This plan as another machine of its kind takes it (schedules.arch); plans that say nothing of a machine's size are the same."""
        return self

    def __str__(self):
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def plan_of(kind, values):
    """The plan of a class that {field: value} says, as records have it; None where the class has other fields."""
    return kind(**values) if set(values) == {field.name for field in fields(kind)} else None


@dataclass(frozen=True)
class Calls:
    """The calls that a plan of an artefact is for: those with at least `queries` query rows, and at least `tiles` tiles of `rows` rows over
    all heads and batch entries; tensors are contiguous unless it is for `strided` ones too. One that is `packed` is for grouped heads and
    fewer queries than it has rows in a tile, which the heads of a group share."""

    queries: int = 0
    tiles: int = 0
    rows: int = 1
    strided: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Budget:
    """What a plan takes of one resource after the other: rows of (name, used, available, unit)."""

    rows: tuple

    def table(self):
        """The rows as aligned text, one line each, with the share that is used."""
        return "\n".join(f"  {name:<28}{used:>9} of {limit:>7} {unit:<12}{100 * used // max(limit, 1):>4} %"
                         for name, used, limit, unit in self.rows)

    def check(self, plan, arch):
        """Return self, or raise PlanError naming the first resource that is exceeded."""
        for name, used, limit, unit in self.rows:
            if used > limit:
                raise PlanError(f"{name} of plan ({plan}) must stay within {limit} {unit} on {arch.name}, found {used}: "
                                f"choose smaller tiles\n{self.table()}")
        return self


def require(condition, wanted, found, remedy):
    """Raise PlanError in the one form that all messages have: what was wanted, what was found, what to do."""
    if not condition:
        raise PlanError(f"{wanted}, found {found}: {remedy}")


def fitting(plans, budget, workload, arch):
    """Those of some plans that a family's `budget` function has room for, in their order."""
    def fits(plan):
        try:
            budget(workload, arch, plan)
        except PlanError:
            return False
        return True
    return tuple(filter(fits, plans))


def first_of(plans, family, workload, arch):
    """The first of the plans that fit, a family's seed; PlanError where there is none."""
    require(plans, f"a tile of {family} for {workload.name} must fit {arch.name}", "none that does", "choose another family or target")
    return plans[0]


def paper_tile(smem_elements, head_dim):
    """Tile sizes of the FlashAttention paper (algorithm 1, line 1): Bc = ceil(M / 4d), Br = min(Bc, d), M in elements."""
    kv_tile = -(-smem_elements // (4 * head_dim))
    return min(kv_tile, head_dim), kv_tile
