"""The backward pass: the definition and the plain functions, unscheduled on llvm, against the reference; and the reference itself."""
import functools
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.s_tir.stmt import SBlock

from schedules.outputs import only
from te_defs import reference
from te_defs.flash_attention_backward import attention_delta, attention_dk_dv, attention_dq
from te_defs.lengths import sample
from te_defs.masks import MASKS
from te_defs.workload import Shape, Workload, make_arguments
from tests.backward import WITHOUT_KEYS, Apart, Fused, Naive, Plain, problem, verdict, without_keys

WORKLOADS = {w.name: w for w in (Workload(32, 16, "float16", "causal"), Workload(16, 32, "bfloat16", "full"),
                                 *(Workload(16, 24, "float32", mask) for mask in MASKS))}
#: Ends of tiles, more queries than keys and fewer, none at all, groups; with a scale factor each.
CALLS = {"wide": (Shape(1, 3, 1, 17, 130), 1.0), "tall": (Shape(2, 2, 2, 130, 17), 1.0), "square": (Shape(1, 3, 3, 130, 130), 1.0),
         "one_query": (Shape(1, 3, 1, 1, 130), 1.0), "one_key": (Shape(1, 2, 1, 130, 1), 1.0), "one": (Shape(1, 1, 1, 1, 1), 1.0),
         "no_keys": (Shape(1, 2, 1, 17, 0), 1.0), "no_queries": (Shape(1, 3, 1, 0, 17), 1.0), "no_batch": (Shape(0, 1, 1, 5, 5), 1.0),
         "zero_scale": (Shape(1, 3, 1, 33, 47), 0.0),
         "negative_scale": (Shape(1, 6, 2, 50, 70), -1.5), "large_scale": (Shape(1, 1, 1, 64, 96), 300.0)}
#: Masks and scores beside those, sinks and lengths.
FEATURES = ("full+softcap", "window+alibi", "causal+bias", "full+softcap+sink", "tests.of_a_user:DocumentCausal",
            "tests.of_a_user:Chunks", "causal+tests.of_a_user:halved_far_away")
LENGTHS = ("causal+keys", "window+packed", "full+softcap+sink+packed", "tests.of_a_user:Chunks+keys")


@pytest.fixture(scope="module")
def compiled():
    """Function (Naive, Plain or Fused, workload) -> that form of its backward pass, each compiled once."""
    return functools.cache(lambda form, workload: form(workload))


@pytest.fixture(params=[Naive, Plain, Fused], ids=["naive", "plain", "fused"])
def form(request, compiled):
    """Function workload -> each form of its backward pass."""
    return functools.partial(compiled, request.param)


@pytest.fixture(params=[Plain, Fused], ids=["plain", "fused"])
def tiled(request, compiled):
    """The same of those that know lengths."""
    return functools.partial(compiled, request.param)


@pytest.fixture
def plain(compiled):
    return functools.partial(compiled, Plain)


def ordered(workload):
    return Fused(workload, in_order=True)


def featured(features):
    return Workload.parse(f"fwd_d16_dv16_f32_{features}")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_numbers(form, workload, call):
    shape, factor = CALLS[call]
    for mask in workload.mask_class.samples:
        assert verdict(form(workload), workload, replace(shape, mask=mask), factor * workload.head_dim**-0.5, mask) is None


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_scores_of_thousands(form, workload):
    mask = workload.mask_class.samples[-1]
    assert verdict(form(workload), workload, Shape(1, 2, 1, 40, 60, mask), workload.head_dim**-0.5, mask, factor=30) is None


@pytest.mark.parametrize("features", FEATURES)
def test_features(form, features):
    it = featured(features)
    for number, (n, m, single, scale) in enumerate(((37, 50, "", 0.25), (50, 20, "BHNM", 0.25), (5, 0, "B", 1.0), (0, 15, "H", 1.0),
                                                     (40, 40, "NH", -0.3))):
        shape = Shape(2, 6, 2, n, m, it.mask_class.samples[min(number, len(it.mask_class.samples) - 1)])
        assert verdict(form(it), it, shape, scale, make_arguments(it, shape, number, single), seed=number) is None


@pytest.mark.parametrize("features", LENGTHS)
def test_lengths(tiled, features):
    it = featured(features)
    for number, (n, m) in enumerate(((37, 50), (60, 20), (1, 33))):
        mask = it.mask_class.samples[-1]
        (batch, rows, keys), lengths = sample(it.lengths, 3, n, m)
        shape = Shape(batch, 4, 2, rows, keys, mask)
        if it.lengths == "packed":
            lengths = (*lengths, int(np.diff(lengths[1]).max()))
        assert verdict(tiled(it), it, shape, 0.25, make_arguments(it, shape, number), lengths, number) is None


