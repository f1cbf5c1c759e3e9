"""On a GPU: the numbers of every family through the checked entry of an exported artefact."""
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi

from schedules.artefact.export import export_artefact
from schedules.artefact.variant import variant_of
from schedules.build import build_plan, strided_of
from schedules.families import mma, simt, simt_te, wgmma
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import Calls
from schedules.registry import FAMILIES, takers
from te_defs import reference
from te_defs.masks import MASKS
from te_defs.storage import EXPANDED, STORAGES
from te_defs.workload import Shape, Workload, make_arguments
from tests import numbers
from tests.numbers import RAGGED

pytestmark = pytest.mark.gpu
WORKLOADS = [Workload(d, d, dtype, mask) for d in (64, 128) for dtype in ("float16", "bfloat16", "float32") for mask in ("full", "causal")]
#: Head dimensions that wgmma has measured plans for, beside those above.
WIDE = [Workload(d, dv, dtype, mask) for d, dv in ((96, 96), (192, 128), (256, 256)) for dtype in ("float16", "bfloat16")
        for mask in ("full", "causal")]
#: Head dimensions whose tiles have zeros at the ends of their rows, or that no plan was measured for.
PADDED = [Workload(32, 32, "float16", "causal"), Workload(40, 72, "bfloat16", "full"), Workload(80, 80, "float16", "causal"),
          Workload(112, 112, "bfloat16", "causal"), Workload(160, 160, "float16", "full"), Workload(72, 184, "float16", "causal"),
          Workload(248, 248, "bfloat16", "causal"), Workload(256, 64, "float16", "full"), Workload(48, 136, "float16", "window")]
MASKED = [(family, Workload(d, d, dtype, mask)) for mask in MASKS if mask not in ("full", "causal") for family, d, dtype in (
    (simt, 64, "float32"), (mma, 64, "float16"), (mma, 128, "bfloat16"), (wgmma, 64, "float16"), (wgmma, 96, "bfloat16"),
    (wgmma, 128, "float16"), (wgmma, 256, "float16"))]
MODIFIED = [(family, Workload.parse(name)) for family, name in (
    *((simt, f"fwd_d64_dv64_f32_{it}") for it in ("causal+softcap", "full+bias+sink", "tests.of_a_user:DocumentCausal")),
    *((family, f"fwd_d{d}_dv{d}_{dtype}_{it}") for family in (mma, wgmma) for d, dtype, it in (
        (64, "f16", "causal+softcap"), (128, "f16", "full+bias"), (128, "bf16", "causal+alibi+sink"), (64, "bf16", "window+bias"),
        (64, "f16", "tests.of_a_user:DocumentCausal"), (128, "f16", "causal+tests.of_a_user:halved_far_away"))),
    (wgmma, "fwd_d256_dv256_f16_full+softcap+sink"), (wgmma, "fwd_d80_dv80_f16_causal+softcap"))]
CASES = [(family, workload) for family in FAMILIES if family.NAME != "cpu" for workload in WORKLOADS]
CASES += [(wgmma, workload) for workload in WIDE] + MASKED + [(family, workload) for workload in PADDED for family in (mma, wgmma)]
CASES += MODIFIED
CASES += [(mma, workload) for workload in WIDE if (workload.dtype, workload.mask) == ("float16", "causal")]
HALVES = [workload for workload in WORKLOADS + WIDE if workload.dtype == "float16"]
LONG, CAUSAL = Workload(128, 128, "float16", "full"), Workload(128, 128, "float16", "causal")
SHAPES = {**RAGGED, "long": (Shape(1, 2, 1, 1000, 1500), 1.0), "odd_group": (Shape(2, 5, 1, 130, 61), 1.0),
          "many_heads": (Shape(70000, 1, 1, 1, 3), 1.0), "negative_scale": (Shape(1, 2, 2, 333, 400), -1.0)}
#: More query tiles than multiprocessors, several times: a persistent grid runs so many waves that FAIR deals in pairs too.
WAVES = Shape(3, 100, 10, 270, 290)
#: Bytes of GPU memory that tensors of more than 2^31 elements want.
ROOM = 40 << 30


def name_of(value):
    return getattr(value, "NAME", None) or getattr(value, "name", None) or str(value)


@pytest.fixture
def arch(gpu_arch):
    return gpu_arch


