"""What warpgroups need of each other: a matrix that each has rows of in registers, as the first operand of a product that reads all of it;
and how they add a matrix in registers to one in memory that many blocks add to.

The matrix goes to shared memory with the fragments' columns side by side, [chunk of columns, row, column of the chunk], swizzled as the
tensor memory accelerator would have it, where wgmma reads either operand in either order.

What is added to memory goes there through shared memory, four registers of a lane at a time: a warp's 16 rows are one piece of the sums,
and all pieces of a tile are added by a single instruction of another warp (PTX ISA, "cp.reduce.async.bulk"). The contract is that of
schedules.intrinsics.wgmma.
"""
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.intrinsics.mma import LANES
from schedules.intrinsics.wgmma import (
    ELEMENT_BYTES, STEP, WARP_ROWS, _address, _but_the_first, _evaluate, _issue, _pair, _registers, _rows, accumulator_place)
from te_defs import script

#: Columns of a chunk: a swizzled line of 128 bytes.
CHUNK = 64
LINE = CHUNK * ELEMENT_BYTES
#: One instruction stores 16 rows and 16 columns of a warp, what four registers of every lane hold.
_STORE_MATRIX = """\
__device__ __forceinline__ void flashtir_store_matrix(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
"""
_STORE_FOUR = """\
__device__ __forceinline__ void flashtir_store_four(void *to, int behind, float a, float b, float c, float d) {
  *(float4 *)((char *)to + behind) = make_float4(a, b, c, d);
}
"""
#: Columns of which a lane holds four of a row.
COLUMNS = 16


