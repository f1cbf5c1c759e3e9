"""An artefact as a custom call of JAX, through jax_tvm_ffi: on arrays as they are, under jit, with its gradient.

    attention = load_attention("build/attention.so")     # from: python -m scripts.export --backward --output build/attention.so ...
    out = jax.jit(attention)(q, k, v)                    # q [B,N,H,D]  k [B,M,G,D]  v [B,M,G,DV]  out [B,N,H,DV]

XLA allocates what a call writes, the memory that gradients need on their way included, and names the stream.
"""
import functools
import re

import jax
import jax_tvm_ffi

from scripts.examples.artefact import ArtefactError, load

#: Of devices in a manifest: the platform that JAX has for them.
PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}
#: jax_tvm_ffi begins each allocation inside the memory that it lends on a multiple of this; gradients allocate up to three times.
ALIGNMENT, ALLOCATIONS = 128, 3
_NAMES = set()


def load_attention(path, name=None):
    """Differentiable attention(q, k, v, scale=D ** -0.5) -> out, computed by the artefact at `path`; the scale is a Python number.

    Its custom calls are flashtir_<name> and flashtir_<name>_backward; the name is that of the workload where none is given. Raises
    ArtefactError where the artefact cannot be used or the name is taken; a call raises what the artefact says of its arguments.
    """
    module, manifest = load(path)
    name = name or re.sub(r"\W", "_", manifest["workload"]["name"])
    kind, backend = manifest["variants"][0]["target"]["kind"], jax.default_backend()
    if PLATFORMS[kind] != backend:
        raise ArtefactError(f"an artefact for JAX's {backend} is wanted, found {path} for {kind}: export for that, or install JAX "
                            f"for {kind}")
    if name in _NAMES:
        raise ArtefactError(f"a new custom call is wanted, found flashtir_{name} there already: give the one for {path} another name")
    _NAMES.add(name)
    forward = _forward_call(_register(name, module.flash_attention_forward, backend))
    backward = manifest["backward"] and _backward_call(
        _register(f"{name}_backward", module.flash_attention_backward, backend, use_last_output_for_alloc_workspace=True),
        manifest["backward"]["variants"])
    function = _differentiable(path, forward, backward)
    return lambda q, k, v, scale=None: function(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


def _register(name, function, platform, **options):
    """Register a function of an artefact: it takes inputs, outputs and the scale, which is an attribute; return the custom call's name."""
    target = f"flashtir_{name}"
    jax_tvm_ffi.register_ffi_target(target, function, ["args", "rets", "attrs.scale"], platform, allow_cuda_graph=True, **options)
    return target


def _like(*arrays):
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def _forward_call(target):
    """Function (q, k, v, scale) -> (out, lse)."""
    def call(q, k, v, scale):
        out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        lse = jax.ShapeDtypeStruct((*q.shape[:1], *q.shape[2:3], *q.shape[1:2]), "float32")  # of any rank: the artefact tells
        return jax.ffi.ffi_call(target, (out, lse))(q, k, v, scale=float(scale))
    return call


def _backward_call(target, variants):
    """Function (dout, q, k, v, out, lse, scale) -> (dq, dk, dv); its last output is the memory of whichever variant needs most."""
    def call(dout, q, k, v, out, lse, scale):
        sizes = {"batch": q.shape[0], "queries": q.shape[1], "heads": q.shape[2], "max": max}
        most = max(eval(variant["workspace_bytes"], sizes) for variant in variants)  # the manifest's formula, such as 4 * queries * heads
        memory = jax.ShapeDtypeStruct((most + ALLOCATIONS * ALIGNMENT,), "uint8")
        return jax.ffi.ffi_call(target, [*_like(q, k, v), memory])(dout, q, k, v, out, lse, scale=float(scale))[:3]
    return call


def _differentiable(path, forward, backward):
    """Function (q, k, v, scale) -> out with its gradient; `backward` is None where the artefact has none."""
    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def attention(q, k, v, scale):
        return forward(q, k, v, scale)[0]

    def save(q, k, v, scale):
        if backward is None:
            raise ArtefactError(f"gradients are wanted, found none in {path}: export it with --backward")
        out, lse = forward(q, k, v, scale)
        return out, (q, k, v, out, lse)

    attention.defvjp(save, lambda scale, saved, dout: tuple(backward(dout, *saved, scale)))
    return attention
