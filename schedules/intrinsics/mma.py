"""Tensor core intrinsics of sm_80 and later: ldmatrix from swizzled shared memory and mma.sync m16n8k16.

All operate on 16 x 16 tiles that a warp holds in registers ("fragments"). A fragment is a buffer [32 lanes, 8 registers] in `warp`
scope; `fragment_place` gives the lane and register of an element (PTX ISA, "Matrix fragments for mma.m16n8k16"). The map of the
accumulator and that of operand A agree, so the probabilities, once cast, are an operand of the second product as they stand.

Names: `ldmatrix_<operand>_<dtype>_<rows>x<columns>` and `mma_<product>_<dtype>`; `register` makes those of a tile known to TVM.
"""
import functools

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from te_defs import script

LANES = 32
PTX_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}
#: A row of a swizzled tile spans whole 128-byte lines: 64 elements of 16 bits.
SWIZZLE_ELEMENTS = 64
#: Elements behind each row of a tile without swizzle: rows are multiples of 64 bytes, and with 16 more they start in different banks.
ROW_GAP = 8
#: Multiples that the channels of a product, and of the shared tiles that it reads, are rounded up to: a step of the reduction, and what
#: leaves all threads whole turns when they copy a tile of 32 rows.
CHANNEL_STEPS = (16, 32)


def fragment_place(i, j):
    """(lane, register) of element (i, j) of a 16 x 16 fragment."""
    return 4 * (i % 8) + j % 8 // 2, 4 * (j // 8) + i // 8 * 2 + j % 2


