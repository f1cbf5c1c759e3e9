"""Tensor core intrinsics of sm_90a: wgmma, the asynchronous product of a warpgroup (PTX ISA, "wgmma.mma_async").

Four warps issue one product together; the contract is nevertheless that of a single warp (schedules.intrinsics.mma): it owns 16 rows,
and accumulators lie in the same lanes and registers, in one flat run [32 lanes, N / 2 registers] for N columns. Operands in shared memory
are boxes [chunks, rows, chunk] as the tensor memory accelerator writes them with its swizzle: a chunk is one swizzled line of 128 or 64
bytes, of the last of which a product may take the first half or quarters alone.

Names: `wgmma_<product>_<dtype>_<sizes>`; `register` makes those of a tile known to TVM.
"""
import functools

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.intrinsics import events
from schedules.intrinsics.mma import LANES, check_bijection, fragment_place
from te_defs import script
from te_defs.integers import round_up

PTX_DTYPE = {"float16": "f16", "bfloat16": "bf16"}
GROUP_WARPS = 4
#: Rows of a warpgroup's product, and of each of its warps.
GROUP_ROWS, WARP_ROWS = 64, 16
#: Reduction steps of one instruction.
STEP = 16
ELEMENT_BYTES = 2
#: Bytes of a swizzled line -> the layout type of a shared memory descriptor (PTX ISA, "Matrix descriptor format").
LAYOUT_TYPE = {128: 1, 64: 2}
#: Rows after which the swizzle repeats.
SWIZZLE_ROWS = 8
KEEP = '__device__ __forceinline__ void flashtir_keep(float &r) { asm volatile("" : "+f"(r) :: "memory"); }\n'


def chunk_of(channels):
    """Channels of one swizzled line of a tile whose products have so many: 64 where rows of a multiple of 32 are whole lines, else 32.

    Products of 48 are shorter than a line of 64.
    """
    return 64 if round_up(channels, 32) % 64 == 0 and channels > 48 else 32


