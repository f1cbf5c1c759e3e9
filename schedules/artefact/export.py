"""From built modules to the files that ship: `<stem>.so` and `<stem>.check.npz`."""
import json
import os
import tempfile
from dataclasses import astuple
from pathlib import Path

import tvm
import tvm_ffi

from schedules.arch import cuda_arch
from schedules.artefact.cases import write_cases
from schedules.artefact.manifest import backward_arguments, call_arguments, optional_arguments, to_json
from schedules.artefact.names import ALONE, MANIFEST
from schedules.artefact.variant import tuned_of
from schedules.backward import ApartPlans, function_names, operand_function_names
from schedules.build import kernel_names, signs
from schedules.lowering.toolkit import run_c_compiler
from te_defs.lengths import LENGTHS

#: The ways into an artefact, and what it says about itself.
FORWARD_SOURCE, BACKWARD_SOURCE, MANIFEST_SOURCE = (Path(__file__).with_name(name) for name in ("entry.c", "backward.c", "manifest.c"))

_DTYPE_CODES = {"int": 0, "float": 2, "bfloat": 4}
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}


class ExportError(RuntimeError):
    """An artefact that would not work where it is meant to run."""


def export_artefact(variants, workload, path, manifest, cases, gradients=()):
    """Write the artefact of some Variants to `path` (a .so) and its cases beside it; return both paths.

    Both files are complete before either gets its name, and the .so is named last: a failure leaves what was there before. Object files are
    made in the system's folder for temporary files, since LLVM ends the process where a disk is full.

    variants  Variants, best first; the functions of each module take what the exported call does and have the names of its place
    workload  te_defs.workload.Workload it was built for: the entry checks calls against it
    manifest  plain data for JSON, as `manifest.describe` makes it
    cases     CheckCases of `cases.check_cases`
    gradients Variants of the backward pass, best first; none: the artefact has none
    Raises ExportError where a module holds source instead of device code or lacks a function, where the variants are for different kinds of
    devices, or where the files cannot be written, ToolkitError where the C compiler fails.
    """
    check_variants(variants, workload, gradients)

    def link(library, objects):
        entries = [*compile_entries(workload, variants, gradients, objects), compile_manifest(manifest, objects)]
        write_library(library, [variant.module for variant in (*variants, *gradients)], entries, objects)
    return write_files(path, manifest, link, lambda checks: write_cases(checks, workload, cases))


