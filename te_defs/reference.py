"""NumPy float64 reference of attention, forward and backward, and the one rule that says when a kernel's answer passes."""
import ml_dtypes
import numpy as np

from te_defs.lengths import slices
from te_defs.workload import element_type as numpy_dtype


def make_inputs(workload, shape, seed=0):
    """Seeded standard-normal Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], rounded to the workload's type."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(size).astype(numpy_dtype(workload)) for size in shape.tensors(workload)[:3])


def _grouped(x, heads):
    """K or V [B, M, G, C] as each query head reads it, [B, M, H, C]."""
    return np.repeat(x, heads // x.shape[2], axis=2) if heads else x[:, :, :0]


def _of_heads(x, heads):
    """The same as [B, H, M, C]."""
    return _grouped(x, heads).swapaxes(1, 2)


def product(q, k):
    """Q K^T [B, H, N, M]."""
    return q.swapaxes(1, 2) @ _of_heads(k, q.shape[2]).swapaxes(2, 3)


def _mean(p, v):
    """P V [B, N, H, DV]."""
    return (p @ _of_heads(v, p.shape[1])).swapaxes(1, 2)


def _by_keys(p, x):
    """P^T x [B, M, H, C], of x [B, N, H, C]."""
    return (p.swapaxes(2, 3) @ x.swapaxes(1, 2)).swapaxes(1, 2)


def row_sums(x):
    """Sums [B, H, N] over the channels of x [B, N, H, C]."""
    return x.sum(axis=-1).swapaxes(1, 2)


def _sum_in_order(a, b):
    """The product [B, H, N, M] of a [B, H, N, L] and b [B, H, L, M], summed one l after the other, as a plain loop does: NumPy's own order
    rounds better than any kernel's need be. As many heads at a time as caches hold."""
    sums = np.zeros((*a.shape[:3], b.shape[3]), a.dtype)
    flat, a, b = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (sums, a, b))
    step = max(1, 2**17 // max(flat[:1].size, 1))
    for x in range(0, len(flat), step):
        part = flat[x:x + step]
        for at in range(a.shape[2]):
            part += a[x:x + step, :, at, None] * b[x:x + step, at, None]
    return sums


def _product_in_order(q, k):
    """Q K^T [B, H, N, M] in the order of `_sum_in_order`."""
    return _sum_in_order(q.swapaxes(1, 2), _of_heads(k, q.shape[2]).swapaxes(2, 3))


def _visible(workload, shape, arguments):
    """Which query sees which key, as booleans that broadcast to scores of this shape [B, H, N, M]."""
    mask, *_ = workload.modifiers(arguments)
    entries = range(shape[0]) if any(argument.kind.axes for argument in mask.arguments()) else range(1)
    return np.stack([mask.at(b).visible(*shape[2:]) for b in entries])[:, None] if entries else np.ones(shape, bool)


def _scores(workload, q, k, scale, arguments, product=product):
    """Masked scores S [B, H, N, M]: scale * Q K^T, modified, -inf where the mask hides the key."""
    s, (_, score, _) = product(q, k) * scale, workload.modifiers(arguments)
    s = s if score is None else score.applied(s, s.shape[2:])
    return np.where(_visible(workload, s.shape, arguments), s, -np.inf)


def _softmax(workload, s, arguments):
    """Unnormalised probabilities, the row sums with the sink's part, and the row maxima (0 for a row that sees nothing)."""
    *_, sink = workload.modifiers(arguments)
    row_max = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        sink = sink[np.arange(s.shape[1])].astype(s.dtype)[:, None, None]
        row_max = np.maximum(row_max, sink)
    row_max = np.where(np.isneginf(row_max), 0, row_max)
    p = np.exp(s - row_max)
    return p, p.sum(axis=-1, keepdims=True) + (0 if sink is None else np.exp(sink - row_max)), row_max


def forward(workload, q, k, v, scale=None, arguments=(), lengths=()):
    """Attention in float64: O [B, N, H, DV] and LSE [B, H, N]. A row that sees no key has O = 0 and LSE = -inf, or that of its sink.

    q [B, N, H, D], k [B, M, G, D], v [B, M, G, DV]; scale defaults to 1 / sqrt(D); arguments are the values of `workload.arguments`,
    lengths those of its lengths. With lengths, rows that belong to no batch entry are NaN.
    """
    if lengths:
        out, lse = np.full((*q.shape[:3], v.shape[3]), np.nan), np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan)
        for entry, rows, keys in slices(workload.lengths, q.shape[1], k.shape[1], lengths, q.shape[0]):
            out[entry, rows], lse[entry, :, rows] = forward(workload, q[entry, rows], k[entry, keys], v[entry, keys], scale, arguments)
        return out, lse
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = _scores(workload, q, k, q.shape[-1] ** -0.5 if scale is None else scale, arguments)
    p, row_sum, row_max = _softmax(workload, s, arguments)
    out = _mean(p / np.where(row_sum == 0, 1, row_sum), v)
    with np.errstate(divide="ignore"):
        return out, (row_max + np.log(row_sum))[..., 0]


