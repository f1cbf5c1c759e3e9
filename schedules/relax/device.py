"""The row of schedules.arch that kernels beside a graph are lowered for, and the plans that they get."""
import re
from pathlib import Path

import tvm
from tvm.target import Target, codegen

from schedules import registry
from schedules.arch import ArchError, arch_of_capability, cpu_arch
from schedules.artefact.kernels import Planned
from schedules.tuning.log import LogError
from schedules.tuning.nearest import Machine, figures_of, nearest_records
from schedules.tuning.records import NoRecord
from schedules.tuning.subjects import ForwardPass


def arch_of(target):
    """Row of schedules.arch for a target of TVM, or its text; None: that of the scope around. ArchError where there is none.

    A GPU's row is that of its compute capability: beside code of TVM for sm_90 stand kernels for sm_90a, which have instructions that TVM's
    own schedules for sm_90a do not use.
    """
    target = Target.current() if target is None else Target(target)
    if target is None:
        raise ArchError("a target was wanted, found none: name one, as FlashAttention(logs, target), or enter it by `with target`")
    if target.kind.name == "llvm":
        return _cpu(target)
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", str(target.attrs.get("arch", "")))
    if target.kind.name != "cuda" or found is None:
        raise ArchError(f"a target is of kind llvm, or of kind cuda with an arch such as sm_80, found {target}: choose such a one")
    return arch_of_capability(*map(int, found.groups()))


def _cpu(target):
    """Row of a CPU; threads are as many as the target has cores, else as TVM's pool has in this process."""
    cores = target.attrs.get("num-cores") or tvm.get_global_func("runtime.NumThreads")()
    triple = str(target.attrs.get("mtriple", "")) or codegen.llvm_get_system_triple()
    return cpu_arch(str(target.attrs.get("mcpu", "generic")), codegen.llvm_get_vector_width(target), int(cores),
                    machine=triple.partition("-")[0])


def plans_for(workload, arch, logs):
    """([Planned, ...], a sentence that says where they are from): of the nearest device with a log, one for each bucket of lengths that was
    tuned, else the default plan.

    logs  folder of tuning logs; None: none
    Raises LogError where there is no such folder.
    """
    subject, why = ForwardPass(workload), "no logs were named"
    if logs is not None:
        if not Path(logs).is_dir():
            raise LogError(f"a folder of tuning logs was wanted, found none at {logs}: name one, or None for default plans")
        try:
            lent = nearest_records(logs, subject, Machine(arch.name, arch))
            plans = [Planned(it.record.family, it.record.plan, figures_of(it.record, it.lender, subject)) for it in lent]
            told = ", ".join(f"{it.family}: {it.plan}" for it in plans)
            return plans, f"the plan of {workload.name} was measured on {lent[0].lender}, {lent[0].date} ({told})"
        except NoRecord as error:
            why = str(error)
    family = registry.takers(workload, arch)[0]
    plan = family.default_plan(workload, arch)
    return [Planned(family.NAME, plan)], f"the plan of {workload.name} is the default one of {family.NAME} ({plan}), since {why}"
