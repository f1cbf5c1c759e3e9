"""Check cases: seeded inputs with their float64 answers, kept beside an artefact so that whoever has it can prove it right.

They are read with NumPy alone. `<stem>.check.npz` holds one text array `index`, JSON of this form, and for each case arrays
`<case>.q`, `.k`, `.v` (the workload's type; bfloat16 as the uint16 of its bits), `.out` and `.lse` (float64), and one for each tensor
argument behind the scale::

    {"schema": 2, "workload": "fwd_d64_dv64_bf16_window+bias", "dtype": "bfloat16", "cases": [
        {"name": "ragged", "scale": 0.125, "arguments": [16, 3, "bias"], "lengths": [],
         "out_tolerance": 0.004, "lse_tolerance": 2e-05}, ...]}

`arguments` and `lengths` are those that follow the scale in the call; a text names an array, here `ragged.bias`, and a list in `lengths`
is an int32 tensor.

Where the artefact has gradients, there are also `<case>.dout` and `.dq`, `.dk`, `.dv` (float64), and in the index `gradient_tolerances`,
the largest errors of these three. They are the gradients for `out` in the workload's type and `lse` in float32; NaN stands for anything.
Where it makes gradients of tensors behind the scale, too, such as a bias, there are `<case>.dbias` (float64), and in the index
`operand_tolerances`, {"dbias": largest error}, in the order of the call.

An artefact of several workloads has one such file for all, in which names of arrays, `index` too, have the workload's name and a slash in
front: `fwd_d64_dv64_bf16_causal/ragged.q`.

A kernel passes a case when |out - answer| <= out_tolerance and |lse - answer| <= lse_tolerance * max(|answer|, 1) everywhere, and rows
whose answer is lse = -inf have exactly that and out = 0.
"""
import itertools
import json
import zipfile
from dataclasses import dataclass, replace

import numpy as np

from te_defs import lengths, operand_reference, reference
from te_defs.workload import Shape, make_arguments

SCHEMA = 2

#: name -> (shape, scale as a multiple of 1 / sqrt(D)). Between them: lengths that no tile divides, one query, more queries than keys
#: (rows without keys under a causal mask), grouped heads, no keys, no batch, more tiles than a GPU has multiprocessors, and scales of
#: either sign and zero.
CHECK_SHAPES = {
    "even": (Shape(batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=128), 1.0),
    "ragged": (Shape(batch=1, q_heads=2, kv_heads=2, q_len=113, kv_len=203), 1.0),
    "grouped": (Shape(batch=2, q_heads=6, kv_heads=2, q_len=17, kv_len=65), 1.0),
    "one_query": (Shape(batch=2, q_heads=4, kv_heads=1, q_len=1, kv_len=257), 1.0),
    "few_keys": (Shape(batch=1, q_heads=2, kv_heads=1, q_len=130, kv_len=61), 1.0),
    "no_keys": (Shape(batch=1, q_heads=2, kv_heads=2, q_len=5, kv_len=0), 1.0),
    "no_batch": (Shape(batch=0, q_heads=2, kv_heads=2, q_len=16, kv_len=16), 1.0),
    "negative_scale": (Shape(batch=1, q_heads=2, kv_heads=2, q_len=33, kv_len=47), -1.0),
    "zero_scale": (Shape(batch=1, q_heads=2, kv_heads=2, q_len=9, kv_len=33), 0.0),
    "many_heads": (Shape(batch=1, q_heads=140, kv_heads=7, q_len=3, kv_len=50), 1.0),
    "large_scores": (Shape(batch=1, q_heads=1, kv_heads=1, q_len=64, kv_len=96), 100.0),
}


@dataclass(frozen=True)
class CheckCase:
    """Inputs q, k, v in the workload's type, scale and what follows it, float64 answers out and lse, the errors that are allowed, and the
    arguments of the lengths."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    arguments: tuple
    out: np.ndarray
    lse: np.ndarray
    out_tolerance: float
    lse_tolerance: float
    lengths: tuple = ()
    gradients: "Gradients | None" = None

    @property
    def rounded(self):
        """out in the workload's type and lse in float32, as a call for gradients gets them."""
        return self.out.astype(self.q.dtype), self.lse.astype(np.float32)


@dataclass(frozen=True)
class Gradients:
    """Input dout in the workload's type, float64 answers, the errors that are allowed, and OperandGradients."""

    dout: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    tolerances: tuple
    operands: tuple = ()


