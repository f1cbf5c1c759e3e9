"""Names, limits, shapes and operation counts of the attention problem."""
import dataclasses
import itertools
from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx
from tvm.sym import Analyzer

from schedules.lowering.rewrite import substitute
from te_defs.masks import MASKS, Window
from te_defs.workload import PRESETS, Shape, Workload, WorkloadError, flops, standard_shape

WORKLOADS = [Workload(d, dv, dtype, mask) for (d, dv), dtype, mask in itertools.product(
    [(64, 64), (128, 128), (192, 128), (8, 256)], ("float16", "bfloat16", "float32"), MASKS)]
LENGTHS = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 9), (9, 1), (4, 7), (7, 4), (16, 16)]


class TestName:
    def test_form(self):
        assert Workload(128, 64, "float16", "causal").name == "fwd_d128_dv64_f16_causal"

    @pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
    def test_parse_reads_it_back(self, workload):
        assert Workload.parse(workload.name) == workload

    def test_names_differ(self):
        assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)

    @pytest.mark.parametrize("name", ["", "fwd_d64_f16_causal", "fwd_d64_dv64_f16", "fwd_d64_dv64_f64_full", "FWD_d64_dv64_f16_full",
                                      "fwd_d64_dv64_f16_full ", "fwd_d64_dv64_f16_full/x", "../fwd_d64_dv64_f16_full"])
    def test_other_forms_are_refused(self, name):
        with pytest.raises(WorkloadError, match="named like fwd_d128_dv128_f16_causal, found .*: correct the name"):
            Workload.parse(name)

    def test_unknown_mask_in_a_name(self):
        known = "full, causal, causal_top_left, window, prefix"
        with pytest.raises(WorkloadError, match=f"mask must be one of {known} or module:class, found 'banded'"):
            Workload.parse("fwd_d64_dv64_f16_banded")

    @pytest.mark.parametrize("short, workload", PRESETS.items(), ids=list(PRESETS))
    def test_presets_are_named_by_the_head_dimension(self, short, workload):
        assert workload.name == "fwd_" + short.replace("_", f"_dv{workload.value_dim}_", 1)
        assert workload.value_dim == (128 if workload.head_dim == 192 else workload.head_dim), "as DeepSeek's latent attention has them"


class TestLimits:
    @pytest.mark.parametrize("size", [0, 4, 7, 100, 264, -8, 64.0, "64"])
    @pytest.mark.parametrize("field", ["head_dim", "value_dim"])
    def test_dimension(self, field, size):
        with pytest.raises(WorkloadError, match=f"{field} must be a multiple of 8 from 8 to 256, found {size!r}"):
            Workload(**{"head_dim": 64, "value_dim": 64, field: size})

    def test_dtype(self):
        with pytest.raises(WorkloadError, match="dtype must be one of float16, bfloat16, float32, found 'float64'"):
            Workload(64, 64, "float64")

    def test_shape_must_not_be_negative(self):
        with pytest.raises(WorkloadError, match="sizes must not be negative, found .*q_len=-1"):
            Shape(1, 1, 1, -1, 1)

    def test_mask_arguments_must_not_be_negative(self):
        with pytest.raises(WorkloadError, match="sizes must not be negative, found .*mask=.-1, 0"):
            Shape(1, 1, 1, 1, 1, (-1, 0))

    @pytest.mark.parametrize("heads, kv_heads", [(4, 3), (2, 4), (1, 0)])
    def test_heads_come_in_groups(self, heads, kv_heads):
        with pytest.raises(WorkloadError, match=f"multiple of key heads, found {heads} and {kv_heads}"):
            Shape(1, heads, kv_heads, 1, 1)


