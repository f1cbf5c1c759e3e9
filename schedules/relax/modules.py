"""The runtime modules of a graph's attention: of each workload its kernels, and the call that checks arguments and chooses among them."""
import logging
import tempfile
from pathlib import Path

import tvm

from schedules.artefact.export import compile_entry
from schedules.artefact.kernels import build_kernels
from schedules.artefact.names import FORWARD, Share, ending_of
from schedules.lowering.toolkit import find_toolkit, preload
from schedules.relax.device import plans_for

#: The way into a workload's kernels from a graph.
CALL = Path(__file__).with_name("call.c")


class Workloads:
    """The workloads of a graph, and the names of the packed functions that serve them."""

    def __init__(self):
        self.names = {}

    def name_of(self, workload):
        """Name of a workload's function, a C identifier; two workloads never share one."""
        if workload not in self.names:
            name = FORWARD + ending_of(workload)
            while name in self.names.values():
                name += "_"
            self.names[workload] = name
        return self.names[workload]


def build(workloads, arch, logs, toolkit=None):
    """([runtime modules], [(level of logging, sentence)]) of some Workloads: kernels and the functions that call them, to be linked into
    one executable, and where the plans are from, a warning where logs were named and have none.

    toolkit  Toolkit that compiles for CUDA; None: the first one that is found without an environment
    Raises ToolkitError where CUDA is wanted and there is none, CompileError where it refuses the code, LogError.
    """
    if arch.kind == "cuda":
        toolkit = toolkit or find_toolkit({})
        with tempfile.TemporaryDirectory() as stub:
            preload(toolkit, stub)
    modules, sentences, place = [], [], 1
    for workload, name in workloads.names.items():
        plans, sentence = plans_for(workload, arch, logs)
        variants = [kernel.variant for kernel in build_kernels(plans, workload, arch, toolkit, place=place)]
        modules += [*(variant.module for variant in variants), _call_of(workload, variants, name, place)]
        sentences.append((logging.INFO if logs is None or plans[0].measured else logging.WARNING, sentence))
        place += len(variants)
    return modules, sentences


def _call_of(workload, variants, name, place):
    """Module with the function of that name, which calls the kernels of Variants from this place on."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"-I{CALL.parent.parent / 'artefact'}", f"-DFLASHTIR_CALL_FROM_GRAPH=__tvm_ffi_{name}"]
        share = Share("_of_artefacts", place)  # the entry's own functions, which the call keeps to itself
        objects = compile_entry(workload, variants, Path(folder), share, source=CALL, options=options)
        return tvm.runtime.load_static_library(str(objects), [name])
