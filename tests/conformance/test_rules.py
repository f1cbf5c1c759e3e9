"""What attention means here, a test for each rule: asked of every family, and answered by the same numbers."""
from dataclasses import replace

import numpy as np
import pytest

from te_defs import reference
from te_defs.storage import EXPANDED, STORAGES
from te_defs.workload import Shape, Workload
from tests.backward import WITHOUT_KEYS, verdict, without_keys
from tests.numbers import run, verdict_on

pytestmark = pytest.mark.slow


class Asked:
    """One engine, asked with masks by name; its element type is the first that the family takes."""

    def __init__(self, engine):
        self.engine = engine
        taken = [dtype for dtype in ("float32", "float16") if engine.declines(Workload(64, 64, dtype)) is None]
        if not taken:
            pytest.skip(f"{engine.name} declines: {engine.declines(Workload(64, 64, 'float16'))}")
        self.dtype = taken[0]

    def workload(self, mask):
        return Workload(64, 64, self.dtype, mask)

    def inputs(self, *sizes, seed=0):
        return reference.make_inputs(self.workload("full"), Shape(*sizes), seed)

    def answer(self, inputs, scale=0.125, mask="full", sizes=()):
        """(out, lse) of one call."""
        return run(self.engine.forward(self.workload(mask)), self.workload(mask), inputs, scale, sizes, self.engine.device)

    def wrong(self, inputs, scale=0.125, mask="full", sizes=(), storage="contiguous"):
        """None where the answer is right, else a sentence."""
        return verdict_on(self.engine.forward(self.workload(mask)), self.workload(mask), inputs, scale, sizes, self.engine.device, storage)


@pytest.fixture
def ask(engine):
    return Asked(engine)


