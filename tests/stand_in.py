"""A small family for tests of the tuner: the plain function on llvm, with structures that are wrong or cannot be scheduled."""
from dataclasses import dataclass, replace
from typing import ClassVar

from schedules.lowering import cpu_pipeline
from schedules.plan import Budget, Plan
from schedules.stages import loops_of
from te_defs.flash_attention import flash_attention_forward
from te_defs.integers import both, maximum, minimum
from te_defs.masks import Causal

NAME = "stand_in"
PIPELINE = "flashtir_cpu"
CONFIG = cpu_pipeline.CONFIG
BINDS_AT = ""

#: Values of StandInPlan.fault. Those that are faster and wrong see the last few keys only: HASTY so few that each ragged shape shows it,
#: FORGETFUL more than the ragged shapes have, so that it takes the large set to show it.
SOUND, WRONG, UNSCHEDULABLE, HASTY, FORGETFUL = range(5)
SEEN = {HASTY: 8, FORGETFUL: 1000}


@dataclass(frozen=True)
class StandInPlan(Plan):
    """lanes: elements of a row that the products handle side by side; spare: nothing; fault: one of the values above."""

    lanes: int = 8
    spare: int = 0
    fault: int = SOUND


PLAN = StandInPlan


def decline(workload, arch):
    return None if arch.kind == "cpu" else f"{arch.name} is no CPU"


def default_plan(workload, arch):
    return StandInPlan(16, 32)


def tile_choices(workload, arch):
    return StandInPlan(16, 32), StandInPlan(32, 16), StandInPlan(16, 16, fault=WRONG), StandInPlan(16, 16, fault=UNSCHEDULABLE)


def knobs(workload, arch, plan):
    return {"lanes": (4, 8, 16), "spare": (0, 1, 2, 3), "fault": (plan.fault,)}


def budget(workload, arch, plan):
    return Budget((("lanes", plan.lanes * plan.kv_tile, 16 * 16, "elements"),)).check(plan, arch)


def compiler_options(plan):
    return {}


def declare(workload, plan, negative_scale=False):
    workload = replace(workload, mask=f"{__name__}:sees_{SEEN[plan.fault]}") if plan.fault in SEEN else workload
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, negative_scale=negative_scale)


@dataclass(frozen=True)
class _Near(Causal):
    """Causal, and no more than `most` keys back."""

    from_start = False
    most: ClassVar[int]

    def keep(self, i, j, kv_len):
        return both(j <= i, j > i - self.most)

    def key_begin(self, i, kv_len):
        return minimum(maximum(i - self.most + 1, 0), kv_len)

    def query_end(self, j, q_len, kv_len):
        return maximum(minimum(j + q_len - kv_len + self.most, q_len), 0)


sees_8, sees_1000 = (type(f"Near{most}", (_Near,), {"name": f"near_{most}", "most": most, "__module__": __name__})
                     for most in SEEN.values())


def vectorize_products(sch, plan):
    for product in ("S", "O_acc_new"):
        i, j, k = loops_of(sch, product)
        j, lanes = sch.split(j, factors=[None, plan.lanes])
        sch.reorder(i, j, k, lanes)
        sch.vectorize(lanes)


def have_faults(sch, plan):
    if plan.fault == WRONG:
        sch.unsafe_set_dtype("P", 0, "float16")
    if plan.fault == UNSCHEDULABLE:
        sch.get_sblock("no such block")


def note_spare(sch, plan):
    sch.annotate(sch.get_sblock("attn"), "spare", plan.spare)


def share_heads(sch, plan):
    sch.parallel(sch.fuse(*loops_of(sch, "attn")[:2]))


STAGES = (vectorize_products, have_faults, note_spare, share_heads)
