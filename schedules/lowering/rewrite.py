"""Small rewrites of TIR that TVM's own passes lack, and what writing one takes. Those of a single family stand beside its pipeline."""
import functools
import itertools

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.sym import Analyzer

FULL_WARP = 0xFFFFFFFF


def function_pass(name):
    """Decorator: a function PrimFunc -> PrimFunc as a module pass called `name`."""
    def make(rewrite):
        @functools.wraps(rewrite)
        def build(*args):
            def apply(mod, _context):
                return tvm.IRModule({var: rewrite(func, *args) for var, func in mod.functions_items()})
            return tvm.transform.module_pass(apply, opt_level=0, name=name)
        return build
    return make


def substitute(node, values):
    """`node` with variables replaced: values maps Var -> expression."""
    return tvm_ffi.structural_map(node, (tirx.Var, lambda var: next((new for old, new in values.items() if var.same_as(old)), var)))


def constant(value, dtype="int32"):
    """An integer as an expression."""
    return tirx.const(value, dtype)


def once(value):
    """A call that hides an integer, so that it is computed where it stands and not wherever it is used."""
    source = "__device__ __forceinline__ int flashtir_once(int value) { return value; }\n"
    return T.cuda.func_call("flashtir_once", value, source_code=source, return_type="int32")


HELD = "flashtir_held"


def hold(bind):
    """A Bind of an integer that TVM's simplifier is to leave where it is computed, until `release_held`."""
    return tirx.Bind(bind.var, tirx.call_extern("int32", HELD, bind.value))


def held(name, value):
    """(variable, its Bind) of such an integer."""
    var = tirx.Var(name, "int32")
    return var, hold(tirx.Bind(var, value))


ASIDE = "flashtir_aside"


def set_aside(binds, name, value):
    """Variable of an integer that TVM's simplifier is to see once and not wherever it is used, until `put_back`; its Bind comes behind
    `binds`."""
    var = tirx.Var(name, "int32")
    binds.append(tirx.Bind(var, tirx.call_extern("int32", ASIDE, value)))
    return var


@function_pass("flashtir.PutBack")
def put_back(func):
    """Put what was set aside in the places where it is used."""
    values = {}

    def take(seq):
        rest = []
        for stmt in seq.seq:
            if isinstance(stmt, tirx.Bind) and is_extern(stmt.value, ASIDE):
                values[stmt.var] = substitute(stmt.value.args[1], values)
            else:
                rest.append(stmt)
        return seq if len(rest) == len(seq.seq) else rest[0] if len(rest) == 1 else tirx.SeqStmt(rest)

    body = tvm_ffi.structural_map(func.body, (tirx.SeqStmt, take))
    return func.with_body(substitute(body, values)) if values else func


def is_call(expr, name):
    return isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "").split(".")[-1] == name


def replace_marked(func, key, replacement):
    """The function with every loop nest under a mark replaced.

    key          of the loop annotation, which lowering has made an AttrStmt; annotated with 0, a nest stays as it is
    replacement  function AttrStmt -> statement
    """
    def replace(mark):
        if mark.attr_key != key:
            return mark
        return replacement(mark) if int(mark.value) else mark.body
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AttrStmt, replace)))


LAZY_RESCALE = "pragma_flashtir_lazy_rescale"


@function_pass("flashtir.SkipRescale")
def skip_rescale(func):
    """Guard a marked rescale of the accumulator by a vote of the warp: where no row has a new maximum every factor is exactly 1.

    The mark is the loop annotation LAZY_RESCALE on the nest `O_new[..] = rescale[..] * O[..]`. The vote is over all factors that the
    lanes of the warp hold; the other branch copies, which the register allocator merges away.
    """
    def guard(mark):
        loops, stores = [], []
        tvm_ffi.structural_walk(mark.body, ((tirx.For, loops.append), (tirx.BufferStore, stores.append)), order="pre")
        factor = stores[0].value.a
        extents = {loop.loop_var: range(int(loop.extent)) for loop in loops}
        used = [var for var in extents if not substitute(factor, {var: tirx.IntImm("int32", 0)}).same_as(factor)]
        ana = Analyzer()
        factors = {}
        for point in itertools.product(*(extents[var] for var in used)):
            at = substitute(factor, {var: tirx.IntImm("int32", value) for var, value in zip(used, point)})
            at = tirx.BufferLoad(at.source, [ana.simplify(index) for index in at.indices])
            factors[str(at)] = at
        one = tirx.const(1.0, "float32")
        any_new = functools.reduce(tirx.Or, (at < one for at in factors.values()))
        vote = tirx.call_extern("int32", "__any_sync", tirx.const(FULL_WARP, "uint32"), any_new.astype("int32"))
        copy = tvm_ffi.structural_map(
            mark.body, (tirx.BufferStore, lambda store: tirx.BufferStore(store.buffer, store.value.b, store.indices)))
        return tirx.IfThenElse(vote != 0, mark.body, copy)

    return replace_marked(func, LAZY_RESCALE, guard)


