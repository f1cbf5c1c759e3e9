"""The backward functions on vector units: numbers after the last stage, for vectors of either width that is common."""
import pytest
from tvm.target import codegen

from schedules.arch import cpu_arch
from schedules.families import cpu_backward
from schedules.plan import PlanError
from te_defs.flash_attention_backward import attention_delta
from te_defs.workload import Shape, Workload, make_arguments
from tests.backward import Plain, alone, verdict
from tests.numbers import on_llvm

ARCH = cpu_arch(codegen.llvm_get_system_cpu(), 256, 2)
WORKLOADS = [Workload(64, 64, "float32", "causal"), Workload(32, 64, "float16", "window"), Workload(40, 72, "bfloat16", "full"),
             Workload.parse("fwd_d64_dv64_f32_full+softcap+sink"), Workload.parse("fwd_d64_dv64_f32_tests.of_a_user:DocumentCausal")]
SHAPES = [(Shape(1, 6, 2, 77, 130), 0.125), (Shape(2, 2, 1, 130, 61), -0.2), (Shape(1, 2, 2, 5, 0), 0.125), (Shape(1, 2, 2, 0, 5), 0.125),
          (Shape(1, 2, 1, 1, 257), 0.0)]


class Scheduled(Plain):
    """The functions after all stages, at plans of a CPU."""

    def __init__(self, workload, arch):
        self.delta = on_llvm(attention_delta(workload))
        self.dq, self.dk_dv = (alone(cpu_backward, role, workload, cpu_backward.default_plan(role, workload, arch), arch)[role]
                               for role in ("dq", "dk_dv"))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_numbers(workload):
    scheduled = Scheduled(workload, ARCH)
    for shape, scale in SHAPES:
        mask = workload.mask_class.samples[-1]
        shape = Shape(shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len, mask)
        assert verdict(scheduled, workload, shape, scale, make_arguments(workload, shape)) is None, shape


def test_wide_vectors():
    """LLVM takes vectors apart that a CPU does not have."""
    workload = WORKLOADS[0]
    assert verdict(Scheduled(workload, cpu_arch(ARCH.name, 512, 2)), workload, Shape(1, 2, 1, 130, 140), 0.125) is None


@pytest.mark.parametrize("role", cpu_backward.ROLES)
def test_after_each_stage(role):
    """On llvm without our own passes, too."""
    workload, plain = WORKLOADS[0], Plain(WORKLOADS[0])
    plan, stages = cpu_backward.default_plan(role, workload, ARCH), cpu_backward.STAGES
    for number in (1, 3, 5, 7):
        setattr(plain, role, on_llvm(cpu_backward.schedule(role, workload, plan, number).mod))
        assert verdict(plain, workload, Shape(1, 2, 1, 77, 130), 0.125) is None, stages[number - 1].__name__


def test_a_cpu_without_room_is_told_so():
    with pytest.raises(PlanError, match="cpu_backward"):
        cpu_backward.default_plan("dq", WORKLOADS[0], cpu_arch(ARCH.name, 512, 2, l2_bytes=1024))
