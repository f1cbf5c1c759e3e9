"""What a user writes beside the project: a mask of their own, score functions, and some that are wrong."""
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from te_defs.arguments import COUNT, PER_HEAD, tensor
from te_defs.integers import both, divide, maximum, minimum
from te_defs.masks import Causal, Mask
from te_defs.scores import Score

IDS = tensor("BM", "int32")


@dataclass(frozen=True)
class DocumentCausal(Causal):
    """Causal inside documents: a query sees the keys up to its own position whose document is its own."""

    exact = False
    documents: IDS

    @classmethod
    def draw(cls, name, size, rng):
        return np.sort(rng.integers(0, 4, size))

    def keep(self, i, j, kv_len):
        return both(j <= i, self.documents[i] == self.documents[j])


@dataclass(frozen=True)
class CausalFromItsOwn(Causal):
    """Causal, with a statement of its own which queries see a key."""

    def query_begin(self, j, q_len, kv_len):
        return super().query_begin(j, q_len, kv_len)


@dataclass(frozen=True)
class FactorsAndRows(Score):
    """Scores times a factor of the head's own, read twice, and a term of the row's own, whose axes are turned."""

    name = "factors_and_rows"
    factors: PER_HEAD
    rows: tensor("NB", "float32")
    marks: tensor("M", "int32")

    def modify(self, s, b, h, i, j, q_len, kv_len):
        of_key, mark = (j % 5).astype("float32"), self.marks[j].astype("float32")
        return s * self.factors[h] * self.factors[h] + tirx.exp(self.rows[i, b]) * of_key + mark


@dataclass(frozen=True)
class ReadsAhead(Score):
    name = "reads_ahead"
    terms: tensor("M", "float32")

    def modify(self, s, b, h, i, j, q_len, kv_len):
        return s + self.terms[j + 1]


def halved_far_away(s, b, h, i, j):
    """Half of the score where key and query are more than 20 rows apart, in heads with an even number."""
    return tirx.Select(tirx.And(h % 2 == 0, tirx.abs(i - j) > 20), s * tirx.const(0.5, "float32"), s)


def by_distance(s, b, h, i, j):
    return s + ((i - j) // 3).astype("float32")


def by_remainder(s, b, h, i, j):
    return s - ((i - j) % 3).astype("float32")


def without_scores(s, b, h, i, j):
    return tirx.const(0, "float32") - tirx.abs((i - j).astype("float32"))


class KeepsNumbers(Causal):
    def keep(self, i, j, kv_len):
        return 5


class AsksPython(Causal):
    def keep(self, i, j, kv_len):
        return j <= i if j < 3 else j < 9


@dataclass(frozen=True)
class OfNoKind(Causal):
    reach: int


@dataclass(frozen=True)
class WithoutSamples(Causal):
    reach: COUNT


def raises(s, b, h, i, j):
    raise RuntimeError("out of paper")


def returns_half_precision(s, b, h, i, j):
    return s.astype("float16")


def returns_nothing(s, b, h, i, j):
    return None


def takes_too_little(s):
    return s


NUMBER = 3


@dataclass(frozen=True)
class Chunks(Mask):
    """A query sees the keys of its own chunk of 24. Which queries see a key is left to what masks derive."""

    from_start = False

    def key_begin(self, i, kv_len):
        return minimum(divide(maximum(i, 0), 24) * 24, kv_len)

    def key_end(self, i, kv_len):
        return minimum(divide(maximum(i, 0), 24) * 24 + 24, kv_len)

    def keep(self, i, j, kv_len):
        return both(j >= self.key_begin(i, kv_len), j < self.key_end(i, kv_len))


class ForgetsItsQueries(Causal):
    """Sees one key more than a causal mask, and says of queries what that one says."""

    def keep(self, i, j, kv_len):
        return both(j <= i + 1, j < kv_len)

    def key_end(self, i, kv_len):
        return maximum(minimum(i + 2, kv_len), 0)