LATE_WAIT = "pragma_flashtir_late_wait"
#: Sums of probabilities are never negative, which the compiler cannot know; a not-a-number compares false.
_LATE_WAIT_SOURCE = """\
__device__ __forceinline__ void flashtir_hold_back(float sum) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" :: "f"(sum), "r"(0) : "memory");
}
"""


@function_pass("flashtir.HoldBack")
def hold_back(func):
    """Keep what stands behind a marked nest of sums behind it in machine code too.

    The compiler moves the wait for an asynchronous product up, over arithmetic that does not touch memory, so that the exponentials
    would no longer run beside the product. A store that never executes, but depends on the sums, stands in the way.
    """
    def pin(mark):
        loops, stores = [], []
        tvm_ffi.structural_walk(mark.body, ((tirx.For, loops.append), (tirx.BufferStore, stores.append)), order="pre")
        sums = (tirx.BufferLoad(stores[0].buffer, [substitute(stores[0].indices[0], {loops[0].loop_var: tirx.IntImm("int32", n)})])
                for n in range(int(loops[0].extent)))
        call = T.cuda.func_call("flashtir_hold_back", functools.reduce(lambda a, b: a + b, sums), source_code=_LATE_WAIT_SOURCE)
        return tirx.SeqStmt([mark.body, tirx.Evaluate(call)])

    return replace_marked(func, LATE_WAIT, pin)


@function_pass("flashtir.FullWarpMask")
def full_warp_mask(func):
    """Shuffle with the mask of a whole warp: our warps never diverge there, and asking for the active lanes costs an instruction."""
    return func.with_body(tvm_ffi.structural_map(
        func.body, (tvm.ir.Call, lambda call: tirx.const(FULL_WARP, "uint32") if is_call(call, "tvm_warp_activemask") else call)))


ASYNC_COPY = "pragma_flashtir_async_copy"


@function_pass("flashtir.AsyncCopy")
def async_copy(func):
    """Make a marked copy to shared memory asynchronous, as a commit group of its own.

    Groups complete in order, so whoever waits for a later group, as the software pipeline does, has this one too.
    """
    def wrap(mark):
        zero, one = tirx.IntImm("int32", 0), tirx.IntImm("int32", 1)
        return tirx.AttrStmt(zero, "async_commit_queue_scope", zero, tirx.AttrStmt(zero, "async_scope", one, mark.body))

    return replace_marked(func, ASYNC_COPY, wrap)


@function_pass("flashtir.TruncatedDivision")
def truncated_division(func):
    """Divide by truncation: no dividend or divisor of ours is negative, and rounding down costs a branch where TVM cannot prove it. Where
    something is subtracted the dividend may be somebody else's, such as the distance of a key from its query, and may be negative."""
    def by(truncated):
        return lambda expr: expr if _may_be_negative(expr.a) else truncated(expr.a, expr.b)
    return func.with_body(tvm_ffi.structural_map(func.body, (
        (tirx.FloorDiv, by(tirx.truncdiv)), (tirx.FloorMod, by(tirx.truncmod)))))


#: Operands of an expression by which it may be negative, where one of them may be.
_SIGNED_BY = {"Add": ("a", "b"), "Mul": ("a", "b"), "Min": ("a", "b"), "FloorDiv": ("a",), "FloorMod": (), "Div": ("a",), "Mod": ("a",),
              "Ramp": ("base", "stride"), "Broadcast": ("value",), "Cast": ("value",), "Select": ("true_value", "false_value")}


