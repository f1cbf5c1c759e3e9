"""TVMScript without what TVM's own decorator spends on looking round, and on reading the same source again."""
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import parse, utils
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.error import ParserError
from tvm.script.parser.core.parser import Parser

#: Sources that were read, each with its syntax tree, by the code of the function.
_read = {}


def prim_func(s_tir, check_well_formed=True):
    """T.prim_func for functions that stand in no class and whose annotations are no text; written `script.prim_func`, since TVM's parser
    knows it by its last name and reads `s_tir` from the source.

    TVM's asks for the line of source of every caller up to the command line, twice a function, in case one of these is a class: deep in
    callers, as under pytest, that takes as long as the parse.
    """
    def parsed(func):
        captured = utils.inspect_function_capture(func)
        return parse(func, captured) if check_well_formed else _parse(func, captured)
    parsed.dispatch_token = "tirx"  # by which the parser tells what kind of function it has
    return parsed


def _parse(func, captured):
    """TVM's `parse` of functions that are well formed, whose definition is read once for all workloads: nearly half of the time."""
    if func.__code__ not in _read:
        source = _read[func.__code__] = Source(func)
        tree = source.as_ast()
        source.as_ast = lambda: tree
    parser = Parser(_read[func.__code__], {func.__name__: func.__annotations__})
    with IRBuilder() as builder:
        try:
            parser.parse(captured)
        except ParserError as error:
            parser.report_error(error.node, error.args[0])
    return builder.get()
