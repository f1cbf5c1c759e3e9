"""Small rewrites of TIR: each on the smallest function that shows it, with numbers where it can run on llvm."""
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.lowering import masked_tiles, polynomial_exp2, rewrite


def loops_over(stmt, name):
    """Extents of the loops whose variable is called `name`, in order."""
    found = []
    tvm_ffi.structural_walk(stmt, (tirx.For, lambda loop: found.append(loop.extent) if loop.loop_var.name == name else None), order="pre")
    return found


def held_in(mod):
    """Names of the variables that the simplifier is to leave where they are computed, after its run."""
    binds = []
    simplified = tirx.transform.StmtSimplify()(tirx.transform.ConvertSSA()(mod))["main"]
    tvm_ffi.structural_walk(simplified.body, (tirx.Bind, binds.append), order="pre")
    return [bind.var.name for bind in binds if rewrite.is_extern(bind.value, rewrite.HELD)]


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
    mod = masked_tiles.split_masked_tiles()(tvm.IRModule({"main": masked_steps.with_attr("global_symbol", "main")}))
    assert len(loops_over(mod["main"].body, "t")) == 2
    assert "likely" not in mod.script()
    result = tvm.runtime.tensor(np.zeros(64, "int32"))
    tvm.compile(tirx.transform.ConvertSSA()(mod), "llvm")(result, n, masked)
    expected = np.where(np.arange(64) < min(n, masked), 1, np.where(np.arange(64) < n, 2, 0))
    np.testing.assert_array_equal(result.numpy(), expected)


@T.prim_func
def masked_ends(a: T.handle, n: T.int32, first: T.int32, last: T.int32):
    """Of n entries those from `first` on before `last` are 2, the others 1."""
    A = T.match_buffer(a, (64,), "int32")
    for t in range(n):
        if T.likely(T.And(t >= first, t < last)):
            A[t] = 2
        else:
            A[t] = 1


@pytest.mark.parametrize("n, first, last", [(10, 3, 7), (10, 0, 10), (10, 7, 3), (10, 4, 4), (3, 7, 9), (5, -2, 3), (0, 0, 0), (6, 2, 99)])
def test_tiles_masked_at_both_ends_run_once(n, first, last):
    mod = masked_tiles.split_masked_tiles()(tvm.IRModule({"main": masked_ends.with_attr("global_symbol", "main")}))
    assert len(loops_over(mod["main"].body, "t")) == 3 and "likely" not in mod.script()
    assert held_in(mod) == ["first_whole", "end_of_whole"]
    mod = rewrite.release_held()(mod)
    assert rewrite.HELD not in mod.script()
    result, at = tvm.runtime.tensor(np.zeros(64, "int32")), np.arange(64)
    tvm.compile(tirx.transform.ConvertSSA()(mod), "llvm")(result, n, first, last)
    np.testing.assert_array_equal(result.numpy(), np.where(at >= n, 0, np.where((at >= first) & (at < last), 2, 1)))


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
    assert tvm_ffi.structural_equal(masked_tiles.split_masked_tiles()(mod)["main"].body, no_hint.body)


def test_what_is_set_aside_is_put_back_wherever_it_is_used():
    n, loop_var, out = tirx.Var("n", "int32"), tirx.Var("i", "int32"), tirx.decl_buffer((64,), "int32", "out")
    binds = []
    inner = rewrite.set_aside(binds, "inner", tirx.max(n, 3))
    outer = rewrite.set_aside(binds, "outer", tirx.min(inner, loop_var))

    def function(*stmts):
        return tirx.PrimFunc([n, out], tirx.For(loop_var, 0, 8, tirx.ForKind.SERIAL, tirx.SeqStmt(stmts) if stmts[1:] else stmts[0]))
    aside = function(*binds, tirx.BufferStore(out, outer * outer + inner, [loop_var]))
    ends = tirx.min(tirx.max(n, 3), loop_var)
    alone = function(tirx.BufferStore(out, ends * ends + tirx.max(n, 3), [loop_var]))
    found = rewrite.put_back()(tvm.IRModule({"main": aside}))["main"]
    assert tvm_ffi.structural_equal(found, alone)
    assert rewrite.put_back()(tvm.IRModule({"main": alone}))["main"].same_as(alone)


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


@pytest.mark.parametrize("dividend, other, quotient", [((7, 0), 3, 2), ((0, 7), 3, -3), ((2, 5), 3, -1), ((9, 1), 4, 2)])
def test_a_dividend_that_may_be_negative_is_rounded_down(dividend, other, quotient):
    """As the distance of a key from its query may be, of which TVM's simplifier makes quotients where it is compared with zero."""
    @T.prim_func
    def divided(a: T.handle, x: T.int32, y: T.int32, z: T.int32):
        A = T.match_buffer(a, (2,), "int32")
        A[0] = (x - y) // z
        A[1] = (x + y * -1) % z
    mod = rewrite.truncated_division()(tvm.IRModule({"main": divided.with_attr("global_symbol", "main")}))
    found = tvm.runtime.tensor(np.zeros(2, np.int32))
    tvm.compile(mod, "llvm")(found, *dividend, other)
    assert found.numpy().tolist() == [quotient, (dividend[0] - dividend[1]) % other]


@T.prim_func
def divided_in_a_loop(a: T.handle, n: T.int32, g: T.int32):
    A = T.match_buffer(a, (64,), "int32")
    block = T.launch_thread("blockIdx.x", 1)
    for t in range(n):
        A[t] = (t + block) // g * 10 + (t + block) % g + n // g * 100


