"""Derivatives of expressions against differences of their values."""
import numpy as np
import pytest
from tvm import tirx

from te_defs.derivative import derivative
from te_defs.evaluate import UnknownExpression, evaluate
from te_defs.scores import SCORES, find_score

S, PLACE, TWO = tirx.Var("s", "float32"), tirx.Var("i", "int32"), tirx.const(2, "float32")
EXPRESSIONS = {
    "sum": S + TWO - S * TWO, "negative": TWO - S, "product": S * S * TWO, "quotient": TWO / (S * S + TWO), "over_constant": S / TWO,
    "exp": tirx.exp(S * TWO), "exp2": tirx.exp2(S), "log": tirx.log(S * S + TWO), "log2": tirx.log2(S * S + TWO),
    "sqrt": tirx.sqrt(S * S + TWO), "rsqrt": tirx.rsqrt(S * S + TWO), "tanh": tirx.tanh(S), "sigmoid": tirx.sigmoid(S),
    "sin": tirx.sin(S * TWO), "cos": tirx.cos(S * TWO), "abs": tirx.abs(S), "pow": tirx.pow(S * S, TWO), "max": tirx.max(S, S * TWO),
    "min": tirx.min(S * S, TWO), "select": tirx.Select(S > TWO, S * S, TWO), "if_then_else": tirx.if_then_else(S < TWO, S * S, S),
    "cast": (S * TWO).astype("float16").astype("float32") * S, "flat": tirx.floor(S) + TWO,
    "of_places": (PLACE // 3).astype("float32"), "constant": TWO}
AT = np.array([-2.3, -1.1, -0.4, 0.3, 0.7, 1.2, 2.6, 5.1])


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=list(EXPRESSIONS))
def test_is_the_slope(expr):
    up, down = (evaluate(expr, {S: AT + off, PLACE: 7}) for off in (1e-6, -1e-6))
    slope = evaluate(derivative(expr, S), {S: AT, PLACE: 7})
    np.testing.assert_allclose(np.broadcast_to(slope, AT.shape), np.broadcast_to((up - down) / 2e-6, AT.shape), rtol=1e-6, atol=1e-7)


def test_of_an_expression_that_stands_for_a_variable():
    scaled = S * TWO
    np.testing.assert_allclose(evaluate(derivative(scaled * scaled, scaled), {S: AT}), 2 * (2 * AT))


def test_an_expression_without_a_rule_is_named():
    with pytest.raises(UnknownExpression, match="an expression with a derivative was wanted, found erf in .*: use exp"):
        derivative(tirx.erf(S), S)


@pytest.mark.parametrize("name", [*SCORES, "tests.of_a_user:halved_far_away", "tests.of_a_user:by_distance",
                                  "tests.of_a_user:without_scores"])
def test_scores_have_theirs(name):
    kind, (n, m), rng = find_score(name), (30, 40), np.random.default_rng(2)
    for sample in kind.samples:
        values = kind.make(sample, {"B": 1, "H": 2, "N": n, "M": m}, np.dtype("float32"), rng)
        score, s, step = kind.of(values), rng.standard_normal((1, 2, n, m)) * 40, 1e-5
        slope = (score.applied(s + step, (n, m)) - score.applied(s - step, (n, m))) / (2 * step)
        np.testing.assert_allclose(np.broadcast_to(score.applied_slopes(s, (n, m)), s.shape), slope, rtol=1e-4, atol=1e-6)
