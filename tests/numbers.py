"""Running a forward function on the CPU and asking the reference whether its numbers are right."""
import numpy as np
import tvm

from scripts import kernels
from te_defs import reference
from te_defs.workload import Shape

#: This CPU, since on any x86-64 each conversion of a 16-bit float would be a call, which makes kernels eight times slower.
_THIS_CPU = tvm.target.Target({"kind": "llvm", "opt-level": 0, "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
#: Shapes that break kernels: no tile divides them, more queries than keys, one query, groups, no keys; with a scale factor each.
RAGGED = {
    "ragged": (Shape(1, 2, 2, 77, 90), 1.0),
    "grouped": (Shape(2, 6, 2, 17, 65), 1.0),
    "one_query": (Shape(1, 2, 1, 1, 129), 1.0),
    "few_keys": (Shape(1, 3, 1, 90, 40), 1.0),
    "even": (Shape(1, 1, 1, 128, 128), 1.0),
    "no_keys": (Shape(1, 2, 2, 5, 0), 1.0),
    "zero_scale": (Shape(1, 1, 1, 33, 47), 0.0),
    "large_scores": (Shape(1, 1, 1, 64, 96), 300.0),
}


#: Passes of TVM that only make kernels faster.
_FOR_SPEED = ("s_tir.StmtSimplify", "s_tir.HoistIfThenElse", "s_tir.InsertHoistIfThenElse", "s_tir.RenormalizeSplitPattern",
              "tirx.RemoveNoOp", "tirx.CommonSubexprElim")


def on_llvm(kernel, without=()):
    """A function or module compiled for this CPU to run a few times: most of the time goes into compiling it, so what only makes kernels
    faster is left out, of LLVM's passes and of TVM's, and further passes that this one can do without."""
    with tvm.transform.PassContext(disabled_pass=[*_FOR_SPEED, *without]):
        return tvm.compile(kernel, _THIS_CPU)


def run(function, workload, inputs, scale, mask=(), device=None, storage="contiguous", lengths=(), whole=False):
    """(out, lse) of a compiled function (q, k, v, out, lse, scale, further arguments, those of the lengths); outputs hold NaN before.

    whole  whether it is that of an artefact, which takes packed sequences without the batch axis
    """
    assert all(x.dtype == reference.numpy_dtype(workload) for x in inputs)
    return kernels.answer(function, inputs, float(scale), mask, device, storage, lengths, whole and workload.lengths == "packed")


def verdict(function, workload, shape, scale_factor=1.0, seed=0):
    """None where the function is right on seeded inputs of this shape, else the reference's sentence.

    shape         where it has no arguments of the mask, all samples of the mask are tried
    scale_factor  scale as a multiple of 1 / sqrt(D)
    """
    scale, inputs = float(np.float32(scale_factor * workload.head_dim**-0.5)), reference.make_inputs(workload, shape, seed)
    complaints = (verdict_on(function, workload, inputs, scale, mask)
                  for mask in ([shape.mask] if shape.mask else workload.mask_class.samples))
    return next((f"{complaint} ({workload.mask})" for complaint in complaints if complaint), None)


def verdict_on(function, workload, inputs, scale, mask=(), device=None, storage="contiguous", lengths=(), whole=False):
    """The same on given inputs (Q, K, V) with these arguments of the mask, laid out as one of te_defs.storage.STORAGES."""
    answers = reference.forward(workload, *inputs, scale, mask, lengths)
    found = run(function, workload, inputs, scale, mask, device, storage, lengths, whole)
    return reference.complaint(found, workload, *inputs, scale, mask, answers, lengths)
