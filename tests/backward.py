"""Running backward functions on the CPU and asking the reference whether their gradients are right."""
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import tvm
import tvm_ffi

from schedules import backward
from schedules.artefact.export import export_artefact
from schedules.build import compiled
from schedules.families import cpu, delta, simt
from schedules.lowering.cuda_compile import cuda_compiler
from scripts.kernels import Gradients, answer_gradients, behind_scale, build_gradients
from te_defs import reference
from te_defs.flash_attention_backward import attention_delta, attention_dk_dv, attention_dq
from te_defs.fused_backward import attention_dk_dv_dq, attention_dq_cast, sum_tiles
from te_defs.naive import naive_backward
from te_defs.workload import Shape, Workload, element_type, make_arguments
from tests.numbers import on_llvm
from tests.stand_in_kernel import named, on_cuda, variant

#: Calls with rows that see no key, next to others that do: parts of a workload's name, shape, arguments of the lengths.
WITHOUT_KEYS = {
    "causal": ("causal", Shape(2, 4, 2, 90, 40), ()), "window": ("window", Shape(1, 4, 2, 90, 40, (20, 0)), ()),
    "prefix": ("prefix", Shape(1, 2, 2, 70, 40, (0,)), ()), "no_keys": ("full", Shape(1, 2, 1, 37, 0), ()),
    "score": ("full+bias", Shape(1, 2, 1, 37, 40), ()), "sink": ("causal+sink", Shape(1, 4, 2, 70, 30), ()),
    "lengths": ("full+keys", Shape(3, 4, 2, 50, 70), (np.array([0, 70, 33], np.int32),)),
    "causal_lengths": ("causal+keys", Shape(3, 4, 2, 50, 70), (np.array([5, 0, 70], np.int32),)),
    "sequences": ("full+packed", Shape(1, 4, 2, 90, 110),
                  (np.array([0, 25, 45, 90], np.int32), np.array([0, 60, 60, 110], np.int32), 45)),
    "causal_sequences": ("causal+packed", Shape(1, 4, 2, 90, 110),
                         (np.array([0, 5, 45, 90], np.int32), np.array([0, 0, 20, 110], np.int32), 45))}

#: Shapes with a scale each.
RAGGED = [(Shape(1, 2, 1, 37, 70), 0.125), (Shape(1, 1, 1, 70, 33), -0.2), (Shape(1, 2, 2, 5, 0), 0.0)]


class Naive:
    """The definition, compiled: (dO, Q, K, V, O, LSE, scale, further arguments) -> dQ, dK, dV."""

    def __init__(self, workload):
        self.function = on_llvm(naive_backward(workload))

    def __call__(self, dout, q, k, v, out, lse, scale, arguments=()):
        gradients = _outputs(q, k, v)
        self.function(*map(tvm.runtime.tensor, (dout, q, k, v, out, lse)), *gradients, scale, *_handed_over(arguments))
        return [x.numpy() for x in gradients]


class Plain:
    """The plain functions, unscheduled, compiled: the same call. Arguments of the lengths are the last."""

    def __init__(self, workload, q_tile=32, kv_tile=16):
        functions = attention_delta(workload), *(form(workload, q_tile, kv_tile) for form in (attention_dk_dv, attention_dq))
        self.delta, self.dk_dv, self.dq = (on_llvm(function) for function in functions)

    def __call__(self, dout, q, k, v, out, lse, scale, arguments=()):
        dout, q_, k_, v_, out, lse_ = map(tvm.runtime.tensor, (dout, q, k, v, out, lse))
        delta, (dq, dk, dv), arguments = tvm.runtime.tensor(np.full_like(lse, np.nan)), _outputs(q, k, v), _handed_over(arguments)
        self.delta(dout, out, lse_, delta)
        self.of_keys((dout, q_, k_, v_, lse_, delta), dk, dv, scale, *arguments)
        self.dq(dout, q_, k_, v_, lse_, delta, dq, scale, *arguments)
        return [x.numpy() for x in (dq, dk, dv)]

    def of_keys(self, given, dk, dv, *arguments):
        """Fill dK and dV."""
        self.dk_dv(*given, dk, dv, *arguments)


class Apart(Plain):
    """The same where dK and dV are computed by a function each."""

    def __init__(self, *functions):
        self.delta, self.dk, self.dv, self.dq = (on_llvm(function) for function in functions)

    def of_keys(self, given, dk, dv, *arguments):
        self.dk(*given, dk, *arguments)
        self.dv(*given, dv, *arguments)


class Scheduled(Plain):
    """The functions after the first stages of a family, on llvm: the same call. `plans` are those of its roles."""

    def __init__(self, family, plans, workload, stages):
        self.delta = on_llvm(attention_delta(workload))
        self.dq, self.dk_dv = (on_llvm(family.schedule(role, workload, plans[role], stages).mod) for role in ("dq", "dk_dv"))