@pytest.fixture
def built(toolkit, arch):
    """Function (family, workload, plan, place, strided) -> Variant of that place in an artefact."""
    def make(family, workload, plan, place=1, strided=None, packed=False):
        strided = strided_of(family)[0] if strided is None else strided
        with cuda_compiler(toolkit, (arch.name,), CudaOptions(**family.compiler_options(plan))) as log:
            module = build_plan(family, workload, plan, arch, place, strided, packed)
        return variant_of(module, family, arch, plan, log.kernels, serves=Calls(rows=plan.q_tile, strided=strided, packed=packed))
    return make


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """Function (workload, variants) -> flash_attention_forward of their artefact."""
    def make(workload, *variants):
        path = tmp_path_factory.mktemp("gpu") / f"{workload.name}.so"
        export_artefact(variants, workload, path, {}, ())
        return tvm_ffi.load_module(str(path)).flash_attention_forward
    return make


@pytest.fixture
def forward(arch, built, kept):
    """Function (family, workload, plan, strided) -> flash_attention_forward of a plan, the seed where none is given; built once each.

    Skips what the family declines.
    """
    def make(family, workload, plan=None, strided=None):
        reason = family.decline(workload, arch)
        if reason is not None:
            pytest.skip(f"{family.NAME} declines: {reason}")
        wanted = plan or family.default_plan(workload, arch)
        return kept(f"forward {family.NAME} {workload.name} {wanted} {strided} {arch.name}", lambda path: export_artefact(
            [built(family, workload, wanted, strided=strided)], workload, path, {}, ())).flash_attention_forward
    return make


def run(function, workload, inputs, scale, mask=(), storage="contiguous", lengths=()):
    """(out, lse) from the GPU; the outputs hold NaN before."""
    return numbers.run(function, workload, inputs, scale, mask, tvm.cuda(0), storage, lengths, whole=True)


def check(function, workload, shape, factor=1.0):
    """The numbers are right, with all samples of the mask, and the same bits come again."""
    inputs = reference.make_inputs(workload, shape)
    scale = float(np.float32(factor * workload.head_dim**-0.5))
    for mask in workload.mask_class.samples:
        arguments = make_arguments(workload, replace(shape, mask=mask), single="" if shape.q_heads % 2 else "BN")
        answer, lse_answer = reference.forward(workload, *inputs, scale, arguments)
        bounds = reference.tolerances(workload, *inputs, scale, arguments, (answer, lse_answer))
        out, lse = run(function, workload, inputs, scale, arguments)
        assert reference.mismatch(out, lse, answer, lse_answer, *bounds) is None, mask
        again = run(function, workload, inputs, scale, arguments)
        assert out.tobytes() == again[0].tobytes() and lse.tobytes() == again[1].tobytes()


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("family, workload", CASES, ids=name_of)
def test_numbers_and_bits(forward, family, workload, case):
    check(forward(family, workload), workload, *SHAPES[case])


def test_nothing_is_written_on_bad_input(forward, arch):
    workload = WORKLOADS[0]
    function = forward(takers(workload, arch)[0], workload)
    q, k, v = (tvm.runtime.tensor(array, tvm.cuda(0)) for array in reference.make_inputs(workload, Shape(1, 2, 1, 8, 8)))
    out = tvm.runtime.tensor(np.full((1, 8, 2, 64), 7, np.float16), tvm.cuda(0))
    lse = tvm.runtime.tensor(np.full((1, 2, 9), 7, np.float32), tvm.cuda(0))
    with pytest.raises(ValueError, match=r"lse.shape\[2\] is 9, wanted 8"):
        function(q, k, v, out, lse, 0.125)
    assert (out.numpy() == 7).all()