@pytest.mark.parametrize("tiles", [(16, 32), (64, 64), (8, 128)], ids=str)
def test_tiles(tiles):
    it = Workload(16, 24, "float32", "window")
    shape = Shape(1, 2, 1, 130, 140, (16, 3))
    assert verdict(Plain(it, *tiles), it, shape, 0.25, shape.mask) is None


class TestSkippedTiles:
    """Of 160 queries and keys, in tiles of 32 and 16, row i sees keys from i - 10 to i + 3."""

    WORKLOAD, MASK = Workload(16, 24, "float32", "window"), (10, 3)

    @pytest.fixture
    def given(self):
        return problem(self.WORKLOAD, Shape(1, 1, 1, 160, 160), 0.25, self.MASK)[0]

    def test_keys_that_no_query_of_a_tile_sees_do_not_leak(self, plain, given):
        clean = plain(self.WORKLOAD)(*given, 0.25, self.MASK)
        for tensor in given[2:4]:  # rows from 64 to 95 see keys from 54 to 98
            tensor[:, :48], tensor[:, 112:] = np.nan, np.inf
        np.testing.assert_array_equal(plain(self.WORKLOAD)(*given, 0.25, self.MASK)[0][:, 64:96], clean[0][:, 64:96])

    def test_queries_that_see_no_key_of_a_tile_do_not_leak(self, plain, given):
        clean = plain(self.WORKLOAD)(*given, 0.25, self.MASK)
        for tensor in (given[0], given[1], given[4]):  # keys from 64 to 79 are seen by rows from 61 to 89
            tensor[:, :32], tensor[:, 96:] = np.nan, np.inf
        for found, wanted in list(zip(plain(self.WORKLOAD)(*given, 0.25, self.MASK), clean))[1:]:
            np.testing.assert_array_equal(found[:, 64:80], wanted[:, 64:80])


def test_rows_without_keys_and_keys_without_queries_get_zeros(form):
    it = Workload(16, 24, "float32", "causal_top_left")
    given, _, lse = problem(it, Shape(1, 1, 1, 20, 90), 0.25)
    assert not np.isneginf(lse).any() and not any(x[:, 20:].any() for x in form(it)(*given, 0.25)[1:])
    it = replace(it, mask="causal")
    given, _, lse = problem(it, Shape(1, 1, 1, 90, 20), 0.25)
    assert np.isneginf(lse[..., :70]).all() and not form(it)(*given, 0.25)[0][:, :70].any()


@pytest.mark.parametrize("unseen", [np.nan, np.inf])
@pytest.mark.parametrize("form, name", [
    (form, name) for form in (Naive, Plain, Fused, ordered) for name, (_, _, lengths) in WITHOUT_KEYS.items()
    if form is not Naive or not lengths], ids=lambda it: getattr(it, "__name__", it))
def test_what_stands_in_o_of_rows_without_keys_does_not_leak(compiled, form, name, unseen):
    """0 * (dP - NaN) would be NaN."""
    it, shape, arguments, lengths = without_keys(name, 16, 24, "f32")
    lengths = (*lengths, int(np.diff(lengths[1]).max())) if it.lengths == "packed" else lengths
    assert verdict(compiled(form, it), it, shape, 0.25, arguments, lengths, unseen=unseen) is None


def test_twice_the_same_bits(plain):
    it = WORKLOADS["fwd_d32_dv16_f16_causal"]
    given, *_ = problem(it, Shape(2, 6, 2, 45, 61), 0.2)
    for first, second in zip(*(plain(it)(*given, 0.2) for _ in range(2))):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_one_output_of_two_is_the_same_bits_without_the_blocks_of_the_other(mask):
    it = Workload(16, 24, "float16", mask)
    both = attention_dk_dv(it, 32, 16)
    shape = Shape(1, 4, 2, 45, 61, it.mask_class.samples[-1])
    given, *_ = problem(it, shape, 0.2, make_arguments(it, shape))
    apart = Apart(attention_delta(it), only(both, "dK"), only(both, "dV"), attention_dq(it, 32, 16))
    for found, wanted in zip(*(form(*given, 0.2, make_arguments(it, shape)) for form in (apart, Plain(it)))):
        np.testing.assert_array_equal(found, wanted)
    blocks = []
    tvm_ffi.structural_walk(only(both, "dV").body, (SBlock, lambda block: blocks.append(block.name_hint)))
    assert not {"V_load", "delta_load", "dov", "dP", "gradient", "dK_acc", "dK"} & set(blocks) and {"K_load", "P_cast", "dV"} <= set(blocks)
    assert [param.name for param in only(both, "dV").params[:8]] == ["dO", "Q", "K", "V", "LSE", "delta", "dV", "scale"]