@dataclass(frozen=True)
class OperandGradient:
    """The float64 answer for a tensor behind the scale, and the error that is allowed."""

    name: str
    answer: np.ndarray
    tolerance: float


def check_cases(workload, seed=0, gradients=False, operands=()):
    """CheckCases of a workload for all of CHECK_SHAPES, with its mask's samples in turn; each draws from a seed of its own, so that adding
    one changes no other.

    gradients  whether they have Gradients
    operands   names of tensors behind the scale that these are of, too
    """
    cases, sizes_to_be_one = [], itertools.cycle(("", "B", "BH", "N", "BHN", "M"))
    for (name, (shape, factor)), mask, single in zip(CHECK_SHAPES.items(), itertools.cycle(workload.mask_class.samples), sizes_to_be_one):
        own_seed = [seed, *name.encode()]
        sizes, given = lengths.sample(workload.lengths, shape.batch, shape.q_len, shape.kv_len)
        shape = replace(shape, mask=mask, **dict(zip(("batch", "q_len", "kv_len"), sizes)))
        q, k, v = reference.make_inputs(workload, shape, own_seed)
        arguments = make_arguments(workload, shape, own_seed, single)
        # The call hands the scale over as float32, so the answer is that of the rounded number.
        scale = float(np.float32(factor * workload.head_dim**-0.5))
        out, lse = reference.forward(workload, q, k, v, scale, arguments, given)
        bounds = reference.tolerances(workload, q, k, v, scale, arguments, (out, lse), given)
        cases.append(CheckCase(name, q, k, v, scale, arguments, out, lse, *bounds, given))
    return tuple(replace(case, gradients=gradients_of(workload, case, [seed, 1, *case.name.encode()], operands)) if gradients else case
                 for case in cases)


def gradients_of(workload, case, seed, operands=()):
    """Gradients of a case for random dout, from its own out and lse, rounded as a kernel gets them."""
    dout = np.random.default_rng(seed).standard_normal(case.out.shape, np.float32).astype(case.q.dtype)
    given = dout, case.q, case.k, case.v
    answers = reference.backward(workload, *given, *case.rounded, case.scale, case.arguments, case.lengths)
    behind, of_operands = (case.scale, case.arguments, case.lengths), []
    for name in operands:
        answer = operand_reference.gradient_of(workload, name, *given, *case.rounded, *behind)
        of_operands.append(OperandGradient(f"d{name}", answer, operand_reference.tolerance(workload, name, *given, answer, *behind)))
    return Gradients(dout, *answers, reference.backward_tolerances(workload, *given, answers, *behind), tuple(of_operands))


def write_cases(path, workload, cases):
    """Write the cases of one workload to `path` in the form that the module describes."""
    fields, names = ("name", "scale", "out_tolerance", "lse_tolerance"), [argument.name for argument in workload.arguments]
    index = {"schema": SCHEMA, "workload": workload.name, "dtype": workload.dtype, "cases": [
        {**{field: getattr(case, field) for field in fields},
         "arguments": [name if isinstance(value, np.ndarray) else value for name, value in zip(names, case.arguments)],
         "lengths": [numbers if isinstance(numbers, int) else numbers.tolist() for numbers in case.lengths],
         **({"gradient_tolerances": case.gradients.tolerances,
             "operand_tolerances": {it.name: it.tolerance for it in case.gradients.operands}} if case.gradients else {})}
        for case in cases]}
    arrays = {"index": np.array(json.dumps(index))}
    for case in cases:
        tensors = {name: getattr(case, name) for name in ("q", "k", "v", "out", "lse")}
        tensors |= {name: getattr(case.gradients, name) for name in ("dout", "dq", "dk", "dv") if case.gradients}
        if workload.lengths == "packed":
            tensors = {name: array[0] for name, array in tensors.items()}
        tensors |= {name: value for name, value in zip(names, case.arguments) if isinstance(value, np.ndarray)}
        tensors |= {it.name: it.answer for it in (case.gradients.operands if case.gradients else ())}
        for name, array in tensors.items():
            arrays[f"{case.name}.{name}"] = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def join_cases(path, files):
    """Write one file of the cases of several workloads to `path`, from {name of the workload: path of its own file}."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, own in files.items():
            with zipfile.ZipFile(own) as part:
                for member in part.namelist():
                    # A ZipInfo of its own has no time of day: equal cases make equal files.
                    whole.writestr(zipfile.ZipInfo(f"{name}/{member}"), part.read(member), zipfile.ZIP_DEFLATED)
