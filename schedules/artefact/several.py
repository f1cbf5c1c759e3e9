"""Several workloads in one artefact: each becomes a Part, which another process may make, and all parts are linked together.

Host code and entries go into the artefact as object files. Device code is looked up by the names of kernels in all that the artefact
imports, so it is read back from each part and packed anew.
"""
from dataclasses import dataclass
from pathlib import Path

import tvm

from schedules.artefact.cases import join_cases, write_cases
from schedules.artefact.export import ExportError, check_variants, compile_entries, compile_manifest, imports, write_files, write_library
from schedules.artefact.manifest import describe_several
from schedules.artefact.names import Share, ending_of

#: Places for the variants of a workload: more than it has, so that processes that make parts need not know how many the others took.
PLACES = 1000


@dataclass(frozen=True)
class Part:
    """What a workload adds to an artefact, as files that stay until it is linked.

    manifest  plain data, as `manifest.describe` makes it for the workload's Share
    objects   paths of object files with host code and entries
    device    path of a library with device code; None: there is none
    checks    path of the check cases
    """

    manifest: dict
    objects: tuple
    device: Path | None
    checks: Path


def shares_of(workloads):
    """The Shares that some workloads have of one artefact, in their order; ExportError where two have functions of the same name."""
    shares, taken = [Share(ending_of(it), 1 + PLACES * number) for number, it in enumerate(workloads)], {}
    for workload, share in zip(workloads, shares):
        for name in share.functions():
            if name in taken:
                raise ExportError(f"the workloads of an artefact must have functions with names of their own, found {name} of "
                                  f"{taken[name]} and of {workload.name}: export one of them apart")
            taken[name] = workload.name
    return shares


def export_part(variants, workload, folder, manifest, cases, gradients, share):
    """Write the Part of a workload into an empty folder; all else as in `export.export_artefact`.

    share  of `shares_of`: places and names of functions are those of its own
    """
    if max(len(variants), len(gradients)) > PLACES:
        raise ExportError(f"a workload of several has at most {PLACES} variants, found {max(len(variants), len(gradients))} of "
                          f"{workload.name}: export it alone")
    check_variants(variants, workload, gradients, share)
    modules = [found for variant in (*variants, *gradients) for found in (variant.module, *imports(variant.module))]
    objects = compile_entries(workload, variants, gradients, folder, share)
    for number, module in enumerate(it for it in modules if it.is_compilation_exportable()):
        objects.append(folder / f"host{number}.o")
        module.write_to_file(str(objects[-1]))
    kernels, device = [it for it in modules if not it.is_compilation_exportable()], None
    if kernels:
        device = folder / "device.so"
        write_library(device, kernels, (), folder)
    write_cases(folder / "check.npz", workload, cases)
    return Part(manifest, tuple(objects), device, folder / "check.npz")


def export_several(parts, path):
    """Write the artefact of some Parts to `path` (a .so) and the cases of all beside it, as `export.export_artefact` does; return both
    paths."""
    manifest = describe_several([part.manifest for part in parts])

    def link(library, objects):
        kernels = [module for part in parts if part.device for module in tvm.runtime.load_module(str(part.device)).imports]
        entries = [*(path for part in parts for path in part.objects), compile_manifest(manifest, objects, alone=False)]
        write_library(library, kernels, entries, objects)
    cases = {part.manifest["workload"]["name"]: part.checks for part in parts}
    return write_files(path, manifest, link, lambda checks: join_cases(checks, cases))
