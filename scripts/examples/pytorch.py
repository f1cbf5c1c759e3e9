"""An artefact as an operator of PyTorch: tensors as they are, on PyTorch's current stream, under autograd, torch.compile and CUDA graphs.

    attention = load_attention("build/attention.so")     # from: python -m scripts.export --backward --output build/attention.so ...
    out = attention(q, k, v)                             # q [B,N,H,D]  k [B,M,G,D]  v [B,M,G,DV]  out [B,N,H,DV]

tvm_ffi takes PyTorch's tensors by DLPack's C exchange, launches on the stream that is current for their device, and lends the artefact
PyTorch's allocator for the memory of its gradients. Before a call is captured in a CUDA graph, make one that is not: it loads the kernels.
"""
import re

import torch

from scripts.examples.artefact import ArtefactError, load

#: What the operators mutate, destination passing: torch.compile then allocates the outputs itself, which it does faster than we could.
FORWARD = "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, float scale) -> ()"
BACKWARD = ("(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, float scale)"
            " -> ()")
_LIBRARY = torch.library.Library("flashtir", "FRAGMENT")


def load_attention(path, name=None):
    """Differentiable attention(q, k, v, scale=D ** -0.5) -> out, computed by the artefact at `path`.

    Its operators are torch.ops.flashtir.<name> and <name>_backward; the name is that of the workload where none is given. Raises
    ArtefactError where the artefact cannot be used or the name is taken; a call raises what the artefact says of its arguments.
    """
    module, manifest = load(path)
    name = name or re.sub(r"\W", "_", manifest["workload"]["name"])
    if hasattr(torch.ops.flashtir, name):
        raise ArtefactError(f"a new operator is wanted, found flashtir::{name} there already: give the one for {path} another name")
    forward = _operator(name, FORWARD, module.flash_attention_forward)
    backward = manifest["backward"] and _operator(f"{name}_backward", BACKWARD, module.flash_attention_backward)
    function = _autograd_function(path, forward, backward)

    def attention(q, k, v, scale=None):
        return function.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
    return attention


def _operator(name, schema, call):
    """Register a function of an artefact. Under torch.compile it is one node of the graph, whose fake does nothing: it returns nothing."""
    def on_the_device(*arguments):
        with torch.cuda.device_of(arguments[0]):  # TVM makes it the current one, and would leave it so
            call(*arguments)
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, on_the_device, "CompositeExplicitAutograd")  # of all devices: the artefact says which one it wants
    torch.library.register_fake(f"flashtir::{name}", lambda *arguments: None, lib=_LIBRARY)
    return getattr(torch.ops.flashtir, name).default


def _autograd_function(path, forward, backward):
    """The autograd function of the two operators; `backward` is None where the artefact has no gradients."""
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale):
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
            lse = q.new_empty((*q.shape[:1], *q.shape[2:3], *q.shape[1:2]), dtype=torch.float32)  # of any rank: the artefact tells
            forward(q, k, v, out, lse, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.scale = scale
            return out

        @staticmethod
        def backward(ctx, dout):
            if backward is None:
                raise ArtefactError(f"gradients are wanted, found none in {path}: export it with --backward")
            inputs = dout.contiguous(), *ctx.saved_tensors
            gradients = [tensor.new_empty(tensor.shape) for tensor in inputs[1:4]]
            backward(*inputs, *gradients, ctx.scale)
            return *gradients, None
    return Attention
