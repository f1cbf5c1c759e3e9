"""The reference against what attention must do whatever its formula: these need no second implementation to be believed."""
from dataclasses import replace

import numpy as np
import pytest

from te_defs import reference
from te_defs.masks import MASKS
from te_defs.workload import Shape, Workload

EXACT = Workload(16, 24, "float32", "full")
SHAPES = [Shape(1, 1, 1, 16, 16), Shape(1, 2, 2, 13, 29), Shape(2, 6, 2, 9, 9), Shape(1, 4, 2, 21, 5), Shape(1, 2, 1, 1, 17)]


def shape_id(shape):
    return f"B{shape.batch}-H{shape.q_heads}-G{shape.kv_heads}-N{shape.q_len}-M{shape.kv_len}"


#: Arguments of the masks here, small enough for the shapes to see their edges.
ARGUMENTS = {"window": (4, 2), "prefix": (3,)}
#: Which key j a row i of n sees of m, written from the definitions.
VISIBLE = {"full": lambda i, j, n, m: True, "causal": lambda i, j, n, m: j <= i + m - n, "causal_top_left": lambda i, j, n, m: j <= i,
           "window": lambda i, j, n, m: (j >= i + m - n - 4) & (j <= i + m - n + 2),
           "prefix": lambda i, j, n, m: (j < 3) | (j <= i + m - n)}


def visible(mask, shape):
    """Boolean [N, M]."""
    i, j = np.ogrid[:shape.q_len, :shape.kv_len]
    return np.broadcast_to(VISIBLE[mask](i, j, shape.q_len, shape.kv_len), (shape.q_len, shape.kv_len))


def forward(workload, *arguments):
    """The reference with this file's arguments of the workload's mask."""
    return reference.forward(workload, *arguments, arguments=ARGUMENTS.get(workload.mask, ()))


