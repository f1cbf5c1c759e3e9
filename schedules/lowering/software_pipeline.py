"""The software pipeline of the key loop, from one integer of the plan.

In a search the order is a sampled value, which may only flow into an annotation: the mma family annotates it on block `attn`, and
this pass, first in the pipeline, turns it into TVM's stage and order lists.
"""
import tvm
from tvm import s_tir

from schedules.lowering.rewrite import function_pass

#: Statements of the key loop in program order, by the block that each computes; loads of one tile are issued while the tile before
#: is computed.
STATEMENTS = ("K_load", "V_load", "S_init", "S", "S_masked", "tile_max", "pair_max", "row_max_new", "rescale", "row_max_scaled", "P",
              "tile_sum", "row_sum_new", "P_cast", "O_init", "O_acc_new", "O_acc", "row_max", "row_sum")
LOADED_AHEAD = ("K_load", "V_load")
ORDER = "flashtir.order"


def _moved(names, before):
    """STATEMENTS with `names` moved in front of `before`."""
    rest = [name for name in STATEMENTS if name not in names]
    at = rest.index(before)
    return (*rest[:at], *names, *rest[at:])


#: Named orders; the plan's `order` is an index.
ORDERS = (
    ("as declared", STATEMENTS),
    ("rescale O before P", _moved(("O_init",), "row_max_scaled")),
    ("row sum after the product", _moved(("tile_sum", "row_sum_new"), "O_acc")),
    ("V behind the scores", _moved(("V_load",), "S_masked")),
)


def pipeline_lists(order):
    """TVM's (stage, order) lists for an order by index: stage 0 for loads, 1 for the rest; positions in execution order."""
    executed = ORDERS[order][1]
    return [0 if name in LOADED_AHEAD else 1 for name in STATEMENTS], [executed.index(name) for name in STATEMENTS]


@function_pass("flashtir.ExpandOrder")
def expand_order(func):
    """Turn the integer on block `attn` into the key loop's pipeline annotations."""
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    marks = sch.get(sch.get_sblock("attn")).annotations
    if ORDER not in marks:
        return func
    stages, order = pipeline_lists(int(marks[ORDER]))
    loop = sch.get_loops(sch.get_sblock("kv"))[-1]
    sch.annotate(loop, "software_pipeline_stage", stages)
    sch.annotate(loop, "software_pipeline_order", order)
    sch.annotate(loop, "software_pipeline_async_stages", [0])
    return sch.mod["main"]
