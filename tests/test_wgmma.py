"""The wgmma family without a GPU: numbers up to the first bind, then the instructions and resources of what is compiled."""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cpu_arch, cuda_arch
from schedules.build import build, schedule
from schedules.families import wgmma, wgmma_plan
from schedules.intrinsics import wgmma as intrinsics, wgmma_exchange
from schedules.intrinsics.mma import LANES
from schedules.lowering import register_shares, rings, software_pipeline, toolkit as toolkits
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from schedules.plan import Calls, PlanError
from schedules.space import Space
from te_defs.workload import Workload
from tests.numbers import RAGGED, on_llvm, verdict
from tests.source_alone import source_alone

pytestmark = pytest.mark.slow

ARCH = cuda_arch("sm_90a")
UNBOUND = [stage.__name__ for stage in wgmma.STAGES[:[stage.__name__ for stage in wgmma.STAGES].index(wgmma.BINDS_AT)]]
WORKLOADS = [Workload(d, dv, "float16", mask) for d, dv in wgmma_plan.MEASURED for mask in ("full", "causal")]
COMPILED = WORKLOADS + [Workload(d, d, "bfloat16", mask) for d in (64, 128) for mask in ("full", "causal")]
CAUSAL = Workload(64, 64, "float16", "causal")
#: Rows that end in lines of 64 and of 128 bytes, and the largest.
PADDED = [Workload(80, 80, "float16", "causal"), Workload(40, 104, "bfloat16", "full"), Workload(248, 248, "float16", "full")]
#: Two consumer warpgroups with shared memory to spare, whatever the seeds are.
PLAN = wgmma.WgmmaPlan(q_tile=128, kv_tile=64, blocks=132, order_of_work=1)
ALL_OFF = PLAN.but(late_wait=0, lazy_rescale=0, ping_pong=0)


def seed_of(workload):
    return wgmma.default_plan(workload, ARCH)


@pytest.fixture(scope="module")
def after_stage():
    """Function (workload, number of stages) -> the half-scheduled function on llvm, each compiled once."""
    known = {}

    def build_prefix(workload, stages):
        if (workload, stages) not in known:
            plan = wgmma.WgmmaPlan(q_tile=64, kv_tile=32)
            known[workload, stages] = on_llvm(schedule(wgmma, workload, plan, stages).mod)
        return known[workload, stages]
    return build_prefix


@pytest.mark.parametrize("case", ["ragged", "few_keys", "grouped", "no_keys"])
@pytest.mark.parametrize("stages", range(1, len(UNBOUND) + 1), ids=UNBOUND)
@pytest.mark.parametrize("workload", [CAUSAL, Workload(96, 96, "float16", "full")], ids=lambda w: w.name)
def test_numbers_after_each_stage_before_the_first_bind(after_stage, workload, stages, case):
    assert verdict(after_stage(workload, stages), workload, *RAGGED[case]) is None


@pytest.mark.parametrize("case", ["ragged", "grouped", "no_keys"])
def test_padded_channels_before_the_first_bind(after_stage, case):
    workload = Workload(40, 72, "float16", "causal")
    assert verdict(after_stage(workload, len(UNBOUND)), workload, *RAGGED[case]) is None


@pytest.fixture(scope="module")
def compile_plan(toolkit):
    """Function (workload, plan) -> (CUDA source, CompiledKernel), each compiled once."""
    known = {}

    def make(workload, plan):
        if (workload, plan) not in known:
            with cuda_compiler(toolkit, (ARCH.name,), CudaOptions(**wgmma.compiler_options(plan))) as log:
                module = build(schedule(wgmma, workload, plan).mod, wgmma, ARCH)
            known[workload, plan] = module.imports[0].inspect_source(), log.last
        return known[workload, plan]
    return make


@pytest.fixture(scope="module")
def text_of(toolkit, compile_plan):
    """Function plan -> CUDA source of its kernel for CAUSAL, without the helpers; of all but PLAN the text alone is made."""
    known = {PLAN: kernel_text(compile_plan(CAUSAL, PLAN)[0])}

    def make(plan):
        if plan not in known:
            with source_alone(toolkit, ARCH.name):
                module = build(schedule(wgmma, CAUSAL, plan).mod, wgmma, ARCH)
            known[plan] = kernel_text(module.imports[0].inspect_source())
        return known[plan]
    return make


