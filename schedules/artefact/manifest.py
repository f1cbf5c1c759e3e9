"""The manifest: what an artefact says about itself, as JSON, through its function flash_attention_manifest()."""
import json
from dataclasses import asdict

import tvm
import tvm_ffi

from schedules.artefact.names import ALONE
from schedules.artefact.variant import tuned_of
from te_defs.lengths import LENGTHS
from te_defs.workload import samples_of

#: Raised when a field changes its meaning or goes away; new fields may come at any time.
SCHEMA = 3
#: Of a list of several workloads, whose entries have SCHEMA.
SCHEMA_OF_SEVERAL = 4


#: Axes of the tensors, named as in the declaration; T and S are the queries and keys of all packed sequences.
LAYOUT = {"batch": {"q": "bnhd", "k": "bmgd", "v": "bmgd", "out": "bnhd", "lse": "bhn"},
          "packed": {"q": "thd", "k": "sgd", "v": "sgd", "out": "thd", "lse": "ht"}}


def call_arguments(workload):
    """Names of the arguments of the exported call, in their order."""
    lengths = LENGTHS[workload.lengths]
    return "q", "k", "v", "out", "lse", "scale", *(argument.name for argument in workload.arguments), *lengths.tensors, *lengths.integers


def optional_arguments(operands=()):
    """Names of the arguments that may follow those of the call for gradients, or be None there: the gradient of lse, then outputs for those
    of some tensors behind the scale."""
    return "dlse", *(f"d{name}" for name in operands)


def backward_arguments(workload):
    """As `call_arguments`, of the call for gradients."""
    lengths = LENGTHS[workload.lengths]
    return ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "scale", *(argument.name for argument in workload.arguments),
            *lengths.tensors, *lengths.backward_integers)


def describe(workload, variants, toolkit=None, gradients=(), share=ALONE):
    """The manifest of an artefact, as plain data. Every value comes from the caller, so that equal builds say equal things.

    workload   te_defs.workload.Workload
    variants   Variants that the artefact chooses among, best first
    toolkit    Toolkit that compiled them; None for CPU kernels
    gradients  Variants of the backward pass, likewise; none: the artefact has none
    share      the workload's Share of the artefact; of one of several it says what its functions are called
    """
    return {
        "schema": SCHEMA,
        **({} if share == ALONE else {"functions": {"forward": share.forward, "backward": share.backward if gradients else None}}),
        "signature": f"{share.forward}({', '.join(call_arguments(workload))})",
        "workload": {"name": workload.name, **asdict(workload)},
        "arguments": _describe_arguments(workload),
        "layout": LAYOUT["packed" if workload.lengths == "packed" else "batch"],
        "workspace_bytes": 0,
        "variants": [_describe_variant(variant) for variant in variants],
        **_describe_buckets(variants),
        "backward": _describe_backward(workload, gradients, share) if gradients else None,
        "versions": {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__, "nvcc": toolkit and ".".join(map(str, toolkit.version))},
    }


def describe_several(manifests):
    """The manifest of an artefact of several workloads, from those of each."""
    return {"schema": SCHEMA_OF_SEVERAL, "workloads": {manifest["workload"]["name"]: manifest for manifest in manifests}}


def _describe_backward(workload, gradients, share):
    """What an artefact says of its gradients; what a variant allocates for a call is given by the sizes of q, and beside that, for each
    gradient of a tensor behind the scale, the most that there may be."""
    optional = ", ".join(f"{name}=None" for name in optional_arguments(gradients[0].operands.names))
    return {
        "signature": f"{share.backward}({', '.join(backward_arguments(workload))}, {optional})",
        "operands": gradients[0].operands.names,
        "variants": [{**_describe_variant(variant), "order": "any" if variant.sum_rows and not variant.turns else "fixed",
                      "workspace_bytes": _workspace(workload, variant.sum_rows, variant.turns),
                      "operands": {name: {"family": variant.operands.family.NAME, "plan": asdict(variant.operands.plan),
                                          "workspace_bytes": variant.operands.workspace_bytes(workload, name)}
                                   for name in variant.operands.names}} for variant in gradients],
        **_describe_buckets(gradients),
    }


def _workspace(workload, sum_rows, turns):
    """Bytes that a call allocates: for delta, and for sums of dQ in tiles of so many rows (te_defs.fused_backward.sum_tiles), where there
    are `turns` with a number for each."""
    packed = workload.lengths == "packed"
    tiles = f"(queries // {sum_rows} + sequences)" if packed else f"max((queries + {sum_rows - 1}) // {sum_rows}, 1)"
    rows = f"(queries + {tiles} * {sum_rows * workload.head_dim + turns})" if sum_rows else "queries"
    return f"4 * {rows} * heads" + " * batch" * (not packed)


def _describe_arguments(workload):
    """What follows the scale in a call: kind of each argument (te_defs/arguments.py), element type, axes of a tensor, else a sample."""
    samples = iter(samples_of(workload))
    return [{"name": argument.name, "kind": argument.kind.name, "dtype": argument.kind.dtype or workload.dtype,
             "axes": argument.kind.axes, "sample": None if argument.kind.axes else next(samples)} for argument in workload.arguments]


def _describe_variant(variant):
    return {
        "family": variant.family,
        "plan": asdict(variant.plan),
        "target": {"kind": variant.arch.kind, "lowered_for": variant.arch.name, "archs": variant.archs},
        "max_elements": variant.max_elements,
        "alignment": variant.alignment,
        "serves": asdict(variant.serves),
        "kernels": [asdict(entry) for kernel in variant.kernels for entry in kernel.resources],
        "measured": variant.measured,
    }


def _describe_buckets(variants):
    """Where calls are told apart by their lengths: what was tuned at which, smaller buckets first, and the numbers of the variants, from 0
    on, that such calls are for."""
    buckets = [{"q_len": it.bucket.q_len, "kv_len": it.bucket.kv_len, "family": it.family, "plan": asdict(it.plan), "measured": it.measured,
                "variants": [number for number, variant in enumerate(variants) if variant.is_for(it.bucket)]}
               for it in tuned_of(variants)]
    return {"buckets": buckets} if buckets else {}


def to_json(manifest):
    """The text that goes into the artefact: ASCII, keys sorted."""
    return json.dumps(manifest, sort_keys=True)
