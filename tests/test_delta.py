"""delta = rowsum(dO * O): numbers on llvm, and what nvcc makes of it."""
import re

import pytest
import tvm
import tvm_ffi
from tvm import s_tir
from tvm.target import codegen
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cpu_arch, cuda_arch
from schedules.families import cpu, delta, mma, simt
from schedules.lowering.cuda_compile import cuda_compiler
from te_defs.flash_attention_backward import attention_delta
from te_defs.workload import Workload
from tests.backward import check_delta, delta_alone

CPU = cpu_arch(codegen.llvm_get_system_cpu(), 256, 2)
WORKLOADS = [Workload(64, 64, "float32"), Workload(64, 128, "float16"), Workload(64, 40, "bfloat16"), Workload(64, 8, "float32")]
#: (B, N, H); no rows in three ways.
SIZES = [(2, 37, 3), (1, 1, 1), (1, 70_000, 1), (0, 5, 2), (1, 0, 2), (3, 5, 0)]


#: Whether a gradient of the LSE comes with the call.
LSE = pytest.mark.parametrize("through_lse", [False, True], ids=["", "through_lse"])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@LSE
def test_numbers_on_a_cpu(workload, through_lse):
    function = delta_alone(workload, CPU, through_lse)[delta.NAME]
    for sizes in SIZES:
        check_delta(function, workload, *sizes, through_lse)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@LSE
def test_numbers_of_the_nest_of_a_gpu_before_threads_are_bound(workload, through_lse):
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_delta(workload, through_lse)}), debug_mask=0)
    delta.give_rows_lanes(sch, workload)
    function = tvm.compile(sch.mod, "llvm")
    for sizes in SIZES:
        check_delta(function, workload, *sizes, through_lse)


@pytest.mark.parametrize("family, arch", [(cpu, CPU), (simt, cuda_arch("sm_80")), (mma, cuda_arch("sm_80"))],
                         ids=lambda value: getattr(value, "NAME", ""))
def test_offsets_have_64_bits(family, arch):
    """In the pipeline of whatever family has the other gradients."""
    target = tvm.target.Target(arch.target(), host="llvm")
    func = delta.schedule(WORKLOADS[1], arch, through_lse=True).mod["main"].with_attr({"target": target, "global_symbol": "main"})
    with target, tvm.transform.PassContext(config=family.CONFIG):
        lowered = get_tir_pipeline(family.PIPELINE)[0](tvm.IRModule({"main": func}))
    types = set()

    def note(buffer, indices):
        if buffer.name in ("dO", "O", "LSE", "dLSE", "delta"):
            types.update(str(index.ty) for index in indices)
    for func in lowered.functions.values():
        tvm_ffi.structural_walk(func.body, ((tvm.ir.TensorLoad, lambda load: note(load.source, load.indices)),
                                            (tvm.tirx.BufferStore, lambda store: note(store.buffer, store.indices))))
    assert types and all(name.startswith("int64") for name in types)


def line_around(source, place):
    """The line that opens the braces around the only line that has `place`."""
    *before, line = source[:source.index("\n", source.index(place))].splitlines()
    assert source.count(place) == 1
    return next(it for it in reversed(before) if it and indent(it) < indent(line))


def indent(line):
    return len(line) - len(line.lstrip())


@pytest.mark.slow
@pytest.mark.parametrize("workload, arch, lanes, loads", [
    (Workload(64, 128, "float16"), "sm_75", 8, 2), (Workload(64, 64, "float32"), "sm_75", 8, 2),
    (Workload(64, 256, "float32"), "sm_90a", 32, 2), (Workload(64, 96, "bfloat16"), "sm_80", 4, 3),
    (Workload(64, 64, "bfloat16"), "sm_90a", 4, 2), (Workload(64, 8, "float16"), "sm_75", 1, 1)],
    ids=lambda value: getattr(value, "name", str(value)))
@LSE
def test_a_lane_loads_16_bytes_at_once(toolkit, workload, arch, lanes, loads, through_lse):
    with cuda_compiler(toolkit, (arch,)) as log:
        source = delta_alone(workload, cuda_arch(arch), through_lse).imports[0].inspect_source()
    assert f"(((int)blockIdx.x) * {delta.THREADS // lanes})" in source
    vectors = list(re.finditer(r"= \*\((?:uint4|float4)\*\)\(d?O_ptr", source))
    assert len(vectors) == 2 * loads
    # The LSE is on its way before the row is, and nothing past the last row is touched.
    of_rows = ["= LSE_ptr[", "  delta_ptr[", *(["= dLSE_ptr["] if through_lse else [])]
    assert all(source.index(place) < vectors[0].start() for place in of_rows if place.startswith("="))
    assert all(re.search(r"if \(.* < ", line_around(source, place)) for place in of_rows)
    kernel = log.last
    assert not kernel.warnings and kernel.most("spill_store_bytes") == 0 and kernel.most("registers") <= 64
