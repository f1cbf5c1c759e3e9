"""A function of the backward pass by itself, from declaration to Schedule and runtime module: the same in all families."""
import tvm
from tvm import s_tir


def staged(func, stages, plan, role):
    """A fresh Schedule of a declaration after some stages."""
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    for stage in stages:
        stage(sch, plan, role)
    return sch


def build(name, sch, arch, pipeline, config):
    """A runtime module with a schedule's function, called `name`; for CUDA a compiler must be installed around the call
    (lowering.cuda_compile)."""
    mod = tvm.IRModule({name: sch.mod["main"].with_attr("global_symbol", name)})
    with arch.target(), tvm.transform.PassContext(config=config):
        return tvm.tirx.build(mod, target=arch.target(), pipeline=pipeline)
