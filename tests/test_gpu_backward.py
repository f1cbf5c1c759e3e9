"""On a GPU: the gradients of every family through the checked entry of an exported artefact."""
import itertools
from dataclasses import replace

import pytest
import tvm

from schedules.backward import ANY_ORDER, FAMILIES
from schedules.families import delta, mma_backward, simt_backward, wgmma_backward, wgmma_fused_backward, wgmma_ordered_backward
from schedules.lowering.cuda_compile import cuda_compiler
from te_defs import lengths
from te_defs.workload import Shape, Workload, make_arguments
from tests import operands
from tests.backward import Called, check_delta, delta_alone, export_gradients, verdict

pytestmark = pytest.mark.gpu
WORKLOADS = [Workload.parse(f"fwd_{name}") for name in (
    "d64_dv64_f16_full", "d64_dv64_f16_causal", "d64_dv64_bf16_causal", "d128_dv128_f16_full", "d128_dv128_f16_causal",
    "d128_dv128_bf16_full", "d128_dv64_f16_causal", "d64_dv128_bf16_full", "d96_dv96_f16_causal", "d32_dv32_f16_full",
    "d256_dv256_f16_causal", "d256_dv256_bf16_full", "d192_dv128_f16_causal+packed", "d200_dv136_bf16_window", "d72_dv104_f16_full+keys",
    "d64_dv64_f16_window", "d128_dv128_f16_window", "d64_dv64_f16_prefix", "d128_dv128_bf16_causal_top_left",
    "d64_dv64_f16_causal+softcap", "d128_dv128_f16_full+bias", "d64_dv64_bf16_causal+alibi+sink", "d64_dv64_f16_window+softcap",
    "d64_dv64_f16_tests.of_a_user:DocumentCausal", "d64_dv64_f16_causal+keys", "d128_dv128_f16_full+keys", "d64_dv64_f16_causal+packed",
    "d128_dv128_bf16_window+packed", "d64_dv64_f32_causal", "d128_dv128_f32_full+bias", "d40_dv72_bf16_causal")]
ON_GPUS = [family for families in FAMILIES.values() for family in families if family.NAME != "cpu_backward"]
SHAPES = {"even": (Shape(1, 2, 2, 256, 256), 1.0), "ragged": (Shape(2, 3, 3, 113, 203), 1.0), "grouped": (Shape(2, 6, 2, 130, 257), 1.0),
          "few_keys": (Shape(1, 4, 2, 300, 61), 1.0), "one_query": (Shape(2, 4, 1, 1, 257), 1.0),
          "odd_group": (Shape(1, 5, 1, 70, 130), 1.0),
          "long": (Shape(1, 2, 1, 1000, 1500), 1.0), "many_heads": (Shape(1, 700, 100, 3, 50), 1.0),
          "negative_scale": (Shape(1, 2, 2, 333, 400), -1.0), "zero_scale": (Shape(1, 2, 2, 33, 70), 0.0),
          "no_keys": (Shape(1, 2, 2, 5, 0), 1.0), "no_queries": (Shape(1, 2, 2, 0, 5), 1.0)}


