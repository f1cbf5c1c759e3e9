"""Columns that a mask hides from a whole warp: what the pass leaves out changes no bit, run on llvm, where a warp is one lane."""
import re

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules import build
from schedules.arch import cuda_arch
from schedules.families import wgmma
from schedules.lowering import hidden_columns, mask_bits, rewrite
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from te_defs.workload import Workload
from tests.numbers import on_llvm

#: Registers of a lane: two rows, two columns in each of 16 blocks of eight.
BLOCKS, REGISTERS = 16, 64


def softmax(mark):
    """A function (S, maxima, P, sums, low, high) on a lane's registers, as the wgmma family lowers a tile; row i sees low + 8 i <= j < high
    + 8 i."""
    @T.prim_func
    def tile(s: T.handle, m: T.handle, p: T.handle, sums: T.handle, low: T.int32, high: T.int32):
        T.func_attr({"global_symbol": "main"})
        S = T.match_buffer(s, (REGISTERS,), "float32")
        MAXIMA = T.match_buffer(m, (2,), "float32")
        P = T.match_buffer(p, (REGISTERS,), "float32")
        SUMS = T.match_buffer(sums, (2,), "float32")
        MASKED = T.alloc_buffer((REGISTERS,), "float32")
        with T.attr(0, hidden_columns.SKIP, mark):
            for block, i, pair in T.grid(BLOCKS, 2, 2):
                MASKED[block * 4 + i * 2 + pair] = T.if_then_else(
                    tirx.And(block * 8 + pair >= low + i * 8, block * 8 + pair < high + i * 8), S[block * 4 + i * 2 + pair],
                    T.float32("-inf"))
        for i, block, pair in T.grid(2, BLOCKS, 2):
            if block == 0 and pair == 0:
                MAXIMA[i] = T.float32(-1e30)
            MAXIMA[i] = T.max(MAXIMA[i], MASKED[block * 4 + i * 2 + pair])
        for block, i, pair in T.grid(BLOCKS, 2, 2):
            P[block * 4 + i * 2 + pair] = T.exp2(MASKED[block * 4 + i * 2 + pair] - MAXIMA[i])
        for i, block, pair in T.grid(2, BLOCKS, 2):
            if block == 0 and pair == 0:
                SUMS[i] = T.float32(0)
            SUMS[i] = SUMS[i] + P[block * 4 + i * 2 + pair]
    unrolled = tvm_ffi.structural_map(tile.body, (tirx.For, lambda loop: tirx.For(
        loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body, None, loop.annotations, loop.step)))
    return tile.with_body(unrolled)


def of_one_lane(func):
    """A function whose warps are lanes: a vote is the lane's own."""
    def vote(call):
        return call.args[2] if getattr(call.op, "name", "") == "tirx.call_extern" and str(call.args[0].value) == "__any_sync" else call
    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, vote)))


@pytest.fixture(scope="module")
def functions():
    """The nests with words of bits, and the same with branches around parts of the columns."""
    passes = tvm.transform.Sequential([mask_bits.mask_bits(), hidden_columns.skip_hidden_columns(), rewrite.put_back()])
    plain, branched = (passes(tvm.IRModule({"main": softmax(mark)}))["main"] for mark in (0, 1))
    assert "__any_sync" not in str(plain) and str(branched).count("__any_sync") == hidden_columns.PARTS
    return [on_llvm(tirx.transform.ConvertSSA()(tvm.IRModule({"main": of_one_lane(func)}))) for func in (plain, branched)]


def test_hidden_columns_change_no_bit(functions):
    scores = tvm.runtime.tensor(np.random.default_rng(0).standard_normal(REGISTERS, np.float32))
    ends = [-2**30, -9, -8, 0, 1, 7, 31, 56, 63, 64, 65, 72, 100, 127, 128, 2**30]
    for low, high in ((low, high) for low in ends for high in ends):
        found = []
        for function in functions:
            outputs = [tvm.runtime.tensor(np.full(size, np.nan, np.float32)) for size in (2, REGISTERS, 2)]
            function(scores, *outputs, low, high)
            found.append([output.numpy() for output in outputs])
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*found)), (low, high)


@pytest.mark.slow
def test_branches_neither_spill_nor_serialise(toolkit):
    workload, arch = Workload.parse("fwd_d128_dv128_f16_window"), cuda_arch("sm_90a")
    plan = wgmma.default_plan(workload, arch).but(skip_hidden=1)
    with cuda_compiler(toolkit, (arch.name,), CudaOptions(**wgmma.compiler_options(plan))) as log:
        module = build.build_plan(wgmma, workload, plan, arch)
    source = module.imports[0].inspect_source()
    tiles = 3  # the first one, and the loops at either end, of the kernel and of its twin
    assert len(re.findall(r"= __any_sync\(", source)) == 2 * tiles * hidden_columns.PARTS
    assert log.last.warnings == () and log.last.most("spill_store_bytes") == 0