def write_files(path, manifest, link, write_checks):
    """Write an artefact and its cases as `export_artefact` says, and return both paths.

    link          function (path of a .so, folder for its object files) that writes the artefact with this manifest
    write_checks  function of a path that writes the cases
    """
    path = Path(path)
    if path.is_dir():
        raise ExportError(f"an artefact is a file, found the folder {path}: name a file in it")
    checks_path = path.with_suffix(".check.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (tempfile.TemporaryDirectory() as objects, tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as scratch):
            library, checks = Path(scratch, "artefact.so"), Path(scratch, "check.npz")
            link(library, Path(objects))
            if read_manifest(library) != json.loads(to_json(manifest)):
                raise ExportError(f"{path.name} does not give back the manifest that went into it: build it again")
            write_checks(checks)
            os.replace(checks, checks_path)
            os.replace(library, path)
    except OSError as error:
        raise ExportError(f"{path} and {checks_path.name} were to be written, found: {error.strerror or error}: make room there, or name "
                          "another file") from error
    return path, checks_path


def export_gradients(gradients, workload, path):
    """Write a library with nothing but flash_attention_backward to `path`, which is what the tuner measures; the rest as in
    `export_artefact`."""
    check_variants((), workload, gradients)
    with tempfile.TemporaryDirectory() as scratch:
        entry = compile_entry(workload, gradients, Path(scratch), backward=True)
        write_library(path, [variant.module for variant in gradients], [entry], scratch)


def write_library(path, modules, objects, scratch):
    """Link modules, with what they import, and object files together."""
    _joined(modules).export_library(str(path), addons=list(map(str, objects)), fcompile=_link, workspace_dir=str(scratch))


def functions_of(variant, workload, place, backward):
    """Symbols of the functions that an artefact calls of a variant in this place, in the order of call.h, None for what it has not; a
    kernel without a twin for scales below zero takes these, too."""
    if backward:
        names = function_names(variant.sum_rows > 0, place, isinstance(variant.plan, ApartPlans))
        names += (None,) * (len(function_names(False, apart=True)) - len(names))
        return *names, *operand_function_names(workload, variant.operands.names, place)
    kernel, negative = kernel_names(place)
    return kernel, negative if True in signs(workload) else kernel


def check_variants(variants, workload, gradients=(), share=ALONE):
    """ExportError where a variant cannot be shipped, or not together with the others."""
    all_places = [*((place, variant, False) for place, variant in enumerate(variants, share.first_place)),
                  *((place, variant, True) for place, variant in enumerate(gradients, share.first_place))]
    for place, variant, backward in all_places:
        for name in filter(None, functions_of(variant, workload, place, backward)):
            if not variant.module.implements_function(name, query_imports=True):
                raise ExportError(f"a module with a function {name} is needed, found none: build it with "
                                  f"{'schedules.backward.build' if backward else 'schedules.build.build_plan'}")
        for part in imports(variant.module):
            # Without its CUDA runtime TVM puts a placeholder here that carries CUDA C++ and runs nowhere.
            if not part.is_runnable():
                raise ExportError(f"the module carries {part.kind} source and no device code: call toolkit.preload before it is built")
        if variant.arch.kind == "cuda" and not variant.archs:
            raise ExportError(f"a CUDA variant says what its code runs on, found that {variant.name} does not: give it its CompiledKernels")
        if variant.arch.kind != all_places[0][1].arch.kind:
            raise ExportError(f"the variants of an artefact are for one kind of device, found {all_places[0][1].arch.kind} and "
                              f"{variant.arch.kind}: make an artefact for each")
    for variant in gradients:
        if variant.operands.names != gradients[0].operands.names:
            raise ExportError(f"variants for gradients have the same arguments, found {variant.operands.names} beside "
                              f"{gradients[0].operands.names}: build them alike")


def imports(module):
    """What a module imports, and what these do."""
    return [found for part in module.imports for found in (part, *imports(part))]


def _joined(modules):
    """A module that imports all of these: their host code is linked together, and device code is looked up in all of them."""
    root = tvm.tirx.build(tvm.IRModule(), target="llvm")
    for module in modules:
        root.import_module(module)
    return root


def _link(library, objects, **_):
    run_c_compiler(["-shared", "-fPIC", *objects, "-o", library])


_link.object_format = "o"


def compile_entries(workload, variants, gradients, folder, share=ALONE):
    """Paths of the object files with the entries of a workload, compiled in `folder`: that of the forward pass and, where there are some,
    that of gradients."""
    entries = [compile_entry(workload, variants, folder, share)]
    return entries + ([compile_entry(workload, gradients, folder, share, backward=True)] if gradients else [])


def compile_entry(workload, variants, folder, share=ALONE, backward=False, source=None, options=()):
    """Path of the object file with the checked entry for this workload, with its Share of the artefact, and these variants, compiled in
    `folder`; with `backward`, that for gradients.

    source   a file of C around the entry; None: the entry alone
    options  further arguments for its compiler
    """
    (folder / "artefact_config.h").write_text(_header(_config(workload, variants, backward, share)))
    return _compile(source or (BACKWARD_SOURCE if backward else FORWARD_SOURCE), folder, options)


def compile_manifest(manifest, folder, alone=True):
    """Path of the object file with flash_attention_manifest, compiled in `folder`; `alone` where the artefact holds one workload."""
    # ASCII JSON has no escapes but \\ and \", which C reads alike.
    (folder / "manifest_config.h").write_text(_header({"MANIFEST": json.dumps(to_json(manifest)), "ALONE": int(alone)}))
    return _compile(MANIFEST_SOURCE, folder)


def _compile(source, folder, options=()):
    """Path of the object file of a source, compiled in the folder of its generated header."""
    objects = folder / f"{source.stem}.o"
    includes = [f"-I{include}" for include in (folder, tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())]
    run_c_compiler(["-x", "c", "-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-fexceptions", *includes, *options, "-c", str(source),
                    "-o", str(objects)])
    return objects


def _header(constants):
    """Text of a generated header."""
    return "".join(f"#define FLASHTIR_{name} {value}\n" for name, value in constants.items())


def _config(workload, variants, backward, share):
    """The constants of artefact_config.h; call.h says what each is."""
    symbols = [[f"__tvm_ffi_{name}" if name else "NULL" for name in functions_of(variant, workload, place, backward)]
               for place, variant in enumerate(variants, share.first_place)]
    lengths, names, operands = LENGTHS[workload.lengths], [it.name for it in workload.arguments], variants[0].operands.names
    return {
        "BACKWARD": int(backward),
        "FUNCTION": share.backward if backward else share.forward,
        "ALONE": int(share == ALONE),
        "FUNCTIONS(X)": " ".join(f"X({name})" for found in symbols for name in dict.fromkeys(found) if name != "NULL"),
        "VARIANTS(X)": " ".join(f"X({_entry_of(variant, names)})" for variant, names in zip(variants, symbols)),
        "BUCKET_COUNT": len(tuned_of(variants)),
        "BUCKETS": "".join(f"{_row_of(it.bucket, variants)}, " for it in tuned_of(variants)),
        "ARCHS": json.dumps(", ".join(dict.fromkeys(arch for variant in variants for arch in variant.archs))),
        "HEAD_DIM": workload.head_dim,
        "VALUE_DIM": workload.value_dim,
        "DTYPE_CODE": _code_and_bits(workload.dtype)[0],
        "DTYPE_BITS": _code_and_bits(workload.dtype)[1],
        "DEVICE_TYPE": _DEVICE_TYPES[variants[0].arch.kind],
        "EXTRAS": "".join(f"{_extra_of(argument, workload)}, " for argument in workload.arguments),
        "OPERANDS": "".join(f'{{"d{name}", {names.index(name)}}}, ' for name in operands),
        "OPTIONAL": json.dumps(", ".join(optional_arguments(operands))),
        "LENGTHS": list(LENGTHS).index(workload.lengths),
        "TABLES": "".join(f"{json.dumps(name)}, " for name in lengths.tensors),
        "INTEGERS": "".join(f"{json.dumps(name)}, " for name in (lengths.backward_integers if backward else lengths.integers)),
        "CALL": json.dumps(", ".join((backward_arguments if backward else call_arguments)(workload))),
    }


def _code_and_bits(dtype):
    """DLPack's code of an element type, and its bits."""
    return _DTYPE_CODES[dtype.rstrip("0123456789")], int("".join(filter(str.isdigit, dtype)))


def _extra_of(argument, workload):
    """What FLASHTIR_EXTRAS says of one argument."""
    code, bits = _code_and_bits(argument.kind.dtype or workload.dtype)
    return f'{{"{argument.name}", {argument.kind.name.upper()}, {{{code}, {bits}, 1}}, "{argument.kind.axes}"}}'


def _row_of(bucket, variants):
    """What FLASHTIR_BUCKETS says of one bucket: calls that none of its own variants can serve ask those of other buckets."""
    order = sorted(range(len(variants)), key=lambda number: not variants[number].is_for(bucket))
    return f"{{{bucket.q_len}, {bucket.kv_len}, {{{', '.join(map(str, order))}}}}}"


def _entry_of(variant, symbols):
    """What FLASHTIR_VARIANTS says of one variant."""
    beyond = variant.max_elements + 1
    beyond = f"2^{beyond.bit_length() - 1}" if beyond.bit_count() == 1 else str(beyond)
    tile = variant.operands.plan and (variant.operands.plan.q_tile, variant.operands.plan.kv_tile, variant.operands.blocks)
    codes = ["{%d, %d, %d}" % (*arch.capability, arch.exact or not variant.portable) for arch in map(cuda_arch, variant.archs)]
    return ", ".join([f'"{variant.name}"', f"({', '.join(symbols)})", str(variant.max_elements), f'"{beyond}"', str(variant.alignment),
                      *(str(int(it)) for it in (*astuple(variant.serves), variant.whole_rows, variant.sum_rows, variant.turns,
                                               *(tile or (1, 1, 1)))),
                      *codes, "{0}"])


def read_manifest(path):
    """Manifest of an artefact, as plain data. A CUDA artefact can only be read where TVM's CUDA runtime is loaded."""
    return json.loads(str(tvm_ffi.load_module(str(path), keep_module_alive=False).get_function(MANIFEST)()))