class TestShape:
    def test_tensors(self):
        shapes = Shape(batch=2, q_heads=6, kv_heads=3, q_len=5, kv_len=7).tensors(Workload(64, 32))
        assert shapes == ((2, 5, 6, 64), (2, 7, 3, 64), (2, 7, 3, 32), (2, 5, 6, 32), (2, 6, 5))

    @pytest.mark.parametrize("length", [512, 1000, 16384, 30000])
    def test_standard_shape_holds_the_tokens(self, length):
        shape = standard_shape(Workload(128, 128), length)
        assert (shape.q_len, shape.kv_len, shape.q_heads, shape.kv_heads) == (length, length, 16, 16)
        assert shape.batch == max(16384 // length, 1)


@pytest.mark.parametrize("n, m", LENGTHS)
@pytest.mark.parametrize("mask", [mask(*sample) for mask in MASKS.values() for sample in mask.samples] + [Window(2, 1), Window(0, 3)],
                         ids=str)
class TestMask:
    def test_count_of_kept_pairs(self, mask, n, m):
        i, j = np.ogrid[:n, :m]
        assert mask.kept(n, m) == np.broadcast_to(mask.keep(mask.position(i, n, m), j, m), (n, m)).sum()

    def test_a_row_sees_one_range_of_keys_whose_ends_never_go_back(self, mask, n, m):
        """What the kernels rely on, for rows that exist and keys past the end alike."""
        rows = [mask.position(i, n, m) for i in range(n)]
        begins, ends = ([end(i, m) for i in rows] for end in (mask.key_begin, mask.key_end))
        assert begins == sorted(begins) and ends == sorted(ends) and all(0 <= end <= m for end in begins + ends)
        assert not (mask.from_start and any(begins))
        seen = [[bool(mask.keep(i, j, m)) for j in range(m + 3)] for i in rows]
        assert seen == [[begin <= j < end for j in range(m + 3)] for begin, end in zip(begins, ends)]

    def test_a_key_is_seen_by_one_range_of_rows_whose_ends_never_go_back(self, mask, n, m):
        """What the backward kernels rely on."""
        begins, ends = ([end(j, n, m) for j in range(m)] for end in (mask.query_begin, mask.query_end))
        assert begins == sorted(begins) and ends == sorted(ends) and all(0 <= end <= n for end in begins + ends)
        seen = mask.visible(n, m)
        np.testing.assert_array_equal(seen, [[begin <= i < end for begin, end in zip(begins, ends)] for i in range(n)] if n * m else seen)

    def test_kernels_read_the_same(self, mask, n, m):
        """The same methods on TIR expressions, with arguments that are variables."""
        arguments = [tirx.Var(argument.name, "int32") for argument in mask.arguments()]
        sizes = [tirx.Var(name, "int32") for name in ("row", "n", "m")]
        row, n_var, m_var = sizes
        symbolic = type(mask)(*arguments)
        place = symbolic.position(row, n_var, m_var)
        for i in range(n):
            values = dict(zip([*sizes, *arguments], map(tirx.const, (i, n, m, *dataclasses.astuple(mask)))))
            at = mask.position(i, n, m)
            pairs = [(symbolic.key_begin(place, m_var), mask.key_begin(at, m)), (symbolic.key_end(place, m_var), mask.key_end(at, m))]
            pairs += [(symbolic.keep(place, tirx.const(j), m_var), mask.keep(at, j, m)) for j in range(m)]
            pairs += [(end(tirx.const(j), n_var, m_var), plain(j, n, m)) for j in range(m) for end, plain in (
                (symbolic.query_begin, mask.query_begin), (symbolic.query_end, mask.query_end))]
            for found, wanted in pairs:
                assert int(Analyzer().simplify(substitute(tirx.const(found) if isinstance(found, int) else found, values))) == wanted


class TestFlops:
    def test_flops_are_two_per_multiply_add(self):
        shape = Shape(batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=5)
        assert flops(Workload(64, 32, mask="full"), shape) == 2 * 2 * 4 * (3 * 5) * (64 + 32)
        assert flops(Workload(64, 32, mask="causal"), shape) == 2 * 2 * 4 * (3 + 4 + 5) * (64 + 32)
        assert flops(Workload(64, 32, mask="window"), replace(shape, mask=(1, 0))) == 2 * 2 * 4 * (2 + 2 + 2) * (64 + 32)
