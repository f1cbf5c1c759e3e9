"""The mma family without a GPU: numbers up to the first bind, then the instructions and resources of what is compiled."""
import re
from dataclasses import replace

import pytest

from schedules.arch import CUDA_ARCHS, cpu_arch, cuda_arch
from schedules.build import build, schedule
from schedules.families import mma
from schedules.intrinsics.mma import ROW_GAP, fragment_layout, statistics_layout, swizzled
from schedules.lowering import software_pipeline
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import PlanError
from te_defs.workload import Workload
from tests.numbers import RAGGED, on_llvm, verdict
from tests.source_alone import source_alone

pytestmark = pytest.mark.slow

UNBOUND = [stage.__name__ for stage in mma.STAGES[:[stage.__name__ for stage in mma.STAGES].index(mma.BINDS_AT)]]
WORKLOADS = [Workload(d, d, dtype, mask) for d in (64, 128) for dtype in ("float16", "bfloat16") for mask in ("full", "causal")]
#: Channels that are no whole number of steps, and those that take rows with a gap, tiles of eight warps and the smallest tiles.
PADDED = [(Workload(40, 72, "bfloat16", "full"), "sm_80"), (Workload(80, 80, "float16", "causal"), "sm_86"),
          (Workload(192, 128, "float16", "full"), "sm_80"), (Workload(248, 248, "float16", "causal"), "sm_86")]
#: Every workload for the oldest chip, every float16 one for the chip whose logs are shipped, one for each chip with less shared memory.
COMPILED = [(w, "sm_80") for w in WORKLOADS] + [(w, "sm_90a") for w in WORKLOADS if w.dtype == "float16"] + [
    (Workload(128, 128, "float16", "causal"), arch) for arch in ("sm_86", "sm_89", "sm_120")] + PADDED


@pytest.fixture(scope="module")
def after_stage():
    """Function (workload, number of stages) -> the half-scheduled function on llvm, each compiled once."""
    known = {}

    def build_prefix(workload, stages):
        if (workload, stages) not in known:
            plan = mma.MmaPlan(q_tile=64, kv_tile=32, warps=2)
            known[workload, stages] = on_llvm(schedule(mma, workload, plan, stages).mod)
        return known[workload, stages]
    return build_prefix


