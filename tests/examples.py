"""What tests of the examples share: whether attention that a framework computes is right, and the program in C++."""
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from te_defs import reference
from te_defs.workload import Shape
from tests.backward import problem

SOURCE = Path(__file__).parent.parent / "scripts" / "examples" / "cpp"
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


def jax_example(backend, otherwise):
    """The example for JAX; a skip where its package is missing, or, with the reason `otherwise`, where JAX computes elsewhere."""
    pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")
    example = importlib.import_module("scripts.examples.jax_ffi")
    if example.jax.default_backend() != backend:
        pytest.skip(otherwise)
    return example


def by_pytorch(attention, device="cpu"):
    """attend(q, k, v, dout) for `complaint`, by an attention of PyTorch's tensors."""
    torch = importlib.import_module("torch")

    def attend(*arrays):
        q, k, v, dout = (torch.from_numpy(array).to(device) for array in arrays)
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [tensor.detach().cpu().numpy() for tensor in (out, *torch.autograd.grad(out, inputs, dout))]
    return attend


def by_jax(attention):
    """The same by an attention of JAX's arrays, under jit."""
    jax = importlib.import_module("jax")

    def attend(q, k, v, dout):
        out, gradients_of = jax.vjp(jax.jit(attention), q, k, v)
        return [np.asarray(array) for array in (out, *gradients_of(jax.numpy.asarray(dout)))]
    return attend


def build_program(folder):
    """Function (arguments, what is new in its environment) -> the finished program in C++, which is built in `folder`."""
    pytest.importorskip("cmake", reason="cmake is not installed")
    if not shutil.which("c++") or not shutil.which("make"):
        pytest.skip("a C++ compiler and make are not installed")
    for options in ("-S", SOURCE, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"), ("--build", folder):
        done = subprocess.run([sys.executable, "-m", "cmake", *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return lambda *arguments, **environment: subprocess.run(
        [folder / "flash_attention", *arguments], capture_output=True, text=True, env={**os.environ, **environment})
