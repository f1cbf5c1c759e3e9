"""A kernel for tests of artefacts, with the right signature: out = scale * q and lse = number of keys, so that whatever the entry lets
through can be seen."""
from types import SimpleNamespace

import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.arch import cpu_arch
from schedules.artefact.variant import variant_of
from schedules.build import kernel_names
from schedules.plan import Calls, Plan

CPU = cpu_arch("znver4", 512, 2)


def stand_in(workload, negative_scale=False, factor=1, strided=False):
    """PrimFunc (q, k, v, out, lse, scale): out = scale * q, as many channels as v has, and lse = factor * M, or -factor * M in the twin.

    strided  whether q, k, v and out are views with strides
    """
    D, DV, dtype = workload.head_dim, workload.value_dim, workload.dtype
    factor = -factor if negative_scale else factor

    def strides_of(name):
        return [*(tirx.Var(f"{name}_{axis}_stride", "int32") for axis in ("batch", "row", "head")), 1] if strided else None

    @T.prim_func(s_tir=True)
    def kernel(q: T.handle, k: T.handle, v: T.handle, out: T.handle, lse: T.handle, scale: T.float32):
        B, N, H, G, M = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        Q = T.match_buffer(q, (B, N, H, D), dtype, strides=strides_of("Q"), align=4)
        K = T.match_buffer(k, (B, M, G, D), dtype, strides=strides_of("K"), align=4)  # noqa: F841, checked by the generated code
        V = T.match_buffer(v, (B, M, G, DV), dtype, strides=strides_of("V"), align=4)  # noqa: F841
        O = T.match_buffer(out, (B, N, H, DV), dtype, strides=strides_of("O"), align=4)
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        for b, i, h, c in T.grid(B, N, H, DV):
            with T.sblock("O"):
                vb, vi, vh, vc = T.axis.remap("SSSS", [b, i, h, c])
                O[vb, vi, vh, vc] = T.Cast(dtype, T.Cast("float32", Q[vb, vi, vh, vc]) * scale)
        for b, h, i in T.grid(B, H, N):
            with T.sblock("LSE"):
                vb, vh, vi = T.axis.remap("SSS", [b, h, i])
                LSE[vb, vh, vi] = T.Cast("float32", factor * M)
    return kernel


def named(workload, place=1, factor=1, strided=False):
    """A module with the stand-in and its twin as `schedules.build` names them in this place of an artefact."""
    functions = {name: stand_in(workload, negative, factor, strided) for name, negative in zip(kernel_names(place), (False, True))}
    return tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})


def on_cuda(workload, place=1, factor=1):
    """The stand-ins with each of their two blocks on a grid of its own."""
    schedule = s_tir.Schedule(named(workload, place, factor))
    for name in kernel_names(place):
        schedule.work_on(name)
        for block in ("O", "LSE"):
            blocks, threads = schedule.split(schedule.fuse(*schedule.get_loops(schedule.get_sblock(block))), [None, 128])
            schedule.bind(blocks, "blockIdx.x")
            schedule.bind(threads, "threadIdx.x")
    return schedule.mod


def variant(module, arch=CPU, kernels=(), name="stand-in", strided=False, **limits):
    """Variant of a built module, for views too where it is `strided`; `limits` are MAX_ELEMENTS and ALIGNMENT, as a family states them."""
    return variant_of(module, SimpleNamespace(NAME=name, **limits), arch, Plan(64, 32), kernels, serves=Calls(strided=strided))


def on_cpu(workload, place=1, factor=1, strided=False, **limits):
    """Variant of the stand-ins, compiled for any x86-64 CPU."""
    return variant(tvm.compile(named(workload, place, factor, strided), "llvm"), strided=strided, **limits)
