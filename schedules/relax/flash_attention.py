"""The pass: attention of a graph as calls of kernels of this project."""
import logging

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_equal

from schedules.relax.attention import ATTENTION, Declined, is_attention, read
from schedules.relax.cleanup import axes_of, operator_of
from schedules.relax.device import arch_of
from schedules.relax.modules import Workloads, build
from schedules.relax.torch_export import HEADS_AND_ROWS

_LOGGER = logging.getLogger("schedules.relax")


@tvm.transform.module_pass(opt_level=0, name="FlashAttention")
class FlashAttention:
    """Replace R.nn.attention, R.nn.attention_bias and R.nn.attention_var_len by calls of kernels of this project, which are built here and
    linked into the executable; to be run before LegalizeOps.

    Tensors that a graph has as [B,H,N,D] are taken as they lie, so that transposes around attention go away. What no kernel serves stays,
    which a warning tells with the reason; key heads that are fewer than query heads are then repeated, since TVM's own attention reads
    them wrongly. The logger `schedules.relax` tells at level INFO where the plans are from, and warns where `logs` have none.

    logs     folder of tuning logs; None: default plans
    target   what the graph is compiled for, of kind llvm or cuda; None: the target of the scope around
    toolkit  for CUDA, Toolkit of schedules.lowering.toolkit; None: nvcc of /usr/local/cuda, else pip's
    Raises ArchError where the target has no kernels, LogError where there is no folder of logs, ToolkitError where CUDA is wanted and there
    is no nvcc.
    """

    def __init__(self, logs=None, target=None, toolkit=None):
        self.logs, self.target, self.toolkit = logs, target, toolkit

    def transform_module(self, mod, _):
        """The IRModule with calls in place of attention, and the kernels among its external modules."""
        arch, workloads = arch_of(self.target), Workloads()
        mod = KernelCalls(arch, workloads)(mod)
        modules, sentences = build(workloads, arch, self.logs, self.toolkit)
        for level, sentence in sentences:
            _LOGGER.log(level, sentence)
        return mod.with_attr("external_mods", [*((mod.attrs or {}).get("external_mods") or ()), *modules]) if modules else mod


@tvm.transform.module_pass(opt_level=0, name="KernelCalls")
class KernelCalls:
    """The first half of FlashAttention: calls of kernels in place of attention, of kernels for a row of schedules.arch that are yet to be
    built; `workloads`, a schedules.relax.modules.Workloads, receives of what."""

    def __init__(self, arch, workloads):
        self.arch, self.workloads = arch, workloads

    def transform_module(self, mod, _):
        """The IRModule with calls in place of attention, but for functions that were given to a library of others."""
        replacer, found = _Replacer(mod, self.arch, self.workloads), 0
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and not _is_taken(function):
                replacer.enter(name.name_hint, function)
                found += len(replacer.found)
                replacer.builder_.update_func(name, relax.analysis.remove_all_unused(replacer.visit_expr(function)))
        if not found:
            _LOGGER.warning("no attention was found: it is R.nn.attention before LegalizeOps, or of torch.export by the importer's "
                            "custom_convert_map=SCALED_DOT_PRODUCT_ATTENTION with run_ep_decomposition=False")
        return replacer.builder_.get()


def _is_taken(function):
    """Whether a function was given to a library of others."""
    return function.attrs is not None and any(name in function.attrs.keys() for name in ("Codegen", "Composite"))


def _variables(expr):
    """The variables inside an expression, a variable itself included."""
    found = []
    relax.analysis.post_order_visit(expr, lambda it: found.append(it) if isinstance(it, relax.Var) else None)
    return found


def _is_turn(expr):
    """Whether an expression exchanges rows and heads."""
    return operator_of(expr) == "relax.permute_dims" and axes_of(expr) == HEADS_AND_ROWS


@mutator
class _Replacer(PyExprMutator):
    """Replaces attention in functions of a module, one after the other."""

    def __init__(self, mod, arch, workloads):
        super().__init__(mod)
        self.arch, self.workloads = arch, workloads

    def enter(self, name, function):
        """Look at a function before it is visited: its calls of attention, and which results all users exchange rows and heads of."""
        bound, users = relax.analysis.get_var2val(function), {}
        for value in (*bound.values(), function.body.body):
            for var in _variables(value):
                users.setdefault(var, []).append(value)
        self.name, self.found = name, {value: var for var, value in bound.items() if is_attention(value)}
        self.turned = {var for var in self.found.values() if all(map(_is_turn, users.get(var, [None])))}

    def visit_call_(self, call):
        if _is_turn(call) and call.args[0] in self.turned:
            return self.visit_expr(call.args[0])
        var, call = self.found.get(call), self.visit_expr_post_order(call)
        if not is_attention(call):
            return call
        try:
            return self.served(read(call, self.arch), var)
        except Declined as reason:
            _LOGGER.warning("%s in %s stays TVM's own: %s", call.op.name, self.name, reason)
            self.turned.discard(var)
            return self.repeated(call)

    def served(self, attention, var):
        """Emit the call of a kernel; the expression of its output."""
        workload, (q, k, v) = attention.workload, attention.tensors
        batch, queries, heads, _ = q.ty.shape.values
        out = relax.TensorType((batch, queries, heads, v.ty.shape.values[3]), workload.dtype)
        lse = relax.TensorType((heads, queries) if workload.lengths == "packed" else (batch, heads, queries), "float32")
        tensors, layout = [], 0
        for place, tensor in enumerate((q, k, v)):
            source = self.before_turn(tensor)
            tensors.append(tensor if source is None else source)
            layout |= (source is not None) << place
        if var in self.turned:
            out, layout = relax.TensorType([out.shape.values[axis] for axis in HEADS_AND_ROWS], workload.dtype), layout | 1 << 3
        inputs = [*tensors, relax.prim_value(attention.scale, "float64"), *attention.arguments, relax.prim_value(layout)]
        call = relax.op.call_dps_packed(self.workloads.name_of(workload), relax.Tuple(inputs), [out, lse])
        return relax.TupleGetItem(self.builder_.emit(call, "attention"), 0)

    def before_turn(self, tensor):
        """What a tensor [B,N,H,D] was before rows and heads were exchanged; None where they were not, or where that is out of reach."""
        value = self.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
        if value is None or not _is_turn(value):
            return None
        source = value.args[0]
        in_reach = isinstance(tensor, relax.DataflowVar) or not isinstance(source, relax.DataflowVar)
        return source if in_reach else None

    def repeated(self, call):
        """A call of TVM's attention with as many key heads as query heads."""
        q, k, v, *rest = call.args
        heads, groups = (x.ty.shape.values[2] for x in (q, k))
        if ATTENTION[call.op.name] == "packed" or not isinstance(heads, tvm.tirx.IntImm) or structural_equal(heads, groups):
            return call
        k, v = (self.builder_.emit(relax.op.repeat(x, int(heads) // int(groups), axis=2)) for x in (k, v))
        return relax.Call(call.op, [q, k, v, *rest], call.attrs)