def _may_be_negative(expr):
    """Whether something in an expression makes it look so: a difference, or a constant below zero. Variables are taken for sizes."""
    kind = type(expr).__name__
    if kind == "Max":
        return _may_be_negative(expr.a) and _may_be_negative(expr.b)
    return kind == "Sub" or kind == "IntImm" and int(expr) < 0 or any(
        _may_be_negative(getattr(expr, operand)) for operand in _SIGNED_BY.get(kind, ()))


class _Quotients:
    """Divisions by run-time sizes whose operands are known at one place of a function, each bound to a variable there."""

    def __init__(self, known):
        self.known, self.found = list(known), []

    def of(self, dividend, divisor):
        """The variable that holds a quotient; None where an operand is not known."""
        used, value = [], tirx.truncdiv(dividend, divisor)
        tvm_ffi.structural_walk(value, (tirx.Var, used.append))
        if not all(any(var.same_as(other) for other in self.known) for var in used):
            return None
        held = next((var for var, other in self.found if tvm_ffi.structural_equal(value, other)), None)
        if held is None:
            held = tirx.Var("quotient", dividend.ty)
            self.found.append((held, value))
            self.known.append(held)
        return held

    def replace(self, body):
        """The statement with variables in the place of its quotients."""
        def replace(node):
            held = None if isinstance(node.b, tirx.IntImm) else self.of(node.a, node.b)
            if held is None:
                return node
            return held if isinstance(node, tirx.FloorDiv) else node.a - held * node.b

        return tvm_ffi.structural_map(body, ((tirx.FloorDiv, tirx.FloorMod), replace))


#: Calls in two loops over the same iterations. Where the one says TAKE_FACTS(address), the numbers that its body binds first and its
#: quotients are read from shared memory; where the other one says PUBLISH_FACTS(address, iteration), they are computed and written there.
TAKE_FACTS, PUBLISH_FACTS = "flashtir_take_facts", "flashtir_publish_facts"
#: Bytes of shared memory for the numbers of one iteration, and of each.
FACT_BYTES, NUMBER_BYTES = 32, 4
_FACT_SOURCES = {
    "flashtir_get": """\
__device__ __forceinline__ int flashtir_get(unsigned from) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
""",
    "flashtir_put": """\
__device__ __forceinline__ void flashtir_put(unsigned to, int value) {
  asm volatile("st.shared.s32 [%0], %1;" :: "r"(to), "r"(value) : "memory");
}
""",
}


def is_extern(call, name):
    """Whether an expression calls the external function of a name."""
    return is_call(call, "call_extern") and str(getattr(call.args[0], "value", "")) == name


@function_pass("flashtir.ReleaseHeld")
def release_held(func):
    """Take what keeps the simplifier away from the bindings of `held`; behind its last run."""
    return func.with_body(tvm_ffi.structural_map(
        func.body, (tvm.ir.Call, lambda call: call.args[1] if is_extern(call, HELD) else call)))


class _Facts:
    """(variable, value) pairs that an iteration of one loop takes from another."""

    def __init__(self):
        self.loop_var, self.pairs = None, None

    def taken(self, loop_var, pairs, stmts):
        """The statements of a loop's body with the pairs bound where they are taken; None where the body takes nothing."""
        at = next((n for n, stmt in enumerate(stmts) if isinstance(stmt, tirx.Evaluate) and is_extern(stmt.value, TAKE_FACTS)), None)
        if at is None:
            return None
        if len(pairs) * NUMBER_BYTES > FACT_BYTES:
            raise ValueError(f"an iteration must take at most {FACT_BYTES // NUMBER_BYTES} numbers, found {len(pairs)}: raise FACT_BYTES")
        self.loop_var, self.pairs, address = loop_var, pairs, stmts[at].value.args[1]
        binds = (tirx.Bind(var, T.cuda.func_call("flashtir_get", self._place(address, n), source_code=_FACT_SOURCES["flashtir_get"],
                                                 return_type="int32")) for n, (var, _) in enumerate(pairs))
        return [*stmts[:at], *binds, *stmts[at + 1:]]

    def published(self, stmt):
        """What stands in the place of a PUBLISH_FACTS."""
        if not is_extern(stmt.value, PUBLISH_FACTS):
            return stmt
        address, iteration = stmt.value.args[1:]
        copies, stmts = {self.loop_var: iteration}, []
        for n, (var, value) in enumerate(self.pairs):
            copy = tirx.Var(var.name, var.ty)
            stmts += [tirx.Bind(copy, substitute(value, copies)), tirx.Evaluate(T.cuda.func_call(
                "flashtir_put", self._place(address, n), copy, source_code=_FACT_SOURCES["flashtir_put"]))]
            copies[var] = copy
        return tirx.SeqStmt(stmts)

    @staticmethod
    def _place(address, number):
        return address + tirx.const(number * NUMBER_BYTES, "uint32")


