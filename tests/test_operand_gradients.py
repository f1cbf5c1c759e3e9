"""Gradients of tensors behind the scale: the plain functions and their schedules on llvm, the reference, and what has no gradient."""
from dataclasses import replace

import numpy as np
import pytest
from tvm.target import codegen

from schedules import backward
from schedules.arch import cpu_arch, cuda_arch
from schedules.artefact.cases import check_cases, write_cases
from schedules.build import compiled
from schedules.families import mma_operand_gradients, operand_gradients
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from te_defs import operand_reference, reference
from te_defs.lengths import LENGTHS, sample
from te_defs.operand_gradients import dtype_of, require_gradient
from te_defs.workload import Shape, Workload, WorkloadError, make_arguments
from tests.numbers import on_llvm
from tests.operands import Plain, verdict

HERE = cpu_arch(codegen.llvm_get_system_cpu(), 256, 2)
#: Lengths, axes of size one and a scale each: ends of tiles, no keys, no queries, sums over every axis.
CALLS = ((37, 50, "", 0.25), (50, 20, "BHNM", 0.25), (5, 0, "B", 1.0), (0, 15, "BHN", 1.0), (70, 133, "NH", -0.3), (133, 70, "M", 0.3),
         (40, 40, "BN", 0.2))


def featured(features, dtype="f32"):
    return Workload.parse(f"fwd_d16_dv24_{dtype}_{features}")


def check(function, workload, name, calls=CALLS):
    for number, (n, m, single, scale) in enumerate(calls):
        (batch, rows, keys), lengths = sample(workload.lengths, 2, n, m)
        shape = Shape(batch, 6, 2, rows, keys, workload.mask_class.samples[-1])
        if workload.lengths == "packed":
            lengths = (*lengths, int(np.diff(lengths[1]).max()))
        assert verdict(function, workload, name, shape, scale, make_arguments(workload, shape, number, single), lengths, number) is None


class TestPlain:
    @pytest.mark.parametrize("features, dtype, name, parts", [
        ("causal+bias", "f16", "bias", 0), ("window+alibi", "f32", "slopes", 5),
        ("full+alibi+packed", "f32", "slopes", 2), ("full+tests.of_a_user:FactorsAndRows", "f32", "factors", 1),
        ("full+tests.of_a_user:FactorsAndRows", "f32", "rows", 0), ("causal+sink", "bf16", "sink", 0),
        ("full+sink+packed", "f32", "sink", 0)])
    def test_numbers(self, features, dtype, name, parts):
        workload = featured(features, dtype)
        check(Plain(workload, name, parts), workload, name)

    @pytest.mark.parametrize("unseen", [np.nan, np.inf])
    @pytest.mark.parametrize("features, name", [("causal+bias", "bias"), ("causal+alibi", "slopes"), ("causal+sink", "sink")])
    def test_what_stands_in_rows_without_keys_does_not_leak(self, features, name, unseen):
        workload = featured(features)
        shape = Shape(2, 6, 2, 50, 20, workload.mask_class.samples[-1])
        arguments = make_arguments(workload, shape)
        if name == "sink":
            arguments[-1][::2] = -np.inf
        assert verdict(Plain(workload, name), workload, name, shape, 0.25, arguments, unseen=unseen) is None

    def test_rows_without_keys_have_their_share_of_the_sink_alone(self):
        """O is zero there, and the LSE is the sink: its slope is one."""
        workload, shape = featured("full+sink"), Shape(2, 3, 3, 7, 0)
        (sink,) = make_arguments(workload, shape)
        dlse = np.random.default_rng(0).standard_normal((2, 3, 7), np.float32)
        zeros = [np.zeros(size, np.float32) for size in shape.tensors(workload)]
        lse = np.broadcast_to(sink[:, None], (2, 3, 7)).copy()
        found = operand_reference.gradient_of(workload, "sink", zeros[3], *zeros[:4], lse, 0.25, (sink,), dlse=dlse)
        np.testing.assert_allclose(found, dlse.astype(np.float64).sum(axis=(0, 2)), rtol=1e-12)


@pytest.mark.parametrize("features, name, single", [
    ("causal+bias+sink", "bias", "B"), ("causal+bias+sink", "sink", ""), ("window+alibi", "slopes", ""), ("full+sink", "sink", "H"),
    ("full+tests.of_a_user:FactorsAndRows", "factors", ""), ("full+tests.of_a_user:FactorsAndRows", "rows", "B")])