class TestForward:
    def test_lse_is_the_natural_logarithm_of_the_sum_of_exponentials(self, ask):
        q, k, v = ask.inputs(1, 1, 1, 3, 5)
        scores = np.einsum("ic,jc->ij", q[0, :, 0].astype(float), k[0, :, 0].astype(float)) * 0.125
        _, lse = ask.answer((q, k, v))
        np.testing.assert_allclose(lse[0, 0], np.log(np.exp(scores).sum(axis=1)), atol=1e-4)

    @pytest.mark.parametrize("scale", [0.0, -0.125, 1.0, -3.0, 1e-30, -1e-30])
    def test_scale_is_any_finite_number(self, ask, scale):
        assert ask.wrong(ask.inputs(1, 2, 1, 33, 47), scale) is None

    def test_equal_keys_give_the_mean_of_the_values(self, ask):
        q, k, v = ask.inputs(1, 1, 1, 9, 70)
        k[:] = k[:, :1]
        out, _ = ask.answer((q, k, v))
        np.testing.assert_allclose(out[0, :, 0], np.broadcast_to(v[0, :, 0].astype(float).mean(axis=0), (9, 64)), atol=2e-3)

    def test_one_key_gives_its_value(self, ask):
        q, k, v = ask.inputs(2, 2, 1, 5, 1)
        out, _ = ask.answer((q, k, v))
        np.testing.assert_allclose(out, np.broadcast_to(v, (2, 5, 2, 64)), rtol=1e-6 if ask.dtype == "float32" else 1e-3)

    @pytest.mark.parametrize("heads, key_heads", [(1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (8, 1), (6, 2), (4, 4)])
    def test_query_heads_of_a_group_share_their_key_head(self, ask, heads, key_heads):
        assert ask.wrong(ask.inputs(1, heads, key_heads, 21, 40)) is None

    def test_parts_merge_by_their_lse(self, ask):
        q, k, v = ask.inputs(1, 2, 2, 19, 100)
        whole, whole_lse = ask.answer((q, k, v))
        (a, lse_a), (b, lse_b) = (ask.answer((q, k[:, part].copy(), v[:, part].copy())) for part in (slice(0, 37), slice(37, 100)))
        lse = np.logaddexp(lse_a, lse_b)
        weights = (np.exp(part - lse).swapaxes(1, 2)[..., None] for part in (lse_a, lse_b))
        np.testing.assert_allclose(sum(weight * part for weight, part in zip(weights, (a, b))), whole, atol=3e-3)
        np.testing.assert_allclose(lse, whole_lse, atol=1e-4)


class TestMasks:
    def test_causal_is_aligned_bottom_right(self, ask):
        inputs = ask.inputs(1, 1, 1, 3, 5)
        _, lse = ask.answer(inputs, 0.0, "causal")
        np.testing.assert_allclose(np.exp(lse[0, 0]), [3, 4, 5], rtol=1e-5)

    def test_top_left_is_the_other_alignment_by_name(self, ask):
        _, lse = ask.answer(ask.inputs(1, 1, 1, 3, 5), 0.0, "causal_top_left")
        np.testing.assert_allclose(np.exp(lse[0, 0]), [1, 2, 3], rtol=1e-5)

    def test_a_window_counts_from_the_aligned_diagonal(self, ask):
        _, lse = ask.answer(ask.inputs(1, 1, 1, 3, 7), 0.0, "window", (2, 1))
        np.testing.assert_allclose(np.exp(lse[0, 0]), [4, 4, 3], rtol=1e-5)

    def test_a_window_without_keys_behind_is_causal(self, ask):
        inputs = ask.inputs(1, 2, 1, 90, 130)
        for found, wanted in zip(ask.answer(inputs, mask="window", sizes=(1000, 0)), ask.answer(inputs, mask="causal")):
            np.testing.assert_allclose(found, wanted, atol=2e-3)

    @pytest.mark.parametrize("length", [130, 200])
    def test_a_window_wider_than_all_keys_is_full(self, ask, length):
        inputs = ask.inputs(1, 1, 1, 70, length)
        for found, wanted in zip(ask.answer(inputs, mask="window", sizes=(1 << 20, 1 << 20)), ask.answer(inputs)):
            np.testing.assert_allclose(found, wanted, atol=2e-3)

    def test_a_prefix_is_seen_by_all(self, ask):
        _, lse = ask.answer(ask.inputs(1, 1, 1, 4, 4), 0.0, "prefix", (2,))
        np.testing.assert_allclose(np.exp(lse[0, 0]), [2, 2, 3, 4], rtol=1e-5)

    @pytest.mark.parametrize("mask, sizes", [("causal", ()), ("window", (3, 0)), ("window", (0, 0)), ("causal_top_left", ()),
                                             ("prefix", (0,))])
    @pytest.mark.parametrize("lengths", [(90, 40), (40, 90), (5, 0)], ids=str)
    def test_a_row_that_sees_no_key_gives_nothing(self, ask, mask, sizes, lengths):
        inputs = ask.inputs(1, 2, 1, *lengths)
        out, lse = ask.answer(inputs, mask=mask, sizes=sizes)
        _, right = reference.forward(ask.workload(mask), *inputs, arguments=sizes)
        unseen = np.isneginf(right)
        assert np.isneginf(lse[unseen]).all() and not out.swapaxes(1, 2)[unseen].any() and np.isfinite(lse[~unseen]).all()

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    @pytest.mark.parametrize("mask, sizes", [("causal", ()), ("window", (20, 0)), ("prefix", (30,))])
    def test_what_stands_in_a_skipped_tile_does_not_leak(self, ask, mask, sizes, poison):
        """The first query tile, of at most 128 rows, sees keys up to row 127 at most; no key tile that it visits reaches to 256."""
        q, k, v = ask.inputs(1, 1, 1, 384, 384)
        clean = ask.answer((q, k, v), mask=mask, sizes=sizes)
        k[:, 256:], v[:, 256:] = poison, poison
        for found, wanted, rows in zip(ask.answer((q, k, v), mask=mask, sizes=sizes), clean, (np.s_[:, :64], np.s_[..., :64])):
            np.testing.assert_array_equal(found[rows], wanted[rows])


class TestViews:
    """Tensors that are views of others; around them stands NaN, and what lies beside the output must stay as it is."""

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("sizes", [(2, 6, 2, 77, 77), (2, 4, 4, 130, 70), (3, 1, 1, 1, 90), (1, 2, 1, 5, 0)], ids=str)
    def test_lie_anywhere(self, ask, storage, sizes):
        assert ask.wrong(ask.inputs(*sizes), mask="causal", storage=storage) is None

    def test_give_the_bits_of_contiguous_tensors(self, ask):
        inputs, workload = ask.inputs(2, 4, 2, 90, 130), ask.workload("causal")
        forward, device = ask.engine.forward(workload), ask.engine.device
        first, *others = (run(forward, workload, inputs, 0.125, (), device, storage) for storage in STORAGES)
        assert all(a.tobytes() == b.tobytes() for other in others for a, b in zip(first, other))

    @pytest.mark.parametrize("storage", EXPANDED)
    def test_inputs_may_be_expanded(self, ask, storage):
        inputs = ask.inputs(3, 4, 4, 40, 70)
        for x in inputs:
            x[:] = x.take([0], EXPANDED[storage])
        assert ask.wrong(inputs, storage=storage) is None


class TestLengths:
    """Batch entries with lengths of their own: rows that belong to others, or to nobody, are NaN or infinite."""

    MASKS = [("full", ()), ("causal", ()), ("window", (20, 3)), ("prefix", (30,)), ("causal_top_left", ())]

    def forward(self, ask, mask, lengths):
        workload = replace(ask.workload(mask), lengths=lengths)
        if ask.engine.declines(workload) is not None:
            pytest.skip(f"{ask.engine.name} declines: {ask.engine.declines(workload)}")
        return ask.engine.forward(workload), workload

    def wrong(self, ask, mask, sizes, inputs, lengths, storage="contiguous", name="keys"):
        forward, workload = self.forward(ask, mask, name)
        return verdict_on(forward, workload, inputs, 0.125, sizes, ask.engine.device, storage, lengths, ask.engine.whole)

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    @pytest.mark.parametrize("mask, sizes", MASKS, ids=str)
    def test_keys_past_a_length_do_not_leak(self, ask, mask, sizes, poison):
        """The mask is aligned with the length, not with the tensor."""
        (q, k, v), lengths = ask.inputs(5, 2, 1, 90, 200), np.array([200, 0, 1, 77, 128], np.int32)
        for b, length in enumerate(lengths):
            k[b, length:], v[b, length:] = poison, poison
        assert self.wrong(ask, mask, sizes, (q, k, v), (lengths,)) is None

    @pytest.mark.parametrize("storage", STORAGES)
    def test_of_views(self, ask, storage):
        lengths = np.array([33, 70], np.int32)
        assert self.wrong(ask, "causal", (), ask.inputs(2, 4, 2, 70, 70), (lengths,), storage) is None

    @pytest.mark.parametrize("mask, sizes", MASKS, ids=str)
    def test_sequences_lie_one_after_the_other(self, ask, mask, sizes):
        q_lengths, k_lengths = (70, 0, 1, 33, 128, 5), (90, 40, 1, 0, 128, 200)
        lengths = *(np.cumsum((0, *rows), dtype=np.int32) for rows in (q_lengths, k_lengths)), 128
        inputs = ask.inputs(1, 2, 1, sum(q_lengths), sum(k_lengths))
        assert self.wrong(ask, mask, sizes, inputs, lengths, name="packed") is None

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    @pytest.mark.parametrize("mask", ["full", "causal"])
    def test_what_stands_in_other_sequences_does_not_leak(self, ask, mask, poison):
        """The rows around the middle sequence, or past the last, are poisoned: it gives what it gives alone."""
        lengths = np.array([0, 40, 110, 150], np.int32), np.array([0, 50, 127, 160], np.int32), 70
        (forward, workload), (q, k, v) = self.forward(ask, mask, "packed"), ask.inputs(1, 2, 2, 170, 190)
        k[:, :50], k[:, 127:], v[:, :50], v[:, 127:], q[:, :40], q[:, 110:] = [poison] * 6
        out, lse = run(forward, workload, (q, k, v), 0.125, (), ask.engine.device, lengths=lengths, whole=ask.engine.whole)
        alone = q[:, 40:110], k[:, 50:127], v[:, 50:127]
        answers = reference.forward(ask.workload(mask), *alone, 0.125)
        bounds = reference.tolerances(ask.workload(mask), *alone, 0.125, (), answers)
        assert reference.mismatch(out[:, 40:110], lse[:, :, 40:110], *answers, *bounds) is None
        assert np.isnan(out[:, 150:]).all() and np.isnan(lse[..., 150:]).all(), "rows of no sequence are left alone"

    @pytest.mark.parametrize("storage", STORAGES)
    def test_of_packed_views(self, ask, storage):
        lengths = np.array([0, 40, 70], np.int32), np.array([0, 20, 70], np.int32), 60
        assert self.wrong(ask, "causal", (), ask.inputs(1, 4, 2, 70, 70), lengths, storage, "packed") is None


class TestGradients:
    @pytest.mark.parametrize("unseen", [np.nan, np.inf])
    @pytest.mark.parametrize("name", WITHOUT_KEYS)
    def test_what_stands_in_rows_without_keys_does_not_leak(self, gradients, name, unseen):
        """In O and dLSE: 0 * (dP - NaN) would be NaN in their dQ and in dK of all keys."""
        workload, shape, arguments, lengths = without_keys(name, 64, 64, "f16")
        if gradients.declines(workload) is not None:
            pytest.skip(f"{gradients.name} declines: {gradients.declines(workload)}")
        function = gradients.backward(workload)
        for through_lse in (False, True):
            assert verdict(function, workload, shape, 0.125, arguments, lengths, through_lse=through_lse, unseen=unseen) is None


class TestNumbers:
    @pytest.mark.parametrize("length", [0, 1, 17, 127, 128, 129, 300])
    def test_every_length_is_legal(self, ask, length):
        for lengths in ((length, 130), (40, length), (length, length)):
            assert ask.wrong(ask.inputs(1, 2, 1, *lengths), mask="causal") is None

    def test_more_queries_than_keys(self, ask):
        assert ask.wrong(ask.inputs(1, 2, 1, 200, 3), mask="causal") is None

    def test_scores_of_thousands_stay_finite_and_right(self, ask):
        q, k, v = ask.inputs(1, 1, 1, 50, 150)
        assert ask.wrong((q * q.dtype.type(40), k * k.dtype.type(40), v)) is None

    def test_denormal_inputs_stay_right(self, ask):
        q, k, v = ask.inputs(1, 1, 1, 50, 150)
        assert ask.wrong((q * q.dtype.type(2**-12), k * k.dtype.type(2**-12), v * v.dtype.type(2**-17))) is None

    @pytest.mark.parametrize("mask, sizes", [("causal", ()), ("window", (9, 9))])
    def test_two_runs_give_the_same_bits(self, ask, mask, sizes):
        inputs = ask.inputs(2, 4, 2, 77, 130)
        first, second = (ask.answer(inputs, mask=mask, sizes=sizes) for _ in range(2))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second))