class TestViews:
    """Views with strides, by the kernel that takes them: its bits are those of contiguous tensors."""

    WORKLOADS = [(simt, Workload(64, 64, "float32", "causal")), (simt, Workload(128, 128, "float16", "full")), (mma, CAUSAL),
                 (mma, Workload(64, 64, "bfloat16", "full")), *((wgmma, workload) for workload in (
                     CAUSAL, Workload(64, 64, "float16", "full"), *(it for it in WIDE if it.dtype == "float16" and it.mask == "causal")))]

    @pytest.mark.parametrize("storage", [*STORAGES[1:], *EXPANDED])
    @pytest.mark.parametrize("family, workload", WORKLOADS, ids=name_of)
    def test_numbers_and_bits(self, forward, family, workload, storage):
        function = forward(family, workload, strided=True)
        for shape, scale in ((Shape(2, 6, 2, 270, 270), 0.1), (Shape(3, 4, 4, 130, 333), -0.1), (Shape(1, 2, 1, 1, 90), 0.1)):
            inputs = reference.make_inputs(workload, shape)
            if storage in EXPANDED:
                for x in inputs:
                    x[:] = x.take([0], EXPANDED[storage])
            answers = reference.forward(workload, *inputs, scale)
            found, plain = (run(function, workload, inputs, scale, storage=where) for where in (storage, "contiguous"))
            assert reference.mismatch(*found, *answers, *reference.tolerances(workload, *inputs, scale, (), answers)) is None
            assert all(a.tobytes() == b.tobytes() for a, b in zip(found, plain))

    def test_the_textbook_of_tensor_expressions_takes_none(self, forward):
        workload = Workload(64, 64, "float32", "full")
        with pytest.raises(ValueError, match="q has stride .* pass a contiguous tensor"):
            run(forward(simt_te, workload), workload, reference.make_inputs(workload, Shape(1, 2, 2, 9, 9)), 0.1, storage="bhnd")

    def test_one_artefact_has_a_kernel_for_either(self, arch, built, linked, capfd):
        plan, inputs = mma.default_plan(CAUSAL, arch), reference.make_inputs(CAUSAL, Shape(2, 6, 2, 270, 270))
        function = linked(CAUSAL, *(built(mma, CAUSAL, plan, place, strided) for place, strided in enumerate(strided_of(mma), 1)))
        first, *others = (run(function, CAUSAL, inputs, 0.1, storage=storage) for storage in STORAGES)
        assert all(a.tobytes() == b.tobytes() for other in others for a, b in zip(first, other))
        assert capfd.readouterr().err == ""


class TestPacking:
    """Row tiles that the query heads of a group share."""

    SHAPES = [Shape(2, 8, 2, 1, 300), Shape(1, 7, 1, 33, 129), Shape(3, 6, 2, 63, 200), Shape(1, 140, 2, 5, 77), Shape(1, 5, 1, 9, 0)]

    @pytest.mark.parametrize("storage", ["contiguous", "bhnd"])
    @pytest.mark.parametrize("workload", [CAUSAL, Workload(64, 64, "bfloat16", "full", "bias", True),
                                          Workload(192, 128, "float16", "causal"), Workload(40, 72, "bfloat16", "window", "alibi")],
                             ids=name_of)
    def test_numbers_and_bits(self, built, linked, arch, workload, storage):
        if mma.decline(workload, arch) is not None:
            pytest.skip(f"mma declines: {mma.decline(workload, arch)}")
        plan = mma.packed_plan(workload, arch)
        function = linked(workload, built(mma, workload, plan, strided=True, packed=True),
                          built(mma, workload, mma.default_plan(workload, arch), 2, True))
        for shape in self.SHAPES:
            shape = replace(shape, mask=(50, 7) if workload.mask == "window" else ())
            inputs, arguments = reference.make_inputs(workload, shape), make_arguments(workload, shape)
            answers = reference.forward(workload, *inputs, 0.1, arguments)
            found, again = (run(function, workload, inputs, 0.1, arguments, storage=storage) for _ in range(2))
            assert reference.mismatch(*found, *answers, *reference.tolerances(workload, *inputs, 0.1, arguments, answers)) is None, shape
            assert all(a.tobytes() == b.tobytes() for a, b in zip(found, again))


