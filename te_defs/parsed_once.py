"""Declarations that are parsed once: TVM's parser takes up to half a second for one."""
import functools

from tvm.s_tir import renew_defs


def parsed_once(declare):
    """The same function from hashable arguments to a PrimFunc, with one parse for equal arguments. Every call gets a copy with variables
    and statements of its own, since a schedule can change what it starts from."""
    known = functools.lru_cache(maxsize=64)(declare)

    @functools.wraps(declare)
    def declared(*arguments, **options):
        return renew_defs(known(*arguments, **options))
    return declared
