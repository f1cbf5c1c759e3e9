"""Score modifications, sinks and masks with tensors: numbers of the plain function, names, and what is refused."""
import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.target import codegen

from schedules.arch import cpu_arch
from schedules.families import cpu
from scripts.kernels import Planned, answer, build_artefact
from te_defs import reference
from te_defs.arguments import Operand
from te_defs.evaluate import UnknownExpression, evaluate
from te_defs.flash_attention import flash_attention_forward
from te_defs.naive import naive_attention
from te_defs.scores import Alibi, Bias, Softcap
from te_defs.workload import Shape, Workload, WorkloadError, make_arguments
from tests.numbers import on_llvm, verdict_on

FEATURES = ("full+softcap", "causal+alibi", "window+bias", "causal+sink", "full+softcap+sink", "tests.of_a_user:DocumentCausal",
            "tests.of_a_user:DocumentCausal+sink", "causal+tests.of_a_user:halved_far_away")
#: (shape, axes of tensors that have size one, scale)
CALLS = ((Shape(2, 4, 2, 37, 50), "", 0.2), (Shape(2, 4, 2, 37, 50), "BHNM", 0.2), (Shape(1, 2, 1, 50, 20), "N", 0.2),
         (Shape(1, 2, 1, 5, 0), "B", 0.2), (Shape(3, 2, 2, 1, 33), "BH", -0.3), (Shape(1, 3, 1, 40, 40), "", 0.0))


def workload(features, head_dim=32, value_dim=16, dtype="f32"):
    return Workload.parse(f"fwd_d{head_dim}_dv{value_dim}_{dtype}_{features}")


@pytest.fixture(scope="module")
def compiled():
    """Function (workload, row_lanes or the definition "naive") -> function for all scales, compiled once each."""
    known = {}

    def build(workload, form):
        if (workload, form) not in known:
            if form == "naive":
                known[workload, form] = on_llvm(naive_attention(workload))
            else:
                kernels = [on_llvm(flash_attention_forward(workload, 32, 16, form, negative_scale=sign))
                           for sign in ((False,) if workload.score else (False, True))]
                known[workload, form] = lambda *arguments: kernels[0 if arguments[5] >= 0 else -1](*arguments)
        return known[workload, form]
    return build


@pytest.mark.parametrize("form", [1, 4, "naive"])
@pytest.mark.parametrize("features", FEATURES)
def test_numbers(compiled, features, form):
    it = workload(features)
    for number, (shape, single, scale) in enumerate(CALLS):
        shape = Shape(shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len, (7, 3) if it.mask == "window" else ())
        inputs, arguments = reference.make_inputs(it, shape, number), make_arguments(it, shape, number, single)
        assert verdict_on(compiled(it, form), it, inputs, float(np.float32(scale)), arguments) is None, (shape, single, scale)


class TestReference:
    """The reference evaluates the kernels' expressions: here the same, written again."""

    S = np.random.default_rng(0).normal(size=(2, 3, 4, 5)) * 3

    def test_softcap(self):
        np.testing.assert_allclose(Softcap.of((2.0,)).applied(self.S, (4, 5)), 2 * np.tanh(self.S / 2), atol=1e-12)

    @pytest.mark.parametrize("cap", [1e-3, 2.0, 24.1, 1e4, 1e6, 1e20])
    def test_softcap_of_any_size(self, compiled, cap):
        """Where the cap is large beside the scores, too: tanh(x) is nearly x then."""
        it = workload("full+softcap")
        q, k, v = reference.make_inputs(it, Shape(1, 2, 1, 9, 20))
        out, lse = answer(compiled(it, 1), (q, k, v), 0.5, (cap,))
        scores = cap * np.tanh(np.einsum("bihc,bjgc->bhij", q.astype(float), k.astype(float)) * 0.5 / cap)
        np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(axis=-1)), rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("function", ["by_distance", "by_remainder", "without_scores"])
    def test_functions_of_places(self, compiled, function):
        """Quotients of distances, which may be negative, are rounded down; what does not depend on the score serves all heads."""
        it = workload(f"full+tests.of_a_user:{function}")
        for shape in (Shape(1, 2, 1, 37, 70), Shape(1, 2, 1, 1, 2)):
            assert verdict_on(compiled(it, 4), it, reference.make_inputs(it, shape), 0.2) is None

    def test_alibi_counts_from_the_aligned_diagonal(self):
        slopes, (i, j) = np.array([0.5, 0.25, 2], np.float32), np.ogrid[:4, :5]
        found = Alibi.of((slopes,)).applied(self.S, (4, 5))
        np.testing.assert_allclose(found, self.S - slopes[:, None, None] * abs(i + 1 - j), atol=1e-12)

    @pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1), (1, 1, 1, 1)])
    def test_bias_broadcasts_in_every_axis(self, size):
        bias = np.random.default_rng(1).normal(size=size).astype(np.float16)
        np.testing.assert_array_equal(Bias.of((bias,)).applied(self.S, (4, 5)), self.S + bias.astype(float))

    def test_a_sink_takes_its_share_and_gives_nothing(self):
        it = workload("full+sink")
        q, k, v = reference.make_inputs(it, Shape(1, 2, 1, 3, 4))
        sink = np.array([0.5, -np.inf], np.float32)
        out, lse = reference.forward(it, q, k, v, 0.3, (sink,))
        bare, bare_lse = reference.forward(workload("full"), q, k, v, 0.3)
        np.testing.assert_allclose(lse[:, 0], np.logaddexp(bare_lse[:, 0], 0.5))
        np.testing.assert_allclose(out[:, :, 0], bare[:, :, 0] * np.exp(bare_lse[:, 0] - lse[:, 0])[..., None])
        np.testing.assert_array_equal(out[:, :, 1], bare[:, :, 1])

    def test_scores_stay_in_their_precision(self):
        assert Softcap.of((2.0,)).applied(self.S.astype(np.float32), (4, 5)).dtype == np.float32

    def test_an_expression_that_numpy_cannot_compute_is_named(self):
        with pytest.raises(UnknownExpression, match="that NumPy can compute was wanted, found popcount in .*: use exp"):
            evaluate(tirx.popcount(tirx.Var("i", "int32")), {tirx.Var("s", "float32"): np.zeros(2)})


