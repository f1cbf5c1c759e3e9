"""exp2 of float32 as a polynomial: on a CPU so that it runs in vector registers, where LLVM would call the C library once for each
lane; on a GPU so that part of the exponentials runs on the multiply-add units, while the special function units do the rest.

The method is that of W. J. Cody and W. Waite, Software Manual for the Elementary Functions (1980), chapter 6: write x = n + f with n the
nearest integer, approximate 2^f on [-1/2, 1/2], and add n to the exponent of the result. FlashAttention-4 computes part of its
exponentials the same way. Here n comes from adding 1.5 * 2^23, whose last mantissa bit is worth 1: the sum is rounded to an integer, and
that integer stands in its low bits.
"""
import functools

import tvm
import tvm_ffi
from tvm import tirx

from schedules.lowering import rewrite

#: Degree -> (2^f - 1) / f, from the constant on, by least squares reweighted (Lawson's method) to the smallest largest relative error:
#: 2e-9 at degree 6, whose result is off by at most 0.94 units in the last place of a float32, a fourth of a unit on average; 3e-6 at
#: degree 4, which is next to nothing beside the rounding of P to 16 bits, and little enough for the row sums.
COEFFICIENTS = {
    4: (0.6931241934177155, 0.2402409860991061, 0.05590642459716125, 0.009582853095191801),
    6: (0.6931472028550684, 0.2402264791362872, 0.05550332471123734, 0.009618437357673036, 0.0013398874414796958,
        0.00015353361909992602),
}
ROUND_TO_INTEGER = 1.5 * 2**23
MANTISSA_BITS = 23
#: From here down the result is 0: at -127 the fraction f is 0 and the polynomial 1, and taking 127 from its exponent leaves no bit.
ZERO_AT = -127.0


def exp2(x, degree=6):
    """2^x of a float32 expression, at most 127, by one of COEFFICIENTS: 0 from -127 down, -inf included, less than 2^-126 up to -126,
    NaN for NaN."""
    def number(value):
        return tirx.const(value, "float32")

    # In this order NaN passes: it is not less.
    x = tirx.Select(x < number(ZERO_AT), number(ZERO_AT), x)
    # Through an integer and back, since TVM's simplifier takes (x + c) - c for x.
    shifted = tirx.reinterpret("int32", x + number(ROUND_TO_INTEGER))
    fraction = x - (tirx.reinterpret("float32", shifted) - number(ROUND_TO_INTEGER))
    last, *others = COEFFICIENTS[degree][::-1]
    power = functools.reduce(lambda sum_, factor: sum_ * fraction + number(factor), (*others, 1.0), number(last))
    bits = tirx.reinterpret("int32", power) + tirx.shift_left(shifted, tirx.const(MANTISSA_BITS, "int32"))
    return tirx.reinterpret("float32", bits)


@rewrite.function_pass("flashtir.PolynomialExp2")
def polynomial_exp2(func):
    """Replace every exp2 of a float32 scalar; to run before loops become vectors."""
    def replace(call):
        return exp2(call.args[0]) if rewrite.is_call(call, "exp2") and str(call.ty) == "float32" else call

    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, replace)))


#: Mark of the loop over the 16-column steps of a nest of exponentials: eighths of them that become polynomials.
POLYNOMIAL_SHARE = "pragma_flashtir_polynomial_share"
EIGHTHS, HALVES = 8, 2


@rewrite.function_pass("flashtir.ShareExponentials")
def share_exponentials(func):
    """Compute some of a marked nest's exponentials, whose results are rounded to 16 bits, by a polynomial of degree 4.

    The blocks of eight columns take turns, so that both kinds of units have work all the time.
    """
    def share(mark):
        loops = []
        tvm_ffi.structural_walk(mark.body, (tirx.For, loops.append), order="pre")
        block = loops[0].loop_var * HALVES + loops[1].loop_var

        def split(store):
            x = store.value.args[0]
            # A GPU's own NaN has all bits of the mantissa set, and adding to its exponent would carry into the sign.
            value = tirx.Select(tirx.isnan(x), x, exp2(x, degree=4))
            by_polynomial = tirx.BufferStore(store.buffer, value, store.indices)
            return tirx.IfThenElse(block % EIGHTHS < int(mark.value), by_polynomial, store)
        return tvm_ffi.structural_map(mark.body, (tirx.BufferStore, split))

    return rewrite.replace_marked(func, POLYNOMIAL_SHARE, share)