@pytest.fixture
def gradients(gpu_arch, toolkit, kept):
    """Function (family, workload, names of tensors behind the scale) -> module with the gradients of a family's seeds, of these tensors,
    too, behind a stand-in of the forward pass; built once each.

    Skips what the family declines.
    """
    def make(family, workload, made=()):
        reason = family.decline(workload, gpu_arch)
        if reason is not None:
            pytest.skip(f"{family.NAME} declines: {reason}")
        return kept(f"gradients {family.NAME} {workload.name} {made} {gpu_arch.name}",
                    lambda path: export_gradients(family, workload, gpu_arch, path, toolkit, made))
    return make


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("family", ON_GPUS, ids=lambda f: f.NAME)
def test_numbers_and_bits(gradients, family, workload):
    call = Called(gradients(family, workload), workload, tvm.cuda(0), times=1 if family in FAMILIES[ANY_ORDER] else 2)
    mask = workload.mask_class.samples[len(workload.mask_class.samples) // 2]
    for name, (shape, factor) in SHAPES.items():
        sizes, given = lengths.sample(workload.lengths, shape.batch, shape.q_len, shape.kv_len)
        shape = replace(shape, mask=mask, **dict(zip(("batch", "q_len", "kv_len"), sizes)))
        for through_lse in (False, True):
            assert verdict(call, workload, shape, factor * workload.head_dim**-0.5, make_arguments(workload, shape), given,
                           through_lse=through_lse) is None, name


@pytest.mark.parametrize("family, workload", [(family, Workload.parse(f"fwd_{name}")) for family, name in (
    (wgmma_backward, "d64_dv64_f16_causal+bias+sink"), (wgmma_backward, "d128_dv128_bf16_full+bias"),
    (wgmma_fused_backward, "d64_dv64_f16_causal+alibi+sink"), (mma_backward, "d128_dv64_f16_window+alibi+sink"),
    (wgmma_backward, "d128_dv128_f16_causal+alibi+sink+packed"), (mma_backward, "d64_dv64_bf16_full+alibi+keys"),
    (mma_backward, "d64_dv64_f16_full+tests.of_a_user:FactorsAndRows"), (simt_backward, "d64_dv64_f32_causal+bias+sink"),
    (simt_backward, "d96_dv96_f16_causal+bias+sink"), (simt_backward, "d256_dv256_bf16_full+alibi+packed"))],
    ids=lambda it: getattr(it, "NAME", None) or it.name)
def test_gradients_of_operands(gradients, family, workload):
    """Each twice, with the same bits, and where axes have size one."""
    made = tuple(it.name for it in workload.arguments if it.kind.axes and it.kind.dtype != "int32")
    module = gradients(family, workload, made)
    for (name, (shape, factor)), single in zip(SHAPES.items(), itertools.cycle(("", "B", "BH", "N", "BHNM", "M", "BN", "H"))):
        sizes, given = lengths.sample(workload.lengths, shape.batch, shape.q_len, shape.kv_len)
        shape = replace(shape, mask=workload.mask_class.samples[-1], **dict(zip(("batch", "q_len", "kv_len"), sizes)))
        for operand in made:
            call, arguments = operands.Called(module, workload, operand, made, tvm.cuda(0)), make_arguments(workload, shape, 0, single)
            scale = factor * workload.head_dim**-0.5
            assert operands.verdict(call, workload, operand, shape, scale, arguments, given) is None, (name, operand, single)


@pytest.mark.parametrize("family, channels", [(wgmma_ordered_backward, 64), (wgmma_ordered_backward, 128), (wgmma_backward, 128),
                                              (wgmma_backward, 256), (mma_backward, 128)],
                         ids=lambda it: getattr(it, "NAME", f"{it}"))
def test_thirty_runs_give_the_same_bits(gradients, family, channels):
    workload = Workload(channels, channels, "float16", "causal")
    call = Called(gradients(family, workload), workload, tvm.cuda(0), times=30)
    assert verdict(call, workload, Shape(2, 8, 2, 600, 700), channels**-0.5) is None


@pytest.mark.parametrize("workload", [Workload(64, 64, "float32"), Workload(128, 128, "float16"), Workload(64, 40, "bfloat16")],
                         ids=lambda w: w.name)
@pytest.mark.parametrize("through_lse", [False, True], ids=["", "through_lse"])
def test_delta(gpu_arch, toolkit, workload, through_lse):
    with cuda_compiler(toolkit, (gpu_arch.name,)):
        function = delta_alone(workload, gpu_arch, through_lse)[delta.NAME]
    check_delta(function, workload, 2, 3001, 5, through_lse, tvm.cuda(0))
