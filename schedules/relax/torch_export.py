"""Scaled-dot-product attention of PyTorch in programs of torch.export, brought into Relax whole.

TVM's importer breaks the operator up into some 25 others, or, told not to, drops its scale and grouped heads and refuses masks of
booleans. With this map it becomes R.nn.attention, which `FlashAttention` replaces::

    from_exported_program(program, run_ep_decomposition=False, custom_convert_map=SCALED_DOT_PRODUCT_ATTENTION)
"""
from tvm import relax

#: What a call may have behind q, k and v by position, with defaults; scale and enable_gqa come by name.
_OPTIONS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
HEADS_AND_ROWS = (0, 2, 1, 3)


class UnsupportedAttention(ValueError):
    """A call of scaled_dot_product_attention that has no counterpart in Relax; the message is one sentence."""


def _converted(node, importer):
    """Emit what a node of torch.fx calls, on q [B,H,N,D], k [B,G,M,D] and v [B,G,M,DV]; the variable of its result [B,H,N,DV].

    Raises UnsupportedAttention for other ranks, and for dropout.
    """
    q, k, v, *given = importer.retrieve_args(node)
    named = {name: importer.env.get(value, value) if name == "attn_mask" else value for name, value in node.kwargs.items()}
    options = {**_OPTIONS, **dict(zip(_OPTIONS, given)), **named}
    if any(len(tensor.ty.shape.values) != 4 for tensor in (q, k, v)):
        raise UnsupportedAttention(f"{node} must have q, k and v of four axes, found {q.ty}: unsqueeze them before the call")
    if options["dropout_p"]:
        raise UnsupportedAttention(f"{node} must be without dropout, found dropout_p={options['dropout_p']}: export it after eval()")
    emit, mask = importer.block_builder.emit, options["attn_mask"]
    turned = (emit(relax.op.permute_dims(tensor, HEADS_AND_ROWS)) for tensor in (q, k, v))
    bias = None if mask is None else _bias(emit, mask, q.ty.dtype)
    causal = "TopLeft" if options["is_causal"] else None
    out = emit(relax.op.nn.attention(*turned, bias, scale=options["scale"], causal_mask=causal))
    return emit(relax.op.permute_dims(out, HEADS_AND_ROWS))


def _bias(emit, mask, dtype):
    """What a mask adds to the scores, with four axes: itself, or of booleans zero where a key is seen and minus infinity elsewhere."""
    if str(mask.ty.dtype) == "bool":
        mask = emit(relax.op.where(mask, relax.const(0.0, dtype), relax.const(float("-inf"), dtype)))
    missing = 4 - len(mask.ty.shape.values)
    return emit(relax.op.expand_dims(mask, list(range(missing)))) if missing else mask


#: For the importer's `custom_convert_map`.
SCALED_DOT_PRODUCT_ATTENTION = {"scaled_dot_product_attention.default": _converted}
