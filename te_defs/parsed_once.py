"""Declarations that are parsed once: TVM's parser takes a third of a second for the forward pass, and reading it again a twentieth."""
import functools

import tvm

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
            return tvm.ir.load_json(known[key])
        func = declare(*arguments, **options)
        if len(known) == MOST:
            known.pop(next(iter(known)))  # the oldest
        known[key] = tvm.ir.save_json(func)
        return func
    return declared
