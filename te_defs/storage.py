"""Where the elements of Q, K, V and O lie in memory: contiguous tensors, and the views that users make of others."""
import math
from dataclasses import dataclass, replace

from numpy.lib.stride_tricks import as_strided

#: contiguous; bhnd, a head's rows one after the other; fused, slices of what one projection made of Q, K and V, or of K and V where these
#: have a length of their own; padded, slices of tensors that are larger along every axis.
STORAGES = ("contiguous", "bhnd", "fused", "padded")
#: Inputs whose batch entries, or heads, are one in memory, by the axis whose stride is 0.
EXPANDED = {"one_entry": 0, "one_head": 2}


@dataclass(frozen=True)
class View:
    """A tensor [batch, rows, heads, channels] in a flat buffer: number of the buffer, first element, shape, and strides in elements."""

    buffer: int
    first: int
    shape: tuple
    strides: tuple

    def without_batch(self):
        """The only batch entry of the view."""
        return replace(self, shape=self.shape[1:], strides=self.strides[1:])

    def of(self, array):
        """The view of a flat NumPy array."""
        return as_strided(array[self.first:], self.shape, [stride * array.itemsize for stride in self.strides])


def views(storage, shapes):
    """([View of q, k, v and out], [size of each buffer]) of tensors of these four shapes, in one of STORAGES or EXPANDED."""
    if storage == "fused":
        return _fused(*shapes)
    if storage in EXPANDED:
        return _expanded(EXPANDED[storage], shapes)
    placed, sizes = [], []
    for number, (b, n, h, d) in enumerate(shapes):
        whole = {"contiguous": (b, n, h, d), "bhnd": (b, h, n, d), "padded": (b, n + 1, h + 2, d + 8)}[storage]
        batch, outer, inner, channel = (math.prod(whole[axis:]) for axis in range(1, 5))
        rows = (inner, outer) if storage == "bhnd" else (outer, inner)
        placed.append(View(number, 0, (b, n, h, d), (batch, *rows, channel)))
        sizes.append(math.prod(whole))
    return placed, sizes


def _expanded(axis, shapes):
    *inputs, out = shapes
    placed, sizes = views("contiguous", [(*shape[:axis], min(shape[axis], 1), *shape[axis + 1:]) for shape in inputs] + [out])
    for number, shape in enumerate(inputs):
        strides = placed[number].strides
        placed[number] = View(number, 0, shape, (*strides[:axis], 0, *strides[axis + 1:]))
    return placed, sizes


def _fused(q, k, v, out):
    placed, sizes = [], []
    for group in ((q, k, v), (out,)) if q[1] == k[1] else ((q,), (k, v), (out,)):
        row, first = sum(h * d for _, _, h, d in group), 0
        b, n, *_ = group[0]
        for shape in group:
            placed.append(View(len(sizes), first if b * n else 0, shape, (n * row, row, shape[3], 1)))
            first += shape[2] * shape[3]
        sizes.append(b * n * row)
    return placed, sizes
