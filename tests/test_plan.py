"""Plans, budgets, hardware rows and the registry: what fits, what is refused, and in which words."""
import pytest

from schedules import backward, registry
from schedules.arch import CUDA_ARCHS, ArchError, CudaArch, arch_of_capability, cpu_arch, cuda_arch
from schedules.plan import Budget, Plan, PlanError, paper_tile, require
from te_defs.workload import Workload


@pytest.mark.parametrize("smem_elements, head_dim, tile", [
    (48 * 1024 // 2, 64, (64, 96)), (163 * 1024 // 2, 128, (128, 163)), (1000, 64, (4, 4))])
def test_paper_tile(smem_elements, head_dim, tile):
    """FlashAttention, algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(Bc, d)."""
    assert paper_tile(smem_elements, head_dim) == tile


def test_budget_names_what_is_exceeded_and_shows_all():
    budget = Budget((("threads", 128, 1024, "of a block"), ("shared memory", 200, 100, "bytes")))
    with pytest.raises(PlanError) as error:
        budget.check(Plan(16, 32), cuda_arch("sm_80"))
    message = str(error.value)
    assert message.startswith("shared memory of plan (q_tile=16 kv_tile=32) must stay within 100 bytes on sm_80, found 200: "
                              "choose smaller tiles")
    assert "threads" in message and "200 %" in message


def test_budget_that_fits_returns_itself():
    budget = Budget((("threads", 128, 1024, "of a block"),))
    assert budget.check(Plan(16, 32), cuda_arch("sm_80")) is budget


def test_require_speaks_in_one_form():
    require(True, "a", "b", "c")
    with pytest.raises(PlanError, match="kv_tile must be even, found 3: round it"):
        require(False, "kv_tile must be even", 3, "round it")


@pytest.mark.parametrize("capability, name", [((7, 5), "sm_75"), ((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")])
def test_arch_of_a_gpu(capability, name):
    assert arch_of_capability(*capability).name == name


@pytest.mark.parametrize("find, message", [
    (lambda: arch_of_capability(7, 0), "compute capability 7.5 or later is needed, found 7.0: use a newer GPU or --target cpu"),
    (lambda: arch_of_capability(99, 0), "compute capability 99.0 has no row"),
    (lambda: cuda_arch("sm_70"), "a CUDA target is one of sm_75, .*, found 'sm_70': choose one of these"),
])
def test_unknown_archs_are_refused(find, message):
    with pytest.raises(ArchError, match=message):
        find()


def test_a_row_with_tensor_cores_names_its_tiles():
    with pytest.raises(ArchError, match="sm_99 has mma and must name the tiles of its seed plans in mma_tile, found none"):
        CudaArch("sm_99", 1024, 1024, mma=True)


@pytest.mark.parametrize("arch", CUDA_ARCHS.values(), ids=list(CUDA_ARCHS))
def test_targets_carry_the_true_limits(arch):
    target = arch.target()
    assert target.attrs["max_shared_memory_per_block"] == arch.smem_bytes <= arch.smem_per_sm_bytes
    assert str(target.attrs["arch"]) == arch.name


@pytest.mark.parametrize("workload, arch, names", [
    (Workload(128, 128, "float16", "causal"), cuda_arch("sm_90a"), ["wgmma", "mma", "simt"]),
    (Workload(128, 128, "float16", "causal"), cuda_arch("sm_90"), ["mma", "simt"]),
    (Workload(192, 128, "bfloat16", "causal"), cuda_arch("sm_90a"), ["wgmma"]),
    (Workload(64, 64, "float32", "full"), cuda_arch("sm_75"), ["simt", "simt_te"]),
    (Workload(64, 64, "float32", "causal"), cpu_arch("x86-64-v4", 512, 2), ["cpu"]),
])
def test_takers_in_order_of_preference(workload, arch, names):
    assert [family.NAME for family in registry.takers(workload, arch)][:len(names)] == names


def test_nobody_takes_what_nobody_can():
    workload = Workload(64, 64, "bfloat16", "full")
    with pytest.raises(registry.NoSchedule) as error:
        registry.takers(workload, cuda_arch("sm_75"))
    message = str(error.value)
    assert message.startswith("a schedule for fwd_d64_dv64_bf16_full on sm_75 was wanted, every family declined (wgmma: sm_75 has no")
    assert all(f"{family.NAME}: " in message for family in registry.FAMILIES)


def test_family_by_name():
    assert registry.family_named("mma").NAME == "mma" and registry.family_named("wgmma").NAME == "wgmma"
    with pytest.raises(registry.NoSchedule, match="a family is one of wgmma, mma, simt, simt_te, cpu, found 'zz': choose one of these"):
        registry.family_named("zz")


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.NAME)
def test_families_keep_the_protocol(family):
    for name in ("NAME", "PIPELINE", "CONFIG", "BINDS_AT", "PLAN", "STAGES", "decline", "default_plan", "tile_choices", "knobs", "budget",
                 "declare", "compiler_options"):
        assert hasattr(family, name), name
    assert issubclass(family.PLAN, Plan)
    assert family.BINDS_AT in ("", *(stage.__name__ for stage in family.STAGES))


@pytest.mark.parametrize("family", [family for families in backward.FAMILIES.values() for family in families], ids=lambda it: it.NAME)
def test_families_of_gradients_keep_theirs(family):
    for name in ("NAME", "PIPELINE", "CONFIG", "STAGES", "STRIDED", "decline", "default_plan", "tile_choices", "knobs", "budget", "declare",
                 "schedule", "role_of", "compiler_options"):
        assert hasattr(family, name), name
    assert issubclass(family.PLAN, Plan) and hasattr(family, "ROLE") == backward.adds(family)