class Fused:
    """The functions with five products, unscheduled: the same call."""

    def __init__(self, workload, q_tile=32, kv_tile=16, in_order=False):
        self.compile(workload, q_tile, attention_delta(workload), attention_dk_dv_dq(workload, q_tile, kv_tile, in_order=in_order),
                     attention_dq_cast(workload, q_tile))

    def compile(self, workload, q_tile, *functions):
        self.q_tile, self.packed = q_tile, workload.lengths == "packed"
        self.in_order = any(param.name == "dQ_turns" for param in functions[1].params if hasattr(param, "data"))
        self.delta, self.fused, self.dq_cast = (on_llvm(function) for function in functions)

    def shape_of_tile(self, channels):
        """Of the sums: they are not scheduled."""
        return self.q_tile, channels

    def __call__(self, dout, q, k, v, out, lse, scale, arguments=()):
        dout, q_, k_, v_, out, lse_ = map(tvm.runtime.tensor, (dout, q, k, v, out, lse))
        delta, (dq, dk, dv), arguments = tvm.runtime.tensor(np.full_like(lse, np.nan)), _outputs(q, k, v), _handed_over(arguments)
        batch, rows, heads, channels = q.shape
        tiles = sum_tiles(rows, self.q_tile, arguments[-4].shape[0] - 1 if self.packed else 0)
        dq_sum = tvm.runtime.tensor(np.zeros((batch, heads, tiles, *self.shape_of_tile(channels)), "float32"))
        self.turns = tvm.runtime.tensor(np.zeros((batch, heads, tiles), "int32"))
        self.delta(dout, out, lse_, delta)
        self.fused(dout, q_, k_, v_, lse_, delta, dq_sum, *([self.turns] if self.in_order else []), dk, dv, scale, *arguments)
        self.dq_cast(dq_sum, dq, scale, *arguments)
        return [x.numpy() for x in (dq, dk, dv)]


def scheduled_apart(family, plans, workload, stages):
    """Apart of the functions after the first stages of a family. `plans` are those of its roles."""
    return Apart(attention_delta(workload), *(family.schedule(role, workload, plans[role], stages).mod for role in ("dk", "dv", "dq")))


def alone(family, role, workload, plan, arch):
    """A function of a family, compiled by itself: a module with a function of the role's name."""
    return compiled({role: family.schedule(role, workload, plan).mod["main"]}, family, arch)


def delta_alone(workload, arch, through_lse=False):
    """The same of delta, which any family's pipeline lowers."""
    return compiled({delta.NAME: delta.schedule(workload, arch, through_lse=through_lse).mod["main"]},
                    cpu if arch.kind == "cpu" else simt, arch)


def check_delta(function, workload, B, N, H, through_lse=False, device=None):
    """Assert that delta is rowsum(dO * O) - dLSE at these sizes, and 0 in rows that see no key, where dO, O and dLSE hold NaN."""
    rng, device = np.random.default_rng(0), device or tvm.cpu()
    d_out, out = (rng.standard_normal((B, N, H, workload.value_dim), np.float32).astype(element_type(workload)) for _ in range(2))
    lse, d_lse = (rng.standard_normal((B, H, N), np.float32) for _ in range(2))
    unseen = rng.random((B, H, N)) < 0.3
    lse[unseen], d_lse[unseen] = -np.inf, np.nan
    d_out.swapaxes(1, 2)[unseen], out.swapaxes(1, 2)[unseen] = np.nan, np.nan
    found = tvm.runtime.tensor(np.full((B, H, N), np.nan, np.float32), device)
    function(*(tvm.runtime.tensor(x, device) for x in (d_out, out, lse, *([d_lse] if through_lse else []))), found)
    terms = d_out.astype(np.float64) * out.astype(np.float64)
    wanted, magnitude = (x.sum(-1).swapaxes(1, 2) for x in (terms, abs(terms)))
    wanted, magnitude = (wanted - d_lse, magnitude + abs(d_lse)) if through_lse else (wanted, magnitude)
    assert not found.numpy()[unseen].any()
    assert np.all(abs(found.numpy() - wanted)[~unseen] <= 1e-6 * magnitude[~unseen])


def unbound(family):
    """Number of a family's stages before the one that binds threads."""
    return [stage.__name__ for stage in family.STAGES].index(family.BINDS_AT)


def check_ragged(function, workload):
    """Assert that gradients are right at shapes that no tile divides, with grouped heads, and without keys."""
    for shape, scale in RAGGED:
        shape = replace(shape, mask=workload.mask_class.samples[2] if workload.mask == "window" else ())
        assert verdict(function, workload, shape, scale, make_arguments(workload, shape)) is None, shape


