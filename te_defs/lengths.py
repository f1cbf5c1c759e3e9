"""Lengths of batch entries: those of the tensors, or lengths that arrive with each call. One class serves kernels and reference.

`part` says which rows of Q and O, and of K and V, belong to a batch entry; it takes NumPy's arrays and TIR buffers alike.
"""
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """The rows of a batch entry: its index in tensors [batch, rows, heads, channels], first row and number of queries and of keys."""

    entry: object
    first_query: object
    queries: object
    first_key: object
    keys: object


#: Fields of a Part that are numbers of rows.
SEQUENCE_ROWS = ("queries", "keys")
#: What kernels call the first query of a tile in its sequence, where the tile may lie past the end.
FIRST_ROW = "first_row"


class Uniform:
    """Every batch entry has all rows of the tensors.

    tensors   names of the int32 tensors that arrive with a call, behind the mask's arguments
    integers  names of the integers behind these
    backward_integers  the same of the backward pass
    """

    name = "uniform"
    tensors, integers, backward_integers = (), (), ()

    @staticmethod
    def part(b, q_len, kv_len):
        return Part(b, 0, q_len, 0, kv_len)


class Keys(Uniform):
    """Batch entry b has the first key_lengths[b] of its keys; masks are aligned with these."""

    name = "keys"
    tensors = ("key_lengths",)

    @staticmethod
    def part(b, q_len, kv_len, key_lengths):
        return Part(b, 0, q_len, 0, key_lengths[b])


class Packed(Uniform):
    """Sequences one after the other in tensors of a single entry: sequence b has the queries from cu_seqlens_q[b] up to the next, and the
    keys likewise; no sequence has more than max_q queries, nor more than max_k keys."""

    name = "packed"
    tensors, integers = ("cu_seqlens_q", "cu_seqlens_k"), ("max_q",)
    backward_integers = ("max_q", "max_k")

    @staticmethod
    def part(b, q_len, kv_len, cu_seqlens_q, cu_seqlens_k):
        (q, q_end), (k, k_end) = ((table[b], table[b + 1]) for table in (cu_seqlens_q, cu_seqlens_k))
        return Part(0, q, q_end - q, k, k_end - k)


def sample(name, batch, q_len, kv_len):
    """(batch, q_len, kv_len) of tensors that hold a batch of these sizes, and the arguments of its lengths: entries of every kind, full,
    shorter and empty."""
    if name == "keys":
        return (batch, q_len, kv_len), (np.array([(kv_len * 3 // 4, kv_len, 0)[b % 3] for b in range(batch)], np.int32),)
    if name == "packed":
        (q, k) = (np.array([0, total // 3, total // 3, total * 3 // 4, total], np.int32) for total in (batch * q_len, batch * kv_len))
        k[2] = k[3]
        return (1, batch * q_len, batch * kv_len), (q, k, int(np.diff(q).max()))
    return (batch, q_len, kv_len), ()


def slices(name, q_len, kv_len, lengths, batch):
    """[(slice of batch entries, of queries, of keys)] of each batch entry.

    lengths  the arguments of a call: arrays of the tensors, then the integers
    batch    entries of tensors of which each holds one
    """
    kind = LENGTHS[name]
    tables = lengths[:len(kind.tensors)]
    parts = (kind.part(b, q_len, kv_len, *tables) for b in range(len(tables[0]) - 1 if name == "packed" else batch))
    return [(slice(part.entry, part.entry + 1), slice(part.first_query, part.first_query + part.queries),
             slice(part.first_key, part.first_key + part.keys)) for part in parts]


LENGTHS = {lengths.name: lengths for lengths in (Uniform, Keys, Packed)}