@function_pass("flashtir.HoistDivisions")
def hoist_divisions(func):
    """Compute divisions by run-time sizes once: at the top of the kernel where they depend on block index and sizes alone, else at the
    top of the loop that they depend on.

    These are not negative, so the quotient is the one that truncates, without the sign cases of floor division.
    """
    launches = []
    tvm_ffi.structural_walk(
        func.body, (tirx.AttrStmt, lambda mark: launches.append(mark) if mark.attr_key == "thread_extent" else None), order="pre")
    known = [*func.params, *(mark.node.var for mark in launches)]

    def in_loop(loop):
        # What the body binds first is known as well.
        stmts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
        bound = list(itertools.takewhile(lambda stmt: isinstance(stmt, tirx.Bind), stmts))
        quotients = _Quotients([*known, loop.loop_var, *(stmt.var for stmt in bound)])
        rest = [quotients.replace(stmt) for stmt in stmts[len(bound):]]
        pairs = [*((stmt.var, stmt.value) for stmt in bound), *quotients.found]
        body = facts.taken(loop.loop_var, pairs, rest) or [*(tirx.Bind(*pair) for pair in pairs), *rest]
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body[0] if len(body) == 1 else tirx.SeqStmt(body), None,
                        loop.annotations, loop.step)

    def at_top(mark):
        if not any(mark.node.same_as(launch.node) for launch in launches[-1:]):
            return mark
        body = top.replace(mark.body)
        known.extend(var for var, _ in top.found)
        body = tvm_ffi.structural_map(tvm_ffi.structural_map(body, (tirx.For, in_loop)), (tirx.Evaluate, facts.published))
        body = tirx.SeqStmt([*(tirx.Bind(*pair) for pair in top.found), body]) if top.found else body
        return tirx.AttrStmt(mark.node, mark.attr_key, mark.value, body)

    top, facts = _Quotients(known), _Facts()
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AttrStmt, at_top)))


@function_pass("flashtir.WideIndices")
def wide_indices(func):
    """Compute indices into what is written, by a store or by its address (O, for wide stores), with 64 bits: it may have more than 2^31
    elements. What bulk loads bring has no indices here, and operands of masks and scores are small, or refused.

    Divisions stay as they are, of numbers that fit; run this behind hoist_divisions.
    """
    def wide(index):
        return tvm_ffi.structural_map(index, (
            (tirx.Var, lambda var: tirx.Cast("int64", var) if str(var.ty) == "int32" else var),
            (tirx.IntImm, lambda number: tirx.IntImm("int64", int(number)) if str(number.ty) == "int32" else number)))

    def store(node):
        if node.buffer.scope() != "global":
            return node
        return tirx.BufferStore(node.buffer, node.value, [wide(index) for index in node.indices])

    def address(node):
        element = node.args[0] if is_call(node, "address_of") else None
        if not isinstance(element, tvm.ir.TensorLoad) or element.source.scope() != "global":
            return node
        return tirx.address_of(tirx.BufferLoad(element.source, [wide(index) for index in element.indices]))

    return func.with_body(tvm_ffi.structural_map(func.body, ((tvm.ir.Call, address), (tirx.BufferStore, store))))


def _has_warp_memory(func):
    found = []
    tvm_ffi.structural_walk(func.body, (tirx.AllocBuffer, lambda stmt: found.append(stmt) if stmt.buffer.scope() == "warp" else None))
    return bool(found)


def lower_all_warp_memory():
    """LowerWarpMemory lowers the first warp buffer of a sequence: repeat it until none is left."""
    lower = tirx.transform.LowerWarpMemory()

    def apply(mod, _context):
        while any(_has_warp_memory(func) for func in mod.functions.values()):
            mod = lower(mod)
        return mod
    return tvm.transform.module_pass(apply, opt_level=0, name="flashtir.LowerAllWarpMemory")
