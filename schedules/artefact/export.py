"""From a built module to the files that ship: `<stem>.so` and `<stem>.check.npz`."""
import json
import os
import tempfile
from pathlib import Path

import tvm_ffi

from schedules.artefact.cases import write_cases
from schedules.artefact.manifest import to_json
from schedules.build import KERNEL, NEGATIVE_SCALE_KERNEL
from schedules.lowering.toolkit import run_c_compiler

ENTRY = Path(__file__).with_name("entry.c")

#: Bytes that tensors must start on a multiple of: 16-byte copies on a GPU; on a CPU what the declaration states for its buffers.
ALIGNMENT = {"cuda": 16, "cpu": 4}

_DTYPE_CODES = {"float": 2, "bfloat": 4}
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}


class ExportError(RuntimeError):
    """An artefact that would not work where it is meant to run."""


def export_artefact(module, workload, path, manifest, cases):
    """Write the artefact of a built kernel to `path` (a .so) and its cases beside it; return both paths.

    Both files are complete before either gets its name, and the .so is named last: a failure leaves what was there before.

    module    Module of `schedules.build.build_plan`, or an Executable; its two functions take (q, k, v, out, lse, scale)
    workload  te_defs.workload.Workload it was built for: the entry checks calls against it
    manifest  plain data for JSON, as `manifest.describe` makes it
    cases     CheckCases of `cases.check_cases`
    Raises ExportError where the module holds source instead of device code or lacks the function, ToolkitError where the C compiler fails.
    """
    path = Path(path)
    if path.is_dir():
        raise ExportError(f"an artefact is a file, found the folder {path}: name a file in it")
    module = getattr(module, "mod", module)
    device = _device_of(module)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as scratch:
        scratch = Path(scratch)
        entry = compile_entry(workload, device, manifest, scratch)
        library, checks = scratch / "artefact.so", scratch / "check.npz"
        module.export_library(str(library), addons=[str(entry)], fcompile=_link, workspace_dir=str(scratch))
        if read_manifest(library) != json.loads(to_json(manifest)):
            raise ExportError(f"{path.name} does not give back the manifest that went into it: build it again")
        write_cases(checks, workload, cases)
        checks_path = path.with_suffix(".check.npz")
        os.replace(checks, checks_path)
        os.replace(library, path)
    return path, checks_path


def _device_of(module):
    """"cuda" or "cpu" by what the module carries; ExportError where it cannot be shipped."""
    for name in (KERNEL, NEGATIVE_SCALE_KERNEL):
        if not module.implements_function(name):
            raise ExportError(f"a module with a function {name} is needed, found none: build it with schedules.build.build_plan")
    for part in module.imports:
        # Without its CUDA runtime TVM puts a placeholder here that carries CUDA C++ and runs nowhere.
        if not part.is_runnable():
            raise ExportError(f"the module carries {part.kind} source and no device code: call toolkit.preload before it is built")
    return "cuda" if any(part.kind == "cuda" for part in module.imports) else "cpu"


def _link(library, objects, **_):
    run_c_compiler(["-shared", "-fPIC", *objects, "-o", library])


_link.object_format = "o"


def compile_entry(workload, device, manifest, folder):
    """Path of the object file with the checked entry for this workload, compiled in `folder`."""
    (folder / "artefact_config.h").write_text(_config(workload, device, manifest))
    objects = folder / "entry.o"
    includes = [f"-I{place}" for place in (folder, tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())]
    run_c_compiler(["-x", "c", "-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", *includes, "-c", str(ENTRY), "-o", str(objects)])
    return objects


def _config(workload, device, manifest):
    """The header artefact_config.h; entry.c says what each constant is."""
    kind, bits = workload.dtype.rstrip("0123456789"), int("".join(filter(str.isdigit, workload.dtype)))
    constants = {
        "KERNEL": f"__tvm_ffi_{KERNEL}",
        "NEGATIVE_KERNEL": f"__tvm_ffi_{NEGATIVE_SCALE_KERNEL}",
        "HEAD_DIM": workload.head_dim,
        "VALUE_DIM": workload.value_dim,
        "DTYPE_CODE": _DTYPE_CODES[kind],
        "DTYPE_BITS": bits,
        "DEVICE_TYPE": _DEVICE_TYPES[device],
        "ALIGNMENT": ALIGNMENT[device],
        # ASCII JSON has no escapes but \\ and \", which C reads alike.
        "MANIFEST": json.dumps(to_json(manifest)),
    }
    return "".join(f"#define FLASHTIR_{name} {value}\n" for name, value in constants.items())


def read_manifest(path):
    """Manifest of an artefact, as plain data. A CUDA artefact can only be read where TVM's CUDA runtime is loaded."""
    return json.loads(str(tvm_ffi.load_module(str(path), keep_module_alive=False).get_function("flash_attention_manifest")()))
