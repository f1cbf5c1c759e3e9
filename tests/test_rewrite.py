"""Small rewrites of TIR: each on the smallest function that shows it, with numbers where it can run on llvm."""
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.lowering import rewrite


def loops_over(stmt, name):
    """Extents of the loops whose variable is called `name`, in order."""
    found = []
    tvm_ffi.structural_walk(stmt, (tirx.For, lambda loop: found.append(loop.extent) if loop.loop_var.name == name else None), order="pre")
    return found


@T.prim_func
def masked_steps(a: T.handle, n: T.int32, masked: T.int32):
    """The first `masked` of n entries are 1, the rest 2."""
    A = T.match_buffer(a, (64,), "int32")
    for t in range(n):
        if T.likely(t >= masked):
            A[t] = 2
        else:
            A[t] = 1


@pytest.mark.parametrize("n, masked", [(10, 3), (10, 0), (10, 10), (3, 7), (0, 0), (1, 1)])
def test_masked_tiles_run_first_and_once(n, masked):
    mod = rewrite.split_masked_tiles()(tvm.IRModule({"main": masked_steps.with_attr("global_symbol", "main")}))
    assert len(loops_over(mod["main"].body, "t")) == 2
    assert "likely" not in mod.script()
    result = tvm.runtime.tensor(np.zeros(64, "int32"))
    tvm.compile(tirx.transform.ConvertSSA()(mod), "llvm")(result, n, masked)
    expected = np.where(np.arange(64) < min(n, masked), 1, np.where(np.arange(64) < n, 2, 0))
    np.testing.assert_array_equal(result.numpy(), expected)


@T.prim_func
def no_hint(a: T.handle, n: T.int32):
    A = T.match_buffer(a, (64,), "int32")
    for t in range(n):
        if t >= 3:
            A[t] = 2
        else:
            A[t] = 1


def test_other_conditions_stay():
    mod = tvm.IRModule({"main": no_hint})
    assert tvm_ffi.structural_equal(rewrite.split_masked_tiles()(mod)["main"].body, no_hint.body)


def rescale_nest(marked):
    """O_new = rescale * O on registers, two steps of four, with the mark's value around it."""
    rescale, old, new = (tirx.decl_buffer((size,), "float32", name=name, scope="local") for name, size in (("r", 2), ("o", 8), ("n", 8)))
    step, column = tirx.Var("step", "int32"), tirx.Var("column", "int32")
    at = step * 4 + column
    store = tirx.BufferStore(new, rescale[step] * old[at], [at])
    inner = tirx.For(column, tirx.IntImm("int32", 0), tirx.IntImm("int32", 4), tirx.ForKind.UNROLLED, store)
    outer = tirx.For(step, tirx.IntImm("int32", 0), tirx.IntImm("int32", 2), tirx.ForKind.UNROLLED, inner)
    return tirx.PrimFunc([], tirx.AttrStmt(tirx.IntImm("int32", 0), rewrite.LAZY_RESCALE, tirx.IntImm("int32", marked), outer))


def test_rescale_is_voted_over_all_factors():
    body = rewrite.skip_rescale()(tvm.IRModule({"main": rescale_nest(1)}))["main"].body
    text = str(body)
    assert text.count("__any_sync") == 1 and "r[0] < " in text and "r[1] < " in text
    rescaled, copied = str(body.then_case), str(body.else_case)
    assert "r[step]" in rescaled and "r[step]" not in copied and "o[step * 4 + column]" in copied


def test_rescale_without_the_choice_stays():
    body = rewrite.skip_rescale()(tvm.IRModule({"main": rescale_nest(0)}))["main"].body
    assert "__any_sync" not in str(body) and loops_over(body, "step")


@T.prim_func
def divided(a: T.handle, n: T.int32, g: T.int32):
    A = T.match_buffer(a, (4,), "int32")
    A[0] = n // g
    A[1] = n % g


def test_division_truncates():
    mod = rewrite.truncated_division()(tvm.IRModule({"main": divided.with_attr("global_symbol", "main")}))
    kinds = []
    divisions = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    tvm_ffi.structural_walk(mod["main"].body, (divisions, lambda expr: kinds.append(type(expr).__name__)))
    assert sorted(kinds) == ["Div", "Mod"]
    result = tvm.runtime.tensor(np.zeros(4, "int32"))
    tvm.compile(mod, "llvm")(result, 17, 5)
    assert result.numpy().tolist() == [3, 2, 0, 0]
