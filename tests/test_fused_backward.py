"""The backward pass with five products: numbers on llvm up to the stage that binds threads, and what nvcc makes of it. Those of the plain
function are in tests/test_backward.py."""
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.sym import Analyzer

from schedules import backward
from schedules.arch import cuda_arch
from schedules.artefact.export import export_artefact
from schedules.artefact.manifest import describe
from schedules.families import dq_cast, mma_fused_backward, wgmma_fused_backward, wgmma_ordered_backward
from schedules.families.mma_fused_backward import MmaFusedBackwardPlan
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import PlanError
from te_defs.flash_attention_backward import attention_delta
from te_defs.fused_backward import attention_dk_dv_dq, attention_dq_cast, attention_dq_zeros, rotated, visits_all
from te_defs.lengths import sample
from te_defs.masks import Causal, CausalTopLeft, Full, Prefix, Window
from te_defs.workload import Shape, Workload
from tests.backward import Called, Fused, check_ragged, problem, unbound, verdict
from tests.numbers import on_llvm
from tests.stand_in_kernel import on_cpu, variant

simplify = Analyzer().simplify
ARCH = cuda_arch("sm_90a")
PLAN = wgmma_fused_backward.WgmmaBackwardPlan(q_tile=64, kv_tile=64)
FULL = Workload(64, 64, "float16", "full")
CAUSAL, CAPPED = Workload(64, 128, "float16", "causal"), Workload.parse("fwd_d64_dv64_bf16_window+softcap")
MMA_PLAN = MmaFusedBackwardPlan(32, 64, 2)
SCHEDULED = [(wgmma_fused_backward, CAUSAL, PLAN), (wgmma_fused_backward, CAPPED, PLAN),
             (wgmma_fused_backward, FULL, PLAN.but(kv_tile=128)), (wgmma_fused_backward, Workload(64, 40, "float16", "causal"), PLAN),
             (wgmma_fused_backward, CAUSAL, PLAN.but(across=1)), (wgmma_ordered_backward, CAUSAL, PLAN),
             (wgmma_ordered_backward, CAPPED, PLAN), (mma_fused_backward, CAPPED, MMA_PLAN),
             (mma_fused_backward, CAUSAL, MMA_PLAN.but(warps=4, parts=2, query_rows=2)),
             (mma_fused_backward, FULL, MMA_PLAN.but(q_tile=48))]
MMA_SEEDS = [(Workload(128, 128, "float16", "causal"), "sm_80"), (Workload(64, 64, "bfloat16", "full"), "sm_80"),
             (Workload(128, 128, "bfloat16", "full"), "sm_86"), (Workload(128, 128, "float16", "full"), "sm_90a")]


def test_keys_past_the_end_add_nothing():
    """Their scores are 0: where all others are far below, exp(0 - LSE) is more than float16, and float32, hold."""
    it = Workload(16, 32, "bfloat16", "full")
    dout, q, k, v, out, lse = problem(it, Shape(1, 1, 1, 20, 40), 1.0)[0]
    q[:], k[:] = 5, -5
    lse[:] = np.log(40) - 400
    assert np.isfinite(Fused(it)(dout, q, k, v, out, lse, 1.0)[0].astype(np.float32)).all()


