"""Gradients of tensors behind the scale on the CPU, and what the reference says of them."""
import numpy as np
import tvm

from te_defs import operand_reference
from te_defs.flash_attention_backward import attention_delta
from te_defs.operand_gradients import attention_d_operand, attention_d_sink, attention_fold_parts
from te_defs.workload import SINK
from tests.backward import problem
from tests.numbers import QUICK_LLVM


class Plain:
    """The functions of one argument, unscheduled, compiled: (what a backward function is handed, scale, arguments, dlse) -> gradient.

    parts  of the sums of a score's operand; 0: of one part, in the operand's type
    """

    def __init__(self, workload, name, parts=0, q_tile=32, kv_tile=16):
        self.workload, self.name, self.parts = workload, name, parts
        self.number = [argument.name for argument in workload.arguments].index(name)
        self.delta = tvm.compile(attention_delta(workload, through_lse=True), QUICK_LLVM)
        self.functions = [tvm.compile(function, QUICK_LLVM) for function in self.declared(q_tile, kv_tile)]

    def declared(self, q_tile, kv_tile):
        if self.name == SINK.name:
            return [attention_d_sink(self.workload)]
        dtype = self.workload.arguments[self.number].kind.dtype or self.workload.dtype
        whole = [attention_d_operand(self.workload, self.name, q_tile, kv_tile, "float32" if self.parts else dtype)]
        return [*whole, attention_fold_parts(self.workload, self.name)] if self.parts else whole

    def __call__(self, dout, q, k, v, out, lse, scale, arguments, dlse):
        operand, (dout, q, k, v, out, lse, dlse) = arguments[self.number], map(tvm.runtime.tensor, (dout, q, k, v, out, lse, dlse))
        delta, behind = tvm.runtime.tensor(np.full(lse.shape, np.nan, np.float32)), [
            tvm.runtime.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments]
        self.delta(dout, out, dlse, delta)
        inputs = (lse, delta) if self.name == SINK.name else (dout, q, k, v, lse, delta)
        dtype = np.float32 if self.parts else operand.dtype
        sums = tvm.runtime.tensor(np.full((max(self.parts, 1), *operand.shape), np.nan, np.float32).astype(dtype))
        self.functions[0](*inputs, sums, scale, *behind)
        if not self.parts:
            return sums.numpy()[0]
        gradient = tvm.runtime.tensor(np.full(operand.size, np.nan, np.float32).astype(operand.dtype))
        self.functions[1](tvm.runtime.tensor(sums.numpy().reshape(self.parts, -1)), gradient)
        return gradient.numpy().reshape(operand.shape)


def verdict(function, workload, name, shape, scale, arguments, lengths=(), seed=0, through_lse=True):
    """None where the gradient of an argument is right on seeded inputs, else the reference's sentence."""
    scale, size = float(np.float32(scale)), (shape.batch, shape.q_heads, shape.q_len)
    dlse = np.random.default_rng([seed, 2]).standard_normal(size, np.float32) * np.float32(through_lse)
    given, *_ = problem(workload, shape, scale, arguments, lengths, seed, dlse=dlse)
    answer = operand_reference.gradient_of(workload, name, *given, scale, arguments, lengths, dlse)
    bound = operand_reference.tolerance(workload, name, *given[:4], answer, scale, arguments, lengths, dlse)
    found = function(*given, scale, (*arguments, *lengths), dlse)
    return operand_reference.mismatch(name, found, answer, bound)
