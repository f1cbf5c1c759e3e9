"""Masks: which keys a query row sees. One class serves the kernel, the reference and the operation count.

A mask is an instance of its class; the fields, if any, arrive with each call (te_defs/arguments.py), and so may be TIR variables. `j` is a
key row. `i` is what `position` makes of a query's index: for most masks it counts from the aligned diagonal, so that the last query
stands on the last key; it is negative for the first rows where N > M, and must not be divided. All methods take Python's integers,
NumPy's arrays and TIR expressions alike.

A mask shows each row one range of keys, whose two ends never go back from row to row: row i sees key j exactly where
key_begin(i) <= j < key_end(i). The kernels rely on it: key tiles before the first row's begin and from the last row's end on are
skipped, and those that all rows see whole run without mask code. A mask that is not `exact` hides keys inside that range as well: then
no tile runs without mask code.

The backward pass asks the other way round: query i has key j in its range exactly where query_begin(j) <= i < query_end(j). These are
queries' own indices, and never go back from key to key either. A mask that does not state them is right as well, but no query tile is
skipped then.
"""
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tvm
from tvm import tirx

from te_defs.arguments import COUNT, Modifier, ModifierError, Operand, find, parameter, require_kinds
from te_defs.integers import both, counted, less, maximum, minimum


@dataclass(frozen=True)
class Mask(Modifier):
    """What masks have in common.

    from_start  whether every row sees its keys from the first one on: kernels then leave out what the other end would cost
    exact       whether a row sees every key of its range
    """

    name: ClassVar[str]
    from_start: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def at(self, b):
        """The mask of batch entry b: its tensors, whose first axis is "B", are then indexed by what follows alone."""
        return type(self)(*(value.at(b) if isinstance(value, Operand) else value for value in vars(self).values()))

    def position(self, i, q_len, kv_len):
        """What stands for query row i in the other methods: its place on the diagonal that ends with the last query and the last key."""
        return i + kv_len - q_len

    def keep(self, i, j, kv_len):
        """Whether row i, which must be one that exists, sees key j, which may lie past the end; as it stands for masks from the start."""
        return j < self.key_end(i, kv_len)

    def key_begin(self, i, kv_len):
        """The first key that row i may see, from 0 to kv_len."""
        return 0

    def key_end(self, i, kv_len):
        """One past the last key that row i may see, from 0 to kv_len; at or before key_begin where it sees none."""
        raise NotImplementedError

    def query_begin(self, j, q_len, kv_len):
        """The first query that may see key j, which must be one that exists: from 0 to q_len."""
        return 0

    def query_end(self, j, q_len, kv_len):
        """One past the last query that may see key j, from 0 to q_len; at or before query_begin where none does."""
        return q_len

    @property
    def knows_queries(self):
        """Whether the class states which queries see a key."""
        return type(self).query_begin is not Mask.query_begin

    def visible(self, q_len, kv_len):
        """Which query sees which key: booleans [q_len, kv_len]."""
        if q_len * kv_len == 0:
            return np.zeros((q_len, kv_len), bool)
        i = self.position(np.arange(q_len)[:, None], q_len, kv_len)
        return np.broadcast_to(self.keep(i, np.arange(kv_len)[None, :], kv_len), (q_len, kv_len))

    def kept(self, q_len, kv_len):
        """Number of (query, key) pairs that are kept; of one that is not exact, those in the ranges."""
        i = self.position(np.arange(q_len), q_len, kv_len)
        return int(np.maximum(np.broadcast_to(self.key_end(i, kv_len) - self.key_begin(i, kv_len), (q_len,)), 0).sum())


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    name = "full"

    def key_end(self, i, kv_len):
        return kv_len

    def query_begin(self, j, q_len, kv_len):
        return 0


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys up to its own position; aligned bottom-right when the lengths differ."""

    name = "causal"

    def keep(self, i, j, kv_len):
        return j <= i  # and so j < kv_len, since the last row stands on the last key

    def key_end(self, i, kv_len):
        return maximum(minimum(i + 1, kv_len), 0)

    def query_begin(self, j, q_len, kv_len):
        return maximum(j + q_len - kv_len, 0)


@dataclass(frozen=True)
class CausalTopLeft(Mask):
    """The same aligned top-left: query i sees the keys up to i, whatever the lengths are."""

    name = "causal_top_left"

    def position(self, i, q_len, kv_len):
        return i

    def key_end(self, i, kv_len):
        return minimum(i + 1, kv_len)

    def query_begin(self, j, q_len, kv_len):
        return minimum(j, q_len)


@dataclass(frozen=True)
class Window(Mask):
    """A sliding window: a query sees `left` keys before its own position and `right` behind it; with right = 0 it is causal."""

    name = "window"
    from_start = False
    samples = ((1023, 0), (0, 0), (16, 3), (5, 90), (70, 0), (100, 100), (1 << 20, 1 << 20))
    left: COUNT
    right: COUNT

    def keep(self, i, j, kv_len):
        return both(j >= i - self.left, j < self.key_end(i, kv_len))

    def key_begin(self, i, kv_len):
        return minimum(maximum(i - self.left, 0), kv_len)

    def key_end(self, i, kv_len):
        return maximum(minimum(i + self.right + 1, kv_len), 0)

    def query_begin(self, j, q_len, kv_len):
        return maximum(j + q_len - kv_len - self.right, 0)

    def query_end(self, j, q_len, kv_len):
        return maximum(minimum(j + q_len - kv_len + self.left + 1, q_len), 0)


@dataclass(frozen=True)
class Prefix(Mask):
    """Causal but for the first `prefix` keys, which every query sees (as in prefix language models)."""

    name = "prefix"
    samples = ((256,), (0,), (1,), (50,), (1 << 20,))
    prefix: COUNT

    def key_end(self, i, kv_len):
        return minimum(maximum(i + 1, self.prefix), kv_len)

    def query_begin(self, j, q_len, kv_len):
        # Not as a choice, which TVM would take for a range of queries.
        return maximum(j + q_len - kv_len, 0) * counted(less(self.prefix, j + 1))


def find_mask(name):
    """Class of a mask, by its name in MASKS or as `module:class`; ModifierError where there is none."""
    found = find("mask", MASKS, name, "module:class")
    if not (isinstance(found, type) and issubclass(found, Mask)):
        raise ModifierError(f"a mask is a class of te_defs.masks.Mask, found {name} to be something else: correct it")
    return found


def _ranges_agree(mask):
    """Whether a mask class states the same pairs of queries and keys from either side, on a few short lengths."""
    for n, m in ((5, 9), (9, 5)):
        values = mask.make(mask.samples[0], {"B": 1, "H": 1, "N": n, "M": m}, np.dtype("float32"), np.random.default_rng(0))
        mine, (i, j) = mask.of(values).at(0), np.ogrid[:n, :m]
        at = mine.position(i, n, m)
        by_keys = (mine.key_begin(at, m) <= j) & (j < mine.key_end(at, m))
        by_queries = (mine.query_begin(j, n, m) <= i) & (i < mine.query_end(j, n, m))
        if np.any(by_keys != by_queries if mine.knows_queries else by_keys > by_queries):
            return False
    return True


def prove(mask, name):
    """ModifierError where a mask class, of this name, raises on expressions or keeps by something else than a condition."""
    require_kinds(mask, name)
    arguments = [parameter(argument, "float16") for argument in mask.arguments()]
    i, j, n, m = (tirx.Var(size, "int32") for size in "ijnm")
    try:
        mine = mask.of(arguments).at(tirx.Var("b", "int32"))
        found = mine.keep(mine.position(i, n, m), j, m)
        ends = mine.key_begin(i, m) + 0, mine.key_end(i, m) + 0
    except Exception as reason:
        raise ModifierError(f"mask {name} must take TIR expressions, and raised {type(reason).__name__}: {reason}: correct it") from reason
    kinds = [str(value.ty) if isinstance(value, tvm.ir.Expr) else type(value).__name__ for value in (found, *ends)]
    if kinds[0] != "bool" or not {*kinds[1:]} <= {"int32", "int"}:
        raise ModifierError(f"mask {name} must keep by a condition and end at rows, found {', '.join(kinds)}: correct it")
    if not _ranges_agree(mask):
        raise ModifierError(f"mask {name} must see by query_begin and query_end what it sees by key_begin and key_end, found them to "
                            "differ: state both, or derive it from Mask and state neither")


MASKS = {mask.name: mask for mask in (Full, Causal, CausalTopLeft, Window, Prefix)}