def test_the_reference_gives_slopes_of_the_forward_pass(features, name, single):
    """Central differences of sum(dO * O) + sum(dLSE * LSE) in float64, along a random direction of the argument."""
    workload, rng = featured(features), np.random.default_rng(5)
    shape = Shape(2, 2, 1, 4, 5, workload.mask_class.samples[-1])
    arguments, number = make_arguments(workload, shape, 1, single), [argument.name for argument in workload.arguments].index(name)
    q, k, v = (x.astype(np.float64) for x in reference.make_inputs(workload, shape))
    (out, lse), direction = reference.forward(workload, q, k, v, 0.5, arguments), rng.standard_normal(arguments[number].shape)
    seen = np.isfinite(lse)
    dout, dlse = rng.standard_normal(out.shape), np.where(seen, rng.standard_normal(lse.shape), 0)

    def total(off):
        moved = [value.astype(np.float64) + off * direction if at == number else value for at, value in enumerate(arguments)]
        ahead, of_rows = reference.forward(workload, q, k, v, 0.5, moved)
        return (dout * ahead).sum() + (dlse * np.where(seen, of_rows, 0)).sum()
    answer = operand_reference.gradient_of(workload, name, dout, q, k, v, out, lse, 0.5, arguments, dlse=dlse)
    np.testing.assert_allclose((answer * direction).sum(), (total(1e-5) - total(-1e-5)) / 2e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_check_cases_of_all_lengths_have_answers_like_their_operands(lengths, tmp_path):
    """Those without a batch entry too, which nothing is summed over."""
    workload, operands = replace(featured("window+alibi+sink"), lengths=lengths), ("slopes", "sink")
    cases = check_cases(workload, gradients=True, operands=operands)
    write_cases(tmp_path / "check.npz", workload, cases)
    for case in cases:
        arguments = dict(zip([argument.name for argument in workload.arguments], case.arguments))
        assert [it.answer.shape for it in case.gradients.operands] == [arguments[name].shape for name in operands], case.name


@pytest.mark.parametrize("features, name, reason", [
    ("causal", "bias", "that fwd_d16_dv24_f32_causal has nothing behind the scale"),
    ("window+alibi", "sink", "has left, right, slopes behind the scale"), ("full+softcap", "cap", "a number, and only tensors"),
    ("full+tests.of_a_user:FactorsAndRows", "marks", "whole numbers, which have no slopes"),
    ("tests.of_a_user:DocumentCausal", "documents", "whole numbers"),
    ("full+tests.of_a_user:ReadsAhead", "terms", r"terms\[j\] must be all that a score reads of terms .* found terms\[j \+ 1\]")])
def test_what_has_no_gradient_is_told_why(features, name, reason):
    with pytest.raises(WorkloadError, match=f"a gradient of {name} was wanted.*{reason}"):
        require_gradient(featured(features), name)


class TestScheduled:
    """The functions for CUDA, before their first bind and compiled; those of a CPU are in artefacts."""

    @pytest.mark.parametrize("family, name, smaller", [
        (operand_gradients, "fwd_d32_dv64_f16_causal+bias", {"q_tile": 32, "kv_tile": 16}),
        (mma_operand_gradients, "fwd_d64_dv128_bf16_causal+bias", {"q_tile": 32, "kv_tile": 32, "warps": 2})], ids=["simt", "mma"])
    def test_cuda_before_threads(self, family, name, smaller):
        workload, plan = Workload.parse(name), family.default_plan(Workload.parse(name), cuda_arch("sm_80")).but(**smaller)
        scheduled = family.schedule(workload, "bias", plan, workload.dtype, family.UNBOUND)
        check(Plain(workload, "bias", compiled=[on_llvm(scheduled.mod)]), workload, "bias", CALLS[:2] + CALLS[4:6])

    @pytest.mark.parametrize("family, name, arch, strided", [
        (mma_operand_gradients, "fwd_d64_dv64_f16_full+bias+sink", "sm_80", False),
        (operand_gradients, "fwd_d128_dv128_bf16_full+alibi+packed", "sm_90a", True)], ids=["mma", "simt"])
    def test_cuda_compiles(self, toolkit, figures, family, name, arch, strided):
        workload, arch = Workload.parse(name), cuda_arch(arch)
        operand, *others = (argument.name for argument in workload.arguments)
        parts = [family.schedule(workload, operand, family.default_plan(workload, arch), dtype_of(workload, operand), strided=strided),
                 family.fold(workload, operand), *(family.sink(workload) for _ in others)]
        options = CudaOptions(**family.compiler_options(family.default_plan(workload, arch)))
        with cuda_compiler(toolkit, (arch.name,), options) as log:
            module = compiled({f"part{number}": sch.mod["main"] for number, sch in enumerate(parts)}, family, arch)
        assert not log.last.warnings
        entries = [entry for kernel in log.kernels for entry in kernel.resources]
        assert len(entries) == len(parts)
        figures(f"gradients of operands {family.NAME} {name} {arch.name}", {
            "registers": max(entry.registers for entry in entries), "spilled_bytes": max(entry.spill_store_bytes for entry in entries)})
        assert ("mma.sync" in module.imports[0].inspect_source()) == (family is mma_operand_gradients)


@pytest.mark.parametrize("name, arch, family", [
    ("fwd_d64_dv128_f16_full+bias", "sm_90a", mma_operand_gradients), ("fwd_d64_dv64_f16_full+bias", "sm_75", operand_gradients),
    ("fwd_d96_dv96_f16_full+bias", "sm_80", operand_gradients), ("fwd_d128_dv128_f32_full+bias", "sm_80", operand_gradients)])
def test_who_takes_a_workload(name, arch, family):
    assert backward.operands(Workload.parse(name), ["bias"], cuda_arch(arch)).family is family


def test_workspaces_are_small():
    workload, arch = featured("causal+alibi+sink"), cuda_arch("sm_90a")
    operands = backward.operands(workload, ["sink", "slopes"], arch)
    assert operands.names == ("slopes", "sink") and operands.workspace_bytes(workload, "sink") == 0
    assert operands.workspace_bytes(workload, "slopes") == 8 * operand_gradients.BLOCKS
    workload = Workload.parse("fwd_d64_dv64_f16_causal+bias")
    for of_bias in (backward.operands(workload, ["bias"], it) for it in (arch, HERE)):
        assert of_bias.workspace_bytes(workload, "bias") <= 2**25
