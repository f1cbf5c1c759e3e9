"""TVMScript without what TVM's own decorator spends on looking round."""
from tvm.script.parser._core import parse, utils


def prim_func(s_tir, check_well_formed=True):
    """T.prim_func for functions that stand in no class and whose annotations are no text; written `script.prim_func`, since TVM's parser
    knows it by its last name and reads `s_tir` from the source.

    TVM's asks for the line of source of every caller up to the command line, twice a function, in case one of these is a class: deep in
    callers, as under pytest, that takes as long as the parse.
    """
    def parsed(func):
        return parse(func, utils.inspect_function_capture(func), check_well_formed=check_well_formed)
    parsed.dispatch_token = "tirx"  # by which the parser tells what kind of function it has
    return parsed