@pytest.fixture(params=list(MASKS))
def workload(request):
    return replace(EXACT, mask=request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
class TestForward:
    def test_values_of_one_give_one(self, workload, shape):
        q, k, v = reference.make_inputs(workload, shape)
        out, lse = forward(workload, q, k, np.ones_like(v))
        seen = visible(workload.mask, shape).any(axis=1)
        np.testing.assert_allclose(out[:, seen], 1, rtol=1e-14)
        assert not out[:, ~seen].any() and np.isneginf(lse[..., ~seen]).all() and np.isfinite(lse[..., seen]).all()

    def test_equal_keys_give_the_mean_of_visible_values(self, workload, shape):
        q, k, v = reference.make_inputs(workload, shape)
        k[:] = k[:, :1]
        out, _ = forward(workload, q, k, v)
        keep = visible(workload.mask, shape).astype(float)
        mean = np.einsum("ij,bjgc->bigc", keep / np.maximum(keep.sum(axis=1, keepdims=True), 1), v)
        np.testing.assert_allclose(out, np.repeat(mean, shape.q_heads // shape.kv_heads, axis=2), atol=1e-12)

    def test_zero_scale_is_equal_keys(self, workload, shape):
        q, k, v = reference.make_inputs(workload, shape)
        out, lse = forward(workload, q, k, v, 0.0)
        same, lse_same = forward(workload, q, np.zeros_like(k), v, 1.0)
        np.testing.assert_array_equal(out, same)
        np.testing.assert_array_equal(lse, lse_same)

    def test_heads_of_a_group_share_their_key_head(self, workload, shape):
        q, k, v = reference.make_inputs(workload, shape)
        group = shape.q_heads // shape.kv_heads
        together, _ = forward(workload, q, k, v)
        apart = [forward(workload, q[:, :, [h]], k[:, :, [h // group]], v[:, :, [h // group]])[0] for h in range(shape.q_heads)]
        np.testing.assert_allclose(together, np.concatenate(apart, axis=2), atol=1e-13)

    def test_a_hidden_key_changes_nothing(self, workload, shape):
        q, k, v = reference.make_inputs(workload, shape)
        before, _ = forward(workload, q, k, v)
        k[:, -1], v[:, -1] = 1e3, -1e3
        after, _ = forward(workload, q, k, v)
        hidden = ~visible(workload.mask, shape)[:, -1]
        np.testing.assert_array_equal(before[:, hidden], after[:, hidden])


class TestForwardByHand:
    def test_permuted_keys_change_nothing_without_mask(self):
        q, k, v = reference.make_inputs(EXACT, Shape(1, 2, 2, 7, 31))
        order = np.random.default_rng(1).permutation(31)
        out, lse = forward(EXACT, q, k, v)
        permuted, permuted_lse = forward(EXACT, q, k[:, order], v[:, order])
        np.testing.assert_allclose(permuted, out, atol=1e-13)
        np.testing.assert_allclose(permuted_lse, lse, atol=1e-13)

    def test_first_causal_row_is_the_first_value(self):
        workload = replace(EXACT, mask="causal")
        q, k, v = reference.make_inputs(workload, Shape(2, 2, 2, 11, 11))
        out, lse = forward(workload, q, k, v)
        np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-14)
        np.testing.assert_allclose(lse[:, :, 0], np.einsum("bhc,bhc->bh", q[:, 0], k[:, 0].astype(float)) / 4, rtol=1e-14)

    def test_last_causal_row_sees_every_key(self):
        workload = replace(EXACT, mask="causal")
        q, k, v = reference.make_inputs(workload, Shape(1, 2, 2, 5, 19))
        causal, full = forward(workload, q, k, v), forward(EXACT, q, k, v)
        np.testing.assert_array_equal(causal[0][:, -1], full[0][:, -1])

    def test_two_keys(self):
        workload = Workload(8, 8, "float32")
        q, k, v = np.ones((1, 1, 1, 8)), np.zeros((1, 2, 1, 8)), np.zeros((1, 2, 1, 8))
        k[0, 1, 0, 0], v[0, 1] = np.log(3), 1
        out, lse = forward(workload, q, k, v, 1.0)
        np.testing.assert_allclose(out, 3 / 4, rtol=1e-14)
        np.testing.assert_allclose(lse, np.log(1 + 3), rtol=1e-14)

    def test_no_keys(self, workload):
        q, k, v = reference.make_inputs(workload, Shape(1, 2, 2, 3, 0))
        out, lse = forward(workload, q, k, v)
        assert out.shape == (1, 3, 2, 24) and not out.any() and np.isneginf(lse).all()

    def test_scores_of_thousands_stay_finite(self, workload):
        q, k, v = reference.make_inputs(workload, Shape(1, 1, 1, 8, 8))
        out, lse = forward(workload, 100 * q, 100 * k, v)
        assert np.isfinite(out).all() and np.isfinite(lse).all() and np.abs(lse).max() > 1000

    def test_parts_merge_by_their_lse(self):
        q, k, v = reference.make_inputs(EXACT, Shape(1, 2, 2, 6, 20))
        whole, whole_lse = forward(EXACT, q, k, v)
        (a, lse_a), (b, lse_b) = (forward(EXACT, q, k[:, part], v[:, part]) for part in (slice(0, 7), slice(7, 20)))
        lse = np.logaddexp(lse_a, lse_b)
        weights = (np.exp(part - lse).swapaxes(1, 2)[..., None] for part in (lse_a, lse_b))
        np.testing.assert_allclose(sum(w * part for w, part in zip(weights, (a, b))), whole, atol=1e-13)
        np.testing.assert_allclose(lse, whole_lse, atol=1e-13)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1, 4, 4), Shape(2, 4, 2, 3, 5), Shape(1, 2, 1, 5, 3)], ids=shape_id)
@pytest.mark.parametrize("wrong", ["q", "k", "v"])
def test_backward_is_the_slope_of_forward(workload, shape, wrong):
    """Central differences of sum(dout * O) along a random direction of one input."""
    rng = np.random.default_rng(3)
    inputs = dict(zip("qkv", (x.astype(np.float64) for x in reference.make_inputs(workload, shape))))
    out, lse = forward(workload, *inputs.values())
    dout, direction = rng.standard_normal(out.shape), rng.standard_normal(inputs[wrong].shape)
    gradients = reference.backward(workload, dout, *inputs.values(), out, lse, arguments=ARGUMENTS.get(workload.mask, ()))
    gradient = dict(zip("qkv", gradients))[wrong]
    step = 1e-5
    ahead, behind = ({**inputs, wrong: inputs[wrong] + sign * step * direction} for sign in (1, -1))
    ahead, behind = ((dout * forward(workload, *moved.values())[0]).sum() for moved in (ahead, behind))
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose((gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-8)


class TestJudge:
    SHAPE = Shape(1, 2, 1, 6, 4)  # causal: the first two rows see no key

    @pytest.fixture(params=["float16", "bfloat16", "float32"])
    def case(self, request):
        """(out, lse, answer, lse answer, bound) of a plain attention, all to be passed to `mismatch`."""
        workload = Workload(16, 24, request.param, "causal")
        q, k, v = reference.make_inputs(workload, self.SHAPE)
        answer, lse = forward(workload, q, k, v)
        bound, _ = reference.tolerances(workload, q, k, v)
        return [reference.plain(workload, q, k, v), lse.astype(np.float32), answer, lse, bound]

    def test_plain_attention_passes(self, case):
        assert reference.mismatch(*case) is None

    def test_known_answer_gives_the_same_tolerance(self):
        workload = Workload(16, 24, "float16", "causal")
        q, k, v = reference.make_inputs(workload, self.SHAPE)
        answers = forward(workload, q, k, v)
        assert reference.tolerances(workload, q, k, v, answers=answers) == reference.tolerances(workload, q, k, v)

    def test_error_is_located(self, case):
        case[0][0, 4, 1, 7] += 1
        assert reference.mismatch(*case).startswith("O[0, 4, 1, 7] is ")

    @pytest.mark.parametrize("place", [0, 5], ids=["row without keys", "row with keys"])
    def test_nan_never_passes(self, case, place):
        case[0][0, place, 0, 0] = np.nan
        assert "O[0, " in reference.mismatch(*case)

    def test_lse_must_be_right_too(self, case):
        case[1][0, 1, 5] += 0.01
        assert reference.mismatch(*case).startswith("LSE is ")

    def test_row_without_keys_must_be_exact(self, case):
        case[1][0, 0, 0] = -1e30
        assert "a row that sees no key must have O = 0 and LSE = -inf" in reference.mismatch(*case)

    def test_nothing_to_judge(self):
        empty = np.zeros((0, 4, 1, 8))
        assert reference.mismatch(empty, np.zeros((0, 1, 4)), empty, np.zeros((0, 1, 4)), 0.0) is None


def test_inputs_come_from_the_seed_alone(workload):
    shape = Shape(1, 2, 2, 3, 4)
    first, second, other = (reference.make_inputs(workload, shape, seed) for seed in (5, 5, 6))
    for a, b, c in zip(first, second, other):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
