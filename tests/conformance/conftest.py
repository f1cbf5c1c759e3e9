"""What the rules are asked of: every family, as artefact where this machine can run it, else on llvm up to the stage that binds threads,
and there the kernel for views with strides."""
import functools

import pytest
import tvm
import tvm_ffi
from tvm.target import codegen

from schedules import backward
from schedules.arch import arch_of_capability, cpu_arch, cuda_arch
from schedules.artefact.export import export_artefact
from schedules.build import schedule, signs
from schedules.families import cpu, cpu_backward, mma, simt, wgmma
from scripts.kernels import Planned, build_kernels
from tests.backward import Called, exported
from tests.numbers import on_llvm

#: A chip that has each family, and a plan of small tiles, for where no GPU is.
WITHOUT_GPU = {simt: ("sm_80", simt.SimtPlan(32, 16, 8, 16, 4)), mma: ("sm_80", mma.MmaPlan(q_tile=64, kv_tile=32, warps=2)),
               wgmma: ("sm_90a", wgmma.WgmmaPlan(q_tile=64, kv_tile=64))}


class Engine:
    """Forward functions of one family.

    name    the family's, and how it runs: "cpu", "mma on llvm", "mma on cuda"
    device  that its tensors are on
    """

    def __init__(self, family, arch, folder, whole):
        self.family, self.arch, self.folder, self.whole = family, arch, folder, whole
        self.device = tvm.runtime.device(arch.kind if whole else "cpu", 0)
        self.name = family.NAME if family is cpu else f"{family.NAME} on {'cuda' if whole else 'llvm'}"
        self._known = {}

    def declines(self, workload):
        """Why it does not take a workload, or None."""
        return self.family.decline(workload, self.arch)

    def forward(self, workload):
        """Function (q, k, v, out, lse, scale, the workload's arguments); built once each."""
        if workload not in self._known:
            self._known[workload] = (self._artefact if self.whole else self._stages)(workload)
        return self._known[workload]

    def _artefact(self, workload):
        path = self.folder / f"{self.family.NAME}-{workload.name}.so"
        kernels = build_kernels([Planned(self.family.NAME, self.family.default_plan(workload, self.arch))], workload, self.arch)
        export_artefact([kernel.variant for kernel in kernels], workload, path, {}, ())
        return tvm_ffi.load_module(str(path)).flash_attention_forward

    def _stages(self, workload):
        _, plan = WITHOUT_GPU[self.family]
        count = [stage.__name__ for stage in self.family.STAGES].index(self.family.BINDS_AT)

        @functools.cache
        def kernel(negative):
            return on_llvm(schedule(self.family, workload, plan, count, negative, strided=True).mod)
        return lambda *arguments: kernel(arguments[5] < 0 and True in signs(workload))(*arguments)


class Gradients:
    """Gradients of one family, by artefacts on the device that it is for.

    name  the family's
    """

    def __init__(self, family, arch, folder, toolkit):
        self.family, self.arch, self.folder, self.toolkit, self.name = family, arch, folder, toolkit, family.NAME
        self._known = {}

    def declines(self, workload):
        """Why it does not take a workload, or None."""
        return self.family.decline(workload, self.arch)

    def backward(self, workload):
        """The call for the gradients of a workload, tests.backward.Called; built once each."""
        if workload not in self._known:
            module = exported(self.family, workload, self.arch, self.folder / f"{self.name}-{workload.name}.so", self.toolkit)
            times = 1 if self.family in backward.FAMILIES[backward.ANY_ORDER] else 2
            self._known[workload] = Called(module, workload, tvm.runtime.device(self.arch.kind, 0), times)
        return self._known[workload]


def arch_here(request, is_cpu):
    """The Arch of this machine's CPU, else of its GPU, for which the toolkit is then loaded."""
    if is_cpu:
        return cpu_arch(codegen.llvm_get_system_cpu(), 512, 2)
    request.getfixturevalue("toolkit")
    return arch_of_capability(*map(int, str(tvm.cuda(0).compute_version).split(".")))


def _id(param):
    family, whole = param
    return family.NAME if family is cpu else f"{family.NAME}-{'cuda' if whole else 'llvm'}"


@pytest.fixture(scope="session", ids=_id, params=[(cpu, True), *((family, False) for family in WITHOUT_GPU), *(
    pytest.param((family, True), marks=pytest.mark.gpu) for family in WITHOUT_GPU)])
def engine(request, tmp_path_factory):
    family, whole = request.param
    if whole:
        arch = arch_here(request, family is cpu)
    else:
        arch = cuda_arch(WITHOUT_GPU[family][0])
    return Engine(family, arch, tmp_path_factory.mktemp("conformance"), whole)


@pytest.fixture(scope="session", ids=lambda family: family.NAME, params=[
    family if family is cpu_backward else pytest.param(family, marks=pytest.mark.gpu)
    for families in backward.FAMILIES.values() for family in families])
def gradients(request, tmp_path_factory):
    family = request.param
    arch = arch_here(request, family is cpu_backward)
    toolkit = None if family is cpu_backward else request.getfixturevalue("toolkit")
    return Gradients(family, arch, tmp_path_factory.mktemp("gradients"), toolkit)