class Called:
    """The exported call of an artefact, in the same form; it is made so many times, and always gives the same bits."""

    def __init__(self, module, workload, device=None, times=1):
        self.backward, self.workload, self.device, self.times = module.flash_attention_backward, workload, device, times

    def __call__(self, dout, q, k, v, out, lse, scale, arguments=(), dlse=None, storage="contiguous"):
        rest = behind_scale(self.workload, arguments, dlse), self.device, storage, self.workload.lengths == "packed"
        found = [answer_gradients(self.backward, (dout, q, k, v, out, lse), scale, *rest) for _ in range(self.times)]
        assert all(a.tobytes() == b.tobytes() for other in found[1:] for a, b in zip(found[0], other)), "two runs differ"
        return found[0]


def export_gradients(family, workload, arch, path, toolkit=None, operands=()):
    """Write an artefact with the gradients of a family's seeds, of operands too, behind a stand-in of the forward pass; the toolkit is for
    CUDA."""
    plain = Workload(workload.head_dim, workload.value_dim, workload.dtype)
    module = on_cuda(plain) if toolkit else named(plain)
    with cuda_compiler(toolkit, (arch.name,)) if toolkit else nullcontext() as log:
        forward = variant(tvm.compile(module, arch.target()), arch, log.kernels if log else ())
    order = next(order for order, families in backward.FAMILIES.items() if family in families)
    gradients = Gradients(family.NAME, backward.default_plans(family, workload, arch), order=order)
    variants = [kernel.variant for kernel in build_gradients(workload, arch, gradients=[gradients], operands=operands)]
    export_artefact([forward], workload, path, {}, (), variants)


def exported(family, workload, arch, path, toolkit=None, operands=()):
    """The module of one."""
    export_gradients(family, workload, arch, path, toolkit, operands)
    return tvm_ffi.load_module(str(path))


def _outputs(*inputs):
    return [tvm.runtime.tensor(np.full_like(x, np.nan)) for x in inputs]


def _handed_over(arguments):
    return [tvm.runtime.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments]


def problem(workload, shape, scale, arguments=(), lengths=(), seed=0, factor=1, dlse=None):
    """(what a backward function is handed, the float64 answers (dQ, dK, dV) and LSE) of seeded inputs, Q and K times a factor."""
    q, k, v = reference.make_inputs(workload, shape, seed)
    q, k = (x * x.dtype.type(factor) for x in (q, k))
    dout = np.random.default_rng([seed, 1]).standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    return reference.backward_case(workload, dout, q, k, v, scale, arguments, lengths, dlse)


def without_keys(name, head_dim, value_dim, dtype):
    """(workload, shape, arguments, lengths) of a call of WITHOUT_KEYS. A bias hides all keys of a few rows, and a sink of half of the
    heads is none."""
    features, shape, lengths = WITHOUT_KEYS[name]
    workload = Workload.parse(f"fwd_d{head_dim}_dv{value_dim}_{dtype}_{features}")
    arguments = make_arguments(workload, shape)
    if name == "score":
        arguments[-1][:, :, 3:9] = -np.inf
    if name == "sink":
        arguments[-1][::2] = -np.inf
    return workload, shape, arguments, lengths


def spoil(lse, unseen, out, dlse=None):
    """Copies of O, and of dLSE where there is one, with a value in rows that see no key, of which there must be some; None: as they are."""
    rows = [x.copy() for x in (out.swapaxes(1, 2), dlse) if x is not None]
    if unseen is not None:
        assert np.isneginf(lse).any(), "a call with rows that see no key was wanted"
        for x in rows:
            x[np.isneginf(lse)] = unseen
    return np.ascontiguousarray(rows[0].swapaxes(1, 2)), *rows[1:]


def verdict(function, workload, shape, scale, arguments=(), lengths=(), seed=0, factor=1, through_lse=False, unseen=None):
    """None where the gradients are right on seeded inputs, else the reference's sentence; with a gradient of the LSE where
    `through_lse`, and `spoil`ed by `unseen`."""
    scale, size = float(np.float32(scale)), (shape.batch, shape.q_heads, shape.q_len)
    dlse = np.random.default_rng([seed, 2]).standard_normal(size, np.float32) if through_lse else None
    given, answers, lse = problem(workload, shape, scale, arguments, lengths, seed, factor, dlse)
    spoiled = spoil(lse, unseen, given[4], dlse)
    gradients = function(*given[:4], spoiled[0], given[5], scale, (*arguments, *lengths), *spoiled[1:])
    return reference.backward_complaint(gradients, workload, *given[:4], scale, arguments, answers, lse, lengths, dlse)
