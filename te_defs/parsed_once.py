"""Declarations that are parsed once: TVM's parser takes a tenth of a second for the forward pass, a copy of what it made a fortieth of
that."""
import functools

# Those behind tvm.ir.load_json, which takes seven times as long: it brings what other versions of TVM have saved up to date.
from tvm.ir.base import from_json_graph_str, to_json_graph_str

#: Declarations that are kept of a function.
MOST = 64


def parsed_once(declare):
    """The same function from hashable arguments to a PrimFunc, with one parse for equal arguments. Every call gets a copy of its own, since
    a schedule can change what it starts from."""
    known = {}

    @functools.wraps(declare)
    def declared(*arguments, **options):
        key = arguments, tuple(sorted(options.items()))
        if key in known:
            return from_json_graph_str(known[key])
        func = declare(*arguments, **options)
        if len(known) == MOST:
            known.pop(next(iter(known)))  # the oldest
        known[key] = to_json_graph_str(func)
        return func
    return declared