@pytest.mark.parametrize("case", ["ragged", "few_keys", "grouped", "no_keys"])
@pytest.mark.parametrize("stages", range(1, len(UNBOUND) + 1), ids=UNBOUND)
@pytest.mark.parametrize("workload", [Workload(64, 64, "float16", "causal"), Workload(64, 64, "float16", "full")], ids=lambda w: w.name)
def test_numbers_after_each_stage_before_the_first_bind(after_stage, workload, stages, case):
    assert verdict(after_stage(workload, stages), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("case", ["ragged", "grouped", "no_keys"])
def test_padded_channels_before_the_first_bind(after_stage, case):
    workload = Workload(40, 72, "float16", "causal")
    assert verdict(after_stage(workload, len(UNBOUND)), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("workload, arch", COMPILED, ids=lambda value: getattr(value, "name", value))
def test_seed_plan_compiles(toolkit, figures, workload, arch):
    arch = cuda_arch(arch)
    plan = mma.default_plan(workload, arch)
    with cuda_compiler(toolkit, (arch.name,), CudaOptions(**mma.compiler_options(plan))) as log:
        source = build(schedule(mma, workload, plan).mod, mma, arch).imports[0].inspect_source()
    kernel = log.last
    for instruction in ("mma.sync.aligned.m16n8k16", "ldmatrix.sync.aligned.m8n8.x4", "cp.async.cg.shared.global", "__any_sync"):
        assert instruction in source
    assert "__activemask" not in source and kernel.warnings == ()
    figures(f"mma {workload.name} {arch.name}", {"registers": kernel.most("registers"), "spilled_bytes": kernel.most("spill_store_bytes")})


@pytest.fixture
def source_of(toolkit):
    """Function (workload, changes of its seed for sm_80) -> CUDA source."""
    def make(workload, **changes):
        arch = cuda_arch("sm_80")
        with source_alone(toolkit, arch.name):
            mod = schedule(mma, workload, mma.default_plan(workload, arch).but(**changes)).mod
            return build(mod, mma, arch).imports[0].inspect_source()
    return make


def test_rescale_is_skipped_only_where_asked(source_of):
    assert "__any_sync" not in source_of(WORKLOADS[0], lazy_rescale=0)


def test_key_loop_is_split_where_the_mask_ends(source_of):
    _before, masked, unmasked = re.split(r"\n  for \(int t", source_of(Workload(64, 64, "float16", "causal")))
    unmasked = unmasked.split("wait_group_0")[0]  # the last tile is computed behind the loop
    assert "CUDART_INF_F" in masked and "CUDART_INF_F" not in unmasked and "mma" in unmasked


@pytest.mark.parametrize("workload, arch, reason", [
    (Workload(64, 64, "float16"), cuda_arch("sm_75"), "sm_75 has no mma.sync m16n8k16"),
    (Workload(64, 64, "float16"), cpu_arch("x", 256, 2), "x is no CUDA GPU"),
    (Workload(64, 64, "float32"), cuda_arch("sm_80"), "tensor cores take 16-bit inputs, not float32"),
    (Workload(64, 8, "float16"), cuda_arch("sm_80"), "the value dimension must be at least 16, a fragment's columns, not 8"),
    (Workload(256, 256, "float16"), replace(cuda_arch("sm_80"), smem_bytes=64 * 1024), "no tile fits sm_80 at head dimensions 256 and 256"),
])
def test_declines_with_a_reason(workload, arch, reason):
    assert re.match(reason, mma.decline(workload, arch))


@pytest.mark.parametrize("changes, message", [
    (dict(q_tile=96), "q_tile must be a multiple of 16 rows for each warp, found q_tile 96 and 4 warps: change either"),
    (dict(kv_tile=40), "kv_tile must be a multiple of 16, found 40: round it"),
    (dict(q_tile=256, warps=4), "registers, about of plan .* must stay within 255 per thread on sm_80, found 312"),
    (dict(q_tile=1024, kv_tile=128, warps=32), "shared memory of plan .* must stay within 166912 bytes on sm_80, found 196608"),
    (dict(kv_tile=16, warps=8, q_tile=128), "a tile of K must be whole turns of 2048 elements that all threads copy together, found 1024"),
])
def test_budget_refuses(changes, message):
    plan = mma.MmaPlan(q_tile=128, kv_tile=64, warps=4)
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        mma.budget(Workload(64, 64), cuda_arch("sm_80"), plan.but(**changes))


@pytest.mark.parametrize("arch", [arch.name for arch in CUDA_ARCHS.values() if arch.mma])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_seed_is_the_first_choice_and_all_choices_fit(workload, arch):
    arch = cuda_arch(arch)
    choices = mma.tile_choices(workload, arch)
    assert choices[0] == mma.default_plan(workload, arch) and len(set(choices)) == len(choices) >= 3
    for plan in choices:
        mma.budget(workload, arch, plan)


@pytest.mark.parametrize("columns", range(32, 257, 32))
def test_eight_rows_of_a_shared_tile_start_in_different_banks(columns):
    """ldmatrix reads 16 bytes of each at once; a line of all banks has 128."""
    gap = 0 if swizzled(columns) else ROW_GAP
    for chunk in range(columns // 8):
        places = {(row * (columns + gap) // 8 + (chunk ^ row if swizzled(columns) else chunk)) % 8 for row in range(8)}
        assert len(places) == 8


def test_layouts_are_those_of_the_ptx_manual():
    """PTX ISA, m16n8k16: c0 of lane 0 is (0, 0), c2 is (8, 0); lane 5 holds row 1, columns 2 and 3."""
    assert fragment_layout(0, 0) == (0, 0, 0, 0) and fragment_layout(8, 0)[2:] == (0, 2)
    assert fragment_layout(1, 2)[2:] == (5, 0) and fragment_layout(1, 3)[2:] == (5, 1) and fragment_layout(0, 8)[2:] == (0, 4)
    assert statistics_layout(25, 2) == (1, 6, 1)


@pytest.mark.parametrize("order", range(len(software_pipeline.ORDERS)), ids=[name for name, _ in software_pipeline.ORDERS])
def test_orders_keep_what_depends_on_each_other(order):
    """Each statement runs once, and after those whose results it reads."""
    stages, positions = software_pipeline.pipeline_lists(order)
    at = dict(zip(software_pipeline.STATEMENTS, positions))
    assert sorted(positions) == list(range(len(positions))) and stages.count(0) == 2
    chains = ("S_init S S_masked tile_max pair_max row_max_new rescale O_init O_acc_new O_acc", "rescale row_sum_new", "rescale row_max",
              "row_max_new row_max_scaled P P_cast O_acc_new", "P tile_sum row_sum_new row_sum")
    for earlier, later in (pair for chain in chains for pair in zip(chain.split(), chain.split()[1:])):
        assert at[earlier] < at[later], f"{later} before {earlier}"
