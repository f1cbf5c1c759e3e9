"""Masks beside full and causal, from the declaration to the call: tiles that are skipped, code that compiles, arguments. That their
numbers are right is asked in tests/conformance."""
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from tvm.target import codegen

from schedules.arch import cpu_arch, cuda_arch
from schedules.artefact.cases import check_cases
from schedules.build import build, schedule
from schedules.families import cpu, mma, simt, wgmma
from schedules.lowering.cuda_compile import CudaOptions, cuda_compiler
from scripts.kernels import Planned, build_artefact
from te_defs import reference
from te_defs.flash_attention import flash_attention_forward
from te_defs.masks import MASKS
from te_defs.workload import Shape, Workload
from tests.numbers import on_llvm, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
HERE = cpu_arch(codegen.llvm_get_system_cpu(), 512, 2)
OTHERS = [mask for mask in MASKS if mask not in ("full", "causal")]
WINDOW = Workload(64, 64, "float32", "window")
SMALL = simt.SimtPlan(q_tile=32, kv_tile=16, thread_rows=8, thread_columns=16, unroll=4)


class TestSkippedTiles:
    """A key tile that no row of a query tile sees is not read: what stands there changes nothing, not even NaN."""

    def test_outside_a_window(self):
        workload, kv_tile = Workload(32, 32, "float32", "window"), 16
        function = on_llvm(flash_attention_forward(workload, 32, kv_tile))
        q, k, v = reference.make_inputs(workload, Shape(1, 1, 1, 128, 128))
        clean = run(function, workload, (q, k, v), 0.2, (10, 3))
        k[:, :16], v[:, :16], k[:, 80:], v[:, 80:] = np.nan, np.nan, np.nan, np.nan
        out, lse = run(function, workload, (q, k, v), 0.2, (10, 3))
        rows = slice(32, 64)  # one query tile: its rows see keys from 22 to 66, in key tiles from 16 to 80
        np.testing.assert_array_equal(out[:, rows], clean[0][:, rows])
        np.testing.assert_array_equal(lse[..., rows], clean[1][..., rows])


@pytest.mark.parametrize("mask", OTHERS)
@pytest.mark.parametrize("family, dtype, arch, dims", [
    (mma, "float16", "sm_80", (64,)), (wgmma, "float16", "sm_90a", (64, 128)), (simt, "float32", "sm_80", (64,))],
    ids=["mma", "wgmma", "simt"])
def test_seeds_compile(toolkit, family, dtype, arch, dims, mask):
    """Those of mma and wgmma; of simt small tiles, since TVM's simplifier takes most of a minute over the mask of its seed."""
    if family is simt and mask != "window":
        pytest.skip("one will do, TVM takes long over it")
    for dim in dims:
        workload, row = Workload(dim, dim, dtype, mask), cuda_arch(arch)
        plan = SMALL if family is simt else family.default_plan(workload, row)
        with cuda_compiler(toolkit, (arch,), CudaOptions(**family.compiler_options(plan))) as log:
            build(schedule(family, workload, plan).mod, family, row)
        assert log.last.warnings == ()
        assert family is not wgmma or log.last.most("spill_store_bytes") == 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Path of an artefact of the window mask for this CPU."""
    path = tmp_path_factory.mktemp("masks") / "window.so"
    return build_artefact([Planned("cpu", cpu.default_plan(WINDOW, HERE))], WINDOW, HERE, path)


class TestArguments:
    @pytest.fixture
    def call(self, exported):
        """Function (*arguments of the mask) -> (out, lse) of one call, or its error."""
        forward = tvm_ffi.load_module(str(exported)).flash_attention_forward
        inputs = reference.make_inputs(WINDOW, Shape(1, 2, 1, 20, 30))

        def make(*mask):
            out, lse = np.full((1, 20, 2, 64), np.nan, "float32"), np.full((1, 2, 20), np.nan, "float32")
            try:
                forward(*inputs, out, lse, 0.125, *mask)
            except (TypeError, ValueError) as error:
                assert np.isnan(out).all() and np.isnan(lse).all()
                raise error
            return out, lse
        return make

    @pytest.mark.parametrize("mask", [(5, 2), (0, 0), (1000, 0)])
    def test_reach_the_kernel(self, call, mask):
        inputs = reference.make_inputs(WINDOW, Shape(1, 2, 1, 20, 30))
        answers = reference.forward(WINDOW, *inputs, arguments=mask)
        assert reference.mismatch(*call(*mask), *answers, *reference.tolerances(WINDOW, *inputs, arguments=mask)) is None

    def test_beyond_all_lengths_they_mean_the_same(self, call):
        for found, wanted in zip(call(2**62, 2**31), call(50, 50)):
            np.testing.assert_array_equal(found, wanted)

    @pytest.mark.parametrize("mask, message", [
        ((), "found 6 arguments, wanted 8: q, k, v, out, lse, scale, left, right"), ((3,), "found 7 arguments, wanted 8"),
        ((3, 4, 5), "found 9 arguments, wanted 8"), ((2.0, 1), "left is a float, wanted an int"),
        ((1, None), "right is None, wanted an int"),
        ((-1, 0), "left is -1, wanted a number of keys, zero or more"), ((0, -7), "right is -7, wanted a number of keys, zero or more")])
    def test_that_are_none_are_refused(self, call, mask, message):
        with pytest.raises((TypeError, ValueError), match=message):
            call(*mask)

    def test_are_told_by_the_manifest(self, exported):
        manifest = json.loads(tvm_ffi.load_module(str(exported)).flash_attention_manifest())
        assert manifest["signature"] == "flash_attention_forward(q, k, v, out, lse, scale, left, right)"
        assert [(argument["name"], argument["kind"], argument["sample"]) for argument in manifest["arguments"]] == [
            ("left", "count", 1023), ("right", "count", 0)]

    def test_run_times_those_that_it_is_given(self, exported):
        command = [sys.executable, "-m", "scripts.run", str(exported), "--lengths", "64", "--repeat", "1", "--arguments"]
        done = subprocess.run([*command, "9", "4"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "length 64, left 9, right 4: " in done.stdout and "11 of 11 check cases passed" in done.stdout
        short = subprocess.run([*command, "9"], cwd=ROOT, capture_output=True, text=True)
        assert short.returncode == 1 and f"{WINDOW.name} takes --arguments left right, found 1 numbers: correct them" in short.stderr

    def test_check_cases_try_several(self):
        assert {case.arguments for case in check_cases(WINDOW)} == set(MASKS["window"].samples)
        assert {case.arguments for case in check_cases(replace(WINDOW, mask="causal"))} == {()}
