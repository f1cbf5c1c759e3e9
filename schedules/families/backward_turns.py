"""In which order wgmma_backward and wgmma_fused_backward do what a turn has to do, and what they wait for.

Products run in the order in which they are issued, beside the arithmetic of the warps that issued them. Which products are in flight is
what an order decides; which registers, too: a matrix has some from the issue of its product up to its last use.

In the orders of ACROSS a turn is cut in two, and its second part runs beside the first of the next turn (a software pipeline of two
stages). Tensor cores then have work while exponentials are computed, and while dS is made. That of all five products is not cut: there the
product for dK runs while warpgroups meet, and what is added to dQ is handed over in the next turn.
"""
from dataclasses import dataclass, replace

from schedules.intrinsics import events


@dataclass(frozen=True)
class Turn:
    """What a turn does.

    order     statements as they are executed
    releases  for each copy that waits for a product: the rings whose tiles nobody reads any more
    later     statements that run a turn later
    """

    order: tuple
    releases: dict
    later: tuple = ()

    def lists(self, statements):
        """TVM's (stage, order) lists for statements in program order."""
        return [int(it in self.later) for it in statements], [self.order.index(it) for it in statements]


_LOADS = ("Q_load", "dO_load", "LSE_load", "delta_load")
_KEYS = (*_LOADS, "S_init", "S", "dP_init", "dP", "S_warp", "P", "P_masked", "P_cast", "dV_init", "dV_acc_new", "dP_warp", "dS", "dS_cast")
#: What is done with an addend of dQ.
_ADDED = ("dQ_part_warp", "dQ_part_warp_shared.dyn", "dQ_sum")

#: One turn behind the other: S and dP are issued together, and what a product adds to a sum is awaited at the end of the turn.
APART = {
    "dq": Turn(("K_load", "V_load", "S_init", "S", "dP_init", "dP", "S_warp", "P", "P_masked", "dP_warp", "dS", "dS_cast", "dQ_init",
                "dQ_acc_new", "dQ_acc"), {"S_warp": (), "dP_warp": (events.V,), "dQ_acc": (events.K,)}),
    "dk_dv": Turn((*_KEYS, "dK_init", "dK_acc_new", "dK_acc", "dV_acc"),
                  {"S_warp": (), "dP_warp": (), "dK_acc": (events.Q,), "dV_acc": (events.DO,)}),
    "dk": Turn((*_LOADS, "S_init", "S", "dP_init", "dP", "S_warp", "P", "P_masked", "dP_warp", "dS", "dS_cast", "dK_init", "dK_acc_new",
                "dK_acc"), {"S_warp": (), "dP_warp": (events.DO,), "dK_acc": (events.Q,)}),
    "dv": Turn((*_LOADS[:3], "S_init", "S", "S_warp", "P", "P_masked", "P_cast", "dV_init", "dV_acc_new", "dV_acc"),
               {"S_warp": (), "dV_acc": (events.Q, events.DO)}),
    "fused": Turn((*_KEYS, "dS_cast_shared.dyn", "dQ_init", "dQ_part", "dK_init", "dK_acc_new", *_ADDED, "dK_acc", "dV_acc"),
                  {"S_warp": (), "dP_warp": (), "dQ_part_warp": (events.DO,), "dK_acc": (events.Q,), "dV_acc": ()}),
}

#: S of the next turn is issued as soon as dS has been computed, in the registers of P; then dV is awaited, whose operand makes room for
#: the cast of dS. Beside dK exponentials are computed, and dS beside dV. Three blocks of registers are enough besides the sums: one for S
#: and P, one for dP and dS, and one for what is cast.
ACROSS = {
    "dq": Turn(("K_load", "V_load", "S_init", "S", "dS_cast", "dQ_init", "dQ_acc_new", "dP_init", "dP", "S_warp", "P", "P_masked", "dQ_acc",
                "dP_warp", "dS"),
               {"S_warp": (), "dP_warp": (events.V,), "dQ_acc": (events.K,)}, ("dS_cast", "dQ_init", "dQ_acc_new", "dQ_acc")),
    "dk_dv": Turn((*_LOADS, "S_init", "S", "dV_acc", "dS_cast", "dK_init", "dK_acc_new", "dP_init", "dP", "S_warp", "P", "P_masked",
                   "dK_acc", "P_cast", "dV_init", "dV_acc_new", "dP_warp", "dS"),
                  {"S_warp": (), "dV_acc": (events.DO,), "dK_acc": (events.Q,), "dP_warp": ()},
                  ("dV_acc", "dS_cast", "dK_init", "dK_acc_new", "dK_acc")),
    "fused": Turn((*_KEYS, "dS_cast_shared.dyn", "dK_init", "dK_acc_new", "dQ_init", "dQ_part", "dK_acc", "dV_acc", *_ADDED),
                  {"S_warp": (), "dP_warp": (), "dK_acc": (events.Q,), "dV_acc": (events.DO,), "dQ_part_warp": ()}),
}


def with_turns(statements):
    """Names of statements, with what stands around additions that are made one after the other."""
    return tuple(name for it in statements for name in (("dQ_ahead", it, "dQ_turn") if it == "dQ_sum" else (it,)))


def _with_ordered(orders):
    """The same, and that of additions one after the other."""
    it = orders["fused"]
    return orders | {"ordered": replace(it, order=with_turns(it.order))}


#: By the plan's `across`.
ORDERS = tuple(map(_with_ordered, (APART, ACROSS, ACROSS)))


def turn_of(role, plan):
    """The Turn of a function at a plan."""
    return ORDERS[plan.across][role]
