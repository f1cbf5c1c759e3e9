"""The software pipeline of the key loop, from one integer of the plan.

In a search the order is a sampled value, which may only flow into an annotation: the mma family annotates it on block `attn`, and
this pass, first in the pipeline, turns it into TVM's stage and order lists.
"""
import tvm
import tvm_ffi
from tvm import s_tir
from tvm.s_tir.stmt import SBlock

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


#: The same for asynchronous products, in program order; "S_ready", block S_warp, and "O_acc" wait for them. A declaration with slack has
#: "row_max_seen".
OVERLAPPED_STATEMENTS = ("K_load", "V_load", "S_init", "S", "S_ready", "S_masked", "tile_max", "pair_max", "row_max_seen", "row_max_new",
                         "rescale", "row_max_scaled", "P", "tile_sum", "row_sum_new", "P_cast", "O_init", "O_acc_new", "O_acc", "row_max",
                         "row_sum")
#: A tile later: the product that consumes P, what waits for it, and the load that it needs.
A_TILE_LATER = ("V_load", "O_acc_new", "O_acc")
#: In execution order: the product of the tile before is issued behind the scores and awaited behind the exponentials.
OVERLAPPED_ORDER = ("K_load", "V_load", "S_init", "S", "O_acc_new", "S_ready", "S_masked", "tile_max", "pair_max", "row_max_seen",
                    "row_max_new", "rescale", "row_max_scaled", "P", "tile_sum", "row_sum_new", "O_acc", "O_init", "P_cast", "row_max",
                    "row_sum")
OVERLAP = "flashtir.overlap"


def overlapped_lists(slack):
    """TVM's (stage, order) lists for asynchronous products, of a declaration with or without slack."""
    statements, executed = ([name for name in names if slack or name != "row_max_seen"]
                            for names in (OVERLAPPED_STATEMENTS, OVERLAPPED_ORDER))
    return [int(name in A_TILE_LATER) for name in statements], [executed.index(name) for name in statements]


def _expand(func, mark, lists, annotations=()):
    """Replace the integer `mark` on block `attn` by the key loop's pipeline annotations; a function without the mark stays as it is."""
    marks = []
    tvm_ffi.structural_walk(func.body, (SBlock, lambda block: marks.extend(
        value for key, value in block.annotations.items() if key == mark)))
    if not marks:
        return func
    stages, order = lists(int(marks[0]))
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    sch.unannotate(sch.get_sblock("attn"), mark)
    loop = sch.get_loops(sch.get_sblock("kv"))[-1]
    for key, value in (("stage", stages), ("order", order), *annotations):
        sch.annotate(loop, f"software_pipeline_{key}", value)
    return sch.mod["main"]


@function_pass("flashtir.ExpandOrder")
def expand_order(func):
    """Turn the integer on block `attn` into the key loop's pipeline annotations, for loads one tile ahead."""
    return _expand(func, ORDER, pipeline_lists, [("async_stages", [0])])


@function_pass("flashtir.ExpandOverlap")
def expand_overlap(func):
    """Turn the mark on block `attn`, which says whether the declaration has slack, into the key loop's pipeline annotations."""
    return _expand(func, OVERLAP, overlapped_lists)