def chunks_of(channels):
    """Swizzled lines that hold a row of so many channels."""
    return -(-channels // chunk_of(channels))


def accumulator_place(i, j):
    """(lane, register) of element (i, j) of a warp's 16 rows."""
    return 4 * (i % 8) + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2


def accumulator_layout(i, j):
    """Index map of a matrix held in accumulators: (16-row step, lane, register)."""
    return (i // WARP_ROWS, *accumulator_place(i, j))


def box_layout(chunk):
    """Index map of a shared tile [rows, channels]: (chunk, row, channel of the chunk)."""
    return lambda r, c: (c // chunk, r, c % chunk)


check_bijection(16, 64, accumulator_place)
assert all(accumulator_place(i, j) == fragment_place(i, j) for i in range(16) for j in range(16))


def _shared(handle, dtype, chunks, rows, chunk, strided=False):
    strides = [T.int32(), T.int32(), 1] if strided else None
    return T.match_buffer(handle, (chunks, rows, chunk), dtype, scope="shared.dyn", offset_factor=1, strides=strides)


def _registers(handle, dtype, count):
    return T.match_buffer(handle, (LANES, count), dtype, scope="warp", offset_factor=1)


def _keep(register):
    """Pin a register between what stands before and after: the compiler does not see that a product in flight writes it."""
    return T.evaluate(T.cuda.func_call("flashtir_keep", register, source_code=KEEP))


def _address(pointer):
    return T.cast(T.cuda.cvta_generic_to_shared(pointer), "int32")


def _descriptor(address, line_bytes, leading_bytes):
    """Shared memory descriptor: address, leading and stride byte offset in units of 16 bytes, layout type."""
    fixed = (SWIZZLE_ROWS * line_bytes >> 4) << 32 | (leading_bytes >> 4) << 16
    layout = T.shift_left(T.uint64(LAYOUT_TYPE[line_bytes]), T.uint64(62))  # as one constant it would not fit a signed integer
    return layout | T.uint64(fixed) | T.cast(T.shift_right(T.bitwise_and(address, 0x3FFFF), 4), "uint64")


def _rows(name, tile, ring, line_bytes, leading_bytes, group_bytes=0):
    """Descriptor of this turn's copy of a shared tile, under a name; from this warpgroup's rows on where it has some of its own, so many
    bytes a warp."""
    address = _address(T.address_of(tile[0, 0, 0]))
    address = address - events.group_bytes(group_bytes) if group_bytes else address
    return T.bind(_descriptor(address + events.slot_bytes(ring), line_bytes, leading_bytes), var=tirx.Var(name, "uint64"))


def _but_the_first(step):
    """Whether a step adds, of a chain that starts from zero."""
    return tirx.NE(step, tirx.const(0, "int32"))


def _issue(X, lane, dtype, columns, steps, operands, flags, adds=lambda step: True):
    """Statements that issue a chain of wgmma on an accumulator of so many columns.

    operands  function without arguments that declares descriptors, and returns that of a step -> A and B as the instruction takes them
    flags     what follows the flag that says whether a step adds to X, which is adds(step)
    """
    registers, kind = columns // 2, PTX_DTYPE[dtype]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    with T.unroll(registers) as register:
        IRBuilder.name("register", register)
        _keep(X[lane, register])
    T.evaluate(T.ptx.wgmma.fence.sync.aligned())
    of_step = operands()
    with T.unroll(steps) as step:
        IRBuilder.name("step", step)
        T.evaluate(T.ptx[instruction](*[X[lane, register] for register in range(registers)], *of_step(step), adds(step), *flags))
    T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())


def wgmma_scores(dtype, rows, columns, channels, own, other, transposed=False, in_turn=False, announced=()):
    """Description and implementation of S += A B^T on a warp's 16 rows of A, all rows of B and all channels; issues the product, does not
    wait for it, but for B.

    rows, columns  rows of the tiles A and B, whose rings are `own` and `other`
    transposed     whether S and its operands are declared the other way round: A's rows, the fragment's, are the second axis
    in_turn        whether warpgroups take turns at issuing it
    announced      calls that say that it has been issued
    """
    chunk, chunks, registers = chunk_of(channels), chunks_of(channels), columns // 2
    line, steps = chunk * ELEMENT_BYTES, chunk // STEP  # bytes and steps of one line
    m, n = (columns, WARP_ROWS) if transposed else (WARP_ROWS, columns)

    def place(i, j):
        return accumulator_place(j, i) if transposed else accumulator_place(i, j)

    def issue(S, A, B, lane):
        def operands():
            q_rows, k_rows = _rows("q_rows", A, own, line, STEP, WARP_ROWS * line), _rows("k_rows", B, other, line, STEP)
            return lambda step: [tile + T.cast(step // steps * (size * line >> 4) + step % steps * 2, "uint64")
                                 for tile, size in ((q_rows, rows), (k_rows, columns))]
        _issue(S, lane, dtype, columns, channels // STEP, operands, (1, 1, 0, 0), adds=_but_the_first)

    @script.prim_func(s_tir=True)
    def meaning(q: T.handle, k: T.handle, s: T.handle) -> None:
        Q = _shared(q, dtype, chunks, m, chunk, not transposed)
        K = _shared(k, dtype, chunks, n, chunk, transposed)
        S = _registers(s, "float32", registers)
        with T.sblock("root"):
            T.reads(S[0:LANES, 0:registers], Q[0:chunks, 0:m, 0:chunk], K[0:chunks, 0:n, 0:chunk])
            T.writes(S[0:LANES, 0:registers])
            for i, j, c in T.grid(m, n, channels):
                with T.sblock("S"):
                    vi, vj, vc = T.axis.remap("SSR", [i, j, c])
                    lane, register = T.meta_var(place(vi, vj))
                    S[lane, register] = S[lane, register] + (
                        T.cast(Q[vc // chunk, vi, vc % chunk], "float32") * T.cast(K[vc // chunk, vj, vc % chunk], "float32"))

    @script.prim_func(s_tir=True)
    def spelling(q: T.handle, k: T.handle, s: T.handle) -> None:
        Q = _shared(q, dtype, chunks, m, chunk, not transposed)
        K = _shared(k, dtype, chunks, n, chunk, transposed)
        S = _registers(s, "float32", registers)
        with T.sblock("root"):
            T.reads(S[0:LANES, 0:registers], Q[0:chunks, 0:m, 0:chunk], K[0:chunks, 0:n, 0:chunk])
            T.writes(S[0:LANES, 0:registers])
            A, B = T.meta_var((K, Q) if transposed else (Q, K))
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(events.wait_full(other))
                if in_turn:
                    T.evaluate(events.take_turn())
                issue(S, A, B, lane)
                _evaluate(announced)

    return meaning, spelling


def _issue_sum(O, P, V, lane, ring, dtype, terms, channels):
    """Statements that issue O += P V, P from registers and V, whose channels lie side by side, from shared memory."""
    line = chunk_of(channels) * ELEMENT_BYTES

    def operands():
        v_rows = _rows("v_rows", V, ring, line, terms * line)
        return lambda step: [*(_pair(P, lane, step * 8 + 2 * pair) for pair in range(4)),
                             v_rows + T.cast(step * (STEP * line >> 4), "uint64")]
    _issue(O, lane, dtype, channels, terms // STEP, operands, (1, 1, 1))


def wgmma_pv(dtype, kv_tile, value_dim):
    """Description and implementation of O += P V on a warp's 16 rows, P from registers; issues the product, does not wait.

    The init of this reduction reads the old accumulator and the rescale factor, see schedules.intrinsics.mma.mma_pv.
    """
    chunk, chunks, p_registers, o_registers = chunk_of(value_dim), chunks_of(value_dim), kv_tile // 2, value_dim // 2

    @script.prim_func(s_tir=True)
    def meaning(o: T.handle, r: T.handle, a: T.handle, p: T.handle, v: T.handle) -> None:
        O = _registers(o, "float32", o_registers)
        R = _registers(r, "float32", 2)
        A = _registers(a, "float32", o_registers)
        P = _registers(p, dtype, p_registers)
        V = _shared(v, dtype, chunks, kv_tile, chunk)
        with T.sblock("root"):
            T.reads(O[0:LANES, 0:o_registers], R[0:LANES, 0:2], A[0:LANES, 0:o_registers], P[0:LANES, 0:p_registers],
                    V[0:chunks, 0:kv_tile, 0:chunk])
            T.writes(O[0:LANES, 0:o_registers])
            for i, c, j in T.grid(WARP_ROWS, value_dim, kv_tile):
                with T.sblock("O"):
                    vi, vc, vj = T.axis.remap("SSR", [i, c, j])
                    lane, register = T.meta_var(accumulator_place(vi, vc))
                    p_lane, p_register = T.meta_var(accumulator_place(vi, vj))
                    T.reads(O[lane, register], R[vi % 8 * 4 + vc % 8 // 2, vi // 8], A[lane, register], P[p_lane, p_register],
                            V[vc // chunk, vj, vc % chunk])
                    T.writes(O[lane, register])
                    O[lane, register] = O[lane, register] + (
                        T.cast(P[p_lane, p_register], "float32") * T.cast(V[vc // chunk, vj, vc % chunk], "float32"))

    @script.prim_func(s_tir=True)
    def spelling(o: T.handle, r: T.handle, a: T.handle, p: T.handle, v: T.handle) -> None:
        O = _registers(o, "float32", o_registers)
        R = _registers(r, "float32", 2)
        A = _registers(a, "float32", o_registers)
        P = _registers(p, dtype, p_registers)
        V = _shared(v, dtype, chunks, kv_tile, chunk)
        with T.sblock("root"):
            T.reads(O[0:LANES, 0:o_registers], R[0:LANES, 0:2], A[0:LANES, 0:o_registers], P[0:LANES, 0:p_registers],
                    V[0:chunks, 0:kv_tile, 0:chunk])
            T.writes(O[0:LANES, 0:o_registers])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(events.wait_full(events.V))
                _issue_sum(O, P, V, lane, events.V, dtype, kv_tile, value_dim)

    return meaning, spelling


def wgmma_sum(dtype, terms, channels, ring, announced=(), arrives=False):
    """Description and implementation of X += P V on a warp's 16 rows, for a reduction whose init reads the old accumulator alone; P comes
    from registers. V, whose ring is given, must be there, since another product has waited for it, unless it `arrives` for this one alone.
    Issues the product, does not wait for it.
    """
    chunk, chunks, p_registers, x_registers = chunk_of(channels), chunks_of(channels), terms // 2, channels // 2

    @script.prim_func(s_tir=True)
    def meaning(x: T.handle, a: T.handle, p: T.handle, v: T.handle) -> None:
        X = _registers(x, "float32", x_registers)
        A = _registers(a, "float32", x_registers)
        P = _registers(p, dtype, p_registers)
        V = _shared(v, dtype, chunks, terms, chunk)
        with T.sblock("root"):
            T.reads(X[0:LANES, 0:x_registers], A[0:LANES, 0:x_registers], P[0:LANES, 0:p_registers], V[0:chunks, 0:terms, 0:chunk])
            T.writes(X[0:LANES, 0:x_registers])
            for i, c, j in T.grid(WARP_ROWS, channels, terms):
                with T.sblock("X"):
                    vi, vc, vj = T.axis.remap("SSR", [i, c, j])
                    lane, register = T.meta_var(accumulator_place(vi, vc))
                    p_lane, p_register = T.meta_var(accumulator_place(vi, vj))
                    T.reads(X[lane, register], A[lane, register], P[p_lane, p_register], V[vc // chunk, vj, vc % chunk])
                    T.writes(X[lane, register])
                    X[lane, register] = X[lane, register] + (
                        T.cast(P[p_lane, p_register], "float32") * T.cast(V[vc // chunk, vj, vc % chunk], "float32"))

    @script.prim_func(s_tir=True)
    def spelling(x: T.handle, a: T.handle, p: T.handle, v: T.handle) -> None:
        X = _registers(x, "float32", x_registers)
        A = _registers(a, "float32", x_registers)
        P = _registers(p, dtype, p_registers)
        V = _shared(v, dtype, chunks, terms, chunk)
        with T.sblock("root"):
            T.reads(X[0:LANES, 0:x_registers], A[0:LANES, 0:x_registers], P[0:LANES, 0:p_registers], V[0:chunks, 0:terms, 0:chunk])
            T.writes(X[0:LANES, 0:x_registers])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                _evaluate([events.wait_full(ring)] * arrives)
                _issue_sum(X, P, V, lane, ring, dtype, terms, channels)
                _evaluate(announced)

    return meaning, spelling


PAIR = "__device__ __forceinline__ unsigned flashtir_pair(void *p) { return *(unsigned *)p; }\n"


def _pair(P, lane, register):
    """Two neighbours of a 16-bit operand as the 32-bit register that they share."""
    return T.cuda.func_call("flashtir_pair", T.address_of(P[lane, register]), source_code=PAIR, return_type="uint32")


def ready(columns, waits, releases=(), transposed=False):
    """Description and implementation of the copy that waits for a product: the accumulator's registers hold it from here on.

    waits       calls that together wait for it, behind which other products may still run
    releases    rings whose tiles nobody reads from here on
    transposed  whether the matrix is declared with the fragment's rows as its second axis
    """
    registers, released = columns // 2, [events.release(ring) for ring in releases]
    m, n = (columns, WARP_ROWS) if transposed else (WARP_ROWS, columns)

    @script.prim_func(s_tir=True)
    def meaning(a: T.handle, b: T.handle) -> None:
        A = _registers(a, "float32", registers)
        B = _registers(b, "float32", registers)
        with T.sblock("root"):
            T.reads(A[0:LANES, 0:registers])
            T.writes(B[0:LANES, 0:registers])
            for i, j in T.grid(m, n):
                with T.sblock("ready"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(accumulator_place(vj, vi) if transposed else accumulator_place(vi, vj))
                    B[lane, register] = A[lane, register]

    @script.prim_func(s_tir=True)
    def spelling(a: T.handle, b: T.handle) -> None:
        A = _registers(a, "float32", registers)
        B = _registers(b, "float32", registers)
        with T.sblock("root"):
            T.reads(A[0:LANES, 0:registers])
            T.writes(B[0:LANES, 0:registers])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                _evaluate(waits)
                for register in T.unroll(registers):
                    _keep(A[lane, register])
                _evaluate(released)
                for register in T.unroll(registers):
                    B[lane, register] = A[lane, register]

    return meaning, spelling


def _evaluate(calls):
    for call in calls:
        T.evaluate(call)


def behind(products):
    """Calls that wait for a product behind which so many others have been issued."""
    return [T.ptx.wgmma.wait_group.sync.aligned(products)]


def names(dtype, q_tile, kv_tile, head_dim, value_dim):
    """Names of the intrinsics of one tile, by what they do."""
    return {"qk": f"wgmma_qk_{dtype}_{q_tile}x{kv_tile}x{head_dim}", "pv": f"wgmma_pv_{dtype}_{kv_tile}x{value_dim}",
            "scores": f"wgmma_ready_scores_{kv_tile}", "output": f"wgmma_ready_output_{value_dim}"}


@functools.cache
def register(dtype, q_tile, kv_tile, head_dim, value_dim):
    """Make known what products of element type `dtype` need at these sizes."""
    pairs = {"qk": wgmma_scores(dtype, q_tile, kv_tile, head_dim, events.Q, events.K, in_turn=True),
             "pv": wgmma_pv(dtype, kv_tile, value_dim),
             "scores": ready(kv_tile, [events.pass_turn(), events.wait_scores()], [events.K]),
             "output": ready(value_dim, behind(0), [events.V])}
    for what, name in names(dtype, q_tile, kv_tile, head_dim, value_dim).items():
        TensorIntrin.register(name, *pairs[what], override=True)