@pytest.mark.parametrize("mask", ["full", "causal", "causal_top_left", "window", "prefix"])
def test_additions_stay_in_the_tiles_that_exist(mask):
    """Zeros that are added elsewhere show where -0 becomes 0."""
    it = Workload(16, 16, "float32", mask)
    function = on_llvm(attention_dk_dv_dq(it, 32, 16))
    for (n, m), mask in itertools.product(((1, 1), (33, 40), (40, 200), (70, 20), (0, 20)), it.mask_class.samples):
        rows = [np.ones((1, length, heads, 16), np.float32) for length, heads in ((n, 2), (n, 2), (m, 1), (m, 1))]
        sums = np.full((1, 2, max(-(-n // 32), 1) + 16, 32, 16), -0.0, np.float32)
        *given, sums, dk, dv = map(tvm.runtime.tensor, (*rows, *np.zeros((2, 1, 2, n), np.float32), sums, *rows[2:]))
        function(*given, sums, dk, dv, 0.2, *mask)
        untouched = np.signbit(sums.numpy()).all((0, 1, 3, 4))
        assert untouched[-16:].all() and not untouched.all()


def test_key_tiles_begin_at_different_query_tiles_and_visit_all():
    for turns in (1, 3, 8):
        orders = [[int(simplify(rotated(tirx.IntImm("int32", turn), tirx.IntImm("int32", turns), 2 * tile))) for turn in range(turns)]
                  for tile in range(9)]
        assert all(sorted(order) == list(range(turns)) for order in orders)
        assert [order[0] for order in orders] == [2 * tile % turns for tile in range(9)]


@pytest.mark.parametrize("mask, rotates", [(Full, True), (Causal, False), (CausalTopLeft, False), (Window, False), (Prefix, False)])
def test_turns_are_rotated_where_all_are_visited(mask, rotates):
    assert visits_all(mask(*mask.samples[-1])) == rotates


@pytest.mark.parametrize("lengths", ["uniform", "keys", "packed"])
def test_rotated_turns(lengths):
    """Several tiles each way, with two tiles of queries for one of keys; where lengths arrive with the call, turns are not rotated."""
    it = Workload(16, 24, "float32", "full", lengths=lengths)
    (batch, rows, keys), tables = sample(lengths, 3, 150, 130)
    tables = (*tables, int(np.diff(tables[1]).max())) if lengths == "packed" else tables
    assert verdict(Fused(it, 16, 32), it, Shape(batch, 4, 2, rows, keys), 0.25, (), tables) is None


@pytest.mark.parametrize("mask, lengths", [("full", "keys"), ("full", "packed"), ("prefix", "uniform"), ("prefix", "keys")])
def test_every_mask_and_length_is_scheduled(mask, lengths):
    """TVM must see that a turn adds to one tile."""
    it = replace(FULL, mask=mask, lengths=lengths)
    assert wgmma_fused_backward.schedule(it, wgmma_fused_backward.default_plan(it, ARCH)).mod["main"].attrs


@pytest.mark.parametrize("lengths", ["uniform", "keys", "packed"])
@pytest.mark.parametrize("mask", ["full", "causal", "causal_top_left", "window", "prefix"])
def test_turns_come_one_after_the_other(mask, lengths):
    """Where the tiles of keys add in order, nobody finds that it is not his turn: he would wait for ever on a GPU."""
    it = Workload(16, 16, "float32", mask, lengths=lengths)
    function = Fused(it, 32, 16, in_order=True)
    for (rows, keys), sample_of in itertools.product(((1, 1), (33, 40), (40, 200), (170, 20), (70, 150)), it.mask_class.samples):
        (batch, n, m), tables = sample(lengths, 2, rows, keys)
        tables = (*tables, int(np.diff(tables[1]).max())) if lengths == "packed" else tables
        given, answers, lse = problem(it, Shape(batch, 2, 1, n, m, sample_of), 0.25, sample_of, tables)
        function(*given, 0.25, (*sample_of, *tables))
        longest = int(np.diff(tables[1]).max()) if lengths == "packed" else m
        assert function.turns.numpy().max() <= -(-longest // 16), (n, m, sample_of)


def unbound_functions(family, workload, plan):
    """The functions but delta up to the stage that binds threads: what runs on llvm."""
    fused = family.schedule(workload, plan, unbound(family))
    cast, zeros = (s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0) for func in (
        attention_dq_cast(workload, plan.q_tile), attention_dq_zeros(workload, plan.q_tile, backward.takes_turns(family))))
    dq_cast.give_rows_lanes(cast, workload.head_dim)
    dq_cast.give_zeros_lanes(zeros, workload.head_dim)
    return [sch.mod["main"] for sch in (fused, cast, zeros)]


class Scheduled(Fused):
    """The functions up to the stage that binds threads, on llvm."""

    def __init__(self, family, workload, plan):
        self.compile(workload, plan.q_tile, attention_delta(workload), *unbound_functions(family, workload, plan)[:2])

    def shape_of_tile(self, channels):
        return self.q_tile * channels,


@pytest.mark.parametrize("family, workload, plan", SCHEDULED, ids=lambda it: getattr(it, "NAME", getattr(it, "name", f"{it}")))
def test_numbers_before_threads_are_bound(family, workload, plan):
    check_ragged(Scheduled(family, workload, plan), workload)


@pytest.mark.parametrize("family, plan", [(wgmma_fused_backward, PLAN), (wgmma_ordered_backward, PLAN), (mma_fused_backward, MMA_PLAN)],
                         ids=["wgmma", "ordered", "mma"])
@pytest.mark.parametrize("lengths", ["uniform", "packed"])
def test_an_artefact_has_room_for_the_sums(tmp_path, lengths, family, plan):
    """What it allocates, and who gets it: the functions of an artefact on llvm."""
    it = replace(FULL, mask="causal", lengths=lengths)
    names = backward.function_names(True)
    functions = [attention_delta(it), attention_delta(it, through_lse=True), *unbound_functions(family, it, plan)]
    made = on_llvm(tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in zip(names, functions)}))
    forward, turns = on_cpu(replace(it, lengths="uniform")), backward.takes_turns(family)
    gradients = replace(variant(made), sum_rows=plan.q_tile, turns=turns)
    path, _ = export_artefact([forward], it, tmp_path / "any_order.so", describe(it, [forward], None, [gradients]), (), [gradients])
    module = tvm_ffi.load_module(str(path))
    told = json.loads(str(module.flash_attention_manifest()))["backward"]["variants"][0]
    sizes = {"queries": 150, "heads": 4, "batch": 1, "sequences": 4, "max": max}
    if lengths == "packed":
        begins = np.array([0, 5, 5, 145, 150], np.int32), np.array([0, 20, 20, 100, 180], np.int32), 140
        assert verdict(Called(module, it), it, Shape(1, 4, 2, 150, 180), 0.2, (), begins) is None
        assert eval(told["workspace_bytes"], sizes) == 4 * 150 * 4 + 4 * 4 * (150 // plan.q_tile + 4) * (plan.q_tile * 64 + turns)
    else:
        assert verdict(Called(module, it), it, Shape(2, 4, 2, 150, 70), 0.2, through_lse=True) is None
        assert verdict(Called(module, it), it, Shape(1, 2, 2, 0, 70), 0.2) is None
        assert eval(told["workspace_bytes"], sizes) == 4 * 150 * 4 + 4 * 4 * -(-150 // plan.q_tile) * (plan.q_tile * 64 + turns)
    assert told["order"] == ("fixed" if turns else "any")


@pytest.mark.slow
@pytest.mark.parametrize("workload", [Workload(128, 128, "float16", "causal"), Workload(64, 64, "bfloat16", "full")], ids=lambda w: w.name)
def test_seeds_compile(toolkit, figures, workload):
    """With 24 registers, the warps that load, tell and add keep some words in memory, and consumers one across a loop: at 64 channels."""
    plan = wgmma_fused_backward.default_plan(workload, ARCH)
    with cuda_compiler(toolkit, (ARCH.name,), CudaOptions(**wgmma_fused_backward.compiler_options(plan))) as log:
        module = backward.build(wgmma_fused_backward, workload, plan, ARCH)
    source = module.imports[0].inspect_source()
    for kernel in log.kernels:
        assert kernel.warnings == () and kernel.most("static_smem_bytes") == 0
        assert kernel.most("spill_store_bytes") <= (96 if workload.head_dim == 64 else 0)
    for instruction in ("_1_1_1_1", "stmatrix.sync.aligned.m8n8.x4.shared.b16",
                        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"):
        assert instruction in source
    figures(f"wgmma backward fused {workload.name} {ARCH.name}", {"registers": log.kernels[0].most("registers"),
                                                                       "spilled_bytes": log.kernels[0].most("spill_store_bytes")})


@pytest.mark.slow
def test_seeds_in_order_compile(toolkit, figures):
    workload = Workload(128, 128, "float16", "causal")
    plan = wgmma_ordered_backward.default_plan(workload, ARCH)
    with cuda_compiler(toolkit, (ARCH.name,), CudaOptions(**wgmma_ordered_backward.compiler_options(plan))) as log:
        module = backward.build(wgmma_ordered_backward, workload, plan, ARCH)
    source = module.imports[0].inspect_source()
    turns = {name: source.count(f"flashtir_{name}_turn((&(dQ_turns_ptr[") for name in ("await", "give")}
    assert turns == {"await": 2, "give": 2}  # in the loop over tiles that the mask cuts, and over those that it leaves whole
    assert not any(kernel.warnings or kernel.most("spill_store_bytes") for kernel in log.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("workload, sm", MMA_SEEDS, ids=lambda it: getattr(it, "name", it))
def test_seeds_of_mma_compile(toolkit, figures, workload, sm):
    arch = cuda_arch(sm)
    plan = mma_fused_backward.default_plan(workload, arch)
    with cuda_compiler(toolkit, (sm,), CudaOptions(**mma_fused_backward.compiler_options(plan))) as log:
        module = backward.build(mma_fused_backward, workload, plan, arch)
    source = module.imports[0].inspect_source()
    for instruction in ("ldmatrix.sync.aligned.m8n8.x4.trans", "mma.sync.aligned.m16n8k16", "cp.async.cg",
                        "red.relaxed.gpu.global.add.v4.f32"):
        assert instruction in source
    assert ("mbarrier.arrive" in source) == (plan.parts > 1)
    assert not any(kernel.warnings for kernel in log.kernels)
    kernel = log.kernels[0]
    figures(f"mma backward fused {workload.name} {sm}",
            {"registers": kernel.most("registers"), "spilled_bytes": kernel.most("spill_store_bytes")})


@pytest.mark.parametrize("workload, reason", [
    (Workload(64, 64, "float32"), "tensor cores take 16-bit inputs, not float32"),
    (Workload(96, 64, "float16"), "the head dimension must be a multiple of 64, not 96"),
    (Workload(64, 256, "float16"), "head dimensions must be at most 128, not 64 and 256")])
def test_declines_with_a_reason(workload, reason):
    assert wgmma_fused_backward.decline(workload, ARCH) == reason


def test_in_order_masks_of_users_that_skip_queries_are_declined():
    """Who waits for a tile of keys that never comes, waits for ever."""
    taken, declined = (Workload.parse(f"fwd_d64_dv64_f16_tests.of_a_user:{name}") for name in ("DocumentCausal", "CausalFromItsOwn"))
    assert wgmma_ordered_backward.decline(taken, ARCH) is None
    assert wgmma_ordered_backward.decline(declined, ARCH).startswith("who waits for whom is known only where")


@pytest.mark.parametrize("changes, message", [
    (dict(q_tile=96), "consumer warpgroups must be able to share 64 query rows each, or parts of 32 channels, found q_tile=96"),
    (dict(kv_tile=192), "consumer warpgroups must be able to share 64 query rows each, or parts of 32 channels, found q_tile=64"),
    (dict(stages=5), r"shared memory of plan \(.*\) must stay within 232448 bytes on sm_90a, found")])
def test_plan_errors(changes, message):
    workload = Workload(128, 128, "float16", "causal")
    with pytest.raises(PlanError, match=message):
        wgmma_fused_backward.budget(workload, ARCH, wgmma_fused_backward.default_plan(workload, ARCH).but(**changes))


@pytest.mark.parametrize("workload, sm, reason", [
    (Workload(64, 64, "float32"), "sm_80", "tensor cores take 16-bit inputs, not float32"),
    (FULL, "sm_75", "sm_75 has no mma.sync m16n8k16 (sm_80 and later have)"),
    (Workload(96, 64, "float16"), "sm_80", "head dimensions must be 64 or 128, not 96 and 64")])
def test_mma_declines_with_a_reason(workload, sm, reason):
    assert mma_fused_backward.decline(workload, cuda_arch(sm)) == reason


@pytest.mark.parametrize("changes, message", [
    (dict(kv_tile=96), "kv_tile must be whole blocks of 16 for each of 4 parts, found 96: change either"),
    (dict(q_tile=48), "q_tile must be whole blocks of 16 for each of 2 parts, found 48: change either"),
    (dict(query_rows=16), "q_tile must be whole blocks of 16 for each of 16 parts, found 64: change either"),
    (dict(warps=32, kv_tile=512), "head_dim must be whole blocks of 16 for each of 16 parts, found 128: change either"),
    (dict(kv_tile=256), r"shared memory of plan \(.*\) must stay within 166912 bytes on sm_80, found"),
    (dict(warps=4, kv_tile=64, parts=1, q_tile=128), r"shared memory of plan \(.*\) must stay within 166912 bytes on sm_80, found")])
def test_mma_plan_errors(changes, message):
    workload, arch = Workload(128, 128, "float16", "causal"), cuda_arch("sm_80")
    with pytest.raises(PlanError, match=message):
        mma_fused_backward.budget(workload, arch, mma_fused_backward.default_plan(workload, arch).but(**changes))


@pytest.mark.parametrize("sm", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("workload", [Workload(128, 128, "float16"), Workload(64, 128, "bfloat16"), Workload(64, 64, "float16", "window")],
                         ids=lambda w: w.name)
def test_mma_has_a_plan_for_every_chip_that_it_takes(workload, sm):
    mma_fused_backward.budget(workload, cuda_arch(sm), mma_fused_backward.default_plan(workload, cuda_arch(sm)))
