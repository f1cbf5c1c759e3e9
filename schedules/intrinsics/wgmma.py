"""Tensor core intrinsics of sm_90a: wgmma, the asynchronous product of a warpgroup (PTX ISA, "wgmma.mma_async").

Four warps issue one product together; the contract is nevertheless that of a single warp (schedules.intrinsics.mma): it owns 16 rows,
and accumulators lie in the same lanes and registers, in one flat run [32 lanes, N / 2 registers] for N columns. Operands in shared memory
are boxes [chunks, rows, chunk] as the tensor memory accelerator writes them with its swizzle: a chunk is one swizzled line of 128 or 64
bytes, of the last of which a product may take the first half or quarters alone.

Names: `wgmma_<product>_<dtype>_<sizes>`; `register` makes those of a tile known to TVM.
"""
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.intrinsics.mma import LANES, check_bijection, fragment_place
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


def wgmma_qk(dtype, q_tile, kv_tile, head_dim):
    """Description and implementation of S += Q K^T on a warp's 16 rows, all keys and channels; issues the product, does not wait."""
    chunk, registers, kind = chunk_of(head_dim), kv_tile // 2, PTX_DTYPE[dtype]
    chunks, line = chunks_of(head_dim), chunk * ELEMENT_BYTES
    instruction = f"wgmma.mma_async.sync.aligned.m64n{kv_tile}k16.f32.{kind}.{kind}"
    steps = chunk // STEP  # of one line

    @T.prim_func(s_tir=True)
    def meaning(q: T.handle, k: T.handle, s: T.handle) -> None:
        Q = _shared(q, dtype, chunks, WARP_ROWS, chunk, True)
        K = _shared(k, dtype, chunks, kv_tile, chunk)
        S = _registers(s, "float32", registers)
        with T.sblock("root"):
            T.reads(S[0:LANES, 0:registers], Q[0:chunks, 0:WARP_ROWS, 0:chunk], K[0:chunks, 0:kv_tile, 0:chunk])
            T.writes(S[0:LANES, 0:registers])
            for i, j, c in T.grid(WARP_ROWS, kv_tile, head_dim):
                with T.sblock("S"):
                    vi, vj, vc = T.axis.remap("SSR", [i, j, c])
                    lane, register = T.meta_var(accumulator_place(vi, vj))
                    S[lane, register] = S[lane, register] + (
                        T.cast(Q[vc // chunk, vi, vc % chunk], "float32") * T.cast(K[vc // chunk, vj, vc % chunk], "float32"))

    @T.prim_func(s_tir=True)
    def spelling(q: T.handle, k: T.handle, s: T.handle) -> None:
        Q = _shared(q, dtype, chunks, WARP_ROWS, chunk, True)
        K = _shared(k, dtype, chunks, kv_tile, chunk)
        S = _registers(s, "float32", registers)
        with T.sblock("root"):
            T.reads(S[0:LANES, 0:registers], Q[0:chunks, 0:WARP_ROWS, 0:chunk], K[0:chunks, 0:kv_tile, 0:chunk])
            T.writes(S[0:LANES, 0:registers])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(events.wait_full(events.K))
                T.evaluate(events.take_turn())
                for register in T.unroll(registers):
                    _keep(S[lane, register])
                T.evaluate(T.ptx.wgmma.fence.sync.aligned())
                q_rows: T.let[T.uint64] = _descriptor(
                    _address(T.address_of(Q[0, 0, 0])) - events.group_bytes(WARP_ROWS * line) + events.slot_bytes(events.Q), line, STEP)
                k_rows: T.let[T.uint64] = _descriptor(_address(T.address_of(K[0, 0, 0])) + events.slot_bytes(events.K), line, STEP)
                for step in T.unroll(head_dim // STEP):
                    T.evaluate(T.ptx[instruction](
                        *[S[lane, register] for register in range(registers)],
                        q_rows + T.cast(step // steps * (q_tile * line >> 4) + step % steps * 2, "uint64"),
                        k_rows + T.cast(step // steps * (kv_tile * line >> 4) + step % steps * 2, "uint64"),
                        step != 0, 1, 1, 0, 0))
                T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    return meaning, spelling


def wgmma_pv(dtype, kv_tile, value_dim):
    """Description and implementation of O += P V on a warp's 16 rows, P from registers; issues the product, does not wait.

    The init of this reduction reads the old accumulator and the rescale factor, see schedules.intrinsics.mma.mma_pv.
    """
    chunk, p_registers, o_registers, kind = chunk_of(value_dim), kv_tile // 2, value_dim // 2, PTX_DTYPE[dtype]
    chunks, line = chunks_of(value_dim), chunk * ELEMENT_BYTES
    instruction = f"wgmma.mma_async.sync.aligned.m64n{value_dim}k16.f32.{kind}.{kind}"

    @T.prim_func(s_tir=True)
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

    @T.prim_func(s_tir=True)
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
                for register in T.unroll(o_registers):
                    _keep(O[lane, register])
                T.evaluate(T.ptx.wgmma.fence.sync.aligned())
                v_rows: T.let[T.uint64] = _descriptor(
                    _address(T.address_of(V[0, 0, 0])) + events.slot_bytes(events.V), line, kv_tile * line)
                for step in T.unroll(kv_tile // STEP):
                    T.evaluate(T.ptx[instruction](
                        *[O[lane, register] for register in range(o_registers)],
                        *[_pair(P, lane, step * 8 + 2 * pair) for pair in range(4)],
                        v_rows + T.cast(step * (STEP * line >> 4), "uint64"), True, 1, 1, 1))
                T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    return meaning, spelling


PAIR = "__device__ __forceinline__ unsigned flashtir_pair(void *p) { return *(unsigned *)p; }\n"


def _pair(P, lane, register):
    """Two neighbours of a 16-bit operand as the 32-bit register that they share."""
    return T.cuda.func_call("flashtir_pair", T.address_of(P[lane, register]), source_code=PAIR, return_type="uint32")


def ready(columns, ring):
    """Description and implementation of the copy that waits for a product: the accumulator's registers hold it from here on.

    ring  events.K: the scores, behind which the product of the tile before may still run; events.V: that product
    """
    registers = columns // 2

    @T.prim_func(s_tir=True)
    def meaning(a: T.handle, b: T.handle) -> None:
        A = _registers(a, "float32", registers)
        B = _registers(b, "float32", registers)
        with T.sblock("root"):
            T.reads(A[0:LANES, 0:registers])
            T.writes(B[0:LANES, 0:registers])
            for i, j in T.grid(WARP_ROWS, columns):
                with T.sblock("ready"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(accumulator_place(vi, vj))
                    B[lane, register] = A[lane, register]

    @T.prim_func(s_tir=True)
    def spelling(a: T.handle, b: T.handle) -> None:
        A = _registers(a, "float32", registers)
        B = _registers(b, "float32", registers)
        with T.sblock("root"):
            T.reads(A[0:LANES, 0:registers])
            T.writes(B[0:LANES, 0:registers])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                if ring == events.K:
                    T.evaluate(events.pass_turn())
                    T.evaluate(events.wait_scores())
                else:
                    T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
                for register in T.unroll(registers):
                    _keep(A[lane, register])
                T.evaluate(events.release(ring))
                for register in T.unroll(registers):
                    B[lane, register] = A[lane, register]

    return meaning, spelling


def names(dtype, q_tile, kv_tile, head_dim, value_dim):
    """Names of the intrinsics of one tile, by what they do."""
    return {"qk": f"wgmma_qk_{dtype}_{q_tile}x{kv_tile}x{head_dim}", "pv": f"wgmma_pv_{dtype}_{kv_tile}x{value_dim}",
            "scores": f"wgmma_ready_scores_{kv_tile}", "output": f"wgmma_ready_output_{value_dim}"}


def register(dtype, q_tile, kv_tile, head_dim, value_dim):
    """Make known what products of element type `dtype` need at these sizes."""
    pairs = {"qk": wgmma_qk(dtype, q_tile, kv_tile, head_dim), "pv": wgmma_pv(dtype, kv_tile, value_dim),
             "scores": ready(kv_tile, events.K), "output": ready(value_dim, events.V)}
    for what, name in names(dtype, q_tile, kv_tile, head_dim, value_dim).items():
        TensorIntrin.register(name, *pairs[what], override=True)