class TestLengths:
    """Batch entries with lengths of their own; what belongs to nobody is NaN."""

    CASES = [(family, Workload(d, dv, dtype, mask, lengths=lengths))
             for lengths in ("keys", "packed") for mask in ("full", "causal", "window")
             for family, d, dv, dtype in ((simt, 64, 64, "float32"), (mma, 128, 128, "float16"), (wgmma, 64, 64, "float16"),
                                          (wgmma, 128, 128, "bfloat16"), (wgmma, 192, 128, "float16"))]
    CASES += [(wgmma, Workload(d, d, "float16", "causal", lengths=lengths)) for d in (96, 256) for lengths in ("keys", "packed")]
    Q_LENGTHS, K_LENGTHS = (270, 0, 1, 64, 600, 129, 5), (300, 40, 1, 0, 900, 128, 333)

    def right(self, function, workload, inputs, lengths, storage):
        for mask in MASKS[workload.mask].samples:
            answers = reference.forward(workload, *inputs, 0.1, mask, lengths)
            bounds = reference.tolerances(workload, *inputs, 0.1, mask, answers, lengths)
            found = run(function, workload, inputs, 0.1, mask, storage, lengths)
            assert reference.mismatch(*found, *answers, *bounds) is None, mask
            again = run(function, workload, inputs, 0.1, mask, storage, lengths)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(found, again))

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("family, workload", CASES, ids=name_of)
    def test_numbers_and_bits(self, forward, family, workload, storage):
        function = forward(family, workload, strided=True)
        if workload.lengths == "keys":
            lengths = np.array([*self.K_LENGTHS, *(700 - 7 * n for n in range(60))], np.int32)
            q, k, v = reference.make_inputs(workload, Shape(len(lengths), 4, 2, 150, 900))
            for b, length in enumerate(lengths):
                k[b, length:], v[b, length:] = np.nan, np.nan
            self.right(function, workload, (q, k, v), (lengths,), storage)
        else:
            lengths = [np.cumsum((0, *rows), dtype=np.int32) for rows in (self.Q_LENGTHS, self.K_LENGTHS)]
            inputs = reference.make_inputs(workload, Shape(1, 4, 2, *(int(table[-1]) for table in lengths)))
            self.right(function, workload, inputs, (*lengths, 600), storage)

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    @pytest.mark.parametrize("family, workload", [case for case in CASES if case[1].lengths == "packed"], ids=name_of)
    def test_what_stands_in_other_sequences_does_not_leak(self, forward, family, workload, poison):
        lengths = np.array([0, 140, 410, 500], np.int32), np.array([0, 150, 427, 600], np.int32), 270
        q, k, v = reference.make_inputs(workload, Shape(1, 2, 2, 520, 640))
        k[:, :150], k[:, 427:], v[:, :150], v[:, 427:], q[:, :140], q[:, 410:] = [poison] * 6
        mask = MASKS[workload.mask].samples[0]
        out, lse = run(forward(family, workload, strided=True), workload, (q, k, v), 0.1, mask, lengths=lengths)
        alone, uniform = (q[:, 140:410], k[:, 150:427], v[:, 150:427]), replace(workload, lengths="uniform")
        answers = reference.forward(uniform, *alone, 0.1, mask)
        bounds = reference.tolerances(uniform, *alone, 0.1, mask, answers)
        assert reference.mismatch(out[:, 140:410], lse[:, :, 140:410], *answers, *bounds) is None
        assert np.isnan(out[:, 500:]).all() and np.isnan(lse[..., 500:]).all(), "rows of no sequence are left alone"

    @pytest.mark.parametrize("family, workload", [case for case in CASES if case[1].mask == "causal"], ids=name_of)
    def test_wrong_lengths_are_refused(self, forward, family, workload):
        """They are read from the device before anything is launched."""
        function, inputs = forward(family, workload, strided=True), reference.make_inputs(workload, Shape(1, 2, 2, 50, 60))
        wrong = {"keys": (np.array([61], np.int32),), "packed": (np.array([0, 50], np.int32), np.array([0, 61], np.int32), 50)}
        with pytest.raises(ValueError, match="is 61, wanted .* 60, the rows of k"):
            run(function, workload, inputs, 0.1, (), lengths=wrong[workload.lengths])


@pytest.fixture
def hopper(arch):
    if not arch.wgmma_seed:
        pytest.skip(f"wgmma needs an sm_90a, found {arch.name}")


