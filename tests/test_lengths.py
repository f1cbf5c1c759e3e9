"""Lengths that arrive with a call: how workloads name them, what the entry of an artefact reads and refuses, and which rows belong to whom.

The host functions of these artefacts return a number instead of computing: what reaches them has passed all checks.
"""
import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from schedules.arch import cuda_arch
from schedules.families import mma, simt, simt_te, wgmma
from schedules.lowering.bulk_loads import UNBOUNDED, WRAP
from schedules.lowering.empty_tiles import EXISTS
from scripts import cli, options
from te_defs import reference
from te_defs.lengths import LENGTHS, sample, slices
from te_defs.workload import Shape, Workload, WorkloadError
from tests.stand_in_kernel import variant
from tests.test_variants import link_numbers
from tests.test_views import text_of  # noqa: F401, a fixture

B, N, H, M, G = 3, 5, 4, 7, 2
KEYS, PACKED = (Workload(16, 8, "float32", "full", lengths=lengths) for lengths in ("keys", "packed"))


def numbers(*values):
    return np.array(values, "int32")


def many(rows):
    """Where 2^19 sequences begin, of which the last has all rows."""
    return np.array([0] * 2**19 + [rows], "int32")


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    """Function (workload, changes of its arguments) -> what an artefact returns."""
    known = {}

    def make(workload, **changes):
        if workload not in known:
            known[workload] = link_numbers([variant(None, strided=True)], tmp_path_factory.mktemp("lengths"), workload)
        arguments = {"keys": {name: np.ones(shape, "float32") for name, shape in (
            ("q", (B, N, H, 16)), ("k", (B, M, G, 16)), ("v", (B, M, G, 8)), ("out", (B, N, H, 8)), ("lse", (B, H, N)))},
            "packed": {name: np.ones(shape, "float32") for name, shape in (
                ("q", (N, H, 16)), ("k", (M, G, 16)), ("v", (M, G, 8)), ("out", (N, H, 8)), ("lse", (H, N)))}}[workload.lengths]
        lengths = {"keys": {"key_lengths": numbers(7, 0, 3)},
                   "packed": {"cu_seqlens_q": numbers(0, 2, 2, 5), "cu_seqlens_k": numbers(0, 0, 4, 7), "max_q": 3}}[workload.lengths]
        return known[workload](*{**arguments, "scale": 1.0, **lengths, **changes}.values())
    return make


class TestWorkload:
    @pytest.mark.parametrize("lengths, suffix", [("uniform", ""), ("keys", "+keys"), ("packed", "+packed")])
    def test_name_says_the_lengths(self, lengths, suffix):
        workload = Workload(64, 64, "float16", "causal_top_left", lengths=lengths)
        assert workload.name == f"fwd_d64_dv64_f16_causal_top_left{suffix}" and Workload.parse(workload.name) == workload

    def test_unknown_lengths(self):
        with pytest.raises(WorkloadError, match="lengths must be one of uniform, keys, packed, found 'ragged': choose one of these"):
            Workload(64, 64, lengths="ragged")

    def test_families(self):
        arch = cuda_arch("sm_90a")
        halves = [Workload(64, 64, "float16", "full", lengths=lengths) for lengths in LENGTHS]
        assert all(family.decline(workload, arch) is None for family in (mma, wgmma) for workload in halves)
        assert "cannot skip the key tiles that packed lengths leave out" in simt_te.decline(halves[2], arch)
        assert wgmma.default_plan(halves[2], arch).blocks == 0 < wgmma.default_plan(halves[1], arch).blocks


    def test_commands_that_time_want_uniform_lengths(self):
        assert options.uniform(Workload(64, 64)) == Workload(64, 64)
        with pytest.raises(cli.UsageError, match="uniform lengths is wanted, found fwd_d16_dv8_f32_full.keys: leave out its .keys"):
            options.uniform(KEYS)


