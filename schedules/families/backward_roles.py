"""What the functions of te_defs/flash_attention_backward.py are made of, for families that schedule all by the same stages."""
from dataclasses import dataclass, replace
from functools import partial

from schedules.families.backward_turns import with_turns
from schedules.families.mma_turns import fetched
from schedules.outputs import only
from te_defs.flash_attention_backward import attention_dk_dv, attention_dq
from te_defs.fused_backward import attention_dk_dv_dq


@dataclass(frozen=True)
class Product:
    """One product on tensor cores: block[row, column] += the sum of first[row, .] * second[column, .].

    first, second  tiles in shared memory; None in the place of the first: a matrix in registers, which the block before has cast
    turned         whether the second is read transposed on its way
    first_turned   whether the first is
    transposed     whether it is declared with rows and columns the other way round
    """

    block: str
    first: str | None
    second: str
    turned: bool = False
    transposed: bool = False
    first_turned: bool = False

    @property
    def form(self):
        """Of mma.sync, see intrinsics.mma: one that adds to a sum starts from it, the others from zero."""
        return "sum" if self.block.endswith("_new") else "part" if self.turned else "kq" if self.transposed else "qk"


@dataclass(frozen=True)
class Role:
    """What one of the functions is made of.

    rows      "i" or "j": whose rows stay, and are rows of the fragments
    stays     loads of the tiles that stay; streams: of those that come by
    products  Products in the order they run
    scores    blocks of what is done with scores between the products
    sums      (block that sets it, block that copies it back, block that stores it) for each accumulator
    turn      block of what is done with a tile that comes by; statements: its leaves in program order, products in two parts
    """

    declare: object
    rows: str
    stays: tuple
    streams: tuple
    products: tuple
    scores: tuple
    sums: tuple
    turn: str
    statements: tuple

    @property
    def written(self):
        """Blocks whose matrices stay in registers: scores, products and accumulators."""
        return (*self.scores, *(product.block for product in self.products), *(init for init, _, _ in self.sums))

    @property
    def statistics(self):
        """Loads of the numbers that go with the queries."""
        return ("LSE_load", "delta_load") if any(product.block == "dP" for product in self.products) else ("LSE_load",)

    def transposes(self, block):
        """Whether the matrix of a block lies transposed in registers: scores do where keys are the rows."""
        return self.rows == "j" and block in ("S", "dP", *self.scores)

    def tiles(self, plan):
        """(rows of the tile that stays, rows of those that come by)."""
        return (plan.q_tile, plan.kv_tile) if self.rows == "i" else (plan.kv_tile, plan.q_tile)


DQ = Role(attention_dq, "i", ("Q_load", "dO_load"), ("K_load", "V_load"),
          (Product("S", "Q_tile", "K_tile"), Product("dP", "dO_tile", "V_tile"), Product("dQ_acc_new", None, "K_tile", turned=True)),
          ("P", "P_masked", "dS", "dS_cast"), (("dQ_acc_init", "dQ_acc", "dQ"),), "kv",
          ("K_load", "V_load", "S_init", "S", "P", "P_masked", "dP_init", "dP", "dS", "dS_cast", "dQ_init", "dQ_acc_new", "dQ_acc"))
DK_DV = Role(attention_dk_dv, "j", ("K_load", "V_load"), ("Q_load", "dO_load"),
             (Product("S", "K_tile", "Q_tile", transposed=True), Product("dV_acc_new", None, "dO_tile", turned=True),
              Product("dP", "V_tile", "dO_tile", transposed=True), Product("dK_acc_new", None, "Q_tile", turned=True)),
             ("P", "P_masked", "P_cast", "dS", "dS_cast"), (("dK_acc_init", "dK_acc", "dK"), ("dV_acc_init", "dV_acc", "dV")), "rows",
             ("Q_load", "dO_load", "LSE_load", "delta_load", "S_init", "S", "P", "P_masked", "P_cast", "dV_init", "dV_acc_new", "dP_init",
              "dP", "dS", "dS_cast", "dK_init", "dK_acc_new", "dK_acc", "dV_acc"))
ROLES = {"dq": DQ, "dk_dv": DK_DV}


def _alone(output, *foreign):
    """The Role of one output of DK_DV by itself, without the blocks whose names start so."""
    def keep(names):
        return tuple(name for name in names if not name.startswith(foreign))
    return replace(DK_DV, declare=lambda *arguments, **options: only(attention_dk_dv(*arguments, **options), output),
                   stays=keep(DK_DV.stays), products=tuple(it for it in DK_DV.products if keep((it.block,))), scores=keep(DK_DV.scores),
                   sums=tuple(it for it in DK_DV.sums if keep(it)), statements=keep(DK_DV.statements))


#: Where the sums of both do not fit in registers: eight products in all, as S is computed once more.
APART = {"dk": _alone("dK", "dV", "P_cast"), "dv": _alone("dV", "dK", "dP", "dS", "V_load", "delta")}
#: te_defs/fused_backward.py. The rows of dQ are nobody's own: its product, with the copies around it, is scheduled by wgmma_fused_backward.
FUSED = replace(DK_DV, declare=attention_dk_dv_dq, statements=(
    *DK_DV.statements[:-2], "dS_cast_shared.dyn", "dQ_init", "dQ_part", "dQ_part_warp", "dQ_part_warp_shared.dyn", "dQ_sum",
    *DK_DV.statements[-2:]))

#: The same where tiles of keys add to dQ one after the other.
ORDERED = replace(FUSED, declare=partial(attention_dk_dv_dq, in_order=True), statements=with_turns(FUSED.statements))

#: The same by mma.sync, with dQ's product among the others. Where P and dS are handed over by shared memory, two warps share the scores of
#: the same keys.
_PART = Product("dQ_part", "dS_cast", "K_tile", turned=True, first_turned=True)
_HANDED = {"dV_acc_new": "P_cast", "dK_acc_new": "dS_cast"}
MMA_ROLES = {"dq": DQ, "dk_dv": replace(DK_DV, statements=fetched(DK_DV.statements))}
MMA_FUSED = replace(FUSED, products=(*FUSED.products, _PART), statements=(
    *fetched(DK_DV.statements)[:-2], "dS_cast_shared.dyn", "dQ_init", "dQ_part", "dQ_sum", *DK_DV.statements[-2:]))
MMA_FUSED_HANDED = replace(
    MMA_FUSED, products=(*(replace(it, first=_HANDED.get(it.block, it.first)) for it in FUSED.products), _PART),
    statements=tuple(name for it in MMA_FUSED.statements if it != "dS_cast_shared.dyn"
                     for name in ((it, f"{it}_warp") if it in _HANDED.values() else (it,))))