def fragment_layout(i, j):
    """Index map of a matrix held in fragments: (row of tiles, column of tiles, lane, register)."""
    return (i // 16, j // 16, *fragment_place(i % 16, j % 16))


def statistics_layout(i, l):
    """Index map of row statistics [rows, 4]: column l belongs to lane l of the quad that holds the row."""
    return i // 16, i % 8 * 4 + l, i % 16 // 8


def check_bijection(rows, columns, place):
    """A wrong lane map must fail at import."""
    seen = {place(i, j) for i in range(rows) for j in range(columns)}
    if len(seen) != rows * columns:
        raise AssertionError("two elements of a fragment share a register")


check_bijection(16, 16, fragment_place)
check_bijection(16, 4, statistics_layout)


def _fragment(handle, dtype, registers=8):
    return T.match_buffer(handle, (LANES, registers), dtype, align=64, offset_factor=registers if registers < 8 else 16, scope="warp")


def _mma(dtype, A, B, C, lane, half):
    """One m16n8k16: columns 8 * half .. 8 * half + 7 of C += A B."""
    kind = PTX_DTYPE[dtype]
    return T.evaluate(T.ptx_legacy.mma(
        "m16n8k16", "row", "col", kind, kind, "fp32", A.data, A.elem_offset + lane * 8, B.data, B.elem_offset + lane * 8 + 4 * half,
        C.data, C.elem_offset + lane * 8 + 4 * half, False, dtype="float32"))


def swizzled(columns):
    """Whether rows of a shared tile are swizzled, see `ldmatrix`; others are kept apart by ROW_GAP.

    Of three lines, too, TVM cannot prove that neighbours in a swizzled row are neighbours, as copies of 16 bytes must be.
    """
    return columns in (SWIZZLE_ELEMENTS, 2 * SWIZZLE_ELEMENTS, 4 * SWIZZLE_ELEMENTS)


@functools.cache
def mma_qk(dtype, transposed=False, turned=False):
    """Description and implementation of S += Q K^T on 16 x 16 x 16, with K's rows in fragments.

    transposed  whether S lies transposed in its fragment, with K's rows as rows: K is then the first operand
    turned      whether it is S += Q K, with K read transposed on its way
    """
    def place(i, j):
        return fragment_place(j, i) if transposed else fragment_place(i, j)

    def second_place(j, k):
        return fragment_place(k, j) if turned else fragment_place(j, k)

    @script.prim_func(s_tir=True)
    def meaning(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = _fragment(a, dtype)
        B = _fragment(b, dtype)
        C = _fragment(c, "float32")
        with T.sblock("root"):
            T.reads(C[0:32, 0:8], A[0:32, 0:8], B[0:32, 0:8])
            T.writes(C[0:32, 0:8])
            for i, j, k in T.grid(16, 16, 16):
                with T.sblock("C"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    cl, cr = T.meta_var(place(vi, vj))
                    al, ar = T.meta_var(fragment_place(vi, vk))
                    bl, br = T.meta_var(second_place(vj, vk))
                    T.reads(C[cl, cr], A[al, ar], B[bl, br])
                    T.writes(C[cl, cr])
                    C[cl, cr] += T.cast(A[al, ar], "float32") * T.cast(B[bl, br], "float32")

    @script.prim_func(s_tir=True)
    def spelling(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = _fragment(a, dtype)
        B = _fragment(b, dtype)
        C = _fragment(c, "float32")
        with T.sblock("root"):
            T.reads(C[0:32, 0:8], A[0:32, 0:8], B[0:32, 0:8])
            T.writes(C[0:32, 0:8])
            operands = T.meta_var((B, A) if transposed else (A, B))
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                _mma(dtype, *operands, C, lane, 0)
                _mma(dtype, *operands, C, lane, 1)

    return meaning, spelling


@functools.cache
def mma_pv(dtype):
    """Description and implementation of O += P V on 16 x 16 x 16.

    The init of this reduction reads the old accumulator and the rescale factor; decompose_reduction leaves these among the reads of
    the update, so the description lists them.
    """

    @script.prim_func(s_tir=True)
    def meaning(c: T.handle, r: T.handle, o: T.handle, a: T.handle, b: T.handle) -> None:
        C = _fragment(c, "float32")
        O = _fragment(o, "float32")
        R = _fragment(r, "float32", 2)
        A = _fragment(a, dtype)
        B = _fragment(b, dtype)
        with T.sblock("root"):
            T.reads(C[0:32, 0:8], R[0:32, 0:2], O[0:32, 0:8], A[0:32, 0:8], B[0:32, 0:8])
            T.writes(C[0:32, 0:8])
            for i, j, k in T.grid(16, 16, 16):
                with T.sblock("C"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    cl, cr = T.meta_var(fragment_place(vi, vj))
                    al, ar = T.meta_var(fragment_place(vi, vk))
                    bl, br = T.meta_var(fragment_place(vk, vj))
                    T.reads(C[cl, cr], R[vi % 8 * 4 + vj % 8 // 2, vi // 8], O[cl, cr], A[al, ar], B[bl, br])
                    T.writes(C[cl, cr])
                    C[cl, cr] += T.cast(A[al, ar], "float32") * T.cast(B[bl, br], "float32")

    @script.prim_func(s_tir=True)
    def spelling(c: T.handle, r: T.handle, o: T.handle, a: T.handle, b: T.handle) -> None:
        C = _fragment(c, "float32")
        O = _fragment(o, "float32")
        R = _fragment(r, "float32", 2)
        A = _fragment(a, dtype)
        B = _fragment(b, dtype)
        with T.sblock("root"):
            T.reads(C[0:32, 0:8], R[0:32, 0:2], O[0:32, 0:8], A[0:32, 0:8], B[0:32, 0:8])
            T.writes(C[0:32, 0:8])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                _mma(dtype, A, B, C, lane, 0)
                _mma(dtype, A, B, C, lane, 1)

    return meaning, spelling


@functools.cache
def mma_sum(dtype):
    """Description and implementation of X += P V on 16 x 16 x 16, for a reduction whose init reads the old accumulator alone."""

    @script.prim_func(s_tir=True)
    def meaning(c: T.handle, o: T.handle, a: T.handle, b: T.handle) -> None:
        C = _fragment(c, "float32")
        O = _fragment(o, "float32")
        A = _fragment(a, dtype)
        B = _fragment(b, dtype)
        with T.sblock("root"):
            T.reads(C[0:32, 0:8], O[0:32, 0:8], A[0:32, 0:8], B[0:32, 0:8])
            T.writes(C[0:32, 0:8])
            for i, j, k in T.grid(16, 16, 16):
                with T.sblock("C"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    cl, cr = T.meta_var(fragment_place(vi, vj))
                    al, ar = T.meta_var(fragment_place(vi, vk))
                    bl, br = T.meta_var(fragment_place(vk, vj))
                    T.reads(C[cl, cr], O[cl, cr], A[al, ar], B[bl, br])
                    T.writes(C[cl, cr])
                    C[cl, cr] += T.cast(A[al, ar], "float32") * T.cast(B[bl, br], "float32")

    @script.prim_func(s_tir=True)
    def spelling(c: T.handle, o: T.handle, a: T.handle, b: T.handle) -> None:
        C = _fragment(c, "float32")
        O = _fragment(o, "float32")
        A = _fragment(a, dtype)
        B = _fragment(b, dtype)
        with T.sblock("root"):
            T.reads(C[0:32, 0:8], O[0:32, 0:8], A[0:32, 0:8], B[0:32, 0:8])
            T.writes(C[0:32, 0:8])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                _mma(dtype, A, B, C, lane, 0)
                _mma(dtype, A, B, C, lane, 1)

    return meaning, spelling


#: Operand -> (transposed while loading, row and 8-element column half of the 8 x 8 matrix whose address a lane gives).
_LDMATRIX = {
    "A": (False, lambda lane: lane % 16, lambda lane: lane // 16),
    "T": (True, lambda lane: lane // 16 * 8 + lane % 8, lambda lane: lane % 16 // 8),
    "K": (False, lambda lane: lane // 16 * 8 + lane % 8, lambda lane: lane % 16 // 8),
    "V": (True, lambda lane: lane % 16, lambda lane: lane // 16),
}


@functools.cache
def ldmatrix(operand, dtype, rows, columns):
    """Description and implementation of one ldmatrix.x4: a 16 x 16 part of a swizzled shared tile [rows, columns] to a fragment.

    operand  A: rows of Q; K: rows of K as the second operand of Q K^T; V: rows of V as that of P V (transposed on the way); T: columns of
             a first operand that is stored transposed

    The tile is stored with the 16-byte chunk c of row r at chunk c ^ (r % 8) of its 128-byte line (TVM's permuted_layout), which
    makes the eight rows that ldmatrix reads at once fall into different banks. The swizzle acts on the bits below a line, so the
    part's column can be XORed last, onto the lane's own address in this copy of the tile (double buffering puts several one after
    the other): the compiler then keeps one address a tile in registers, and not one for each column.

    Rows that no swizzle fits have a gap behind them instead, which makes eight rows start in different banks as well.
    """
    tile = rows * columns
    transposed, row, half = _LDMATRIX[operand]

    def own_row(offset, lane):
        """Where the row that a lane names starts, counted from the part's first element, at this offset of the buffer."""
        if not swizzled(columns):
            return row(lane) * (columns + ROW_GAP) + half(lane) * 8
        copy, column = offset // tile * tile, offset % SWIZZLE_ELEMENTS
        own = copy + row(lane) * columns + T.bitwise_xor(half(lane), lane % 8) * 8
        return T.bitwise_xor(own, column) - column - copy

    @script.prim_func(s_tir=True)
    def meaning(w: T.handle, s: T.handle) -> None:
        shared = T.match_buffer(s, (16, 16), dtype, align=64, offset_factor=16, scope="shared.dyn")
        warp = _fragment(w, dtype)
        with T.sblock("root"):
            T.reads(shared[0:16, 0:16])
            T.writes(warp[0:32, 0:8])
            for i, j in T.grid(16, 16):
                with T.sblock("fragment"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    T.reads(shared[vi, vj])
                    lane, register = T.meta_var(fragment_place(vj, vi) if operand == "T" else fragment_place(vi, vj))
                    T.writes(warp[lane, register])
                    warp[lane, register] = shared[vi, vj]

    @script.prim_func(s_tir=True)
    def spelling(w: T.handle, s: T.handle) -> None:
        s0 = T.int32()
        s1 = T.int32()
        shared = T.match_buffer(s, (16, 16), dtype, align=64, offset_factor=16, scope="shared.dyn", strides=[s0, s1])
        warp = _fragment(w, dtype)
        with T.sblock("root"):
            T.reads(shared[0:16, 0:16])
            T.writes(warp[0:32, 0:8])
            for lane in T.thread_binding(0, LANES, "threadIdx.x"):
                T.evaluate(T.ptx_legacy.ldmatrix(
                    transposed, 4, ".b16", warp.data, warp.elem_offset + 8 * lane, shared.access_ptr("r"),
                    own_row(shared.elem_offset, lane), dtype=dtype))

    return meaning, spelling


def ldmatrix_name(operand, dtype, rows, columns):
    return f"ldmatrix_{operand}_{dtype}_{rows}x{columns}"


def register(dtype, tiles):
    """Make known what products of element type `dtype` need; tiles maps operands A, K, T and V to their tiles' (rows, columns)."""
    for operand, shape in tiles.items():
        TensorIntrin.register(ldmatrix_name(operand, dtype, *shape), *ldmatrix(operand, dtype, *shape), override=True)
    TensorIntrin.register(f"mma_qk_{dtype}", *mma_qk(dtype), override=True)
    TensorIntrin.register(f"mma_kq_{dtype}", *mma_qk(dtype, transposed=True), override=True)
    TensorIntrin.register(f"mma_part_{dtype}", *mma_qk(dtype, turned=True), override=True)
    TensorIntrin.register(f"mma_pv_{dtype}", *mma_pv(dtype), override=True)
    TensorIntrin.register(f"mma_sum_{dtype}", *mma_sum(dtype), override=True)
