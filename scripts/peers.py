"""Other people's attention kernels as rows of data: who they are, what they take and how they are called at their best."""
from dataclasses import astuple, dataclass
from importlib import metadata
from typing import Callable

from scripts.contest import Contestant
from te_defs.masks import MASKS
from te_defs.workload import DTYPES

#: Largest error of a peer's O beside ours, relative, in the Frobenius norm. Two right bfloat16 answers differ by a sixth of it.
LARGEST_ERROR = 2e-2
_HALVES = ("float16", "bfloat16")


class LeftOut(RuntimeError):
    """Why a peer takes no part, as the end of a sentence."""


@dataclass(frozen=True)
class Call:
    """What `prepare` of PyTorch's kernels returns: a call without arguments of `attend`, which makes O [B, N, H, DV] of inputs.

    heads_outside  whether the inputs are [B, H, N, D] and not [B, N, H, D]
    """

    inputs: tuple
    attend: Callable
    heads_outside: bool = False

    def __call__(self):
        import torch
        with torch.no_grad():
            return self.attend(*self.inputs)

    def backward(self, dout):
        """A call without arguments that computes the gradients of the inputs for dout [B, N, H, DV], after a forward pass here."""
        import torch
        inputs = [tensor.detach().requires_grad_() for tensor in self.inputs]
        out = self.attend(*inputs)
        dout = torch.empty_like(out).copy_(dout)  # side by side as the kernel left O
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def rows_outside(self, gradient):
        """A gradient of an input in the layout [B, N, H, D]."""
        return gradient.transpose(1, 2) if self.heads_outside else gradient


