"""Head dimensions in steps of 8 on tensor cores: which are taken, and by which plans."""
import pytest

from schedules.arch import CUDA_ARCHS, cuda_arch
from schedules.families import mma, wgmma
from te_defs.workload import Workload

HOPPER = cuda_arch("sm_90a")


@pytest.mark.parametrize("arch", [arch for arch in CUDA_ARCHS.values() if arch.mma], ids=lambda arch: arch.name)
def test_mma_takes_them_from_values_of_16_on(arch):
    for d in range(16, 257, 8):
        for workload in (Workload(*pair) for pair in ((d, d), (d, 64), (64, d), (256, d), (8, d))):
            assert mma.decline(workload, arch) is None
            mma.budget(workload, arch, mma.default_plan(workload, arch))


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_wgmma_takes_them_from_32_on(mask):
    """And all plans of an artefact fit."""
    for d in range(32, 257, 8):
        for workload in (Workload(*pair, mask=mask) for pair in ((d, d), (d, 64), (64, d), (256, d), (d, 128))):
            assert wgmma.decline(workload, HOPPER) is None
            for plan, _ in wgmma.further_plans(workload, HOPPER, wgmma.default_plan(workload, HOPPER)):
                wgmma.budget(workload, HOPPER, plan)


@pytest.mark.parametrize("dims, row", [((40, 72), (96, 96)), ((128, 64), (128, 128)), ((192, 64), (192, 128)), ((192, 136), (256, 256)),
                                       ((56, 48), (64, 64)), ((64, 256), (256, 256))], ids=str)
def test_a_seed_of_wgmma_is_that_of_the_next_larger_pair_that_was_measured(dims, row):
    found, wanted = (wgmma.default_plan(Workload(*pair), HOPPER) for pair in (dims, row))
    assert found.but(kv_tile=0, loader_registers=0) == wanted.but(kv_tile=0, loader_registers=0)
    assert found.kv_tile >= wanted.kv_tile
