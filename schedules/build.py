"""From workload and plan to a runtime module, the same way for tuning, export and `show`."""
import tvm
import tvm_ffi
from tvm import s_tir

#: Symbols of a kernel's TVM functions; the checked entry `flash_attention_forward` of an artefact calls one of them by the sign of scale.
KERNEL = "attention_forward"
NEGATIVE_SCALE_KERNEL = "attention_forward_negative_scale"


def kernel_names(place=1):
    """(KERNEL, NEGATIVE_SCALE_KERNEL) as they are called for the kernel in this place of an artefact; the first place changes nothing."""
    suffix = "" if place == 1 else f"_variant{place}"
    return KERNEL + suffix, NEGATIVE_SCALE_KERNEL + suffix


def strided_of(family):
    """For each kernel that an artefact holds of a plan, whether it takes views with strides: a family may state it as STRIDED."""
    return getattr(family, "STRIDED", (False,))


def declared(family, workload, plan, negative_scale=False, strided=None, packed=False):
    """The symbolic declaration of a kernel.

    strided  whether it takes views with strides; None: what the kernel for contiguous tensors does
    packed   whether the query heads of a group share row tiles, in a family that has a `packed_plan`
    """
    forms = {"strided": strided_of(family)[0] if strided is None else strided, "packed": packed}
    return family.declare(workload, plan, negative_scale=negative_scale, **{form: True for form, wanted in forms.items() if wanted})


def declaration_of(family, workload, plan):
    """Structural hash of the plain declaration of a plan, as text: what a record is of."""
    return str(tvm_ffi.structural_hash(tvm.IRModule({"main": family.declare(workload, plan)})))


def schedule(family, workload, plan, stages=None, negative_scale=False, strided=None, packed=False):
    """A fresh Schedule of `declared` after the family's stages; after the first `stages` of them where given."""
    func = declared(family, workload, plan, negative_scale, strided, packed)
    return staged(s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0), family, plan, stages)


def staged(sch, family, plan, stages=None):
    """The Schedule of a declaration, after the family's stages; after the first `stages` of them where given."""
    for stage in family.STAGES[:stages]:
        stage(sch, plan)
    return sch


def compiled(functions, family, arch):
    """Scheduled functions by their symbols, lowered by the family's pipeline and compiled for `arch`, as one runtime module; for CUDA a
    compiler must be installed around the call (schedules.lowering.cuda_compile)."""
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
    target = arch.target()
    with target, tvm.transform.PassContext(config=family.CONFIG):
        return tvm.tirx.build(mod, target=target, pipeline=family.PIPELINE)


def runtime_module(built):
    """The runtime module of what TVM built, which may be an Executable around it. A module itself must not be asked for an attribute:
    it would compile all of its host code to look for a function of that name."""
    return built.mod if isinstance(built, tvm.runtime.Executable) else built


def build(mod, family, arch, negative_scale_mod=None, place=1):
    """A scheduled module, `compiled`.

    Its function is called KERNEL in the result, and that of `negative_scale_mod`, the twin for scales below zero that an artefact
    needs, NEGATIVE_SCALE_KERNEL; `kernel_names` says what they are in other places than the first.
    """
    parts = [mod] if negative_scale_mod is None else [mod, negative_scale_mod]
    return compiled({name: part["main"] for name, part in zip(kernel_names(place), parts)}, family, arch)


def build_plan(family, workload, plan, arch, place=1, strided=None, packed=False):
    """What an artefact holds of a plan in this place: the kernel and, where it needs one, its twin for scales below zero, as a runtime
    module."""
    mods = [schedule(family, workload, plan, negative_scale=negative, strided=strided, packed=packed).mod for negative in signs(workload)]
    return build(mods[0], family, arch, *mods[1:], place=place)


def signs(workload):
    """Whether scales are below zero, for each kernel that a workload needs: scores that are modified are scaled first, by any scale."""
    return (False,) if workload.score else (False, True)
