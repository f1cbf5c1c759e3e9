"""Plain attention in Tensor Expression, softmax in three passes: the definition, the llvm oracle and the baseline.

Every quantity of the formula is one named tensor, whole: S and P are of size N x M. Built as it stands it is what TVM does without a
schedule; the online form (te_defs/online.py) and the tiled one (te_defs/flash_attention.py) compute the same and store neither.
"""
from tvm import te, tirx


def naive_attention(workload):
    """PrimFunc (Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], O [B, N, H, DV], LSE [B, H, N], scale, ...) -> None.

    B, N, M, H and G are symbolic; H must be a multiple of G. LSE and scale are float32, LSE in natural logarithm; what follows are
    `workload.arguments`. Rows that see no key get O = 0 and LSE = -inf, or that of their sink. Sums are float32, and P is not rounded to
    the input type. Offsets are 64-bit: S is large.
    """
    arguments, D, DV = [_parameter(argument, workload.dtype) for argument in workload.arguments], workload.head_dim, workload.value_dim
    mask, score, sink = workload.modifiers([x.astype("int64") if argument.kind.name == "count" else x
                                            for x, argument in zip(arguments, workload.arguments)])
    B, N, M, H, G = (te.var(name, "int64") for name in ("B", "N", "M", "H", "G"))
    scale = te.var("scale", "float32")
    Q = te.placeholder((B, N, H, D), workload.dtype, name="Q")
    K = te.placeholder((B, M, G, D), workload.dtype, name="K")
    V = te.placeholder((B, M, G, DV), workload.dtype, name="V")
    c = te.reduce_axis((0, D), name="c")
    j_max, j_sum, j = (te.reduce_axis((0, M), name="j") for _ in range(3))

    def group(h):
        """The key head that serves query head h."""
        return h // (H // G)

    def masked(b, h, i, j):
        s = S[b, h, i, j] * scale
        s = s if score is None else score.modify(s, *(place.astype("int32") for place in (b, h, i, j, N, M)))
        return tirx.Select(mask.at(b).keep(mask.position(i, N, M), j, M), s, tirx.const(float("-inf"), "float32"))

    def sees_a_key(b, h, i):
        # Asked of the lengths first: TVM never initialises a reduction over an empty axis (M = 0).
        at = mask.position(i, N, M)
        in_range = mask.key_end(at, M) > mask.key_begin(at, M)
        return in_range if mask.exact else tirx.And(in_range, row_sum[b, h, i] > 0)

    def total(b, h, i):
        return row_sum[b, h, i] if sink is None else row_sum[b, h, i] + te.exp(sink[h] - row_max[b, h, i])

    S = te.compute((B, H, N, M), lambda b, h, i, j: te.sum(
        Q[b, i, h, c].astype("float32") * K[b, j, group(h), c].astype("float32"), axis=c), name="S")
    S_masked = te.compute((B, H, N, M), masked, name="S_masked")
    # The identity of max is finite, so that P of a row that sees no key is exp(-inf) = 0 and not NaN.
    seen_max = te.compute((B, H, N), lambda b, h, i: te.max(S_masked[b, h, i, j_max], axis=j_max), name="row_max")
    row_max = seen_max if sink is None else te.compute((B, H, N), lambda b, h, i: tirx.max(seen_max[b, h, i], sink[h]), name="row_max_sink")
    P = te.compute((B, H, N, M), lambda b, h, i, j: te.exp(S_masked[b, h, i, j] - row_max[b, h, i]), name="P")
    row_sum = te.compute((B, H, N), lambda b, h, i: te.sum(P[b, h, i, j_sum], axis=j_sum), name="row_sum")
    O_acc = te.compute((B, N, H, DV), lambda b, i, h, c: te.sum(
        P[b, h, i, j] * V[b, j, group(h), c].astype("float32"), axis=j), name="O_acc")
    O = te.compute((B, N, H, DV), lambda b, i, h, c: tirx.Select(
        sees_a_key(b, h, i), O_acc[b, i, h, c] / total(b, h, i), tirx.const(0, "float32")).astype(workload.dtype), name="O")
    LSE = te.compute((B, H, N), lambda b, h, i: tirx.Select(
        sees_a_key(b, h, i), row_max[b, h, i] + te.log(total(b, h, i)),
        tirx.const(float("-inf"), "float32") if sink is None else sink[h]), name="LSE")
    return te.create_prim_func([Q, K, V, O, LSE, scale, *arguments])


