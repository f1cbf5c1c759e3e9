"""The space of plans: what is drawn, what a scheduled module says of it, and traces that fit both forms of a declaration."""
import pytest
import tvm
import tvm_ffi
from tvm import s_tir

from schedules import build
from schedules.arch import cpu_arch, cuda_arch
from schedules.backward_parts import Part
from schedules.families import (
    cpu, cpu_backward, mma, mma_backward, mma_fused_backward, simt, simt_backward, simt_te, wgmma, wgmma_backward, wgmma_fused_backward)
from schedules.plan import PlanError
from schedules.registry import NoSchedule, takers
from schedules.space import Space, decisions, draw, schedule_in, spaces_of
from schedules.tuning.forms import copy_of, loops_and_blocks, schedule_static, static_form, symbolic_form
from te_defs.workload import PRESETS, Shape, Workload
from tests import stand_in

CPU = cpu_arch("x86-64-v4", 512, 2)
ARCHS = [cuda_arch(name) for name in ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120")] + [CPU]
CASES = [(cpu, Workload(64, 64, "float32", "causal"), CPU), (wgmma, Workload(64, 64, "float16", "causal"), cuda_arch("sm_90a")),
         (mma, Workload(64, 64, "float16", "causal"), cuda_arch("sm_80")),
         (simt, Workload(64, 64, "float32", "causal"), cuda_arch("sm_80")), (simt_te, Workload(64, 64, "float32"), cuda_arch("sm_80"))]
SHAPE = Shape(2, 4, 2, 512, 512)


def family_id(case):
    return case[0].NAME


def stand_in_space():
    return spaces_of((stand_in,), Workload(64, 64, "float32"), CPU)[0]


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
@pytest.mark.parametrize("workload", PRESETS.values(), ids=list(PRESETS))
def test_every_space_has_its_seed_and_the_seed_fits(workload, arch):
    try:
        families = takers(workload, arch)
    except NoSchedule:
        pytest.skip(f"no family takes {workload.name} on {arch.name}")
    spaces = spaces_of(families, workload, arch)
    assert spaces[0].seed == families[0].default_plan(workload, arch)
    assert [space.name for space in spaces if not space.fits(space.seed)] == []
    assert len({space.name for space in spaces}) == len(spaces), "two spaces have one name"


class TestSpace:
    def test_counts_what_fits(self):
        space = stand_in_space()
        assert space.size == 12
        assert len(space.fitting_plans()) == 8, "16 lanes of 32 keys are over the budget of 256"
        assert space.seed in space.fitting_plans()

    def test_owns_the_plans_of_its_structure_only(self):
        space = stand_in_space()
        assert space.owns("stand_in", space.seed.but(lanes=4, spare=3))
        assert not space.owns("stand_in", space.seed.but(lanes=5))
        assert not space.owns("stand_in", space.seed.but(q_tile=32))
        assert not space.owns("another", space.seed)

    def test_refuses_a_seed_that_its_knobs_do_not_offer(self):
        with pytest.raises(PlanError, match="stand_in.knobs must offer the value of each seed, found lanes=5 outside"):
            Space.around(stand_in, Workload(64, 64), CPU, stand_in.StandInPlan(16, 32, lanes=5))


class TestDraw:
    @pytest.mark.parametrize("seed", range(3))
    def test_draws_from_the_candidates_and_says_what(self, seed):
        space = stand_in_space()
        sch = s_tir.Schedule(symbolic_form(space), debug_mask=0, seed=seed + 1)
        plan = draw(sch, space)
        workload, family, values = decisions(sch.mod)
        assert (workload, family) == (space.workload.name, "stand_in")
        assert space.owns(family, stand_in.StandInPlan(**values))
        assert values["lanes"] == int(sch.get(plan.lanes))

    def test_takes_the_values_of_a_plan(self):
        space = stand_in_space()
        chosen = space.seed.but(lanes=4, spare=2)
        sch = s_tir.Schedule(symbolic_form(space), debug_mask=0)
        draw(sch, space, chosen)
        assert stand_in.StandInPlan(**decisions(sch.mod)[2]) == chosen

    def test_a_single_candidate_is_no_draw(self):
        space = stand_in_space()
        sch = s_tir.Schedule(symbolic_form(space), debug_mask=0)
        draw(sch, space)
        assert [str(inst.kind.name) for inst in sch.trace.insts].count("SampleCategorical") == 2


def without_annotations(mod):
    """The module without what `draw` wrote on it."""
    sch = s_tir.Schedule(copy_of(mod), debug_mask=0)
    root = sch.get_sblock("root")
    for key in [str(key) for key in mod["main"].body.block.annotations if str(key).startswith("flashtir.")]:
        sch.unannotate(root, key)
    return sch.mod


def replayed_from_static(space, plan):
    """The symbolic form of a space, scheduled by the trace of a plan on the static form."""
    symbolic = symbolic_form(space)
    static = schedule_static(static_form(symbolic, space.workload, SHAPE))
    schedule_in(static, space, plan)
    replayed = s_tir.Schedule(copy_of(symbolic), debug_mask=0)
    static.trace.simplified(True).apply_to_schedule(replayed, remove_postproc=True)
    return without_annotations(replayed.mod)


@pytest.mark.parametrize("case", [(Part(cpu_backward, "dk_dv"), *CASES[0][1:]), (Part(wgmma_backward, "dq"), *CASES[1][1:]),
                                  (Part(wgmma_fused_backward), *CASES[1][1:]), (Part(mma_backward, "dk_dv"), *CASES[2][1:]),
                                  (Part(mma_fused_backward), *CASES[2][1:]), (Part(simt_backward, "dq"), *CASES[3][1:])], ids=family_id)
def test_a_static_trace_gives_the_function_of_a_gradient_that_is_built(case):
    part, workload, arch = case
    space = spaces_of((part,), workload, arch)[0]
    plan = space.fitting_plans()[-1]
    named = () if part.role is None else (part.role,)
    assert tvm_ffi.structural_equal(replayed_from_static(space, plan), part.family.schedule(*named, workload, plan).mod)


@pytest.mark.parametrize("case", CASES, ids=family_id)
class TestForms:
    def test_a_static_trace_gives_the_symbolic_kernel_that_is_built(self, case):
        family, workload, arch = case
        space = spaces_of((family,), workload, arch)[0]
        plan = space.fitting_plans()[-1]
        assert tvm_ffi.structural_equal(replayed_from_static(space, plan), build.schedule(family, workload, plan, strided=False).mod)

    def test_scheduling_does_not_change_the_static_form(self, case):
        family, workload, arch = case
        space = spaces_of((family,), workload, arch)[0]
        static = static_form(symbolic_form(space), workload, SHAPE)
        before = tvm.ir.save_json(static)
        schedule_in(schedule_static(static), space, space.seed)
        assert tvm.ir.save_json(static) == before

    def test_the_static_form_has_one_hash(self, case):
        family, workload, arch = case
        space = spaces_of((family,), workload, arch)[0]
        hashes = {tvm_ffi.structural_hash(static_form(symbolic_form(space), workload, SHAPE)) for _ in range(2)}
        assert len(hashes) == 1


def test_loops_and_blocks_are_found_at_every_depth():
    parts = loops_and_blocks(symbolic_form(stand_in_space())["main"].body)
    names = [getattr(part, "name_hint", None) or part.loop_var.name for part in parts]
    assert names[:5] == ["root", "b", "h", "r", "attn"]
    assert {"kv", "S", "O_acc_new", "LSE"} < set(names)