class TestOperand:
    def test_beyond_an_end_it_reads_that_end(self):
        rows = Operand(np.array([[1, 2, 3]]))
        assert [int(rows[b, j]) for b, j in ((0, 0), (5, 2), (0, 9), (-1, -4))] == [1, 3, 3, 1]

    def test_of_one_batch_entry(self):
        assert int(Operand(np.array([[1, 2], [3, 4]])).at(1)[0]) == 3


class TestNames:
    @pytest.mark.parametrize("features", FEATURES)
    def test_parse_reads_it_back(self, features):
        assert Workload.parse(workload(features).name) == workload(features)

    @pytest.mark.parametrize("features, message", [
        ("full+hardcap", "score must be one of softcap, alibi, bias or module:function, found 'hardcap'"),
        ("full+softcap+alibi", "takes one score modification, found softcap and alibi: write one function of both"),
        ("full+nowhere:score", "a score nowhere:score was wanted, and importing it raised ModuleNotFoundError: No module named 'nowhere'"),
        ("full+tests.of_a_user:absent", "a score tests.of_a_user:absent was wanted, and importing it raised AttributeError"),
        ("full+tests.of_a_user:NUMBER", "is a function .* found tests.of_a_user:NUMBER to be int"),
        ("full+tests.of_a_user:raises", "must take TIR expressions .*, and raised RuntimeError: out of paper"),
        ("full+tests.of_a_user:takes_too_little", "must take TIR expressions .*, and raised TypeError"),
        ("full+tests.of_a_user:returns_half_precision", "must return a float32 expression, found float16: cast it"),
        ("full+tests.of_a_user:returns_nothing", "must return a float32 expression, found NoneType"),
        ("tests.of_a_user:raises", "a mask is a class of te_defs.masks.Mask, found tests.of_a_user:raises to be something else"),
        ("tests.of_a_user:Absent", "a mask tests.of_a_user:Absent was wanted, and importing it raised AttributeError"),
        ("tests.of_a_user:KeepsNumbers", "mask tests.of_a_user:KeepsNumbers must keep by a condition and end at rows, found int"),
        ("tests.of_a_user:AsksPython", "mask tests.of_a_user:AsksPython must take TIR expressions, and raised"),
        ("tests.of_a_user:ForgetsItsQueries", "mask tests.of_a_user:ForgetsItsQueries must see by query_begin and query_end what it sees"),
        ("tests.of_a_user:OfNoKind", "the fields of tests.of_a_user:OfNoKind must be COUNT, .* found reach to be <class 'int'>"),
        ("tests.of_a_user:WithoutSamples", r"the samples of tests.of_a_user:WithoutSamples must be tuples of 1 numbers \(reach\)"),
        ("full+sink+sink", "takes one sink and lengths of one kind, found sink behind fwd_d32_dv16_f32_full.sink"),
        ("full+keys+packed", "takes one sink and lengths of one kind, found packed"), ("full+uniform", "found uniform behind"),
        ("full+bias+keys", "tensors behind the scale must be by head alone where lengths are keys, found bias"),
        ("tests.of_a_user:DocumentCausal+packed", "must be by head alone where lengths are packed, found documents")])
    def test_what_is_none_is_refused(self, features, message):
        with pytest.raises(WorkloadError, match=message):
            workload(features)


