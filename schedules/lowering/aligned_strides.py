"""What code generation has to know of the strides of views: that they are whole vectors."""
from tvm import DataType, tirx

from schedules.lowering.rewrite import function_pass, substitute

#: Bytes that strides are multiples of on a GPU; the entry of an artefact refuses others.
STRIDE_BYTES = 16


#: Attribute of a function whose views are all accessed by vectors, whichever family's pipeline lowers it.
ALIGNED_VIEWS = "flashtir.aligned_views"


@function_pass("flashtir.AlignedViews")
def aligned_views(func):
    """The same for all arguments of a function with the attribute."""
    return _aligned(func, ()) if func.attrs and ALIGNED_VIEWS in func.attrs else func


@function_pass("flashtir.AlignedStrides")
def aligned_strides(func, *names):
    """Write the strides of arguments, those of these names or all, as multiples of STRIDE_BYTES: accesses to neighbouring channels then
    stay vectors.

    A vector access must start on a multiple of its size, and of a stride that is a mere variable TVM cannot know that.
    """
    return _aligned(func, names)


def _aligned(func, names):
    vectors = {}
    for buffer in func.params:
        for stride in getattr(buffer, "strides", ()) if buffer.name in (names or [buffer.name]) else ():
            if isinstance(stride, tirx.Var):
                elements = tirx.IntImm(str(stride.ty), STRIDE_BYTES * 8 // DataType(buffer.dtype).bits)
                vectors[stride] = tirx.floordiv(stride, elements) * elements
    return func.with_body(substitute(func.body, vectors)) if vectors else func
