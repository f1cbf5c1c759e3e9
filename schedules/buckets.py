"""Buckets: the lengths that plans were tuned at, and which of them a call is nearest to."""
import re
from dataclasses import dataclass
from fractions import Fraction

#: Largest length of a bucket, and of a call that a kernel takes (MOST_ROWS of schedules/artefact/call.h).
MOST_ROWS = 10**9

_TEXT = re.compile(r"([1-9][0-9]{0,9})(?:x([1-9][0-9]{0,9}))?", re.ASCII)


@dataclass(frozen=True)
class Bucket:
    """Query rows and key rows of the calls that a plan was tuned at, from 1 to MOST_ROWS; ValueError for others."""

    q_len: int
    kv_len: int

    def __post_init__(self):
        if not 0 < min(self.q_len, self.kv_len) <= max(self.q_len, self.kv_len) <= MOST_ROWS:
            raise ValueError(f"query rows and key rows from 1 to 10^9 are wanted, found {self}")

    def __str__(self):
        return f"{self.q_len}x{self.kv_len}"

    @property
    def size(self):
        """What orders buckets: the larger one has more scores, of as many scores more queries."""
        return self.q_len * self.kv_len, self.q_len


def bucket_at(shape):
    """The Bucket of a te_defs.workload.Shape that was timed."""
    return Bucket(shape.q_len, shape.kv_len)


def bucket_named(text):
    """The Bucket of a text such as 1x8192, or 512 for queries and keys alike; ValueError where it is none."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"lengths are wanted as query rows x key rows, such as 1x8192, or 512 for both, found {text!r}")
    return Bucket(*map(int, found.groups(found[1])))


def nearest(buckets, q_len, kv_len):
    """Which of some buckets a call with so many query rows and key rows is nearest to: abs(log2(q_len / bucket's)) plus the same of kv_len
    is least; of equally near ones the larger. Lengths below 1 count as 1, those above MOST_ROWS as that.

    Artefacts choose by the same rule (schedules/artefact/buckets.h), as exactly: by the product of the two ratios, without logarithms.
    """
    lengths = [min(max(length, 1), MOST_ROWS) for length in (q_len, kv_len)]

    def distance(bucket):
        product = Fraction(1)
        for length, other in zip(lengths, (bucket.q_len, bucket.kv_len)):
            product *= Fraction(max(length, other), min(length, other))
        return product
    return min(buckets, key=lambda bucket: (distance(bucket), *(-number for number in bucket.size)))
