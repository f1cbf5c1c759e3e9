"""Plain attention in Tensor Expression, softmax in three passes: the definition, the llvm oracle and the baseline.

Every quantity of the formula is one named tensor, whole: S and P are of size N x M. Built as it stands it is what TVM does without a
schedule; the online form (te_defs/online.py) and the tiled one (te_defs/flash_attention.py) compute the same and store neither.
"""
from tvm import te, tirx

from te_defs.masks import MASKS


def naive_attention(workload):
    """PrimFunc (Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], O [B, N, H, DV], LSE [B, H, N], scale, ...) -> None.

    B, N, M, H and G are symbolic; H must be a multiple of G. LSE and scale are float32, LSE in natural logarithm; what follows are the
    mask's arguments, int32. Rows that see no key get O = 0 and LSE = -inf. Sums are float32, and P is not rounded to the
    input type. Offsets are 64-bit: S is large.
    """
    arguments = [te.var(name) for name in MASKS[workload.mask].arguments()]
    mask, D, DV = MASKS[workload.mask](*(x.astype("int64") for x in arguments)), workload.head_dim, workload.value_dim
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
        return tirx.Select(mask.keep(mask.position(i, N, M), j, M), S[b, h, i, j] * scale, tirx.const(float("-inf"), "float32"))

    def sees_a_key(i):
        # Asked of the lengths and not of row_sum: TVM never initialises a reduction over an empty axis (M = 0).
        at = mask.position(i, N, M)
        return mask.key_end(at, M) > mask.key_begin(at, M)

    S = te.compute((B, H, N, M), lambda b, h, i, j: te.sum(
        Q[b, i, h, c].astype("float32") * K[b, j, group(h), c].astype("float32"), axis=c), name="S")
    S_masked = te.compute((B, H, N, M), masked, name="S_masked")
    # The identity of max is finite, so that P of a row that sees no key is exp(-inf) = 0 and not NaN.
    row_max = te.compute((B, H, N), lambda b, h, i: te.max(S_masked[b, h, i, j_max], axis=j_max), name="row_max")
    P = te.compute((B, H, N, M), lambda b, h, i, j: te.exp(S_masked[b, h, i, j] - row_max[b, h, i]), name="P")
    row_sum = te.compute((B, H, N), lambda b, h, i: te.sum(P[b, h, i, j_sum], axis=j_sum), name="row_sum")
    O_acc = te.compute((B, N, H, DV), lambda b, i, h, c: te.sum(
        P[b, h, i, j] * V[b, j, group(h), c].astype("float32"), axis=j), name="O_acc")
    O = te.compute((B, N, H, DV), lambda b, i, h, c: tirx.Select(
        sees_a_key(i), O_acc[b, i, h, c] / row_sum[b, h, i], tirx.const(0, "float32")).astype(workload.dtype), name="O")
    LSE = te.compute((B, H, N), lambda b, h, i: tirx.Select(
        sees_a_key(i), row_max[b, h, i] + te.log(row_sum[b, h, i]), tirx.const(float("-inf"), "float32")), name="LSE")
    return te.create_prim_func([Q, K, V, O, LSE, scale, *arguments])
