"""Online softmax in Tensor Expression: FlashAttention declared as a reduction over key tiles.

Each key tile gives a partial result of its own (its row maximum, row sum and output), and an associative operator merges two partial
results: that operator is the whole of the online softmax (FlashAttention, algorithm 1, lines 10 to 13). Declared so, a schedule
reaches both published nests by primitives alone:

* reorder the tile axis outward and compute_at the rest below it: the FlashAttention nest (schedules/families/simt_te.py);
* rfactor the tile axis: split-KV, or flash-decoding (schedules/split_kv.py).

Scores are kept in base 2: scale * log2(e) is folded into Q once.
"""
from tvm import te, tirx


LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def _float32(value):
    return tirx.const(value, "float32")


def merge(a, b):
    """Merge two partial softmax results (row_max, row_sum, output column, ...) over disjoint keys, in base 2."""
    row_max = tirx.max(a[0], b[0])
    rescale_a, rescale_b = tirx.exp2(a[0] - row_max), tirx.exp2(b[0] - row_max)
    return (row_max, *(x * rescale_a + y * rescale_b for x, y in zip(a[1:], b[1:])))


def empty(columns):
    """The identity of `merge` with that many output columns: no key seen. Finite, so that a difference of two is 0 and not NaN."""
    return (tirx.min_value("float32"), *(_float32(0),) * (1 + columns))


def online_attention(workload, q_tile, kv_tile, columns=1):
    """PrimFunc (Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], O [B, N, H, DV], LSE [B, H, N], scale, ...) -> None.

    B, N, M, H and G are symbolic; H must be a multiple of G. LSE and scale are float32, LSE in natural logarithm; what follows are the
    mask's arguments, int32. The workload has no score modification and no sink. Rows that see no key get O = 0 and LSE = -inf. Lengths
    are rounded up to whole tiles inside, with zero-filled loads.

    q_tile   query rows that N is rounded up to (Br)
    kv_tile  key rows of a partial result (Bc)
    columns  output columns that share one copy of row_max and row_sum, a divisor of DV: all parts of a Tensor Expression tuple
             have one shape, here [B, H, rows, DV / columns], so the statistics exist DV / columns times
    """
    if workload.score or workload.sink:
        raise ValueError(f"a workload without score modification and sink was wanted, found {workload.name}: use the tiled function")
    arguments = [te.var(argument.name) for argument in workload.arguments]
    mask, dtype, D, DV = workload.mask_class(*arguments), workload.dtype, workload.head_dim, workload.value_dim
    if DV % columns:
        raise ValueError(f"columns must divide the value dimension {DV}, found {columns}: choose a divisor")
    B, N, M, H, G = (te.var(name) for name in ("B", "N", "M", "H", "G"))
    scale = te.var("scale", "float32")
    Q = te.placeholder((B, N, H, D), dtype, name="Q")
    K = te.placeholder((B, M, G, D), dtype, name="K")
    V = te.placeholder((B, M, G, DV), dtype, name="V")
    rows = tirx.floordiv(N + (q_tile - 1), q_tile) * q_tile
    tiles = tirx.floordiv(tirx.max(M, 1) + (kv_tile - 1), kv_tile)  # at least one, so that the state is always initialised
    c = te.reduce_axis((0, D), name="c")
    t = te.reduce_axis((0, tiles), name="t")
    e = te.reduce_axis((0, DV // columns), name="e")
    j_max, j_sum, j = (te.reduce_axis((0, kv_tile), name="j") for _ in range(3))

    def tile_of(x):
        """Rows of K or V as key tiles of a query head, zero past the end."""
        return lambda b, h, t, j, c: tirx.if_then_else(
            t * kv_tile + j < M, x[b, t * kv_tile + j, h // (H // G), c].astype("float32"), _float32(0))

    def masked(b, h, i, t, j):
        kept = mask.keep(mask.position(i, N, M), t * kv_tile + j, M)
        return tirx.Select(kept, S[b, h, i, t, j], _float32(float("-inf")))

    Q_load = te.compute((B, H, rows, D), lambda b, h, i, c: tirx.if_then_else(
        i < N, Q[b, i, h, c].astype("float32"), _float32(0)) * (scale * _float32(LOG2_E)), name="Q_load")
    K_load = te.compute((B, H, tiles, kv_tile, D), tile_of(K), name="K_load")
    V_load = te.compute((B, H, tiles, kv_tile, DV), tile_of(V), name="V_load")
    S = te.compute((B, H, rows, tiles, kv_tile), lambda b, h, i, t, j: te.sum(
        Q_load[b, h, i, c] * K_load[b, h, t, j, c], axis=c), name="S")
    S_masked = te.compute(S.shape, masked, name="S_masked")
    tile_max = te.compute((B, H, rows, tiles), lambda b, h, i, t: te.max(S_masked[b, h, i, t, j_max], axis=j_max), name="tile_max")
    P = te.compute(S.shape, lambda b, h, i, t, j: tirx.exp2(S_masked[b, h, i, t, j] - tile_max[b, h, i, t]), name="P")
    tile_sum = te.compute((B, H, rows, tiles), lambda b, h, i, t: te.sum(P[b, h, i, t, j_sum], axis=j_sum), name="tile_sum")
    O_tile = te.compute((B, H, rows, tiles, DV), lambda b, h, i, t, c: te.sum(
        P[b, h, i, t, j] * V_load[b, h, t, j, c], axis=j), name="O_tile")

    def partial(b, h, i, e):
        outputs = (O_tile[b, h, i, t, e * columns + n] for n in range(columns))
        return online((tile_max[b, h, i, t], tile_sum[b, h, i, t], *outputs), axis=t)

    online = te.comm_reducer(merge, lambda *dtypes: empty(len(dtypes) - 2), name="online")
    m, l, *o = te.compute((B, H, rows, DV // columns), partial, name="state")

    def normalised(b, i, h, c):
        value = o[0][b, h, i, c // columns]
        for n in range(1, columns):
            value = tirx.Select(c % columns == n, o[n][b, h, i, c // columns], value)
        total = l[b, h, i, c // columns]
        return (value * tirx.Select(total > 0, 1 / total, _float32(0))).astype(dtype)

    O = te.compute((B, N, H, DV), normalised, name="O")
    # The copies of a statistic are equal: their maximum picks one, and is a reduction that a schedule can share among threads.
    row_max = te.compute((B, H, rows), lambda b, h, i: te.max(m[b, h, i, e], axis=e), name="row_max")
    row_sum = te.compute((B, H, rows), lambda b, h, i: te.max(l[b, h, i, e], axis=e), name="row_sum")
    LSE = te.compute((B, H, N), lambda b, h, i: row_max[b, h, i] * _float32(LN_2) + te.log(row_sum[b, h, i]), name="LSE")
    return te.create_prim_func([Q, K, V, O, LSE, scale, *arguments])
