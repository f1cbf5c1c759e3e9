"""The two forms of a declaration: symbolic, which is built, and static, which MetaSchedule searches with."""
import itertools

import numpy as np
import tvm
from tvm import s_tir, tirx

from te_defs.fused_backward import sum_tiles
from te_defs.workload import timed_arguments


def symbolic_form(space):
    """Module whose function `main` is the declaration of a space: lengths, batch and heads are variables."""
    return tvm.IRModule({"main": space.family.declare(space.workload, space.seed)})


def sizes_of(func, workload, shape):
    """{parameter: its sizes at a shape} of the tensors in front of the scale; a gradient has the size of what it is of."""
    sizes = dict(zip(("Q", "K", "V", "O", "LSE"), shape.tensors(workload)))
    sizes |= {f"d{name}": size for name, size in sizes.items()} | {"delta": sizes["LSE"]}
    tensors = list(itertools.takewhile(lambda param: param.name != "scale", func.params))
    for sums in (param for param in tensors if param.name == "dQ_sum"):  # in tiles of so many rows
        rows, channels = map(int, sums.shape[3:])
        tiles = shape.batch, shape.q_heads, sum_tiles(shape.q_len, rows)
        sizes |= {"dQ_sum": (*tiles, rows, channels), "dQ_turns": tiles}
    return {param: sizes[param.name] for param in tensors}


def static_form(symbolic, workload, shape):
    """The same at fixed sizes, the default scale and timed arguments: MetaSchedule's search key cannot have variables.

    An attribute of the function holds every loop and block once more. A Schedule shares the module that it starts from, and TVM 0.27
    changes a loop or block in place if it is held once, by a sequence or a realize statement that is shared itself: without the
    attribute, replaying a first trace would spoil the module for the second.
    """
    func = symbolic["main"]
    buffers = {param: tirx.decl_buffer(size, param.dtype, name=param.name, data_alignment=param.data_alignment)
               for param, size in sizes_of(func, workload, shape).items()}
    scale, *arguments = func.params[len(buffers):]
    values = {param: tirx.decl_buffer(value.shape, param.dtype, name=param.name, data_alignment=param.data_alignment)
              if isinstance(value, np.ndarray) else tirx.const(value, str(param.ty))
              for param, value in zip(arguments, timed_arguments(workload, shape))}
    fixed = func.specialize({**buffers, scale: tirx.FloatImm("float32", workload.head_dim**-0.5), **values})
    return tvm.IRModule({"main": fixed.with_attr("flashtir.parts", loops_and_blocks(fixed.body))})


def schedule_static(static):
    """A Schedule of a static form. Its errors do not show the module: TVM's printer would end the process over the attribute."""
    return s_tir.Schedule(static, debug_mask=0, error_render_level="fast")


def copy_of(mod):
    """A module that shares nothing with this one; what a schedule of the symbolic form starts from."""
    return tvm.ir.load_json(tvm.ir.save_json(mod))


def loops_and_blocks(stmt):
    """All loops and blocks of a statement, outer ones first."""
    kind = type(stmt).__name__
    if kind == "SBlockRealize":
        return [stmt.block, *loops_and_blocks(stmt.block.body)]
    if kind == "For":
        return [stmt, *loops_and_blocks(stmt.body)]
    if kind == "SeqStmt":
        return [part for each in stmt.seq for part in loops_and_blocks(each)]
    return []
