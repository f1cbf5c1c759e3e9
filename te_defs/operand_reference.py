"""NumPy float64 reference of the gradients of tensors behind the scale, and how far off a kernel's may be; beside te_defs/reference.py."""
import ml_dtypes
import numpy as np

from te_defs.lengths import slices
from te_defs.reference import delta_of, errors_of_scores, forward, probabilities, product, row_sums
from te_defs.workload import SINK


def gradient_of(workload, name, dout, q, k, v, out, lse, scale=None, arguments=(), lengths=(), dlse=None):
    """Gradient of the argument `name` in float64, of its shape; everything else as in te_defs.reference.backward."""
    axes, operand = _operand(workload, name, arguments)
    if lengths:
        return sum((gradient_of(workload, name, *part, scale, arguments, dlse=of_lse)
                    for *part, of_lse in _entries(workload, lengths, dout, q, k, v, out, lse, dlse)), np.zeros(operand.shape))
    dout, q, k, v, out, lse = (x.astype(np.float64) for x in (dout, q, k, v, out, lse))
    delta = delta_of(dout, out, lse, dlse)
    if name == SINK.name:
        return _folded(-_share(operand, lse) * delta[..., None], axes, operand)
    p, slope = _slopes(workload, name, q, k, lse, scale, arguments)
    return _folded(p * (product(dout, v) - delta[..., None]) * slope, axes, operand)


def tolerance(workload, name, dout, q, k, v, answer, scale=None, arguments=(), lengths=(), dlse=None):
    """Largest error that the gradient of an argument may have: twice what rounding does to first order, for want of a yardstick, plus one
    rounding step of its type.

    answer  the gradient in float64
    """
    out, lse = forward(workload, q, k, v, scale, arguments, lengths)
    parts = _entries(workload, lengths, dout, q, k, v, out, lse, dlse) if lengths else [(dout, q, k, v, out, lse, dlse)]
    error = sum(_rounding(workload, name, *part, scale, arguments).max(initial=0) for part in parts)
    kind = ml_dtypes.finfo(_operand(workload, name, arguments)[1].dtype)
    return float(2 * error + float(kind.eps) * np.abs(answer).max(initial=0) + float(kind.smallest_subnormal))


def mismatch(name, found, answer, bound):
    """None where the gradient of an argument passes, else one sentence; bound is its `tolerance`."""
    error = np.abs(np.nan_to_num(found.astype(np.float64), nan=np.inf) - answer)
    if error.max(initial=0) <= bound:
        return None
    at = tuple(int(x) for x in np.unravel_index(error.argmax(), error.shape))
    return f"d{name}{list(at)} is {float(found[at]):.6g} where {answer[at]:.6g} is right: error {error[at]:.2e} exceeds {bound:.2e}"


def _entries(workload, lengths, dout, q, k, v, out, lse, dlse):
    """What each batch entry has of the tensors."""
    return [(dout[entry, rows], q[entry, rows], k[entry, keys], v[entry, keys], out[entry, rows], lse[entry, :, rows],
             None if dlse is None else dlse[entry, :, rows])
            for entry, rows, keys in slices(workload.lengths, q.shape[1], k.shape[1], lengths, q.shape[0])]


def _operand(workload, name, arguments):
    """(axes, array) of an argument."""
    return next((argument.kind.axes, value) for argument, value in zip(workload.arguments, arguments) if argument.name == name)


def _folded(terms, axes, operand):
    """Terms [B, H, N, M] summed as an operand with these axes, of which some may have size one, is read."""
    sums = np.einsum(f"BHNM->{axes}", terms)
    return sums.sum(axis=tuple(axis for axis, size in enumerate(operand.shape) if size == 1), keepdims=True)


def _share(sink, lse):
    """What the sinks have of each row's softmax, [B, H, N, 1]."""
    seen = ~np.isneginf(lse)
    sink = np.broadcast_to(sink, lse.shape[1])[:, None].astype(np.float64)
    return np.exp(np.where(seen, sink - np.where(seen, lse, 0), -np.inf))[..., None]


def _slopes(workload, name, q, k, lse, scale, arguments):
    """(P, slopes of the modified scores by the elements of an operand) [B, H, N, M]."""
    scale, (_, score, _) = q.shape[-1] ** -0.5 if scale is None else scale, workload.modifiers(arguments)
    raw, (_, p, _) = product(q, k) * scale, probabilities(workload, q, k, lse, scale, arguments)
    return p, np.where(p > 0, score.applied_slopes_of(name, raw, raw.shape[2:]), 0)


def _rounding(workload, name, dout, q, k, v, out, lse, dlse, scale, arguments):
    """Errors of the gradient of an argument to first order: those of single scores add up like chance, and so do those of rows, by delta
    and the LSE; sums are off by their terms' magnitudes, and the base by the same in all rows."""
    axes, operand = _operand(workload, name, arguments)
    scale, step = q.shape[-1] ** -0.5 if scale is None else scale, np.finfo(np.float32).eps / 2
    p, _, through, off, of_through, of_delta, common = errors_of_scores(workload, dout, q, k, v, scale, arguments, dlse)
    known = np.where(np.isneginf(lse), 0, lse)[..., None]
    if name == SINK.name:
        delta = row_sums(dout.astype(np.float64) * out) - (0 if dlse is None else dlse)
        weights, through, of_through, off = _share(operand, lse), -delta[..., None], 0.0, 2 * step
    else:
        p, slope = _slopes(workload, name, *(x.astype(np.float64) for x in (q, k)), lse, scale, arguments)
        weights = p * slope
    terms, keys = weights * through, "M" not in axes or operand.shape[axes.index("M")] == 1

    def along(x):
        return x.sum(axis=-1, keepdims=True) if keys else x
    of_scores = (abs(terms) * off + abs(weights) * of_through)**2
    of_rows = (of_delta * abs(along(weights)) + 4 * step * abs(known * along(terms)))**2
    chance = np.sqrt(_folded(of_scores, axes, operand) + _folded(of_rows, axes, operand))
    return chance + step * _folded(abs(terms), axes, operand) + common * abs(_folded(terms, axes, operand))
