"""The functions of te_defs/operand_gradients.py on vector units, beside cpu_backward.py and by its stages.

Lanes serve keys, as for dK and dV: K, V, scores and sums lie in panels of keys, and Q and dO give scalars. What an axis of size one still
asks for is summed at the end, out of a copy of the sums that lies by rows.
"""
import tvm
from tvm import s_tir

from schedules import roles
from schedules.families import cpu_backward
from schedules.families.cpu import CONFIG, PIPELINE, compiler_options  # noqa: F401, the same here
from schedules.stages import loops_of
from te_defs.operand_gradients import attention_d_operand, attention_d_sink, attention_fold_parts

NAME = "cpu_operand_gradients"
ROLE = cpu_backward.Role(attention_d_operand, "j", ("K_load", "V_load"), ("Q_load", "dO_load"), ("S", "dP"),
                         (("P", ("P_masked",)), ("dS", ("sum_new",))), ("sum_init", "sum", "tile"))
#: Parts of sums that keep the cores of a CPU busy to their end.
BLOCKS = 64


def decline(workload, arch):
    """Why this does not take a workload, or None."""
    return cpu_backward.decline(workload, arch)


def default_plan(workload, arch):
    """That of dK and dV, which has the same tiles and more to sum."""
    return cpu_backward.default_plan("dk_dv", workload, arch)


def budget(workload, arch, plan):
    """What a plan takes, likewise at most; PlanError where it does not fit."""
    return cpu_backward.budget("dk_dv", workload, arch, plan)


def schedule(workload, name, plan, dtype, stages=cpu_backward.STAGES, strided=False):
    """A fresh Schedule of the function that sums the gradient of a score's operand, as `dtype`."""
    return roles.staged(attention_d_operand(workload, name, plan.q_tile, plan.kv_tile, dtype), stages, plan, ROLE, strided)


def fold(workload, name):
    """A fresh Schedule of the function that adds up parts."""
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_fold_parts(workload, name)}), debug_mask=0)
    element, = loops_of(sch, "dX")
    sch.compute_at("total", element)
    sch.parallel(element)
    return sch


def sink(workload):
    """A fresh Schedule of the function that makes the gradient of the sink: a core has a head, and reads its rows in memory order."""
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_d_sink(workload)}), debug_mask=0)
    lane, *rows = loops_of(sch, "part")
    sch.reorder(*rows, lane)
    sch.parallel(*loops_of(sch, "head"))
    return sch
