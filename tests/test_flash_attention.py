"""The plain function, unscheduled on llvm: the numbers that every family starts from."""
import numpy as np
import pytest
import tvm
import tvm_ffi

from te_defs import reference
from te_defs.flash_attention import flash_attention_forward
from te_defs.masks import MASKS
from te_defs.workload import Shape, Workload
from tests.numbers import RAGGED, on_llvm, run, verdict, verdict_on

WORKLOADS = {w.name: w for w in (Workload(32, 32, "float32", "full"), Workload(32, 16, "float16", "causal"),
                                 Workload(16, 32, "bfloat16", "causal"), Workload(64, 64, "float16", "full"),
                                 *(Workload(32, 16, "float32", mask) for mask in MASKS if mask not in ("full", "causal")))}
KV_TILE = 16


@pytest.fixture(scope="module", params=[1, 4], ids=lambda lanes: f"lanes{lanes}")
def compiled(request):
    """Function (workload, negative_scale, max_slack) -> its compiled plain form, each compiled once."""
    known = {}

    def build(workload, negative_scale=False, max_slack=0):
        key = workload, negative_scale, max_slack
        if key not in known:
            known[key] = on_llvm(flash_attention_forward(workload, 32, KV_TILE, request.param, negative_scale, max_slack))
        return known[key]
    return build


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_numbers(compiled, workload, case):
    assert verdict(compiled(workload), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("case", ["ragged", "grouped", "no_keys"])
def test_channels_may_be_padded_inside(case):
    workload = Workload(40, 24, "float16", "causal")
    func = flash_attention_forward(workload, 32, KV_TILE, row_lanes=4, channel_steps=(16, 32))
    assert verdict(on_llvm(func), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("dims, steps", [((64, 96), (16, 32)), ((40, 72), (8, 8))], ids=str)
def test_padding_leaves_what_needs_none_as_it_is(dims, steps):
    workload = Workload(*dims, "float16", "causal")
    plain, padded = (flash_attention_forward(workload, 32, KV_TILE, channel_steps=pair) for pair in ((1, 1), steps))
    assert str(plain) == str(padded)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_twin_serves_scales_below_zero(compiled, workload):
    assert verdict(compiled(workload, negative_scale=True), workload, Shape(1, 2, 1, 50, 70), -1.5) is None


def test_what_lies_behind_the_mask_does_not_leak(compiled):
    workload = Workload(32, 32, "float32", "causal")
    q, k, v = reference.make_inputs(workload, Shape(1, 1, 1, 40, 40))
    clean = run(compiled(workload), workload, (q, k, v), 0.2)
    # Queries before 16 see no key from 16 on: a tile that holds only such keys is skipped for them.
    k[:, 20:], v[:, 32:] = np.nan, np.inf
    out, lse = run(compiled(workload), workload, (q, k, v), 0.2)
    np.testing.assert_array_equal(out[:, :16], clean[0][:, :16])
    np.testing.assert_array_equal(lse[..., :16], clean[1][..., :16])


def test_twice_the_same_bits(compiled):
    workload = WORKLOADS["fwd_d64_dv64_f16_full"]
    inputs = reference.make_inputs(workload, Shape(1, 2, 1, 45, 61))
    first, second = (run(compiled(workload), workload, inputs, 0.125) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_row_lanes_are_one_or_four():
    with pytest.raises(ValueError, match="row_lanes must be 1 or 4, found 3"):
        flash_attention_forward(WORKLOADS["fwd_d64_dv64_f16_full"], 32, 16, row_lanes=3)


class TestSlack:
    """A declaration whose row maximum may stay behind by 8 powers of two."""

    WORKLOADS = [WORKLOADS["fwd_d32_dv16_f16_causal"], WORKLOADS["fwd_d64_dv64_f16_full"]]

    @pytest.mark.parametrize("case", RAGGED)
    @pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
    def test_numbers(self, compiled, workload, case):
        assert verdict(compiled(workload, max_slack=8), workload, *RAGGED[case]) is None

    @pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
    def test_twin_serves_scales_below_zero(self, compiled, workload):
        assert verdict(compiled(workload, negative_scale=True, max_slack=8), workload, Shape(1, 2, 1, 50, 70), -1.5) is None

    @pytest.mark.parametrize("growth", [0.5, 3, 7.9, 8.1, 30])
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
    def test_scores_that_grow_from_tile_to_tile(self, compiled, workload, sign, growth):
        """By so many powers of two: of eight tiles the maximum stays behind in all, in some, in one at a time or in none."""
        q, k, v = reference.make_inputs(workload, Shape(1, 2, 1, 40, 8 * KV_TILE))
        scale = sign * float(np.float32(workload.head_dim**-0.5))
        # The last tile comes first. One channel carries the growth; what the others add is small beside it.
        tile = (k.shape[1] - 1 - np.arange(k.shape[1])) // KV_TILE
        q[..., 1:], q[..., 0] = q[..., 1:] / 8, 4
        k[..., 0] = (growth * tile / (4 * scale * np.log2(np.e)))[:, None]
        assert verdict_on(compiled(workload, sign < 0, max_slack=8), workload, (q, k, v), scale) is None

    @pytest.mark.parametrize("row_lanes", [1, 4])
    def test_none_is_the_declaration_as_it_was(self, row_lanes):
        workload = self.WORKLOADS[0]
        plain, none, some = (flash_attention_forward(workload, 32, KV_TILE, row_lanes, **slack)
                             for slack in ({}, {"max_slack": 0}, {"max_slack": 8}))
        assert tvm_ffi.structural_equal(plain, none) and not tvm_ffi.structural_equal(plain, some)
        assert "row_max_seen" not in {block.name_hint for block in blocks_of(plain)} and "row_max_seen" in {
            block.name_hint for block in blocks_of(some)}


def blocks_of(func):
    found = []
    tvm_ffi.structural_walk(func.body, (tvm.s_tir.stmt.SBlock, found.append))
    return found
