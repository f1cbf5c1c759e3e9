"""Masks as words of bits: what the pass makes of a nest keeps the same scores, run on llvm, for every place of the ends."""
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.lowering import mask_bits, rewrite
from tests.numbers import on_llvm

ROWS, LANES = 2, 4
#: Conditions of score (i, j) where a window ends at `low` and `high`: those of masks with one end and two, and one with a way round.
CONDITIONS = {
    "end": lambda i, j, low, high: j <= i + high,
    "strict end": lambda i, j, low, high: i + high > j,
    "both ends": lambda i, j, low, high: tirx.And(j >= i + low, j < i + high),
    "end of the keys as well": lambda i, j, low, high: tirx.And(tirx.And(i + low <= j, i + high >= j), j < 37),
    "no row": lambda i, j, low, high: j < high,
    "clipped rows": lambda i, j, low, high: j < tirx.max(tirx.min(i + high, 30), low),
    "a way round": lambda i, j, low, high: tirx.And(j >= i + low, tirx.Or(j < i + high, low < -3)),
    "not of columns": lambda i, j, low, high: tirx.And(j < high, low > 2),
}


def masked(condition, blocks, otherwise=T.float32(0), symbol="main"):
    """A function (S [rows, columns], kept alike, lane, low, high): a lane's scores of two rows, two columns in each block of eight."""
    @T.prim_func
    def nest(s: T.handle, kept: T.handle, lane: T.int32, low: T.int32, high: T.int32):
        T.func_attr({"global_symbol": symbol})
        S = T.match_buffer(s, (blocks * 4,), "float32")
        KEPT = T.match_buffer(kept, (blocks * 4,), "float32")
        for block in T.unroll(blocks):
            for row in T.unroll(ROWS):
                for pair in T.unroll(2):
                    KEPT[block * 4 + row * 2 + pair] = T.if_then_else(
                        condition(row * 8 + 5, block * 8 + lane * 2 + pair, low, high), S[block * 4 + row * 2 + pair], otherwise)
    return nest


def choices(func):
    """Conditions of the choices in a function."""
    found = []
    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, lambda call: found.append(call.args[0]) if "if_then_else" in str(call.op) else None))
    return found


@pytest.fixture(scope="module", params=[4, 22], ids="{} blocks".format)
def kernels(request):
    """(blocks, {condition: (function as declared, with bits)}), all built at once; 22 blocks have columns for two words."""
    blocks, otherwise = request.param, T.float32("-inf")
    plain = {name: masked(condition, blocks, otherwise, name.replace(" ", "_")) for name, condition in CONDITIONS.items()}
    bits = rewrite.put_back()(mask_bits.mask_bits()(tvm.IRModule(plain)))
    assert all(type(choice).__name__ == "NE" for func in bits.functions.values() for choice in choices(func))
    both = {**plain, **{f"{var.name_hint} bits": func.with_attr("global_symbol", func.attrs["global_symbol"] + "_bits")
                        for var, func in bits.functions_items()}}
    built = on_llvm(tirx.transform.ConvertSSA()(tvm.IRModule(both)), without=["tirx.StmtSimplify"])
    return blocks, {name: [built[name.replace(" ", "_") + suffix] for suffix in ("", "_bits")] for name in CONDITIONS}


@pytest.mark.parametrize("name", CONDITIONS)
def test_bits_keep_what_comparisons_keep(kernels, name):
    blocks, functions = kernels
    scores = tvm.runtime.tensor(np.arange(1, blocks * 4 + 1, dtype="float32"))
    results = [tvm.runtime.tensor(np.zeros(blocks * 4, "float32")) for _ in functions[name]]
    ends = [-2**30, -40, -9, -8, -7, -1, 0, 1, 2, 3, 7, 8, 9, 12, 31, 33, 60, 63, 64, 65, 8 * blocks - 1, 8 * blocks, 2**30]
    for n, low, high in ((n, low, high) for n, low in enumerate(ends) for high in ends[n % 3::3]):
        for function, result in zip(functions[name], results):
            function(scores, result, n % LANES, low, high)
        np.testing.assert_array_equal(*(result.numpy() for result in results))


@pytest.mark.parametrize("condition", [
    lambda i, j, low, high: j * j < high,
    lambda i, j, low, high: j * 3 < high,
    lambda i, j, low, high: j != high,
    lambda i, j, low, high: low < high,
])
def test_other_conditions_stay(condition):
    mod = tvm.IRModule({"main": masked(condition, 16)})
    assert tvm_ffi.structural_equal(mask_bits.mask_bits()(mod)["main"].body, mod["main"].body)


def test_few_columns_stay():
    mod = tvm.IRModule({"main": masked(CONDITIONS["end"], 3)})
    assert tvm_ffi.structural_equal(mask_bits.mask_bits()(mod)["main"].body, mod["main"].body)
