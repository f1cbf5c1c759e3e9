"""What tests of the examples share: whether attention that a framework computes is right."""
import numpy as np

from te_defs import reference
from te_defs.workload import Shape
from tests.backward import problem

#: Grouped heads, lengths that no tile divides, and every row sees a key.
SHAPE = Shape(2, 4, 2, 37, 50)


def complaint(attend, workload, seed=0):
    """None where attend(q, k, v, dout) -> (out, dq, dk, dv), NumPy's arrays, is right on seeded inputs, else the reference's sentence."""
    scale = float(np.float32(workload.head_dim**-0.5))
    (dout, q, k, v, *_), answers, lse = problem(workload, SHAPE, scale, seed=seed)
    out, *gradients = attend(q, k, v, dout)
    answer = reference.forward(workload, q, k, v, scale)
    bound, _ = reference.tolerances(workload, q, k, v, scale, answers=answer)
    return (reference.mismatch(out, answer[1], answer[0], answer[1], bound)
            or reference.backward_complaint(gradients, workload, dout, q, k, v, scale, (), answers, lse))


def by_pytorch(attention, device="cpu"):
    """attend(q, k, v, dout) for `complaint`, by an attention of PyTorch's tensors."""
    import torch

    def attend(*arrays):
        q, k, v, dout = (torch.from_numpy(array).to(device) for array in arrays)
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [tensor.detach().cpu().numpy() for tensor in (out, *torch.autograd.grad(out, inputs, dout))]
    return attend


def by_jax(attention):
    """The same by an attention of JAX's arrays, under jit."""
    import jax

    def attend(q, k, v, dout):
        out, gradients_of = jax.vjp(jax.jit(attention), q, k, v)
        return [np.asarray(array) for array in (out, *gradients_of(jax.numpy.asarray(dout)))]
    return attend
