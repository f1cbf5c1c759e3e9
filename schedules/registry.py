"""Who takes a workload on an architecture, and why the others decline."""
from schedules.families import cpu, mma, simt, simt_te, wgmma

#: In order of preference: the first family that does not decline is the default.
FAMILIES = (wgmma, mma, simt, simt_te, cpu)


class NoSchedule(ValueError):
    """No family takes the workload: the message carries each family's reason."""


def declines(workload, arch):
    """Reason of each family by name; None for a family that takes the workload on this architecture."""
    return {family.NAME: family.decline(workload, arch) for family in FAMILIES}


def takers(workload, arch):
    """The families that take the workload, in order of preference; NoSchedule where there is none."""
    reasons = declines(workload, arch)
    families = tuple(family for family in FAMILIES if reasons[family.NAME] is None)
    if not families:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NoSchedule(f"a schedule for {workload.name} on {arch.name} was wanted, every family declined ({listed}): "
                         "choose another target or workload")
    return families


def packer(workload, arch):
    """The family whose kernel serves few queries of grouped heads, beside one of any family; None where none does."""
    return next((family for family in FAMILIES if hasattr(family, "packed_plan") and family.decline(workload, arch) is None), None)


def family_named(name):
    """The family module of a name, as a plan or a record carries it; NoSchedule where none is called so."""
    for family in FAMILIES:
        if family.NAME == name:
            return family
    raise NoSchedule(f"a family is one of {', '.join(f.NAME for f in FAMILIES)}, found {name!r}: choose one of these")