def shared(size, shape, count):
    """An output of this shape and, in its first elements, a table of `count` zeros."""
    memory = np.zeros(size, "float32")
    return memory.reshape(shape), memory[:count].view("int32")


class TestReference:
    def test_each_entry_is_a_problem_of_its_own(self):
        workload, inputs = Workload(16, 8, "float32", "causal", lengths="packed"), reference.make_inputs(KEYS, Shape(1, 4, 2, 9, 12))
        lengths = numbers(0, 4, 9), numbers(0, 5, 12), 5
        out, lse = reference.forward(workload, *inputs, lengths=lengths)
        for rows, keys in ((slice(0, 4), slice(0, 5)), (slice(4, 9), slice(5, 12))):
            parts = (x[:, part] for x, part in zip(inputs, (rows, keys, keys)))
            alone, alone_lse = reference.forward(Workload(16, 8, "float32", "causal"), *parts)
            np.testing.assert_array_equal(out[:, rows], alone)
            np.testing.assert_array_equal(lse[..., rows], alone_lse)

    @pytest.mark.parametrize("name", ["keys", "packed"])
    def test_samples_are_legal(self, name):
        (batch, q_len, kv_len), lengths = sample(name, 3, 33, 47)
        parts = slices(name, q_len, kv_len, lengths, batch)
        assert len({(rows.stop - rows.start, keys.stop - keys.start) for _, rows, keys in parts}) > 2
        assert all(0 <= keys.start <= keys.stop <= kv_len and 0 <= rows.start <= rows.stop <= q_len for _, rows, keys in parts)