def matrix_line(lane, column=0):
    """Bytes from a warp's first row to the eight columns that a lane names for one of the four matrices of a step, which begins at a column
    of its chunk: rows 0 to 7, then 8 to 15, of the left half and then of the right. A line's 16-byte parts are swizzled by its row."""
    return lane % 16 * LINE + (((lane // 16) ^ (lane % 8)) * 16 ^ column * ELEMENT_BYTES)


def store_matrix(to, *pairs):
    """Call by which a warp stores 16 rows and 16 columns to shared memory, where each lane names a place by `matrix_line`.

    pairs  four registers of a lane, of two neighbours each: of the matrices in that order
    """
    return T.cuda.func_call("flashtir_store_matrix", T.cast(to, "uint32"), *pairs, source_code=_STORE_MATRIX)


def column_place(c):
    """Place of column c of 16: the four of a lane stand side by side."""
    return c % 8 // 2 * 4 + c // 8 * 2 + c % 2


def piece_place(i, c):
    """Place of element (i, c) of a warp's 16 rows in its piece of the sums: [16 columns, row, column of the 16]."""
    return c // COLUMNS, i, column_place(c % COLUMNS)


def _tile(handle, dtype, chunks, rows, columns):
    """A part of a shared tile of chunks."""
    return T.match_buffer(handle, (chunks, rows, columns), dtype, scope="shared.dyn", offset_factor=1,
                          strides=[T.int32(), T.int32(), 1])


def _piece(handle, groups):
    """A warp's piece of sums in shared memory, of so many times 16 columns."""
    return T.match_buffer(handle, (groups, WARP_ROWS, COLUMNS), "float32", scope="shared.dyn", offset_factor=1)


def hand_over(dtype, rows, columns):
    """Description and implementation of a warp's 16 of so many rows of a matrix on their way from registers to shared memory, for all
    warpgroups; nobody waits. It is declared with the fragment's rows as its second axis.
    """
    chunks, registers = columns // CHUNK, columns // 2

    @script.prim_func(s_tir=True)
    def meaning(p: T.handle, d: T.handle) -> None:
        P = _registers(p, dtype, registers)
        D = _tile(d, dtype, chunks, WARP_ROWS, CHUNK)
        with T.sblock("root"):
            T.reads(P[0:LANES, 0:registers])
            T.writes(D[0:chunks, 0:WARP_ROWS, 0:CHUNK])
            for i, j in T.grid(columns, WARP_ROWS):
                with T.sblock("hand_over"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(accumulator_place(vj, vi))
                    D[vi // CHUNK, vj, vi % CHUNK] = P[lane, register]

    @script.prim_func(s_tir=True)
    def spelling(p: T.handle, d: T.handle) -> None:
        P = _registers(p, dtype, registers)
        D = _tile(d, dtype, chunks, WARP_ROWS, CHUNK)
        with T.sblock("root"):
            T.reads(P[0:LANES, 0:registers])
            T.writes(D[0:chunks, 0:WARP_ROWS, 0:CHUNK])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                start: T.let[T.int32] = _address(T.address_of(D[0, 0, 0])) + events.slot_bytes(events.DS)
                place: T.let[T.int32] = matrix_line(lane)  # bound, or ptxas keeps one for every step
                for step in T.unroll(columns // STEP):
                    T.evaluate(store_matrix(start + step // 4 * (rows * LINE) + T.bitwise_xor(place, step % 4 * (STEP * ELEMENT_BYTES)),
                                            *[_pair(P, lane, step * 8 + 2 * pair) for pair in range(4)]))
                T.evaluate(events.hand_over(T.address_of(D[0, 0, 0]), events.DS))

    return meaning, spelling


def product_of_tiles(dtype, terms, columns, chunk, other, announced=()):
    """Description and implementation of X += A B on a warp's 16 rows, A handed over, B's columns side by side in a tile of chunks, whose
    ring is given and which must be there; waits for all of A, issues the product, does not wait for that. X starts from zero.

    terms      rows of both tiles
    columns    of B that this warpgroup takes, part of a chunk or several
    chunk      columns of a line of B
    announced  calls that say that it has been issued
    """
    chunks, within, registers, line = max(columns // chunk, 1), min(columns, chunk), columns // 2, chunk * ELEMENT_BYTES

    def issue(X, A, B, lane):
        def operands():
            a_rows = _rows("a_rows", A, events.DS, LINE, terms * LINE, WARP_ROWS * ELEMENT_BYTES)
            b_rows = _rows("b_rows", B, other, line, terms * line)
            return lambda step: [rows + T.cast(step * (STEP * size >> 4), "uint64") for rows, size in ((a_rows, LINE), (b_rows, line))]
        _issue(X, lane, dtype, columns, terms // STEP, operands, (1, 1, 1, 1), adds=_but_the_first)

    @script.prim_func(s_tir=True)
    def meaning(a: T.handle, b: T.handle, x: T.handle) -> None:
        A = _tile(a, dtype, 1, terms, WARP_ROWS)
        B = _tile(b, dtype, chunks, terms, within)
        X = _registers(x, "float32", registers)
        with T.sblock("root"):
            T.reads(X[0:LANES, 0:registers], A[0:1, 0:terms, 0:WARP_ROWS], B[0:chunks, 0:terms, 0:within])
            T.writes(X[0:LANES, 0:registers])
            for i, c, j in T.grid(WARP_ROWS, columns, terms):
                with T.sblock("X"):
                    vi, vc, vj = T.axis.remap("SSR", [i, c, j])
                    lane, register = T.meta_var(accumulator_place(vi, vc))
                    X[lane, register] = X[lane, register] + (
                        T.cast(A[0, vj, vi], "float32") * T.cast(B[vc // chunk, vj, vc % chunk], "float32"))

    @script.prim_func(s_tir=True)
    def spelling(a: T.handle, b: T.handle, x: T.handle) -> None:
        A = _tile(a, dtype, 1, terms, WARP_ROWS)
        B = _tile(b, dtype, chunks, terms, within)
        X = _registers(x, "float32", registers)
        with T.sblock("root"):
            T.reads(X[0:LANES, 0:registers], A[0:1, 0:terms, 0:WARP_ROWS], B[0:chunks, 0:terms, 0:within])
            T.writes(X[0:LANES, 0:registers])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(events.meet(events.DS))
                issue(X, A, B, lane)
                _evaluate(announced)

    return meaning, spelling


def set_down(columns):
    """Description and implementation of a warp's 16 rows of so many columns on their way from registers to its piece in shared memory, once
    what stood there has been added up."""
    registers, groups = columns // 2, columns // COLUMNS

    @script.prim_func(s_tir=True)
    def meaning(x: T.handle, d: T.handle) -> None:
        X = _registers(x, "float32", registers)
        D = _piece(d, groups)
        with T.sblock("root"):
            T.reads(X[0:LANES, 0:registers])
            T.writes(D[0:groups, 0:WARP_ROWS, 0:COLUMNS])
            for i, c in T.grid(WARP_ROWS, columns):
                with T.sblock("set_down"):
                    vi, vc = T.axis.remap("SS", [i, c])
                    lane, register = T.meta_var(accumulator_place(vi, vc))
                    T.buffer_store(D, X[lane, register], piece_place(vi, vc))

    @script.prim_func(s_tir=True)
    def spelling(x: T.handle, d: T.handle) -> None:
        X = _registers(x, "float32", registers)
        D = _piece(d, groups)
        with T.sblock("root"):
            T.reads(X[0:LANES, 0:registers])
            T.writes(D[0:groups, 0:WARP_ROWS, 0:COLUMNS])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(events.reclaim(T.address_of(D[0, 0, 0]), events.DQ))
                slot: T.let[T.int32] = events.slot_bytes(events.DQ)
                for group, half in T.grid(groups, 2):
                    T.evaluate(T.cuda.func_call(
                        "flashtir_store_four", T.address_of(D[group, half * 8 + lane // 4, lane % 4 * 4]), slot,
                        *[X[lane, group * 8 + eight * 4 + half * 2 + pair] for eight in range(2) for pair in range(2)],
                        source_code=_STORE_FOUR))

    return meaning, spelling


def add_up(columns):
    """Description and implementation of the addition of a warp's piece in shared memory to the one in memory, which is not said to be read:
    it is left to whoever adds the pieces of all warps, and nobody waits."""
    groups, elements = columns // COLUMNS, columns * WARP_ROWS

    def place(i, c):
        """In the piece in memory, whose axes are one."""
        group, row, column = piece_place(i, c)
        return (group * WARP_ROWS + row) * COLUMNS + column

    @script.prim_func(s_tir=True)
    def meaning(x: T.handle, d: T.handle) -> None:
        X = T.match_buffer(x, (elements,), "float32", align=4, offset_factor=1)
        D = _piece(d, groups)
        with T.sblock("root"):
            T.reads(D[0:groups, 0:WARP_ROWS, 0:COLUMNS])
            T.writes(X[0:elements])
            for i, c in T.grid(WARP_ROWS, columns):
                with T.sblock("add_up"):
                    vi, vc = T.axis.remap("SS", [i, c])
                    T.reads(D[piece_place(vi, vc)])
                    T.writes(X[place(vi, vc)])
                    X[place(vi, vc)] = X[place(vi, vc)] + D[piece_place(vi, vc)]

    @script.prim_func(s_tir=True)
    def spelling(x: T.handle, d: T.handle) -> None:
        X = T.match_buffer(x, (elements,), "float32", align=4, offset_factor=1)
        D = _piece(d, groups)
        with T.sblock("root"):
            T.reads(D[0:groups, 0:WARP_ROWS, 0:COLUMNS])
            T.writes(X[0:elements])
            T.evaluate(events.add_up(T.address_of(D[0, 0, 0]), T.address_of(X[0]), elements, events.DQ))

    return meaning, spelling
