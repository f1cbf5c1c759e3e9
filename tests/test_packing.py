"""Row tiles that the query heads of a group share: numbers for any ratio, the entry's choice, and the mma family's stages."""
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi

from schedules import registry
from schedules.arch import cpu_arch, cuda_arch
from schedules.artefact.export import export_artefact
from schedules.artefact.variant import variant_of
from schedules.build import kernel_names, schedule
from schedules.families import mma, wgmma
from schedules.plan import Calls, Plan
from scripts.kernels import answer
from te_defs import lengths, reference
from te_defs.flash_attention import flash_attention_forward
from te_defs.workload import Shape, Workload, make_arguments
from tests.numbers import on_llvm, verdict_on
from tests.stand_in_kernel import variant
from tests.test_variants import WORKLOAD, link_numbers

ROWS = 32
HERE = cpu_arch("x86-64-v4", 512, 2)
#: Ratios of heads; more heads than a tile has rows, too; lengths that leave rows of a tile empty.
SHAPES = [Shape(2, 4, 2, 37, 50), Shape(1, 1, 1, 20, 30), Shape(2, 3, 1, 5, 50), Shape(1, 5, 1, 33, 20), Shape(2, 14, 2, 1, 40),
          Shape(1, 8, 1, 4, 0), Shape(1, 32, 1, 40, 40), Shape(1, 33, 1, 2, 2), Shape(1, 140, 2, 2, 17)]


def sizes_of(shape, rows=ROWS):
    """heads, queries and parts, as the entry works them out."""
    group = shape.q_heads // shape.kv_heads
    heads = min(group, rows)
    return heads, rows // heads, -(-group // heads)


def packed(function, shape, rows=ROWS):
    return lambda *arguments: function(*arguments, *sizes_of(shape, rows))


@pytest.mark.parametrize("row_lanes", [1, 4])
@pytest.mark.parametrize("features", ["full", "causal", "window+alibi", "causal+bias+sink", "tests.of_a_user:DocumentCausal"])
def test_numbers_for_any_ratio(features, row_lanes):
    workload = Workload.parse(f"fwd_d32_dv16_f32_{features}")
    function = on_llvm(flash_attention_forward(workload, ROWS, 16, row_lanes, packed=True))
    for shape in SHAPES:
        shape = Shape(shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len, (7, 3) if workload.mask == "window" else ())
        inputs, arguments = reference.make_inputs(workload, shape), make_arguments(workload, shape)
        assert verdict_on(packed(function, shape), workload, inputs, 0.2, arguments) is None, shape


@pytest.mark.parametrize("features", ["causal+keys", "full+softcap+sink+packed", "window+alibi+keys", "causal+packed"])
def test_numbers_with_lengths(features):
    workload = Workload.parse(f"fwd_d32_dv16_f32_{features}")
    function = on_llvm(flash_attention_forward(workload, ROWS, 16, packed=True))
    for shape in (Shape(3, 4, 2, 9, 50), Shape(4, 3, 1, 5, 40), Shape(1, 40, 1, 3, 33)):
        (batch, q_len, kv_len), given = lengths.sample(workload.lengths, shape.batch, shape.q_len, shape.kv_len)
        shape = Shape(batch, shape.q_heads, shape.kv_heads, q_len, kv_len, (7, 3) if workload.mask == "window" else ())
        inputs, arguments = reference.make_inputs(workload, shape), make_arguments(workload, shape)
        assert verdict_on(packed(function, shape), workload, inputs, 0.2, arguments, lengths=given) is None, shape


@pytest.mark.parametrize("features", ["causal", "full+bias"])
def test_stages_of_mma_keep_the_numbers(features):
    workload = Workload.parse(f"fwd_d64_dv64_f16_{features}")
    plan = mma.MmaPlan(q_tile=64, kv_tile=32, warps=4)
    count = [stage.__name__ for stage in mma.STAGES].index(mma.BINDS_AT)
    function = on_llvm(schedule(mma, workload, plan, count, strided=True, packed=True).mod)
    for shape in (Shape(1, 8, 1, 9, 40), Shape(1, 6, 2, 30, 33), Shape(1, 70, 1, 1, 20)):
        inputs, arguments = reference.make_inputs(workload, shape), make_arguments(workload, shape)
        assert verdict_on(packed(function, shape, 64), workload, inputs, 0.125, arguments) is None, shape


class Family:
    """Two variants for a CPU, of the plain function: one whose heads share tiles, and one for all other calls."""

    NAME = "plain"


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    workload, variants = Workload(32, 16, "float32", "causal"), []
    for place, serves in ((1, Calls(rows=ROWS, strided=True, packed=True)), (2, Calls(strided=True))):
        functions = {name: flash_attention_forward(workload, ROWS, 16, negative_scale=negative, strided=True, packed=serves.packed)
                     for name, negative in zip(kernel_names(place), (False, True))}
        mod = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
        variants.append(variant_of(tvm.tirx.build(mod, "llvm"), Family, HERE, Plan(ROWS, 16), serves=serves))
    path, _ = export_artefact(variants, workload, tmp_path_factory.mktemp("packing") / "packed.so", {}, ())
    return workload, tvm_ffi.load_module(str(path))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_entry_hands_over_what_a_tile_holds(module, shape, number):
    workload, artefact = module
    inputs = reference.make_inputs(workload, shape)
    answers = reference.forward(workload, *inputs, -0.3)
    found = answer(lambda *arguments: artefact.flash_attention_forward_variant(number, *arguments), inputs, -0.3)
    assert reference.mismatch(*found, *answers, *reference.tolerances(workload, *inputs, -0.3, (), answers)) is None


@pytest.mark.parametrize("heads, key_heads, queries, place", [(8, 2, 1, 1), (8, 2, 31, 1), (8, 2, 32, 2), (8, 8, 1, 2), (8, 1, 1000, 2)])
def test_few_queries_of_grouped_heads_share_tiles(tmp_path, heads, key_heads, queries, place):
    calls = Calls(rows=ROWS, strided=True, packed=True), Calls(strided=True)
    choose = link_numbers([replace(variant(None), serves=serves) for serves in calls], tmp_path)
    tensors = [np.zeros(size, "float32") for size in Shape(1, heads, key_heads, queries, 9).tensors(WORKLOAD)]
    assert choose(*tensors, 0.5) == place


def test_families_with_tensor_cores_have_a_kernel_for_groups():
    workload = Workload(128, 128, "float16", "causal")
    assert registry.packer(workload, cuda_arch("sm_90a")) is mma and registry.packer(workload, cuda_arch("sm_80")) is mma
    assert registry.packer(workload, cuda_arch("sm_75")) is None and registry.packer(workload, HERE) is None
    assert registry.packer(Workload(128, 128, "float32"), cuda_arch("sm_80")) is None
    assert not hasattr(wgmma, "packed_plan"), "its tiles come by bulk loads, which the rows of several heads are no box for"


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (192, 128), (256, 256), (40, 72)], ids=str)
def test_plans_for_groups_fit(dims, arch):
    workload, row = Workload(*dims, "float16", "causal"), cuda_arch(arch)
    plan = mma.packed_plan(workload, row)
    assert plan.q_tile == 64 and mma.budget(workload, row, plan)