@pytest.mark.parametrize("n, g", [(10, 3), (1, 1), (0, 2), (7, 100)])
def test_divisions_are_computed_once(n, g):
    mod = rewrite.truncated_division()(rewrite.hoist_divisions()(
        tvm.IRModule({"main": divided_in_a_loop.with_attr("global_symbol", "main")})))
    kinds = []
    tvm_ffi.structural_walk(mod["main"].body, ((tirx.Div, tirx.Mod), lambda expr: kinds.append(type(expr).__name__)))
    assert kinds == ["Div"] * 2, "one for the launch, one for an iteration"

    def without_launch(mark):
        return tirx.SeqStmt([tirx.Bind(mark.node.var, tirx.IntImm("int32", 0)), mark.body])
    func = mod["main"].with_body(tvm_ffi.structural_map(mod["main"].body, (tirx.AttrStmt, without_launch)))
    result = tvm.runtime.tensor(np.full(64, -1, "int32"))
    tvm.compile(tirx.transform.ConvertSSA()(tvm.IRModule({"main": func})), "llvm")(result, n, g)
    assert result.numpy().tolist() == [t // g * 10 + t % g + n // g * 100 for t in range(n)] + [-1] * (64 - n)


@T.prim_func
def told_by_another_loop(a: T.handle, n: T.int32, g: T.int32):
    A = T.match_buffer(a, (64,), "int32")
    block = T.launch_thread("blockIdx.x", 1)
    for t in range(n):
        T.evaluate(T.call_extern("int32", rewrite.PUBLISH_FACTS, T.uint32(64), t))
    for u in range(n):
        T.evaluate(T.call_extern("int32", rewrite.TAKE_FACTS, T.uint32(64)))
        A[u] = (u + block) // g + (u + block) // (g + 1)


def test_one_loop_divides_for_another():
    """The loop that takes facts has no division left, and reads as many numbers as the other one works out and writes."""
    mod = rewrite.hoist_divisions()(tvm.IRModule({"main": told_by_another_loop.with_attr("global_symbol", "main")}))
    loops = []
    tvm_ffi.structural_walk(mod["main"].body, (tirx.For, loops.append))
    telling, taking = (str(loop) for loop in sorted(loops, key=lambda loop: "flashtir_get" in str(loop)))
    assert telling.count("T.Div(") == telling.count('"flashtir_put"') == taking.count('"flashtir_get"') == 2
    assert "T.Div(" not in taking and "//" not in taking


@T.prim_func
def scaled_copy(a: T.handle, b: T.handle, n: T.int32):
    A = T.match_buffer(a, (64,), "int32")
    B = T.match_buffer(b, (64,), "int32")
    C = T.alloc_buffer((64,), "int32", scope="local")
    for t in range(n):
        C[t * 2] = A[t * 2 + 1]
        B[t * n] = C[t * 2]


def test_indices_of_what_is_written_have_64_bits():
    mod = rewrite.wide_indices()(tvm.IRModule({"main": scaled_copy.with_attr("global_symbol", "main")}))
    found = {}

    def note(buffer, indices):
        for index in indices:  # the leaves: variables are cast, constants have the type
            tvm_ffi.structural_walk(index, ((tirx.Cast, tirx.IntImm), lambda leaf: found.setdefault(buffer.name, set()).add(str(leaf.ty))))
    tvm_ffi.structural_walk(mod["main"].body, ((tvm.ir.TensorLoad, lambda load: note(load.source, load.indices)),
                                               (tirx.BufferStore, lambda store: note(store.buffer, store.indices))))
    assert found == {"A": {"int32"}, "B": {"int64"}, "C": {"int32"}}
    result = tvm.runtime.tensor(np.zeros(64, "int32"))
    tvm.compile(mod, "llvm")(tvm.runtime.tensor(np.arange(64, dtype="int32")), result, 5)
    assert result.numpy()[:25:5].tolist() == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("share", [0, 1, 2])
def test_a_share_of_the_exponentials_is_a_polynomial(share):
    """Of each eight blocks of eight columns; 32 steps of two blocks, here with one element each."""
    x, y = (tirx.decl_buffer((32, 2), "float32", name=name) for name in "xy")
    step, half = tirx.Var("step", "int32"), tirx.Var("half", "int32")
    body = tirx.BufferStore(y, tirx.exp2(x[step, half]), [step, half])
    for var, extent in ((half, 2), (step, 32)):
        body = tirx.For(var, tirx.IntImm("int32", 0), tirx.IntImm("int32", extent), tirx.ForKind.SERIAL, body)
    marked = tirx.AttrStmt(tirx.IntImm("int32", 0), polynomial_exp2.POLYNOMIAL_SHARE, tirx.IntImm("int32", share), body)
    func = tirx.PrimFunc([x, y], marked).with_attr("global_symbol", "main")
    function = tvm.compile(polynomial_exp2.share_exponentials()(tvm.IRModule({"main": func})), "llvm")
    values = -np.linspace(0, 20, 64, dtype="float32").reshape(32, 2)
    result = tvm.runtime.tensor(np.zeros((32, 2), "float32"))
    function(tvm.runtime.tensor(values), result)
    error = np.abs(result.numpy() / np.exp2(values.astype("float64")) - 1).ravel().reshape(8, 8)
    assert error.max() < 3.5e-6 and (error[:, share:] < 2e-7).all()
    assert (error[:, :share].max(axis=0) > 1e-6).all(), "these are no library calls"
