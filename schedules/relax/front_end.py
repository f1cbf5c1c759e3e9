"""The front end: what happens to a graph before its functions are scheduled, step by step, with what each step did."""
from collections import Counter
from dataclasses import dataclass

from tvm import relax
from tvm.relax import transform

from schedules.relax.cleanup import CancelTransposes, RemoveNoOps, SimplifyArithmetic, operator_of


@dataclass(frozen=True)
class Step:
    """Passes, in their order, that make one step, and what it is for."""

    purpose: str
    passes: tuple

    @property
    def names(self):
        """Names of the passes, in their order."""
        return tuple(it.info.name.removeprefix("transform.") for it in self.passes)


@dataclass(frozen=True)
class Done:
    """What a Step did: nodes of the graph by operator, before and after."""

    step: Step
    before: Counter
    after: Counter

    @property
    def change(self):
        """What went and what came, such as "-2 permute_dims +1 call_tir"."""
        parts = [f"{self.after[name] - self.before[name]:+} {name}" for name in sorted({*self.before, *self.after})
                 if self.after[name] != self.before[name]]
        return " ".join(parts) or "nothing to do"


def steps(attention):
    """Steps from a graph of operators to one of TensorIR functions, ready to be scheduled.

    attention  pass for the step that replaces attention, a FlashAttention; None: attention stays TVM's
    """
    return (
        Step("no-op and zero-size elimination", (RemoveNoOps, transform.RemoveRedundantReshape(), transform.CanonicalizeBindings())),
        Step("algebraic simplification", (SimplifyArithmetic, transform.AdjustMatmulOrder())),
        Step("transpose clean-up", (CancelTransposes,)),
        Step("common-subexpression elimination", (transform.EliminateCommonSubexpr(),)),
        Step("dead-code elimination", (transform.DeadCodeElimination(),)),
        *((Step("attention by our kernel", (attention,)),) if attention else ()),
        Step("products with transposed weights", (transform.FuseTransposeMatmul(),)),
        Step("operators to TensorIR", (transform.LegalizeOps(), transform.AnnotateTIROpPattern())),
        Step("constant folding", (transform.FoldConstant(),)),
        Step("operator fusion", (transform.FuseOps(), transform.FuseTIR())),
    )


def run(mod, attention):
    """(IRModule, [Done, ...]) of `steps`; to be called within the target, which LegalizeOps asks for."""
    told = []
    for step in steps(attention):
        before = nodes(mod)
        for it in step.passes:
            mod = it(mod)
        told.append(Done(step, before, nodes(mod)))
    return mod, told


def nodes(mod):
    """Calls in the Relax functions of a graph, counted by operator; one of a function of the graph counts by the kind of function."""
    found = Counter()

    def count(expr):
        if isinstance(expr, relax.Call):
            found[(operator_of(expr) or _kind(expr.op)).removeprefix("relax.")] += 1
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, count)
    return found


def _kind(called):
    return "extern" if isinstance(called, relax.ExternFunc) else "function"
