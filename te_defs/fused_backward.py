"""The backward pass with five products instead of seven: dK, dV and dQ by one function, for users who take sums in any order.

Where te_defs/flash_attention_backward.py computes S and dP twice, once for keys and once for queries, here every tile of keys adds what it
knows of dQ to a float32 tensor in memory. Blocks that run side by side add in no fixed order, so two runs may differ in their last bits;
run one after the other, as on a CPU, they add in the order of the keys. Inside the loop over tiles of queries stand, behind those of
`attention_dk_dv`::

    dQ_part       what these keys add to dQ, without the scale
    dQ_sum        its addition to the sum in memory, row by row of those that exist

A key past the end must add nothing here, while it may spoil its own rows of dK and dV: the tile that it is in is always masked.
"""
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from te_defs.blocks import block, product
from te_defs.flash_attention_backward import attention_dk_dv

#: Parameters of attention_dk_dv before its outputs, and all of its own; the one for the sums of dQ is declared behind them.
OPERANDS, OWN = 6, 9


def in_order(c):
    """Channels of dQ_sum as those of Q."""
    return c


class QuerySum:
    """What `attention_dk_dv` does besides: it builds the blocks that add up dQ.

    place_of  where dQ_sum keeps channel c
    """

    def __init__(self, place_of):
        self.place_of, self.tensor = place_of, None

    def declare(self, Q):
        """The tensor that takes the sums, like Q in float32."""
        self.tensor = T.match_buffer(T.arg("d_s", T.handle()), Q.shape, "float32", align=4)
        IRBuilder.name("dQ_sum", self.tensor)
        return self.tensor

    def add(self, dS_cast, K_tile, q0, n, place):
        """Add dS K to the rows from q0 on, of n; `place` is their batch entry, the first row of their sequence, and their head."""
        (q_tile, _), (_, channels), (entry, first, head) = dS_cast.shape, K_tile.shape, place
        part = T.sblock_alloc_buffer((q_tile, channels), "float32")
        IRBuilder.name("dQ_part", part)
        with T.sblock("dsk"):
            product(part, "dQ_part", "icj", dS_cast.shape[1], lambda i, j: dS_cast[i, j], lambda c, j: K_tile[j, c])
        with T.sblock("sum"), block("dQ_sum", "ic", part.shape) as (i, c):
            at = [entry, first + q0 + i, head, self.place_of(c)]
            with T.If(q0 + i < n), T.Then():
                T.buffer_store(self.tensor, self.tensor[tuple(at)] + part[i, c], at)


def attention_dk_dv_dq(workload, q_tile, kv_tile, place_of=in_order):
    """PrimFunc (dO [B, N, H, DV], Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], LSE [B, H, N], delta [B, H, N], dQ_sum [B, N, H, D]
    float32, dK [B, M, G, D], dV [B, M, G, DV], scale, ...) -> None. As `attention_dk_dv`; besides, dQ / scale is added to dQ_sum, which
    holds zeros before the call, and keeps channel c at place_of(c)."""
    func = attention_dk_dv(workload, q_tile, kv_tile, QuerySum(place_of))
    params = list(func.params)
    params.insert(OPERANDS, params.pop(OWN))
    return tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)


def attention_dq_cast(workload, place_of=in_order):
    """PrimFunc (dQ_sum [B, N, H, D] float32, dQ [B, N, H, D], scale) -> None: dQ = scale * dQ_sum, in the element type; as above."""
    dtype, D = workload.dtype, workload.head_dim

    @T.prim_func(s_tir=True)
    def dq_cast(d_s: T.handle, d_q: T.handle, scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, H = T.int32(), T.int32(), T.int32()
        dQ_sum = T.match_buffer(d_s, (B, N, H, D), "float32", align=4)
        dQ = T.match_buffer(d_q, (B, N, H, D), dtype, align=4)
        for b, i, h, c in T.grid(B, N, H, D):
            with T.sblock("dQ"):
                vb, vi, vh, vc = T.axis.remap("SSSS", [b, i, h, c])
                dQ[vb, vi, vh, vc] = T.cast(dQ_sum[vb, vi, vh, place_of(vc)] * scale, dtype)

    return dq_cast


def attention_dq_zeros(workload):
    """PrimFunc (dQ_sum [B, N, H, D] float32) -> None: dQ_sum = 0."""
    D = workload.head_dim

    @T.prim_func(s_tir=True)
    def dq_zeros(d_s: T.handle):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, H = T.int32(), T.int32(), T.int32()
        dQ_sum = T.match_buffer(d_s, (B, N, H, D), "float32", align=4)
        for b, i, h, c in T.grid(B, N, H, D):
            with T.sblock("dQ_sum"):
                vb, vi, vh, vc = T.axis.remap("SSSS", [b, i, h, c])
                dQ_sum[vb, vi, vh, vc] = T.float32(0)

    return dq_zeros