def kernel_text(source):
    return source.split('extern "C" __global__')[-1]


@pytest.fixture(scope="module")
def disassemble(toolkit, tmp_path_factory):
    """Function CompiledKernel -> [(address, instruction)] of its machine code."""
    folders = [os.environ["PATH"], Path(toolkit.nvcc).parent, *(folder / "bin" for folder in toolkits._pip_folders())]
    cuobjdump = shutil.which("cuobjdump", path=os.pathsep.join(map(str, folders)))
    if cuobjdump is None:
        pytest.skip("cuobjdump is wanted, found none on the PATH, beside nvcc or in pip's nvidia-cuda-cuobjdump")
    cubin = tmp_path_factory.mktemp("cubin") / "kernel.cubin"

    def make(kernel):
        cubin.write_bytes(kernel.image)
        listing = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        return [(int(address, 16), text.strip()) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", listing)]
    return make


def key_loops(code):
    """The innermost loops with products, as lists of instructions: that of tiles with a mask, then that of the others."""
    jumps = ((at, re.search(r"\bBRA.*?\b(0x[0-9a-f]+)$", text)) for at, text in code)
    spans = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) <= at]
    loops = {span: [text for at, text in code if span[0] <= at <= span[1]] for span in spans}
    # Waits stand at the end of the code and jump back: what they seem to enclose holds the loader's program too.
    loops = {span: loop for span, loop in loops.items() if count(loop, "HGMMA") and not count(loop, "UTMALDG")}
    return [loop for (first, last), loop in loops.items()
            if not any((first, last) != other and first <= other[0] and other[1] <= last for other in loops)]


def count(code, instruction):
    return sum(instruction in text for text in code)


@pytest.mark.parametrize("workload", COMPILED, ids=lambda w: w.name)
class TestSeedPlan:
    def test_compiles_without_spills(self, compile_plan, figures, workload):
        plan = seed_of(workload)
        source, kernel = compile_plan(workload, plan)
        for instruction in ("wgmma.mma_async.sync.aligned.m64n", "cp.async.bulk.tensor.5d.shared::cluster", "setmaxnreg.inc"):
            assert instruction in source
        assert "__activemask" not in source and kernel.warnings == () and kernel.most("static_smem_bytes") == 0
        assert (kernel.most("stack_bytes"), kernel.most("spill_store_bytes"), kernel.most("spill_load_bytes")) == (0, 0, 0)
        entry, consumer = kernel.most("registers"), register_shares.consumer_registers(plan.groups, plan.loader_registers)
        assert plan.loader_registers <= entry <= consumer
        assert plan.groups * consumer + plan.loader_registers <= (plan.groups + 1) * entry, "consumers would wait for registers for ever"
        figures(f"wgmma {workload.name} {ARCH.name}", {"registers": entry, "spilled_bytes": 0})

    def test_machine_code(self, compile_plan, disassemble, workload):
        plan = seed_of(workload)
        code = disassemble(compile_plan(workload, plan)[1])
        text = [text for _, text in code]
        in_bulk = plan.query_stages > 1 and workload.value_dim % wgmma_exchange.CHUNK == 0
        assert count(text, "UTMALDG.5D") and count(text, "USETMAXREG") == 2
        assert [bool(count(text, stored)) for stored in ("UTMASTG.4D", "STG.E.128")] == [in_bulk, not in_bulk]
        assert bool(count(text, ".BF16")) == (workload.dtype == "bfloat16")
        masked, steady = key_loops(code)
        for loop in (masked, steady):
            assert (count(loop, "LDL"), count(loop, "STL")) == (0, 0)
            assert count(loop, "HGMMA") == (workload.head_dim + plan.kv_tile) // intrinsics.STEP
        if plan.late_wait:
            *_, wait = (n for n, text in enumerate(steady) if "WARPGROUP.DEPBAR" in text)
            assert count(steady[:wait], "MUFU.EX2") == count(steady, "MUFU.EX2") > plan.kv_tile // 2, "beside the output's product"


