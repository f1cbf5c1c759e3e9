"""Gradients of tensors behind the scale on the CPU, and what the reference says of them."""
import functools

import numpy as np
import tvm

from scripts.kernels import answer_gradients, behind_scale
from te_defs import operand_reference
from te_defs.flash_attention_backward import attention_delta
from te_defs.operand_gradients import attention_d_operand, attention_d_sink, attention_fold_parts, dtype_of
from te_defs.workload import SINK, Workload
from tests.backward import problem, spoil
from tests.numbers import on_llvm


@functools.cache
def _delta(dtype, value_dim):
    return on_llvm(attention_delta(Workload(value_dim, value_dim, dtype), through_lse=True))


class Plain:
    """The functions of one argument, unscheduled, compiled: (what a backward function is handed, scale, arguments, dlse) -> gradient.

    parts     of the sums of a score's operand; 0: of one part, in the operand's type
    compiled  functions that stand in their place
    """

    def __init__(self, workload, name, parts=0, compiled=None):
        self.workload, self.name, self.parts = workload, name, parts
        self.number = [argument.name for argument in workload.arguments].index(name)
        self.delta = _delta(workload.dtype, workload.value_dim)
        self.functions = compiled or [on_llvm(function) for function in self.declared(32, 16)]

    def declared(self, q_tile, kv_tile):
        if self.name == SINK.name:
            return [attention_d_sink(self.workload)]
        whole = [attention_d_operand(self.workload, self.name, q_tile, kv_tile, self.dtype)]
        return [*whole, attention_fold_parts(self.workload, self.name)] if self.parts else whole

    @property
    def dtype(self):
        return "float32" if self.parts else dtype_of(self.workload, self.name)

    def __call__(self, dout, q, k, v, out, lse, scale, arguments, dlse):
        operand, (dout, q, k, v, out, lse, dlse) = arguments[self.number], map(tvm.runtime.tensor, (dout, q, k, v, out, lse, dlse))
        delta, behind = tvm.runtime.tensor(np.full(lse.shape, np.nan, np.float32)), [
            tvm.runtime.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments]
        self.delta(dout, out, lse, dlse, delta)
        inputs = (lse, delta) if self.name == SINK.name else (dout, q, k, v, lse, delta)
        dtype = np.float32 if self.parts else operand.dtype
        sums = tvm.runtime.tensor(np.full((max(self.parts, 1), *operand.shape), np.nan, np.float32).astype(dtype))
        self.functions[0](*inputs, sums, scale, *behind)
        if not self.parts:
            return sums.numpy()[0]
        gradient = tvm.runtime.tensor(np.full(operand.size, np.nan, np.float32).astype(operand.dtype))
        self.functions[1](tvm.runtime.tensor(sums.numpy().reshape(self.parts, -1)), gradient)
        return gradient.numpy().reshape(operand.shape)


class Called:
    """The exported call of an artefact that makes gradients of `made`, in the same form; made twice, it gives the same bits of these, in
    whichever order dQ is summed."""

    def __init__(self, module, workload, name, made, device=None):
        self.backward, self.workload, self.made, self.device = module.flash_attention_backward, workload, made, device
        self.name = name

    def __call__(self, dout, q, k, v, out, lse, scale, arguments, dlse):
        named, inputs = dict(zip([argument.name for argument in self.workload.arguments], arguments)), (dout, q, k, v, out, lse)
        arguments, operands = behind_scale(self.workload, arguments, dlse), [named[name] for name in self.made]
        asked = {"without_batch": self.workload.lengths == "packed", "operands": operands}
        first, again = (answer_gradients(self.backward, inputs, scale, arguments, self.device, **asked)[3:] for _ in range(2))
        assert [array.tobytes() for array in first] == [array.tobytes() for array in again], "two runs differ"
        return dict(zip(self.made, first))[self.name]


def verdict(function, workload, name, shape, scale, arguments, lengths=(), seed=0, through_lse=True, unseen=None):
    """None where the gradient of an argument is right on seeded inputs, `spoil`ed by `unseen`, else the reference's sentence."""
    scale, size = float(np.float32(scale)), (shape.batch, shape.q_heads, shape.q_len)
    dlse = np.random.default_rng([seed, 2]).standard_normal(size, np.float32) * np.float32(through_lse)
    given, _, right_lse = problem(workload, shape, scale, arguments, lengths, seed, dlse=dlse)
    answer = operand_reference.gradient_of(workload, name, *given, scale, arguments, lengths, dlse)
    bound = operand_reference.tolerance(workload, name, *given[:4], answer, scale, arguments, lengths, dlse)
    out, dlse = spoil(right_lse, unseen, given[4], dlse)
    found = function(*given[:4], out, given[5], scale, (*arguments, *lengths), dlse)
    return operand_reference.mismatch(name, found, answer, bound)