def naive_backward(workload):
    """PrimFunc (dO [B, N, H, DV], Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], O [B, N, H, DV], LSE [B, H, N], dQ, dK, dV, scale, ...)
    -> None: gradients of the shapes of Q, K and V, P recomputed from the LSE of `naive_attention`; sizes and sums as there."""
    arguments, D, DV = [_parameter(argument, workload.dtype) for argument in workload.arguments], workload.head_dim, workload.value_dim
    mask, score, _ = workload.modifiers([x.astype("int64") if argument.kind.name == "count" else x
                                         for x, argument in zip(arguments, workload.arguments)])
    B, N, M, H, G = (te.var(name, "int64") for name in ("B", "N", "M", "H", "G"))
    scale = te.var("scale", "float32")
    dO, O = (te.placeholder((B, N, H, DV), workload.dtype, name=name) for name in ("dO", "O"))
    Q = te.placeholder((B, N, H, D), workload.dtype, name="Q")
    K, V = (te.placeholder((B, M, G, size), workload.dtype, name=name) for name, size in (("K", D), ("V", DV)))
    LSE = te.placeholder((B, H, N), "float32", name="LSE")
    group = H // G
    i, j, e = te.reduce_axis((0, N), name="i"), te.reduce_axis((0, M), name="j"), te.reduce_axis((0, group), name="e")

    def wide(tensor, *place):
        return tensor[place].astype("float32")

    def scores(a, b, channels, name):
        """a b^T of a tensor of the query heads and one of the key heads."""
        c = te.reduce_axis((0, channels), name="c")
        return te.compute((B, H, N, M), lambda b_, h, i, j: te.sum(wide(a, b_, i, h, c) * wide(b, b_, j, h // group, c), axis=c), name=name)

    def place(b, h, i, j):
        return [x.astype("int32") for x in (b, h, i, j, N, M)]

    def sees(b, h, i):
        return LSE[b, h, i] > tirx.const(float("-inf"), "float32")

    def probability(b, h, i, j):
        s = S[b, h, i, j] * scale
        s = s if score is None else score.modify(s, *place(b, h, i, j))
        kept = tirx.And(mask.at(b).keep(mask.position(i, N, M), j, M), sees(b, h, i))
        return tirx.Select(kept, te.exp(s - LSE[b, h, i]), tirx.const(0, "float32"))

    def gradient(b, h, i, j):
        ds, s = P[b, h, i, j] * (dP[b, h, i, j] - delta[b, h, i]), S[b, h, i, j] * scale
        return ds if score is None else tirx.Select(P[b, h, i, j] > 0, ds * score.derivative(s, *place(b, h, i, j)), ds)

    def of_keys(scores, rows, channels, name):
        """scores^T rows, summed over the query heads of a group."""
        return te.compute((B, M, G, channels), lambda b, j, g, c: te.sum(
            scores[b, g * group + e, i, j] * wide(rows, b, i, g * group + e, c), axis=(e, i)), name=name)

    def rounded(total, like, exists, factor, name):
        # Asked of the lengths: TVM never initialises a reduction over an empty axis.
        return te.compute(like.shape, lambda *at: tirx.Select(exists, total[at] * factor, tirx.const(0, "float32")).astype(
            workload.dtype), name=name)

    S, dP = scores(Q, K, D, "S"), scores(dO, V, DV, "dP")
    c = te.reduce_axis((0, DV), name="c")
    row_sum = te.compute((B, H, N), lambda b, h, i: te.sum(wide(dO, b, i, h, c) * wide(O, b, i, h, c), axis=c), name="row_sum")
    delta = te.compute((B, H, N), lambda *row: tirx.Select(sees(*row), row_sum[row], tirx.const(0, "float32")), name="delta")
    P = te.compute((B, H, N, M), probability, name="P")
    dS = te.compute((B, H, N, M), gradient, name="dS")
    dQ_acc = te.compute((B, N, H, D), lambda b, i, h, c: te.sum(dS[b, h, i, j] * wide(K, b, j, h // group, c), axis=j), name="dQ_acc")
    dQ = rounded(dQ_acc, Q, M > 0, scale, "dQ")
    dK = rounded(of_keys(dS, Q, D, "dK_acc"), K, N > 0, scale, "dK")
    dV = rounded(of_keys(P, dO, DV, "dV_acc"), V, N > 0, tirx.const(1, "float32"), "dV")
    return te.create_prim_func([dO, Q, K, V, O, LSE, dQ, dK, dV, scale, *arguments])


def _parameter(argument, dtype):
    """Parameter of the function for an Argument."""
    kind = argument.kind
    if not kind.axes:
        return te.var(argument.name, kind.dtype)
    return te.placeholder([te.var(f"{argument.name}_{axis}") for axis in kind.axes], kind.dtype or dtype, argument.name)
