"""mma, gradients of operands: attention_d_operand of te_defs/operand_gradients.py on tensor cores of sm_80 and later.

The idea is that of dQ in mma_backward.py, whose stages these are, without its third product: warps split the queries of a tile, and S, dP
and the sums lie in the fragments of mma.sync. What is left is done as in operand_gradients.py.

The budget. Per thread S, dP and the sums take q_tile * kv_tile / threads registers each, 32 of 255. Shared memory holds Q and dO once, K
and V twice; in their place comes a copy of the sums.
"""
from schedules import roles
from schedules.families import mma_backward
from schedules.families.backward_roles import Product, Role
from schedules.families.mma_backward import CONFIG, PIPELINE, compiler_options, decline  # noqa: F401, the same here
from schedules.families.mma_backward_plan import MmaBackwardPlan, budget_of
from schedules.families.operand_gradients import BLOCKS, bind_sums, declare, fold, share_sums, sink, split_sums  # noqa: F401, likewise
from schedules.intrinsics import mma as intrinsics
from schedules.plan import first_of, fitting
from schedules.stages import own_fragment
from te_defs.operand_gradients import attention_d_operand

NAME = "mma_operand_gradients"
ROLE = Role(attention_d_operand, "i", ("Q_load", "dO_load"), ("K_load", "V_load"),
            (Product("S", "Q_tile", "K_tile"), Product("dP", "dO_tile", "V_tile")),
            ("P", "P_masked", "dS", "sum_new"), (("sum_init", "sum", "tile"),), "kv",
            ("K_load", "V_load", "S_init", "S", "P", "P_masked", "dP_init", "dP", "dS", "sum_new", "sum"))
#: The one plan. ptxas makes do with 168 registers and spills up to 24 bytes, which at this level are the fewest.
PLAN = MmaBackwardPlan(64, 64, 4, register_level=3)


def default_plan(workload, arch):
    """The one plan; PlanError where an architecture has no room for it."""
    return first_of(fitting([PLAN], budget, workload, arch), NAME, workload, arch)


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    return budget_of(ROLE, plan.kv_tile, workload, arch, plan)


def tile_sums(sch, plan, role):
    """A thread sums a key or a query, and stores every so manieth element."""
    split_sums(sch, plan.warps, intrinsics.LANES)


def bind_fragments(sch, plan, role):
    """Every lane computes the elements of scores and sums that its registers hold."""
    for block in (*role.scores, *role.sums[0]):
        own_fragment(sch, block, plan.warps)


#: As many as have no thread yet, then the others.
UNBOUND = (mma_backward.place_buffers, share_sums, mma_backward.lay_out_fragments, mma_backward.tile_products, mma_backward.stage_fragments,
           tile_sums)
STAGES = (*UNBOUND, mma_backward.bind_grid, mma_backward.copy_tiles, bind_fragments, bind_sums, mma_backward.bind_products,
          mma_backward.use_tensor_cores, mma_backward.pipeline_loads)


def schedule(workload, name, plan, dtype, stages=STAGES, strided=False):
    """A fresh Schedule of the function that sums the gradient of a score's operand, as `dtype`."""
    mma_backward.register(workload, plan)
    return roles.staged(declare(workload, name, plan, dtype), stages, plan, ROLE, strided)
