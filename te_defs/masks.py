"""Masks: which keys a query row sees. One class serves the kernel, the reference and the operation count.

`i` is a query row counted from the aligned diagonal, that is query index + M - N, so that the last query stands on the last key; it is
negative for the first rows where N > M, and must not be divided. `j` is a key row. The methods take Python integers, NumPy arrays and TIR
expressions alike.

A mask shows each row a prefix of the keys, one that never shrinks from row to row: row i sees key j exactly where j < key_end(i). The
kernels rely on it: tiles before the first row's key_end run without mask code, tiles from the last row's key_end on are skipped.
"""
from tvm import tirx


class Full:
    """Every query sees every key."""

    name = "full"

    @staticmethod
    def keep(i, j, kv_len):
        """Whether row i, which must be one that exists, sees key j, which may lie past the end."""
        return j < kv_len

    @staticmethod
    def key_end(i, kv_len):
        """One past the last key that row i may see."""
        return kv_len

    @staticmethod
    def kept(q_len, kv_len):
        """Number of (query, key) pairs that are kept."""
        return q_len * kv_len


class Causal:
    """A query sees the keys up to its own position; aligned bottom-right when the lengths differ."""

    name = "causal"

    @staticmethod
    def keep(i, j, kv_len):
        return j <= i  # and so j < kv_len, since the last row stands on the last key

    @staticmethod
    def key_end(i, kv_len):
        if isinstance(i, int) and isinstance(kv_len, int):
            return max(min(i + 1, kv_len), 0)
        return tirx.max(tirx.min(i + 1, kv_len), 0)

    @staticmethod
    def kept(q_len, kv_len):
        # Row i keeps max(i + 1, 0) keys; the kept counts are the last min(N, M) of 1, 2, ..., M.
        rows = min(q_len, kv_len)
        return rows * (2 * kv_len - rows + 1) // 2


MASKS = {mask.name: mask for mask in (Full, Causal)}
