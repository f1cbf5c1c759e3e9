"""What a call of R.nn.attention asks for, as a workload and the arguments of its kernel; or why no kernel of ours serves it.

Relax has three such operators. q [B,N,H,D], k [B,M,G,D] and v [B,M,G,DV] lie as our kernels take them; the packed ones of
R.nn.attention_var_len have a batch axis of size one in front.
"""
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.sym import Analyzer

from schedules import registry
from schedules.relax.cleanup import operator_of
from te_defs.workload import Workload, WorkloadError

#: Operators by name, with the lengths of their batch entries.
ATTENTION = {"relax.nn.attention": "uniform", "relax.nn.attention_bias": "uniform", "relax.nn.attention_var_len": "packed"}
MASKS = {None: "full", "TopLeft": "causal_top_left", "BottomRight": "causal"}


class Declined(ValueError):
    """Why a call of attention stays as it is; the message is the end of a sentence."""


@dataclass(frozen=True)
class Attention:
    """A call of attention as a kernel takes it.

    workload   te_defs.workload.Workload
    tensors    expressions of q, k and v
    scale      what scores are multiplied by
    arguments  what follows the scale: expressions of tensors
    """

    workload: Workload
    tensors: tuple
    scale: float
    arguments: tuple


def is_attention(expr):
    """Whether an expression is a call of one of ATTENTION."""
    return operator_of(expr) in ATTENTION


def read(call, arch):
    """The Attention of a call, for kernels that are lowered for a row of schedules.arch; Declined where no family serves it."""
    lengths = ATTENTION[call.op.name]
    q, k, v, *rest = call.args
    sizes = [_shape_of(name, expr) for name, expr in zip("qkv", (q, k, v))]
    head_dim, value_dim = (_channels(name, sizes[place]) for name, place in (("q", 0), ("v", 2)))
    arguments = _packed(sizes, rest) if lengths == "packed" else tuple(_bias(q, expr) for expr in rest)
    try:
        workload = Workload(head_dim, value_dim, str(q.ty.dtype), _mask(call, sizes, rest), "bias" if rest and lengths == "uniform" else "",
                            lengths=lengths)
        registry.takers(workload, arch)
    except (WorkloadError, registry.NoSchedule) as error:
        raise Declined(str(error)) from error
    scale = head_dim**-0.5 if call.attrs.scale is None else float(call.attrs.scale)
    return Attention(workload, (q, k, v), scale, arguments)


def _shape_of(name, expr):
    """Sizes of a tensor of four axes; Declined where they are not known."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != 4:
        raise Declined(f"{name} must have four axes of known names, found {expr.ty}: give it a shape by R.match_cast")
    return tuple(shape.values)


def _channels(name, sizes):
    if not isinstance(sizes[3], tvm.tirx.IntImm):
        raise Declined(f"the channels of {name} must be a number, found {sizes[3]}: bind it by BindSymbolicVars")
    return int(sizes[3])


def _mask(call, sizes, rest):
    """Name of the mask. Where lengths are equal both alignments are one, of which `causal` is the one that is tuned. TVM moves the diagonal
    of BottomRight by abs(n - m), which is ours only where no row is without keys."""
    if call.attrs.window_size is not None:
        raise Declined("Relax does not define which keys a window_size shows: use a bias, or an artefact with the mask window")
    name = call.attrs.causal_mask
    if name not in MASKS:
        raise Declined(f"causal_mask must be one of {', '.join(filter(None, MASKS))}, found {name}: correct it")
    packed, (queries, keys) = ATTENTION[call.op.name] == "packed", (size[1] for size in sizes[:2])
    same = rest[0].same_as(rest[1]) if packed else Analyzer().can_prove(queries == keys)
    if name == "BottomRight" and not same and (packed or not Analyzer().can_prove(queries <= keys)):
        raise Declined("BottomRight with more queries than keys has another meaning in Relax than in the field, and it cannot be proved "
                       "that there are none: use TopLeft, or lengths that tell")
    return "causal" if name and same else MASKS[name]


def _bias(q, bias):
    if len(_shape_of("bias", bias)) == 4 and str(bias.ty.dtype) != str(q.ty.dtype):
        raise Declined(f"bias must be of q's type {q.ty.dtype}, found {bias.ty.dtype}: cast it by R.astype")
    return bias


def _packed(sizes, rest):
    """The kernel's lengths: where sequences begin in q and k, and the most queries that one has."""
    begins_q, begins_k, most_queries, _ = rest
    if not all(isinstance(size[0], tvm.tirx.IntImm) and int(size[0]) == 1 for size in sizes):
        raise Declined(f"packed sequences have a batch axis of size one, found {[str(size[0]) for size in sizes]}: reshape them")
    return begins_q, begins_k, most_queries