@pytest.mark.parametrize("workload", PADDED, ids=lambda w: w.name)
def test_padded_channels(compile_plan, disassemble, workload):
    """Each line of a tile is loaded by itself, so that the accelerator fills what is past the channels; products round up to 16."""
    plan = seed_of(workload)
    source, kernel = compile_plan(workload, plan)
    assert kernel.warnings == () and kernel.most("spill_store_bytes") == kernel.most("stack_bytes") == 0
    code = disassemble(kernel)
    d, dv = (-(-size // 16) * 16 for size in (workload.head_dim, workload.value_dim))
    assert f"m64n{plan.kv_tile}k16" in source and f"m64n{dv}k16" in source
    text = [text for _, text in code]
    assert count(text, "UTMALDG.4D") and not count(text, "UTMALDG.5D") and count(text, "STG.E")
    for loop in key_loops(code):
        assert (count(loop, "LDL"), count(loop, "STL")) == (0, 0)
        assert count(loop, "HGMMA") == (d + plan.kv_tile) // intrinsics.STEP


class TestKnobs:
    """What each knob does to the kernel."""

    @pytest.mark.parametrize("plan, there", [(PLAN, True), (ALL_OFF, False)], ids=["on", "off"])
    @pytest.mark.parametrize("sign", ["flashtir_hold_back(", "__any_sync(", "ptx_bar_sync", "ptx_bar_arrive"])
    def test_late_wait_lazy_rescale_and_ping_pong(self, text_of, plan, there, sign):
        assert (sign in text_of(plan)) == there

    def test_one_warpgroup_takes_no_turns(self, text_of):
        assert "ptx_bar_" not in text_of(PLAN.but(q_tile=64))

    def test_grid_of_all_tiles(self, compile_plan, text_of):
        source, kernel = compile_plan(CAUSAL, PLAN.but(blocks=0))
        assert kernel.warnings == () and kernel.most("spill_store_bytes") == 0
        for sign in ("flashtir_once(", "counts_ptr["):
            assert sign not in kernel_text(source) and sign in text_of(PLAN)

    @pytest.mark.parametrize("workload", [CAUSAL, WORKLOADS[-2]], ids=lambda w: w.name)
    def test_further_plans_compile(self, compile_plan, workload):
        for plan, _ in wgmma.further_plans(workload, ARCH, seed_of(workload))[1:]:
            kernel = compile_plan(workload, plan)[1]
            assert kernel.warnings == () and kernel.most("spill_store_bytes") == 0

    @pytest.mark.parametrize("share", [0, 2])
    def test_polynomial_share(self, compile_plan, disassemble, share):
        """All exponentials of P but these eighths, and the two rescale factors."""
        plan = PLAN.but(polynomial_share=share)
        kernel = compile_plan(CAUSAL, plan)[1]
        loops = key_loops(disassemble(kernel))
        assert [count(loop, "MUFU.EX2") for loop in loops] == [plan.kv_tile // 2 * (8 - share) // 8 + 2] * 2
        assert kernel.warnings == () and kernel.most("spill_store_bytes") == 0

    def test_the_loader_tells_the_consumers_what_their_tile_is(self, compile_plan):
        """Consumers read the numbers of a tile; the loader writes them in two places, for a tile and for a wave that has none left."""
        for shared in (0, 1):
            source, kernel = compile_plan(CAUSAL, PLAN.but(blocks=132, order_of_work=1, shared_decode=shared))
            assert ("flashtir_put(" in source) == ("flashtir_get(" in source) == bool(shared)
            assert kernel.warnings == () and kernel.most("spill_store_bytes") == 0
            told = kernel_text(source)
            assert told.count("flashtir_get(") == told.count("flashtir_put(") // 2, "once for a tile, once for none"

    @pytest.mark.parametrize("workload, changes", [
        (CAUSAL, {}), (CAUSAL, dict(q_tile=192, kv_tile=80, stages=3, query_stages=2, loader_registers=32)), (Workload(72, 40), {})],
        ids=str)
    def test_budget_tells_the_shared_memory_that_lowering_takes(self, workload, changes):
        plan = PLAN.but(**changes)
        func = schedule(wgmma, workload, plan).mod["main"].with_attr("target", ARCH.target())
        with ARCH.target(), tvm.transform.PassContext(config=wgmma.CONFIG):
            lowered = get_tir_pipeline(wgmma.PIPELINE)[0](tvm.IRModule({"main": func}))
        elements = []
        for func in lowered.functions.values():
            tvm_ffi.structural_walk(func.body, (tvm.tirx.AllocBuffer, lambda alloc: elements.append(int(alloc.buffer.shape[0]))
                                                if alloc.buffer.scope() == "shared.dyn" else None))
        told = next(used for name, used, *_ in wgmma.budget(workload, ARCH, plan).rows if name == "shared memory")
        assert [2 * count for count in elements] == [told]


def test_a_third_stage_is_room_for_one_more_tile_of_keys_and_values():
    two, three = (dict(row[:2] for row in wgmma.budget(CAUSAL, ARCH, PLAN.but(stages=stages)).rows) for stages in (2, 3))
    assert three["shared memory"] - two["shared memory"] == 2 * PLAN.kv_tile * (64 + 64) + 4 * rings.BARRIER_BYTES


def test_key_loop_is_split_where_the_mask_ends(text_of):
    consumer = text_of(PLAN).split("setmaxnreg_inc")[1]
    _first_tile, masked, unmasked = re.split(r"\n +for \(int t\w* = 0;", consumer)
    unmasked = unmasked.split("wait_group_sync_aligned_0")[0]  # the last product is awaited behind the loop too
    assert "CUDART_INF_F" in masked and "CUDART_INF_F" not in unmasked and "wgmma_f16_ss" in unmasked and "wgmma_f16_rs" in unmasked


def test_output_is_stored_16_bytes_at_a_time_at_64_bit_indices(compile_plan, text_of):
    plan = PLAN.but(blocks=132, query_stages=1)  # the next queries want the place of these, so that lanes store O
    text = text_of(plan)
    assert "flashtir_store_f16((&(O_ptr[" in text and "@p st.global.v4.b32" in compile_plan(CAUSAL, plan)[0]
    assert not re.search(r"O_ptr\[.*\] = ", text), "no other store"
    indices = re.findall(r"\b(?:O|LSE)_ptr\[(.*)", text)
    assert len(indices) == 2
    for index in indices:
        assert "(int64_t)N" in index and "(int64_t)quotient" in index
        assert re.findall(r"(?<!\(int64_t\))\b(?:N|H|warp|tile\w*|quotient\w*)\b", index.split("] = ")[0].split(")]))")[0]) == []


@pytest.mark.parametrize("workload, arch, reason", [
    (CAUSAL, cuda_arch("sm_80"), r"sm_80 has no wgmma \(sm_90a has\)"),
    (CAUSAL, cuda_arch("sm_90"), r"sm_90 has no wgmma \(sm_90a has\)"),
    (CAUSAL, cuda_arch("sm_120"), r"sm_120 has no wgmma \(sm_90a has\)"),
    (CAUSAL, cpu_arch("x", 256, 2), "x is no CUDA GPU"),
    (Workload(64, 64, "float32"), ARCH, "tensor cores take 16-bit inputs, not float32"),
    (Workload(24, 64, "float16"), ARCH, "head dimensions must be at least 32, not 24 and 64"),
    (Workload(128, 16, "float16"), ARCH, "head dimensions must be at least 32, not 128 and 16"),
])
def test_declines_with_a_reason(workload, arch, reason):
    assert re.fullmatch(reason, wgmma.decline(workload, arch))


@pytest.mark.parametrize("changes, message", [
    (dict(q_tile=96), "q_tile must be 64 rows for each of one to three consumer warpgroups, found 96: choose 64, 128 or 192"),
    (dict(q_tile=256), "q_tile must be 64 rows for each of one to three consumer warpgroups, found 256: choose 64, 128 or 192"),
    (dict(kv_tile=40), "kv_tile must be a multiple of 16 up to 256, found 40: round it"),
    (dict(kv_tile=272), "kv_tile must be a multiple of 16 up to 256, found 272: round it"),
    (dict(loader_registers=20), "loader_registers must be a multiple of 8 from 24 to what a thread starts with, found 20: round it"),
    (dict(loader_registers=16), "loader_registers must be a multiple of 8 from 24 to what a thread starts with, found 16: round it"),
    (dict(loader_registers=176), "loader_registers must be a multiple of 8 from 24 to what a thread starts with, found 176: round it"),
    (dict(stages=0), "stages must be from 1 to 16, found 0: correct it"),
    (dict(query_stages=0), "query_stages must be from 1 to 16, found 0: correct it"),
    (dict(polynomial_share=9), "polynomial_share must be from 0 to 8, found 9: correct it"),
    (dict(blocks=-1), "blocks must be from 0 to 65535, found -1: correct it"),
    (dict(kv_tile=128, stages=4), "shared memory of plan (.*) must stay within 232448 bytes on sm_90a, found 295088: choose smaller tiles"),
    (dict(q_tile=192, kv_tile=96), r"registers, about of plan (.*) must stay within 160 per consumer on sm_90a, found \d+: choose smaller"),
])
def test_budget_refuses(changes, message):
    plan = wgmma.WgmmaPlan(q_tile=128, kv_tile=96)
    with pytest.raises(PlanError, match=message.replace("(.", r"\(.").replace("*)", r"*\)")):
        wgmma.budget(Workload(128, 128), ARCH, plan.but(**changes))


@pytest.mark.parametrize("workload", COMPILED, ids=lambda w: w.name)
def test_seed_is_the_first_choice_and_all_choices_fit(workload):
    choices = wgmma.tile_choices(workload, ARCH)
    assert choices[0] == seed_of(workload) and len(set(choices)) == len(choices) >= 4
    for plan in choices:
        wgmma.budget(workload, ARCH, plan)
        space = Space.around(wgmma, workload, ARCH, plan)
        assert plan in space.fitting_plans() and space.size > 1


class TestFurtherPlans:
    WAVE = dict(tiles=ARCH.peak.sms + 1, rows=64)

    @pytest.mark.parametrize("workload", COMPILED, ids=lambda w: w.name)
    def test_of_the_seed(self, workload):
        """Plans for calls that fill the chip, by length, the seed among them; one of a single warpgroup for all other calls."""
        seed = seed_of(workload)
        *by_length, (small, rest) = wgmma.further_plans(workload, ARCH, seed)
        assert seed in dict(by_length) and len(dict(by_length)) == len(by_length)
        assert [calls for _, calls in by_length] == [Calls(queries=calls.queries, **self.WAVE) for _, calls in by_length]
        fewest = [calls.queries for _, calls in by_length]
        assert fewest == sorted(fewest, reverse=True) and fewest[-1] == 0
        assert (small.q_tile, small.blocks) == (64, 0) and rest == Calls()
        for plan, _ in wgmma.further_plans(workload, ARCH, seed):
            wgmma.budget(workload, ARCH, plan)

    @pytest.mark.parametrize("key, lengths", ARCH.wgmma_lengths.items(), ids=str)
    def test_rows_of_lengths(self, key, lengths):
        """Longest first, down to none, and the seed itself in the range that plans are tuned at."""
        fewest = [queries for queries, _ in lengths]
        assert key in ARCH.wgmma_seed and fewest == sorted(set(fewest), reverse=True) and fewest[-1] == 0
        assert next(changes for queries, changes in lengths if queries <= wgmma_plan.TUNED_AT) == {}

    @pytest.mark.parametrize("tuned_at, places", [(4096, {1025: "plan", 0: "seed"}), (1024, {1025: "seed", 0: "plan"}),
                                                  (16384, {1025: "plan", 0: "seed"})], ids=str)
    def test_a_tuned_plan_is_for_lengths_like_its_own(self, tuned_at, places):
        workload = Workload(256, 256, "float16", "full")
        seed = seed_of(workload)
        plans = {"plan": seed.but(kv_tile=64), "seed": seed}
        found = wgmma.further_plans(workload, ARCH, plans["plan"], tuned_at)
        assert found[:-1] == [(plans[name], Calls(queries=queries, **self.WAVE)) for queries, name in places.items()]

    def test_where_several_lengths_were_tuned_each_plan_serves_all_calls_but_those_with_few_tiles(self):
        seed = seed_of(Workload(256, 256, "float16", "full"))
        (plan, calls), (small, rest) = wgmma.further_plans(Workload(256, 256, "float16", "full"), ARCH, seed, None)
        assert (plan, calls, rest) == (seed, Calls(**self.WAVE), Calls()) and (small.q_tile, small.blocks) == (64, 0)

    def test_a_plan_stands_once(self):
        """Where neighbours are the same plan, one entry takes the calls of both."""
        workload = Workload(64, 64, "float16", "causal")
        _, (short, _), (small, _) = wgmma.further_plans(workload, ARCH, seed_of(workload))
        assert wgmma.further_plans(workload, ARCH, short)[:-1] == [(short, Calls(**self.WAVE))]
        assert wgmma.further_plans(workload, ARCH, small, 1)[1:] == [(small, Calls())]


@pytest.mark.parametrize("q_tile, groups, warps", [(64, 1, 4), (128, 2, 8), (192, 3, 12)])
def test_a_warpgroup_takes_64_rows(q_tile, groups, warps):
    plan = PLAN.but(q_tile=q_tile)
    assert (plan.groups, plan.warps) == (groups, warps) == (q_tile // intrinsics.GROUP_ROWS, q_tile // intrinsics.WARP_ROWS)


def test_layouts_are_those_of_the_ptx_manual():
    """PTX ISA, wgmma.m64nNk16, fragment of D: d_i of a lane is row lane / 4 (+ 8), column 8 * (i / 4) + 2 * (lane % 4) (+ 1)."""
    for lane in range(LANES):
        for i in range(256 // 2):
            row, column = lane // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
            assert intrinsics.accumulator_place(row, column) == (lane, i)
            assert intrinsics.accumulator_layout(48 + row, column) == (3, lane, i)
    assert [intrinsics.chunk_of(channels) for channels in (64, 96, 128, 192, 256)] == [64, 32, 64, 64, 64]
    for channels in range(32, 257, 8):
        product = -(-channels // 16) * 16
        chunk, chunks = intrinsics.chunk_of(product), intrinsics.chunks_of(product)
        assert (chunk, chunks) == (intrinsics.chunk_of(channels), intrinsics.chunks_of(channels))
        assert chunk <= product and chunk * chunks == -(-channels // 32) * 32, "tiles are whole lines, none of them empty"
    assert intrinsics.box_layout(64)(5, 130) == (2, 5, 2) and intrinsics.box_layout(32)(5, 95) == (2, 5, 31)


@pytest.mark.parametrize("slack", [False, True])
def test_overlapped_order_keeps_what_depends_on_each_other(slack):
    """Each statement runs once, and after those whose results it reads; what is a tile later reads what the tile before left."""
    stages, positions = software_pipeline.overlapped_lists(slack)
    names = [name for name in software_pipeline.OVERLAPPED_STATEMENTS if slack or name != "row_max_seen"]
    assert sorted(positions) == list(range(len(names))) and len(stages) == len(names)
    assert {name for name, stage in zip(names, stages) if stage} == {"V_load", "O_acc_new", "O_acc"}

    def time(name, tile=0):
        """(iteration, position in it) in which a statement of a tile runs."""
        return stages[names.index(name)] + tile, positions[names.index(name)]
    seen = "row_max_seen row_max_new" if slack else "row_max_new"
    same_tile = (f"K_load S S_ready S_masked tile_max pair_max {seen} rescale O_init O_acc_new O_acc", "S_init S", "V_load O_acc_new",
                 "rescale row_sum_new", "rescale row_max", "row_max_new row_max_scaled P P_cast O_acc_new",
                 "P tile_sum row_sum_new row_sum")
    for earlier, later in (pair for chain in same_tile for pair in zip(chain.split(), chain.split()[1:])):
        assert time(earlier) < time(later), f"{later} before {earlier}"
    # O, P and the statistics are there once: what reads a tile's must be through before the next tile's are written.
    for earlier, later in (("O_acc", "O_init"), ("O_acc", "P_cast"), ("S_ready", "S_init"), ("row_max", seen.split()[0]),
                           ("row_sum", "row_sum_new")):
        assert time(earlier) < time(later, tile=1), f"{later} of the next tile before {earlier}"
    # The point of it: the product of the tile before is under way from the scores on and awaited behind the exponentials.
    assert time("S", tile=1) < time("O_acc_new") < time("S_ready", tile=1) < time("P", tile=1) < time("O_acc")