def test_no_block_reads_what_it_writes():
    """What schedules rely on: but for reductions, which read their own element."""
    first, schedule = (tvm.s_tir.Schedule(attention_dk_dv(Workload(16, 24, "float16", "window"), 32, 16)) for _ in range(2))
    assert tvm_ffi.structural_equal(first.mod, schedule.mod)
    for group in ("load_keys", "init", "statistics", "qk", "softmax", "pdo", "dov", "gradient", "dsq", "back", "finish"):
        for block in map(schedule.get, schedule.get_child_blocks(schedule.get_sblock(group))):
            assert not {region.source.name for region in block.reads} & {region.source.name for region in block.writes}


@pytest.mark.parametrize("features", ["full+softcap+sink", "window+alibi", "causal+bias",
                                      "full+tests.of_a_user:without_scores"])
def test_gradients_are_the_slopes_of_the_forward_pass(plain, features):
    """Central differences of sum(dO * O) in float64 along a random direction of each input."""
    it, rng = featured(features), np.random.default_rng(3)
    mask = it.mask_class.samples[-1]
    shape = Shape(1, 2, 1, 4, 5, mask)
    arguments = make_arguments(it, shape)
    given, answers, _ = problem(it, shape, 0.5, arguments)
    dout, inputs = given[0].astype(np.float64), [x.astype(np.float64) for x in given[1:4]]
    for number, (gradient, answer) in enumerate(zip(plain(it)(*given, 0.5, arguments), answers)):
        direction = rng.standard_normal(inputs[number].shape)
        ends = ([x + off * direction if n == number else x for n, x in enumerate(inputs)] for off in (1e-5, -1e-5))
        ahead, behind = ((dout * reference.forward(it, *moved, 0.5, arguments)[0]).sum() for moved in ends)
        np.testing.assert_allclose((answer * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose((gradient * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-3, atol=1e-4)


class TestJudge:
    @pytest.fixture(params=["float16", "bfloat16", "float32"])
    def case(self, request):
        """(gradients, answers, bounds, lse) of the yardstick, all to be passed to `backward_mismatch`; the first two rows see no key."""
        it = Workload(16, 24, request.param, "causal")
        given, answers, lse = problem(it, Shape(1, 2, 1, 40, 38), 0.25)
        bounds = reference.backward_tolerances(it, *given[:4], answers, 0.25)
        return [[*reference.plain_backward(it, *given[:4], 0.25)], answers, bounds, lse]

    def test_the_yardstick_passes(self, case):
        assert reference.backward_mismatch(*case) is None

    @pytest.mark.parametrize("number, name", list(enumerate(("dQ", "dK", "dV"))))
    def test_one_wrong_element_never_passes(self, case, number, name):
        case[0][number][0, 5, 0, 3] += case[0][number].dtype.type(4 * case[2][number])
        assert reference.backward_mismatch(*case).startswith(f"{name}[0, 5, 0, 3] is ")
        case[0][number][0, 5, 0, 3] = np.nan
        assert reference.backward_mismatch(*case).startswith(f"{name}[0, 5, 0, 3] is ")

    def test_row_without_keys_must_be_exact(self, case):
        case[0][0][0, 1, 0, 0] = case[2][0] / 2
        assert reference.backward_mismatch(*case) == "a row that sees no key must have dQ = 0, and has something else"

    def test_bounds_are_a_few_rounding_steps(self, case):
        step = float(reference.ml_dtypes.finfo(case[0][0].dtype).eps)
        for answer, bound in zip(case[1], case[2]):
            assert bound < 8 * max(step, 2**-21) * np.abs(answer).max()

    @pytest.mark.parametrize("channels", [16, 32, 64, 128, 256])
    def test_sums_in_any_order_pass_where_dp_and_delta_cancel(self, channels):
        """Rows that see one key: P is 1, and dS is nothing but how dP and delta were rounded."""
        it, shape = Workload(channels, channels, "float32", "window"), Shape(1, 2, 2, 113, 150, (0, 0))
        seen = slice(shape.kv_len - shape.q_len, None)
        for seed in range(8):
            given, answers, lse = problem(it, shape, 0.25, (0, 0), seed=seed)
            bounds, (dout, q, k, v, out, _) = reference.backward_tolerances(it, *given[:4], answers, 0.25, (0, 0)), given
            orders = np.random.default_rng(seed).permuted([range(channels)] * 2, axis=1)
            dp, delta = (np.cumsum((dout * x)[..., order], axis=-1)[..., -1:] for x, order in zip((v[:, seen], out), orders))
            dq, dk, dv = np.float32(0.25) * (dp - delta) * k[:, seen], np.zeros_like(k), np.zeros_like(v)
            dk[:, seen], dv[:, seen] = np.float32(0.25) * (dp - delta) * q, dout
            assert reference.backward_mismatch((dq, dk, dv), answers, bounds, lse) is None