class TestEntry:
    @pytest.mark.parametrize("workload", [KEYS, PACKED], ids=lambda it: it.lengths)
    def test_what_is_right(self, forward, workload):
        assert forward(workload) == 1 and forward(workload, scale=-1.0) == -1

    @pytest.mark.parametrize("changes", [dict(key_lengths=numbers(0, 0, 0)), dict(key_lengths=numbers(7, 7, 7))], ids=str)
    def test_any_number_of_keys(self, forward, changes):
        assert forward(KEYS, **changes) == 1

    @pytest.mark.parametrize("changes", [
        dict(max_q=2**40), dict(cu_seqlens_q=numbers(0, 1), cu_seqlens_k=numbers(0, 7)), dict(cu_seqlens_k=numbers(0, 0, 0, 0)),
        dict(q=np.ones((H, N, 16), "float32").swapaxes(0, 1), out=np.ones((H, N, 8), "float32").swapaxes(0, 1))],
        ids=["max_q", "rows_of_nobody", "no_keys", "bhnd"])
    def test_packed_calls(self, forward, changes):
        assert forward(PACKED, **changes) == 1

    @pytest.mark.parametrize("changes", [dict(cu_seqlens_q=numbers(0), cu_seqlens_k=numbers(0)),
                                         dict(cu_seqlens_q=numbers(0, 0, 0, 0), max_q=0)], ids=["no_sequences", "no_queries"])
    def test_nothing_to_do(self, forward, changes):
        assert forward(PACKED, **changes) is None

    @pytest.mark.parametrize("workload, changes, error, message", [
        (KEYS, dict(key_lengths=numbers(7, -1, 3)), ValueError, "key_lengths[1] is -1, wanted 0 to 7, the rows of k"),
        (KEYS, dict(key_lengths=numbers(7, 0, 8)), ValueError, "key_lengths[2] is 8, wanted 0 to 7, the rows of k"),
        (KEYS, dict(key_lengths=numbers(7, 0)), ValueError, "key_lengths.shape[0] is 2, wanted 3, the batch"),
        (KEYS, dict(key_lengths=np.array([7, 0, 3])), TypeError, "key_lengths has dtype int64, wanted int32"),
        (KEYS, dict(key_lengths=numbers([7, 0, 3])), ValueError, "key_lengths has 2 dimensions, wanted 1"),
        (KEYS, dict(key_lengths=numbers(7, 0, 0, 0, 3, 0)[::2]), ValueError, "key_lengths has stride 2 in dimension 0, wanted 1"),
        (KEYS, dict(key_lengths=7), TypeError, "key_lengths is an int, wanted a tensor"),
        (KEYS, dict(zip(("lse", "key_lengths"), shared(3 * H * N, (3, H, N), 3))), ValueError,
         "lse shares memory with key_lengths, wanted outputs of their own"),
        (PACKED, dict(zip(("lse", "cu_seqlens_k"), shared(H * N, (H, N), 4))), ValueError,
         "lse shares memory with cu_seqlens_k, wanted outputs of their own"),
        (PACKED, dict(lse=np.ones((H, N + 4), "float32")[:, :N]), ValueError, "lse has stride 9 in dimension 0, wanted 5"),
        (PACKED, dict(cu_seqlens_q=numbers(1, 2, 2, 5)), ValueError, "cu_seqlens_q[0] is 1, wanted 0"),
        (PACKED, dict(cu_seqlens_k=numbers(0, 4, 3, 7)), ValueError,
         "cu_seqlens_k[2] is 3, wanted 4 or more, where the sequence before begins"),
        (PACKED, dict(cu_seqlens_q=numbers(0, 2, 2, 6), max_q=4), ValueError, "cu_seqlens_q[3] is 6, wanted at most 5, the rows of q"),
        (PACKED, dict(cu_seqlens_k=numbers(0, 4, 8, 8)), ValueError, "cu_seqlens_k[2] is 8, wanted at most 7, the rows of k"),
        (PACKED, dict(cu_seqlens_k=numbers(0, 7)), ValueError, "cu_seqlens_k.shape[0] is 2, wanted 4, as that of cu_seqlens_q"),
        (PACKED, dict(cu_seqlens_q=numbers()), ValueError, "cu_seqlens_q.shape[0] is 0, wanted a number more than there are sequences"),
        (PACKED, dict(max_q=2), ValueError, "max_q is 2, wanted 3 or more, the queries of the longest sequence"),
        (PACKED, dict(max_q=3.0), TypeError, "max_q is a float, wanted an int"),
        (PACKED, dict(q=np.ones((1, N, H, 16), "float32")), ValueError, "q has 4 dimensions, wanted 3: [queries, heads, head_dim]"),
        (PACKED, dict(v=np.ones((M, 4, 8), "float32")), ValueError, "v.shape[1] is 4, wanted 2 as k.shape[1]"),
        (PACKED, dict(lse=np.ones((N, H), "float32")), ValueError, "lse.shape[0] is 5, wanted 4 as q.shape[1]"),
        (PACKED, dict(k=np.ones((M, 16, G), "float32").swapaxes(1, 2)), ValueError, "k has stride 2 in dimension 2, wanted 1"),
        (PACKED, dict(q=np.ones((N, 4096, 16), "float32"), out=np.ones((N, 4096, 8), "float32"), lse=np.ones((4096, N), "float32"),
                      cu_seqlens_q=many(N), cu_seqlens_k=many(M), max_q=N), ValueError,
         "there are 524288 sequences of up to 5 rows and 4096 heads, wanted fewer than 2^31 tiles of 16 rows in all"),
    ], ids=lambda value: value if isinstance(value, str) else "")
    def test_what_is_wrong_is_named(self, forward, workload, changes, error, message):
        with pytest.raises(error) as caught:
            forward(workload, **changes)
        assert str(caught.value).startswith("flash_attention_forward: " + message)