def sdpa(backend=None):
    """`prepare` of PyTorch's scaled_dot_product_attention on one torch.nn.attention.SDPBackend, or on the one that PyTorch chooses."""
    def prepare(q, k, v, mask):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
        causal = _one_of({"full": False, "causal": True}, mask)

        # causal is aligned top-left there, which is the same for the equal lengths of a benchmark.
        def attend(q, k, v):
            return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

        def attend_by_backend(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return attend(q, k, v)
        return Call(_heads_outside(q, k, v), attend if backend is None else attend_by_backend, heads_outside=True)
    return prepare


def flash_attention_4(q, k, v, mask):
    from flash_attn.cute import flash_attn_func
    sizes = astuple(mask)
    options = _one_of({"full": {"causal": False}, "causal": {"causal": True}, "window": {"causal": False, "window_size": sizes}}, mask)

    def attend(q, k, v):
        found = flash_attn_func(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found  # with or without the LSE, by version
    return Call(tuple(tensor.contiguous() for tensor in (q, k, v)), attend)


def flex_attention(q, k, v, mask):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    q, k, v = _heads_outside(q, k, v)
    sizes = astuple(mask)
    # As PyTorch wants it, by query and key; the lengths of a benchmark are equal, so that all alignments are one.
    keep = _one_of({"full": None, "causal": lambda b, h, i, j: j <= i, "causal_top_left": lambda b, h, i, j: j <= i,
                    "window": lambda b, h, i, j: (j >= i - sizes[0]) & (j <= i + sizes[1]),
                    "prefix": lambda b, h, i, j: (j <= i) | (j < sizes[0])}, mask)
    blocks = keep and create_block_mask(keep, None, None, q.shape[2], k.shape[2], device=q.device)
    torch.compiler.reset()  # after some shapes of one function PyTorch would stop compiling it
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        return compiled(q, k, v, block_mask=blocks).transpose(1, 2)
    return Call((q, k, v), attend, heads_outside=True)


def _one_of(ways, mask):
    """What a peer has for a mask, of these by name; LeftOut where it has nothing."""
    if mask.name not in ways:
        raise LeftOut(f"it has no mask {mask.name}")
    return ways[mask.name]


def _heads_outside(*tensors):
    """[B, N, H, D] -> contiguous [B, H, N, D], the layout that PyTorch's functions are documented for."""
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)


@dataclass(frozen=True)
class Peer:
    """One kernel to compare with.

    name          for people
    prepare       function (q, k, v, mask) of PyTorch tensors [B, N, H, D] and one of te_defs.masks; it does once what need not be timed and
                  returns a call without arguments that returns O [B, N, H, DV]. ImportError where the peer is not installed, LeftOut where
                  it does not have the mask
    kinds         kinds of device that it is for
    dtypes        element types that it takes; what else it cannot do it tells by an exception when it is called first
    distribution  the package that it is of, where that is not PyTorch
    """

    name: str
    prepare: Callable
    kinds: tuple = ("cuda",)
    dtypes: tuple = tuple(DTYPES)
    distribution: str | None = None


FLASH_ATTENTION_2 = Peer("FlashAttention-2", sdpa("FLASH_ATTENTION"), dtypes=_HALVES)
CUDNN = Peer("cuDNN", sdpa("CUDNN_ATTENTION"), dtypes=_HALVES)

#: Who takes part where PyTorch is installed, by kind of device.
BY_DEFAULT = {"cuda": (FLASH_ATTENTION_2, CUDNN, Peer("efficient", sdpa("EFFICIENT_ATTENTION"))),
              "cpu": (Peer("PyTorch", sdpa(), kinds=("cpu",)),)}
#: Who takes part with --peers: the fastest that are known.
FASTEST = (FLASH_ATTENTION_2, CUDNN,
           Peer("FlashAttention-4", flash_attention_4, dtypes=_HALVES, distribution="flash-attn-4"),
           Peer("FlexAttention", flex_attention, kinds=("cuda", "cpu")))


def named(names):
    """Those of the FASTEST with these names, in their order; all where no name is given."""
    return tuple(peer for peer in FASTEST if peer.name in names or not names)


def versions(names):
    """{package: version} of those of the FASTEST that have these names and are not PyTorch's."""
    found = {}
    for distribution in (peer.distribution for peer in FASTEST if peer.name in names and peer.distribution):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[distribution] = "of a source tree"
    return found


def admit(peers, workload, data, backward=False):
    """(contestants, sentences): the peers that are installed, take the workload and agree with us, and why each other one is left out.

    data      TorchData whose O holds what our kernel made of its Q, K and V; TvmData where PyTorch is not installed
    backward  whether they compute gradients; `data.gradients` are then ours
    """
    contestants, sentences = [], []
    for peer in peers:
        try:
            call = _proven_call(peer, workload, data)
            contestants.append(Contestant(peer.name, _proven_gradients(call, data) if backward else call))
        except ImportError as error:
            sentences.append(f"{peer.name} is left out: it is not installed ({error})")
        except LeftOut as reason:
            sentences.append(f"{peer.name} is left out of {workload.name}: {reason}")
        except Exception as error:  # each has its own ways to decline
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            sentences.append(f"{peer.name} is left out of {workload.name} at length {data.tensors[0].shape[1]}: {told}")
    return contestants, sentences


def _proven_call(peer, workload, data):
    """The peer's call, after one whose result was right."""
    if data.kind not in peer.kinds:
        raise LeftOut(f"it is for {' and '.join(peer.kinds)}, found {data.kind}")
    if workload.dtype not in peer.dtypes:
        raise LeftOut(f"it takes {' and '.join(peer.dtypes)}, found {workload.dtype}")
    q, k, v, ours, _ = data.tensors
    if workload.score or workload.sink or workload.mask not in MASKS:
        raise LeftOut("it is compared by the masks of te_defs.masks alone")
    call = peer.prepare(q, k, v, MASKS[workload.mask](*data.shape.mask))
    error = relative_error(call(), ours)
    if not error <= LARGEST_ERROR:
        raise LeftOut(f"at length {q.shape[1]} its output is off from ours by {error:.2g}, more than {LARGEST_ERROR:g}")
    return call


def _proven_gradients(call, data):
    """The call of a peer's gradients, after one whose results were right."""
    dout, *ours = data.gradients
    backward = call.backward(dout)
    for name, found, wanted in zip(("dq", "dk", "dv"), backward(), ours):
        error = relative_error(call.rows_outside(found), wanted)
        if not error <= LARGEST_ERROR:
            raise LeftOut(f"at length {dout.shape[1]} its {name} is off from ours by {error:.2g}, more than {LARGEST_ERROR:g}")
    return backward


def relative_error(found, wanted):
    """Frobenius norm of the difference over that of `wanted`, of two tensors of one shape."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm())
