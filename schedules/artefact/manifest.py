"""The manifest: what an artefact says about itself, as JSON, through its function flash_attention_manifest()."""
import json
from dataclasses import asdict

import tvm
import tvm_ffi

#: Raised when a field changes its meaning or goes away; new fields may come at any time.
SCHEMA = 1
SIGNATURE = "flash_attention_forward(q, k, v, out, lse, scale)"


def describe(workload, arch, family, plan, kernels=(), toolkit=None, measured=None):
    """The manifest of one kernel, as plain data. Every value comes from the caller, so that equal builds say equal things.

    workload  te_defs.workload.Workload
    arch      row of schedules.arch that the kernel was lowered for
    family    name of the schedule's family
    plan      the Plan (a frozen dataclass of integers) that it was built with
    kernels   CompiledKernels of the build's CompileLog; none for a CPU kernel
    toolkit   Toolkit that compiled them
    measured  figures of a benchmark, with where they come from; None where nothing was measured
    """
    return {
        "schema": SCHEMA,
        "signature": SIGNATURE,
        "workload": {"name": workload.name, **asdict(workload)},
        "layout": {"q": "bnhd", "k": "bmgd", "v": "bmgd", "out": "bnhd", "lse": "bhn"},
        "target": {"kind": arch.kind, "lowered_for": arch.name, "archs": sorted({name for kernel in kernels for name in kernel.archs})},
        "family": family,
        "plan": asdict(plan),
        "workspace_bytes": 0,
        "kernels": [asdict(entry) for kernel in kernels for entry in kernel.resources],
        "measured": measured,
        "versions": {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__, "nvcc": toolkit and ".".join(map(str, toolkit.version))},
    }


def to_json(manifest):
    """The text that goes into the artefact: ASCII, keys sorted."""
    return json.dumps(manifest, sort_keys=True)