def _summed_over_groups(x, key_heads):
    """Gradients [B, M, H, C] of what query heads read as those of key heads [B, M, G, C]."""
    b, m, h, c = x.shape
    return x.reshape(b, m, key_heads, h // key_heads if key_heads else 0, c).sum(axis=3)


def probabilities(workload, q, k, lse, scale, arguments):
    """(S with the modification, P, slope of the modification) [B, H, N, M], P from the LSE [B, H, N]."""
    raw, (_, score, _) = product(q, k) * scale, workload.modifiers(arguments)
    s = _scores(workload, q, k, scale, arguments)
    seen = ~np.isneginf(lse)[..., None]
    p = np.exp(np.where(seen, s - np.where(seen, lse[..., None], 0), -np.inf))
    return s, p, 1.0 if score is None else np.where(p > 0, score.applied_slopes(raw, raw.shape[2:]), 0)


def delta_of(dout, out, lse, dlse=None):
    """rowsum(dO * O) - dLSE [B, H, N] in float64; 0 for rows that see no key, whatever stands there."""
    return np.where(np.isneginf(lse), 0.0, row_sums(dout * out) - (0 if dlse is None else dlse.astype(np.float64)))


def backward(workload, dout, q, k, v, out, lse, scale=None, arguments=(), lengths=(), dlse=None):
    """Gradients dQ, dK, dV in float64, recomputed from the LSE (FlashAttention-2, section 2.3.2); those of the arguments are left out.

    dlse [B, H, N] is the gradient of the LSE; None: zero. Shapes as in `forward`; dK and dV of a key head are summed over its group of
    query heads. With lengths, keys past the length of their batch entry have gradients of zero, and rows of packed sequences that belong
    to none NaN.
    """
    if lengths:
        past = np.nan if workload.lengths == "packed" else 0.0
        gradients = np.full(q.shape, np.nan), np.full(k.shape, past), np.full(v.shape, past)
        for entry, rows, keys in slices(workload.lengths, q.shape[1], k.shape[1], lengths, q.shape[0]):
            found = backward(workload, dout[entry, rows], q[entry, rows], k[entry, keys], v[entry, keys], out[entry, rows],
                             lse[entry, :, rows], scale, arguments, dlse=None if dlse is None else dlse[entry, :, rows])
            for gradient, of, part in zip(gradients, (rows, keys, keys), found):
                gradient[entry, of] = part
        return gradients
    dout, q, k, v, out, lse = (x.astype(np.float64) for x in (dout, q, k, v, out, lse))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, p, slope = probabilities(workload, q, k, lse, scale, arguments)
    delta = delta_of(dout, out, lse, dlse)
    ds = p * (product(dout, v) - delta[..., None]) * slope
    dq, dk, dv = scale * _mean(ds, k), scale * _by_keys(ds, q), _by_keys(p, dout)
    return dq, *(_summed_over_groups(x, k.shape[2]) for x in (dk, dv))


def _plain(workload, q, k, v, scale, arguments):
    """(O, LSE) of the yardstick."""
    dtype = numpy_dtype(workload)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    p, row_sum, row_max = _softmax(workload, _scores(workload, q, k, scale, arguments, _product_in_order), arguments)
    row_sum -= p.sum(axis=-1, keepdims=True)  # what is left is the sink's part
    for j in range(k.shape[1]):
        row_sum += p[..., j, None]
    row_sum = np.where(row_sum == 0, 1, row_sum)
    out = _sum_in_order(p.astype(dtype).astype(np.float32), _of_heads(v, q.shape[2]))
    return (out / row_sum).swapaxes(1, 2).astype(dtype), (row_max + np.log(row_sum))[..., 0]


def plain(workload, q, k, v, scale=None, arguments=()):
    """The yardstick: plain attention that reads the input type, sums in float32, in order, and rounds P and O to the input type."""
    return _plain(workload, q, k, v, scale, arguments)[0]


def _errors_of_rounding(workload, q, k, v, out, scale, arguments):
    """Errors of O [B, N, H, DV] and LSE [B, H, N] to first order, where float32 rounds each step once: the sums of a score and of O by
    the sum of their products' magnitudes, the scaled score, its distance from the row's maximum, P (twice: no exponential is better
    than to one unit), P times a value, and four steps of a score modification. By errors of the scores O is off by the sum over keys of
    p * off * (v - O), which Cauchy and Schwarz bound by two sums of products."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale, step = q.shape[-1] ** -0.5 if scale is None else scale, np.finfo(np.float32).eps / 2
    s = _scores(workload, q, k, scale, arguments)
    p, row_sum, row_max = _softmax(workload, s, arguments)
    p /= np.where(row_sum == 0, 1, row_sum)
    steps = 5 if workload.score else 1
    off = step * (abs(scale) * product(abs(q), abs(k)) + np.where(np.isneginf(s), 0, steps * abs(s) + abs(s - row_max)) + 2)
    spread = np.sqrt(np.maximum(_mean(p, v**2) - out**2, 0))
    by_scores = np.sqrt((p * off**2).sum(axis=-1)).swapaxes(1, 2)[..., None] * spread
    return by_scores + 2 * step * _mean(p, abs(v)), (p * off).sum(axis=-1)


#: LSE is float32 whatever the inputs are: it may be off by so much more than twice its yardstick.
LSE_TOLERANCE = 2e-5


def tolerances(workload, q, k, v, scale=None, arguments=(), answers=None, lengths=(), yardstick=True):
    """(largest error that O may have, largest error of LSE relative to the size of LSE but at least absolute).

    That of O is twice that of `plain` on the same inputs plus one rounding step of the output type, that of LSE twice that of `plain` plus
    LSE_TOLERANCE. Where few scores matter `plain` may round well by luck: what rounding does anyhow is allowed in any case.

    answers    (O, LSE) in float64, where they are already known
    lengths    the arguments of the workload's lengths; the largest errors of all batch entries
    yardstick  False: without `plain`, which takes most of the time; what is allowed in any case
    """
    if lengths:
        out, lse = forward(workload, q, k, v, scale, arguments, lengths) if answers is None else answers
        parts = [((q[entry, rows], k[entry, keys], v[entry, keys]), (out[entry, rows], lse[entry, :, rows]))
                 for entry, rows, keys in slices(workload.lengths, q.shape[1], k.shape[1], lengths, q.shape[0])]
        bounds = [tolerances(workload, *inputs, scale, arguments, found, yardstick=yardstick) for inputs, found in parts]
        return tuple(max(bound) for bound in zip((0.0, LSE_TOLERANCE), *bounds))
    out, lse = forward(workload, q, k, v, scale, arguments) if answers is None else answers
    if out.size == 0:
        return 0.0, LSE_TOLERANCE
    of_out, lse_error = _errors_of_rounding(workload, q, k, v, out, scale, arguments)
    error, seen = of_out.max(), ~np.isneginf(lse)
    lse = np.where(seen, lse, 0)
    if yardstick:
        plain_out, plain_lse = _plain(workload, q, k, v, scale, arguments)
        error = max(2 * np.abs(plain_out.astype(np.float64) - out).max(), error)
        lse_error = np.maximum(2 * np.abs(plain_lse - lse), lse_error)
    lse_error = (lse_error / np.maximum(np.abs(lse), 1)).max(initial=0, where=seen)
    return float(error + ml_dtypes.finfo(numpy_dtype(workload)).eps * np.abs(out).max()), LSE_TOLERANCE + float(lse_error)


def mismatch(out, lse, answer, lse_answer, bound, lse_bound=LSE_TOLERANCE):
    """None where (out, lse) pass, else one sentence that says where they are furthest off. The only judge of results.

    bound and lse_bound are the `tolerances` of the same inputs. Rows without keys must be exactly 0 and -inf.
    """
    if out.size == 0:
        return None
    error = np.abs(np.nan_to_num(out.astype(np.float64), nan=np.inf) - answer)
    if not error.max() <= bound:
        at = tuple(int(x) for x in np.unravel_index(error.argmax(), error.shape))
        return f"O{list(at)} is {float(out[at]):.6g} where {answer[at]:.6g} is right: error {error[at]:.2e} exceeds {bound:.2e}"
    dead = np.isneginf(lse_answer)
    if not (np.isneginf(lse[dead]).all() and not out.swapaxes(1, 2)[dead].any()):
        return "a row that sees no key must have O = 0 and LSE = -inf, and has something else"
    error = np.abs(np.nan_to_num(lse[~dead].astype(np.float64), nan=np.inf) - lse_answer[~dead])
    allowed = lse_bound * np.maximum(np.abs(lse_answer[~dead]), 1)
    if not (error <= allowed).all():
        worst = (error - allowed).argmax()
        return f"LSE is {lse[~dead][worst]:.6g} where {lse_answer[~dead][worst]:.6g} is right"
    return None


def cheapest_first(judge):
    """What judge(yardstick) says of answers. The yardstick, which can but allow more, is only computed for what is not allowed in any
    case."""
    return judge(False) and judge(True)


def complaint(found, workload, q, k, v, scale, arguments, answers, lengths=()):
    """`mismatch` of found (O, LSE) by the `tolerances` of the inputs that they are of."""
    return cheapest_first(lambda yardstick: mismatch(
        *found, *answers, *tolerances(workload, q, k, v, scale, arguments, answers, lengths, yardstick)))


def backward_case(workload, dout, q, k, v, scale=None, arguments=(), lengths=(), dlse=None):
    """((dO, Q, K, V, O, LSE) as a backward function takes them, contiguous and rounded; (dQ, dK, dV) and LSE in float64)."""
    out, lse = forward(workload, q, k, v, scale, arguments, lengths)
    answers = backward(workload, dout, q, k, v, out, lse, scale, arguments, lengths, dlse)
    return tuple(map(np.ascontiguousarray, (dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)))), answers, lse


def plain_backward(workload, dout, q, k, v, scale=None, arguments=(), dlse=None):
    """The yardstick of gradients: plain attention that reads the input type, its O and LSE, and sums in float32, in order; P, dS and the
    gradients are rounded to the input type."""
    dtype = numpy_dtype(workload)
    out, lse = _plain(workload, q, k, v, scale, arguments)
    dout, q, k, v, out = (x.astype(np.float32) for x in (dout, q, k, v, out))
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    raw, (_, score, _) = _product_in_order(q, k) * scale, workload.modifiers(arguments)
    s = _scores(workload, q, k, scale, arguments, _product_in_order)
    p = np.exp(np.where(np.isneginf(s), s, s - np.where(np.isneginf(lse), 0, lse)[..., None]))
    # From the last channel on, as dP is not: where they cancel, a row that sees one key, equal orders would leave no error by luck.
    delta = np.cumsum((dout * out)[..., ::-1], axis=-1)[..., -1].swapaxes(1, 2) - (np.float32(0) if dlse is None else dlse)
    ds = p * (_product_in_order(dout, v) - delta[..., None])
    ds = ds if score is None else np.where(p > 0, ds * score.applied_slopes(raw, raw.shape[2:]), 0)
    p, ds = (x.astype(dtype).astype(np.float32) for x in (p, ds))
    dq, dk, dv = (_sum_in_order(rows, x).swapaxes(1, 2) for rows, x in (
        (ds, _of_heads(k, q.shape[2])), (ds.swapaxes(2, 3), q.swapaxes(1, 2)), (p.swapaxes(2, 3), dout.swapaxes(1, 2))))
    return tuple(x.astype(dtype) for x in (dq * scale, _summed_over_groups(dk, k.shape[2]) * scale, _summed_over_groups(dv, k.shape[2])))


def errors_of_scores(workload, dout, q, k, v, scale, arguments, dlse, cast=0.0):
    """(P, slope of the modification, dP - delta [B, H, N, M]; relative errors of P, errors of dP, of delta [B, H, N, 1]; the relative error
    that all may have in common) to first order, where each step is rounded once: scores and P as in `_errors_of_rounding`, scores and the
    LSE three times, since kernels change to base 2, sums by their products' magnitudes, and O by `cast` of itself."""
    out, lse = forward(workload, q, k, v, scale, arguments)
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    step = np.finfo(np.float32).eps / 2
    s, p, slope = probabilities(workload, q, k, lse, scale, arguments)
    s, lse = np.where(p > 0, s, 0), np.where(np.isneginf(lse), 0, lse)[..., None]
    steps, common = 7 if workload.score else 3, 3 * step * abs(lse).max(initial=0)
    off = step * (abs(scale) * product(abs(q), abs(k)) + steps * abs(s) + 3 * abs(lse) + abs(s - lse) + 2)
    of_delta = step * row_sums(abs(dout * out)) + cast * np.sqrt(row_sums((dout * out)**2))
    dlse = np.zeros(of_delta.shape) if dlse is None else dlse.astype(np.float64)
    of_delta = (of_delta + step * abs(dlse))[..., None]
    through = product(dout, v) - (row_sums(dout * out) - dlse)[..., None]
    return p, slope, through, off, step * product(abs(dout), abs(v)), of_delta, common


def _backward_errors_of_rounding(workload, dout, q, k, v, scale, arguments, answers, dlse):
    """Errors of dQ, dK, dV to first order, by those of the scores, with P, dS and O rounded to the input type. Errors of single scores add
    up like chance, that of delta along its row; those of the base may be the same in all rows."""
    cast = 0 if workload.dtype == "float32" else ml_dtypes.finfo(numpy_dtype(workload)).eps / 2
    scale, step = q.shape[-1] ** -0.5 if scale is None else scale, np.finfo(np.float32).eps / 2
    p, slope, through, off, of_dp, of_delta, common = errors_of_scores(workload, dout, q, k, v, scale, arguments, dlse, cast)
    off, slope = off + cast, abs(slope)
    dout, q, k = (x.astype(np.float64) for x in (dout, q, k))
    ds = abs(p * slope * through)
    of_ds = (ds * off + p * slope * of_dp)**2
    dq = np.sqrt(_mean(of_ds, k**2)) + step * _mean(ds, abs(k))
    dq += of_delta.swapaxes(1, 2) * abs(_mean(p * slope, k))
    dk = np.sqrt(_by_keys(of_ds + (p * slope * of_delta)**2, q**2)) + step * _by_keys(ds, abs(q))
    dv = np.sqrt(_by_keys((p * off)**2, dout**2)) + step * _by_keys(p, abs(dout))
    errors = abs(scale) * dq, abs(scale) * _summed_over_groups(dk, k.shape[2]), _summed_over_groups(dv, k.shape[2])
    return [error + common * abs(answer) for error, answer in zip(errors, answers)]


def backward_tolerances(workload, dout, q, k, v, answers, scale=None, arguments=(), lengths=(), dlse=None, yardstick=True):
    """Largest errors that dQ, dK and dV may have, in the spirit of `tolerances`: twice that of `plain_backward` on the same inputs, or what
    rounding does anyhow, plus one rounding step of the output type.

    answers    (dQ, dK, dV) in float64
    yardstick  False: without `plain_backward`, which takes most of the time; what is allowed in any case
    """
    if lengths:
        parts = [backward_tolerances(workload, dout[entry, rows], q[entry, rows], k[entry, keys], v[entry, keys],
                                     [x[entry, of] for x, of in zip(answers, (rows, keys, keys))], scale, arguments,
                                     dlse=None if dlse is None else dlse[entry, :, rows], yardstick=yardstick)
                 for entry, rows, keys in slices(workload.lengths, q.shape[1], k.shape[1], lengths, q.shape[0])]
        return tuple(max(bound) for bound in zip((0.0, 0.0, 0.0), *parts))
    kind = ml_dtypes.finfo(numpy_dtype(workload))
    errors = zip(answers, plain_backward(workload, dout, q, k, v, scale, arguments, dlse) if yardstick else answers,
                 _backward_errors_of_rounding(workload, dout, q, k, v, scale, arguments, answers, dlse))
    return tuple(max(2 * np.abs(plain.astype(np.float64) - answer).max(initial=0), rounding.max(initial=0))
                 + float(kind.eps) * np.abs(answer).max(initial=0) + float(kind.smallest_subnormal) for answer, plain, rounding in errors)


def backward_mismatch(gradients, answers, bounds, lse):
    """None where gradients (dQ, dK, dV) pass, else one sentence. bounds are the `backward_tolerances`, lse [B, H, N] that of the forward
    pass: rows without keys must have dQ = 0 exactly. Elements whose answer is NaN may be anything."""
    for name, found, answer, bound in zip(("dQ", "dK", "dV"), gradients, answers, bounds):
        error = np.where(np.isnan(answer), 0, np.abs(np.nan_to_num(found.astype(np.float64), nan=np.inf) - answer))
        if not error.max(initial=0) <= bound:
            at = tuple(int(x) for x in np.unravel_index(error.argmax(), error.shape))
            return f"{name}{list(at)} is {float(found[at]):.6g} where {answer[at]:.6g} is right: error {error[at]:.2e} exceeds {bound:.2e}"
    if np.any(gradients[0].swapaxes(1, 2)[np.isneginf(lse)]):
        return "a row that sees no key must have dQ = 0, and has something else"
    return None


def backward_complaint(gradients, workload, dout, q, k, v, scale, arguments, answers, lse, lengths=(), dlse=None):
    """`backward_mismatch` of gradients (dQ, dK, dV) by the `backward_tolerances` of the inputs that they are of.

    answers, lse  (dQ, dK, dV) and the LSE [B, H, N] in float64
    """
    return cheapest_first(lambda yardstick: backward_mismatch(gradients, answers, backward_tolerances(
        workload, dout, q, k, v, answers, scale, arguments, lengths, dlse, yardstick), lse))