@pytest.mark.usefixtures("hopper")
class TestWgmma:
    @pytest.mark.parametrize("workload", HALVES + PADDED + [workload for family, workload in MASKED if family is wgmma],
                             ids=name_of)
    def test_several_waves(self, forward, workload):
        check(forward(wgmma, workload), workload, WAVES)

    @pytest.mark.parametrize("case", ["ragged", "one_query", "no_keys", "long", "odd_group", "negative_scale"])
    @pytest.mark.parametrize("workload", HALVES + PADDED[1:3], ids=name_of)
    def test_further_plans(self, forward, arch, workload, case):
        for plan, _ in wgmma.further_plans(workload, arch, wgmma.default_plan(workload, arch))[1:]:
            check(forward(wgmma, workload, plan), workload, *SHAPES[case])

    @pytest.mark.parametrize("changes", [{}, dict(blocks=0), dict(order_of_work=0), dict(stages=3), dict(kv_tile=80, stages=4),
                                         dict(query_stages=2), dict(ping_pong=0), dict(late_wait=0), dict(lazy_rescale=0),
                                         dict(polynomial_share=2), dict(shared_decode=1), dict(q_tile=64)], ids=str)
    @pytest.mark.parametrize("shape", [WAVES, Shape(1, 2, 1, 1000, 1500)], ids=["waves", "long"])
    def test_every_knob(self, forward, arch, changes, shape):
        workload = Workload(64, 64, "float16", "causal")
        plan = wgmma.WgmmaPlan(q_tile=128, kv_tile=64, blocks=arch.peak.sms, order_of_work=1).but(**changes)
        check(forward(wgmma, workload, plan), workload, shape)

    @pytest.mark.parametrize("workload", [CAUSAL, Workload(64, 64, "bfloat16", "full")], ids=name_of)
    def test_a_hundred_runs_give_the_same_bits(self, forward, workload):
        function, inputs = forward(wgmma, workload), reference.make_inputs(workload, WAVES)
        first = run(function, workload, inputs, 0.1)
        for _ in range(100):
            again = run(function, workload, inputs, 0.1)
            assert all(found.tobytes() == expected.tobytes() for found, expected in zip(again, first))

    def test_an_artefact_that_holds_mma_too_takes_wgmma(self, arch, built, linked):
        """Which of them serves shows in the bits: they sum in different orders."""
        inputs = reference.make_inputs(CAUSAL, WAVES)
        plans = {family: family.default_plan(CAUSAL, arch) for family in (wgmma, mma)}

        def bits(*variants):
            return run(linked(CAUSAL, *variants), CAUSAL, inputs, 0.1)[0].tobytes()
        of_wgmma, of_mma = (bits(built(family, CAUSAL, plan)) for family, plan in plans.items())
        both = bits(*(built(family, CAUSAL, plan, place) for place, (family, plan) in enumerate(plans.items(), 1)))
        assert both == of_wgmma != of_mma


@pytest.mark.parametrize("family, length", [(wgmma, 140_000), (mma, 100_800)], ids=name_of)
class TestMoreThan31Bits:
    """Tensors of many rows of 128 heads and 128 channels: 2.3e9 elements, or 1.7e9, as many as a family that counts elements in 32 bits
    takes: their bytes need 33. A few rows and heads are compared with the reference."""

    HEADS, BLOCK = 128, 1400
    HEADS_CHECKED = [0, 77, 127]

    @pytest.fixture(autouse=True)
    def room(self):
        free = tvm.cuda(0).available_global_memory
        if free < ROOM:
            pytest.skip(f"tensors of more than 2^31 elements want {ROOM >> 30} GiB of free GPU memory, found {free >> 30}")

    def long_tensor(self, length, seed):
        """[1, length, HEADS, 128]: a block of random rows again and again, but for the first channel, which tells all rows apart."""
        rng = np.random.default_rng(seed)
        block = rng.standard_normal((1, self.BLOCK, self.HEADS, 128), np.float32).astype(np.float16)
        tensor = np.tile(block, (1, length // self.BLOCK, 1, 1))
        tensor[..., 0] = rng.standard_normal(tensor.shape[:3], np.float32)
        assert tensor.nbytes > 2**31
        return tensor

    def check_some(self, function, inputs, rows):
        q, k, v = inputs
        out, lse = run(function, LONG, inputs, 0.1)
        chosen = q[:, rows][:, :, self.HEADS_CHECKED], *(np.ascontiguousarray(x[:, :, self.HEADS_CHECKED]) for x in (k, v))
        answer, lse_answer = reference.forward(LONG, *chosen, 0.1)
        bounds = reference.tolerances(LONG, *chosen, 0.1, (), (answer, lse_answer))
        found = out[:, rows][:, :, self.HEADS_CHECKED], lse[:, self.HEADS_CHECKED][:, :, rows]
        assert reference.mismatch(*found, answer, lse_answer, *bounds) is None
        assert not np.isnan(lse).any(), "rows that nobody has written"

    def test_queries_and_output(self, forward, family, length):
        q = self.long_tensor(length, 0)
        k, v = reference.make_inputs(LONG, Shape(1, self.HEADS, self.HEADS, 1, 64))[1:]
        rows = [row for row in (0, 1, 63, 65_535, 65_536, 65_600, 131_071, 131_072, 131_200) if row < length]
        self.check_some(forward(family, LONG), (q, k, v), [*rows, length - 1])

    def test_keys_and_values(self, forward, family, length):
        q, *_ = reference.make_inputs(LONG, Shape(1, self.HEADS, self.HEADS, 40, 1))
        self.check_some(forward(family, LONG), (q, self.long_tensor(length, 1), self.long_tensor(length, 2)), [0, 17, 39])
