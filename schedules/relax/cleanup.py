"""Rewrites of Relax graphs that TVM's own passes leave undone: operators that change nothing, sums and products with neutral elements,
concatenations with nothing, exchanges of axes that cancel out."""
import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_equal


def operator_of(expr):
    """Name of the operator that an expression calls; None where it calls none."""
    return expr.op.name if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) else None


def axes_of(call):
    """The order of axes that a call of permute_dims asks for."""
    axes = call.attrs.axes
    return tuple(map(int, axes)) if axes is not None else tuple(reversed(range(call.args[0].ty.ndim)))


def _unchanged(call, lookup):
    """The operand, where the result is of its shape and type."""
    return call.args[0] if structural_equal(call.ty, call.args[0].ty) else None


def _without_empty(call, lookup):
    """A concatenation without the operands that have no elements along its axis."""
    operands, axis = call.args[0], int(call.attrs.axis or 0)
    operands = lookup(operands) if isinstance(operands, relax.Var) else operands
    kept = [it for it in operands.fields if not (isinstance(it.ty.shape, relax.ShapeExpr) and _is_zero(it.ty.shape.values[axis]))]
    if len(kept) == len(operands.fields) or not kept:
        return None
    return kept[0] if len(kept) == 1 else relax.op.concat(kept, axis)


def _is_zero(size):
    return isinstance(size, tvm.tirx.IntImm) and int(size) == 0


def _neutral(number, either_side):
    """Rule for an operator of which a constant of this number changes nothing: on the right, or on either side."""
    def rule(call, lookup):
        sides = (call.args, call.args[::-1]) if either_side else (call.args,)
        for operand, constant in sides:
            neutral = isinstance(constant, tvm.ir.GenericConst) and np.all(constant.value.numpy() == number)
            if neutral and structural_equal(call.ty, operand.ty):
                return operand
        return None
    return rule


def _turned_once(call, lookup):
    """One exchange of axes in place of two in a row, or none where it changes nothing."""
    source, axes = call.args[0], axes_of(call)
    before = lookup(source) if isinstance(source, relax.DataflowVar) else None
    if operator_of(before) == "relax.permute_dims":
        source, axes = before.args[0], tuple(axes_of(before)[axis] for axis in axes)
        return source if axes == tuple(range(len(axes))) else relax.op.permute_dims(source, axes)
    return source if axes == tuple(range(len(axes))) else None


@mutator
class _Rewriter(PyExprMutator):
    """Applies rules, {name of an operator: function of a call and of what looks a variable up}; None of one leaves a call as it is."""

    def __init__(self, mod, rules):
        super().__init__(mod)
        self.rules = rules

    def visit_call_(self, call):
        call = self.builder_.normalize(self.visit_expr_post_order(call))
        rule = self.rules.get(operator_of(call))
        found = None if rule is None else rule(call, self.lookup_binding)
        return call if found is None else found


def _pass_of(name, rules):
    """A pass that applies rules to all functions of a graph."""
    @tvm.transform.module_pass(opt_level=0, name=name)
    def rewrite(mod, _):
        rewriter = _Rewriter(mod, rules)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return rewriter.builder_.get().with_attrs(mod.attrs) if mod.attrs else rewriter.builder_.get()
    return rewrite


#: Operators that change nothing, and operands without elements.
RemoveNoOps = _pass_of("RemoveNoOps", {**dict.fromkeys(("relax.reshape", "relax.astype", "relax.broadcast_to"), _unchanged),
                                       "relax.concat": _without_empty})
#: x + 0, x - 0, x * 1, x / 1.
SimplifyArithmetic = _pass_of("SimplifyArithmetic", {"relax.add": _neutral(0, True), "relax.multiply": _neutral(1, True),
                                                     "relax.subtract": _neutral(0, False), "relax.divide": _neutral(1, False)})
#: Exchanges of axes that follow one another.
CancelTransposes = _pass_of("CancelTransposes", {"relax.permute_dims": _turned_once})