class TestWholeRows:
    """Kernels that find sequences by the number of a row want batch entries of k and v whole rows apart."""

    @pytest.fixture
    def whole(self, tmp_path):
        """Function (workload, k, v) -> what an artefact returns whose first variant wants this; the second does not."""
        variants = [replace(variant(None, name=name, strided=True), whole_rows=name == "whole") for name in ("whole", "any")]

        def make(workload, k, v, *lengths):
            shapes = ((B, N, H, 16), (B, N, H, 8), (B, H, N)) if workload.lengths == "keys" else ((N, H, 16), (N, H, 8), (H, N))
            q, out, lse = (np.ones(shape, "float32") for shape in shapes)
            return link_numbers(variants, tmp_path, workload)(q, k, v, out, lse, 1.0, *lengths)
        return make

    def keys(self, width, between):
        """[B, M, G, width] whose batch entries are M rows and `between` elements apart."""
        entry = M * G * width + between
        return as_strided(np.ones(B * entry, "float32"), (B, M, G, width), [4 * stride for stride in (entry, G * width, width, 1)])

    @pytest.mark.parametrize("between, place", [(0, 1), (G * 16, 1), (8, 2)], ids=["contiguous", "a_row", "half_a_row"])
    def test_of_key_lengths(self, whole, capfd, between, place):
        assert whole(KEYS, self.keys(16, between), self.keys(8, 0), numbers(7, 0, 3)) == place
        assert ("k has stride 232 in dimension 0, wanted a multiple of 32, that of dimension 1" in capfd.readouterr().err) == (place == 2)

    def test_rows_that_are_one_in_memory(self, whole, capfd):
        k = as_strided(np.ones(B * 32, "float32"), (B, M, G, 16), (128, 0, 64, 4))
        assert whole(KEYS, k, self.keys(8, 0), numbers(7, 0, 3)) == 2
        assert "k has stride 0 in dimension 1, wanted rows with places of their own" in capfd.readouterr().err

    def test_packed_sequences_have_one_entry(self, whole):
        k, v = (self.keys(width, 8)[0] for width in (16, 8))
        assert whole(PACKED, k, v, numbers(0, 5), numbers(0, 7), 5) == 1


class TestEmptyTiles:
    @pytest.mark.parametrize("family, dtype, arch", [(mma, "f16", "sm_80"), (wgmma, "f16", "sm_90a"), (simt, "f32", "sm_80")],
                             ids=["mma", "wgmma", "simt"])
    def test_blocks_past_the_end_of_a_sequence_end_at_once(self, text_of, family, dtype, arch):
        """The condition stands in front of the first barrier, copy and loop, and everything behind it is inside."""
        text = text_of(family, f"fwd_d64_dv64_{dtype}_full+packed", arch, True)
        head, body = re.split(r"\n  if \([^\n]*< \(queries \+ \d+\)\) \{\n", text, maxsplit=1)
        assert not re.search(r"sync|cp_async|for \(", head.split("{", 1)[1]) and EXISTS not in head + body
        assert body.rstrip().endswith("  }\n}") and "\n  if" not in body


class TestRagged:
    """The addresses that the tensor memory accelerator computes for the rows of a sequence inside a tensor."""

    @pytest.mark.parametrize("stride", [16, 256, 3 * 4096, 2**32])
    @pytest.mark.parametrize("start, size, row", [(0, 5, 0), (0, 5, 4), (1000, 130, 128), (2**29, 1, 0), (7, 2**30 - 1, 2**30 - 2)])
    def test_wrap_round_to_the_row(self, stride, start, size, row):
        steps, place = (stride, stride, 2**64 // WRAP - stride), (WRAP - size + row, start + size, WRAP)
        assert sum(a * b for a, b in zip(steps, place)) % 2**64 == (start + row) * stride
        assert all(0 < step < 2**40 and step % 16 == 0 for step in steps)
        assert place[0] < WRAP and max(place) < UNBOUNDED, "inside all dimensions"

    @pytest.mark.parametrize("size", [0, 1, 5, 2**30 - 1])
    def test_rows_past_the_sequence_are_past_a_dimension(self, size):
        assert WRAP - size + size >= WRAP
