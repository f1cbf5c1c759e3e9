"""What export, show and bench share: a plan's kernel, built for an architecture on whatever machine this is."""
import concurrent.futures
import ctypes
import multiprocessing
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tvm

from schedules import backward
from schedules.artefact import kernels as forward
from schedules.artefact.cases import check_cases
from schedules.artefact.export import export_artefact
from schedules.artefact.kernels import Kernel, Planned, compiler, merged, portable
from schedules.artefact.manifest import describe
from schedules.artefact.names import ALONE
from schedules.artefact.variant import gradient_variant
from schedules.lowering.toolkit import find_toolkit, preload
from schedules.tuning.gate import on_device
from te_defs.storage import views

#: Bytes of the head of a TVM object, behind which a tensor's DLTensor stands.
OBJECT_BYTES = 24

#: Where a machine without an NVIDIA driver keeps the library that stands in for it while it compiles.
STUB_DRIVER = Path(__file__).parent.parent / "build" / "stub"


def cuda_toolkit(arch):
    """Toolkit that builds for a CUDA architecture, with TVM's CUDA runtime loaded as artefacts need it; None for a CPU."""
    if arch.kind != "cuda":
        return None
    toolkit = find_toolkit(os.environ)
    preload(toolkit, STUB_DRIVER)
    return toolkit


def build_kernel(family, workload, plan, arch):
    """Kernel of a plan, by this machine's toolkit; ToolkitError where CUDA is wanted and there is none."""
    return forward.build_kernel(family, workload, plan, arch, cuda_toolkit(arch))


def build_kernels(plans, workload, arch, archs=(), place=1):
    """Kernels of an artefact of some Planned, likewise."""
    return forward.build_kernels(plans, workload, arch, cuda_toolkit(arch), archs, place)


@dataclass(frozen=True)
class Gradients(Planned):
    """How gradients are made: a plan as schedules.backward.default_plans has it, and the order in which dQ is summed, a key of
    schedules.backward.FAMILIES."""

    order: str = backward.IN_ORDER


def default_gradients(workload, arch, order=backward.IN_ORDER):
    """Gradients by the default plans of the first family that takes the workload."""
    family = backward.taker(workload, arch, order)
    return Gradients(family.NAME, backward.default_plans(family, workload, arch), order=order)


def build_gradient(family, workload, plans, arch, archs, place, strided, operands, measured, tuned):
    """Kernel of gradients, as `build_kernel` of a plan; operands are schedules.backward.Operands."""
    toolkit = cuda_toolkit(arch)
    with compiler(toolkit, arch, archs, backward.compiler_options(family, plans)) as log:
        module = backward.build(family, workload, plans, arch, place, strided)
    compiled = log.kernels if log else ()
    if operands.names:
        with compiler(toolkit, arch, archs, operands.family.compiler_options(operands.plan)) as log:
            module.import_module(backward.build_operands(workload, operands, arch, place, strided))
        compiled = *compiled, *(log.kernels if log else ())
    runs_later = portable(arch, lambda row: backward.fit(family, workload, plans, row, operands))
    variant = gradient_variant(module, family, arch, plans, strided, operands, kernels=compiled, measured=measured, portable=runs_later)
    return Kernel(replace(variant, tuned=tuned), toolkit)


def build_gradients(workload, arch, archs=(), place=1, gradients=(), operands=()):
    """Kernels of the gradients of a workload, lowered for `arch`: one of each plan, or where views with strides have one of their own, two.

    archs      further architectures, as in `build_kernel`
    place      of the first among the artefact's variants for gradients
    gradients  Gradients, several as in `build_kernels`; none: the default ones
    operands   names of tensors behind the scale whose gradients are made, too
    """
    operands = backward.operands(workload, operands, arch)
    gradients = gradients or (default_gradients(workload, arch),)

    def kinds(it):
        return [(backward.family_named(it.order, it.family), it.plan, strided)
                for strided in backward.family_named(it.order, it.family).STRIDED]

    def figures(family, plan, strided):  # of what the tuner measures
        return next((it.measured for it in gradients if (it.family, it.plan, strided) == (family.NAME, plan, family.STRIDED[0])), None)
    return [build_gradient(family, workload, plan, arch, archs, number, strided, operands, figures(family, plan, strided), tuned)
            for number, ((family, plan, strided), tuned) in enumerate(merged(gradients, kinds), place)]


def write_artefact(kernels, workload, path, seed=0, gradients=()):
    """Write Kernels as one artefact that chooses among them, best first; paths of the .so and of its check cases, drawn from `seed`.

    gradients  Kernels of the backward pass, likewise
    """
    return export_artefact(path=path, **contents(kernels, workload, seed, gradients))


def contents(kernels, workload, seed=0, gradients=(), share=ALONE):
    """What `export_artefact` takes of Kernels, but for a path, by name; `share` is the workload's of the artefact."""
    variants, backward_variants = ([kernel.variant for kernel in some] for some in (kernels, gradients))
    operands = backward_variants[0].operands.names if backward_variants else ()
    return {"variants": variants, "workload": workload, "gradients": backward_variants,
            "manifest": describe(workload, variants, kernels[0].toolkit, backward_variants, share),
            "cases": check_cases(workload, seed, bool(gradients), operands)}