HERE = cpu_arch(codegen.llvm_get_system_cpu(), 512, 2)
BIASED = Workload(32, 32, "float16", "window", "bias", sink=True)
CAPPED = Workload(32, 32, "float32", "full", "softcap")


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Function (workload, *arguments behind the scale) -> (out, lse) of one call."""
    folder, functions = tmp_path_factory.mktemp("scores"), {}
    for it in (BIASED, CAPPED):
        path = build_artefact([Planned("cpu", cpu.default_plan(it, HERE))], it, HERE, folder / f"{it.score}.so")
        functions[it] = tvm_ffi.load_module(str(path)).flash_attention_forward

    def make(it, *arguments):
        inputs, lse = reference.make_inputs(it, Shape(2, 4, 2, 20, 30)), np.full((2, 4, 20), 7, "float32")
        out = np.full((2, 20, 4, 32), 7, reference.numpy_dtype(it))
        try:
            functions[it](*inputs, out, lse, 0.125, *arguments)
        except (TypeError, ValueError) as error:
            assert (out == 7).all() and (lse == 7).all()
            raise error
        return out, lse
    return make


class TestEntry:
    """Arguments behind the scale at the entry of an artefact: what is wrong is named before anything is written."""

    def test_right_ones_are_served(self, call):
        shape = Shape(2, 4, 2, 20, 30, (5, 5))
        inputs, arguments = reference.make_inputs(BIASED, shape), make_arguments(BIASED, shape, single="B")
        answers = reference.forward(BIASED, *inputs, 0.125, arguments)
        bounds = reference.tolerances(BIASED, *inputs, 0.125, arguments, answers)
        assert reference.mismatch(*call(BIASED, *arguments), *answers, *bounds) is None

    @pytest.mark.parametrize("bias, sink, message", [
        (np.zeros((2, 4, 20, 29), "float16"), None, r"bias.shape\[3\] is 29, wanted 1 or 30, the number of keys"),
        (np.zeros((3, 4, 20, 30), "float16"), None, r"bias.shape\[0\] is 3, wanted 1 or 2, the number of batch entries"),
        (np.zeros((2, 2, 20, 30), "float16"), None, r"bias.shape\[1\] is 2, wanted 1 or 4, the number of heads"),
        (np.zeros((2, 4, 0, 30), "float16"), None, r"bias.shape\[2\] is 0, wanted 1 or 20, the number of queries"),
        (np.zeros((20, 30), "float16"), None, "bias has 2 dimensions, wanted 4: BHNM"),
        (np.zeros((2, 4, 20, 30), "float32"), None, "bias has dtype float32, wanted float16"),
        (np.zeros((2, 4, 20, 60), "float16")[..., ::2], None, "bias has stride 2 in dimension 3, wanted 1: pass a contiguous tensor"),
        (1.0, None, "bias is a float, wanted a tensor"), (None, 1.0, "sink is a float, wanted a tensor"),
        (None, np.zeros(3, "float32"), r"sink.shape\[0\] is 3, wanted 1 or 4, the number of heads"),
        (None, np.zeros(4, "float16"), "sink has dtype float16, wanted float32")])
    def test_wrong_tensors_are_refused(self, call, bias, sink, message):
        bias = np.zeros((1, 1, 20, 30), "float16") if bias is None else bias
        with pytest.raises((TypeError, ValueError), match=message):
            call(BIASED, 3, 3, bias, np.zeros(4, "float32") if sink is None else sink)

    @pytest.mark.parametrize("cap, message", [
        (0, "cap is 0, wanted a number above zero that is finite in float32"), (-1.5, "cap is -1.5, wanted a number above zero"),
        (1e-60, "cap is 1e-60, wanted a number above zero"), (1e39, r"cap is 1e\+39, wanted a number above zero"),
        (float("nan"), "cap is nan, wanted"), (None, "cap is None, wanted a number"), ("30", "cap is text or bytes, wanted a number")])
    def test_wrong_numbers_are_refused(self, call, cap, message):
        with pytest.raises((TypeError, ValueError), match=message):
            call(CAPPED, cap)

    def test_outputs_may_not_share_memory_with_them(self, call, tmp_path):
        path = build_artefact([Planned("cpu", cpu.default_plan(BIASED, HERE))], BIASED, HERE, tmp_path / "biased.so")
        q, k, v = reference.make_inputs(BIASED, Shape(1, 1, 1, 32, 32))
        out, lse = np.full((1, 32, 1, 32), 7, "float16"), np.zeros((1, 1, 32), "float32")
        forward = tvm_ffi.load_module(str(path)).flash_attention_forward
        with pytest.raises(ValueError, match="out shares memory with bias, wanted outputs of their own"):
            forward(q, k, v, out, lse, 0.1, 3, 3, out.reshape(1, 1, 32, 32), np.zeros(1, "float32"))
        assert (out == 7).all()

    def test_an_artefact_has_one_kernel_for_all_scales(self, tmp_path):
        path = build_artefact([Planned("cpu", cpu.default_plan(CAPPED, HERE))], CAPPED, HERE, tmp_path / "capped.so")
        inputs = reference.make_inputs(CAPPED, Shape(1, 2, 1, 20, 30))
        answers = reference.forward(CAPPED, *inputs, -0.5, (2.0,))
        found = answer(tvm_ffi.load_module(str(path)).flash_attention_forward, inputs, -0.5, (2.0,))
        assert reference.mismatch(*found, *answers, *reference.tolerances(CAPPED, *inputs, -0.5, (2.0,), answers)) is None
        assert b"attention_forward_negative_scale" not in path.read_bytes()
