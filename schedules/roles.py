"""A function of the backward pass by itself, from declaration to Schedule: the same in all families."""
import tvm
import tvm_ffi
from tvm import s_tir, tirx

#: Parameters that can be views with strides: all tensors with channels but sums that belong to a call.
VIEWS = ("dO", "O", "Q", "K", "V", "dQ", "dK", "dV")


def with_strides(func):
    """The function for VIEWS with strides of their own, which come with the tensors, as te_defs.flash_attention declares them."""
    def view(tensor):
        axes = (("batch", "int64"), ("row", "int32"), ("head", "int32"))
        strides = [*(tirx.Var(f"{tensor.name}_{axis}_stride", dtype) for axis, dtype in axes), 1]
        shape = tirx.Cast("int64", tensor.shape[0]), *tensor.shape[1:]  # TVM reads a stride in the type of its axis
        return tirx.decl_buffer(shape, tensor.dtype, name=tensor.name, strides=strides, data_alignment=4)

    views = [(param, view(param)) for param in func.params if getattr(param, "name", None) in VIEWS]
    def replaced(var):
        return next((new for old, new in views if var.same_as(old)), var)
    body = tvm_ffi.structural_map(func.body, (type(func.params[0]), replaced))
    return tirx.PrimFunc([replaced(param) for param in func.params], body, func.ret_type, func.attrs)


def staged(func, stages, plan, role, strided=False):
    """A fresh Schedule of a declaration after some stages; for views with strides where it is `strided`."""
    sch = s_tir.Schedule(tvm.IRModule({"main": with_strides(func) if strided else func}), debug_mask=0)
    for stage in stages:
        stage(sch, plan, role)
    return sch