def build_artefact(plans, workload, arch, path, gradients=()):
    """Build some Planned and write them as an artefact, with Gradients, if any; the path of the .so. Takes and returns what another process
    can be sent."""
    of_gradients = build_gradients(workload, arch, gradients=gradients) if gradients else ()
    return write_artefact(build_kernels(plans, workload, arch), workload, path, gradients=of_gradients)[0]


def build_artefacts(jobs):
    """Paths of several artefacts, built side by side by processes of their own; a job is a tuple of `build_artefact`'s arguments."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(build_artefact, *zip(*jobs)))


def answer(forward, inputs, scale, arguments=(), device=None, storage="contiguous", lengths=(), without_batch=False):
    """(out, lse) of one call of an exported function as NumPy arrays; the outputs hold NaN before, as does what lies between views.

    arguments      what follows the scale, but for the lengths
    storage        where q, k, v and out lie, one of te_defs.storage.STORAGES or EXPANDED
    lengths        the arguments of the workload's lengths: int32 arrays, then integers
    without_batch  whether tensors are handed over without their batch axis, of size one, as artefacts for packed sequences want it
    Raises RuntimeError where something else than the elements of `out` was written.
    """
    q, _, v = inputs
    stored = _Stored(storage, (*inputs, _nothing((*q.shape[:3], v.shape[-1]), q.dtype)), device, without_batch)
    lse = tvm.runtime.tensor(np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32), device)
    forward(*stored.views, lse._create_view(lse.shape[1:]) if without_batch else lse, scale, *on_device((*arguments, *lengths), device))
    return *stored.written(3), lse.numpy()


def answer_gradients(backward, inputs, scale, arguments=(), device=None, storage="contiguous", without_batch=False, operands=()):
    """[dq, dk, dv, gradients of operands] of one call of an exported function as NumPy arrays; the rest as in `answer`.

    inputs     dout, q, k, v, out and lse
    arguments  what follows the scale, with dlse or None where there are operands
    storage    where q, k, v and out lie, and so dq, dk, dv and dout
    operands   of the arguments, those whose gradients are asked for
    """
    dout, q, k, v, out, lse = inputs
    stored = _Stored(storage, (q, k, v, out), device, without_batch)
    gradients = _Stored(storage, (*(_nothing(array.shape, array.dtype) for array in (q, k, v)), dout), device, without_batch)
    *outputs, dout = gradients.views
    lse = tvm.runtime.tensor(lse[0] if without_batch else lse, device)
    of_operands = [tvm.runtime.tensor(_nothing(array.shape, array.dtype), device) for array in operands]
    backward(dout, *stored.views, lse, *outputs, scale, *on_device(arguments, device), *of_operands)
    return [*gradients.written(0, 1, 2), *(tensor.numpy() for tensor in of_operands)]


def behind_scale(workload, arguments, dlse=None):
    """What a call for gradients takes behind the scale: `arguments` are those of the forward pass, lengths included, dlse [B, H, N] or None
    is the gradient of the LSE."""
    if workload.lengths == "packed":
        *_, cu_seqlens_k, _ = arguments
        arguments, dlse = (*arguments, int(np.diff(cu_seqlens_k).max(initial=0))), None if dlse is None else dlse[0]
    return arguments if dlse is None else (*arguments, dlse)


def _nothing(shape, dtype):
    return np.full(shape, np.nan, np.float32).astype(dtype)


class _Stored:
    """Arrays [batch, rows, heads, channels], such as q, k, v and out, on a device where a storage has them; between them lies NaN.

    views  what a function is handed
    """

    def __init__(self, storage, arrays, device, without_batch):
        self.placed, sizes = views(storage, [array.shape for array in arrays])
        self.buffers = [_nothing(size, arrays[0].dtype) for size in sizes]
        for view, array in zip(self.placed, arrays):
            view.of(self.buffers[view.buffer])[:] = array
        self.tensors = [tvm.runtime.tensor(buffer, device) for buffer in self.buffers]
        self.views = [strided(self.tensors[view.buffer], view.without_batch() if without_batch else view) for view in self.placed]

    def written(self, *places):
        """The arrays at these places, now; RuntimeError where anything else has changed."""
        now = [tensor.numpy() for tensor in self.tensors]
        outputs = [self.placed[place] for place in places]
        found = [view.of(now[view.buffer]).copy() for view in outputs]
        for view in outputs:
            view.of(now[view.buffer])[:] = view.of(self.buffers[view.buffer])
        if any(after.tobytes() != before.tobytes() for after, before in zip(now, self.buffers)):
            raise RuntimeError("a kernel wrote beside the elements of its output")
        return found


class DLTensor(ctypes.Structure):
    """The tensor of dlpack.h."""

    _fields_ = [("data", ctypes.c_size_t), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


def strided(tensor, view):
    """The te_defs.storage.View of a flat tensor of TVM, which has no function that makes one: start, shape and strides are put in."""
    made = tensor._create_view([1] * len(view.shape) if 0 not in view.shape else view.shape)
    head = DLTensor.from_address(made.__chandle__() + OBJECT_BYTES)
    head.data += view.first * np.dtype(tensor.dtype).itemsize
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides)):
        head.shape[axis], head.strides[axis] = size, stride
    return made
