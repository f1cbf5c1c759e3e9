"""Several workloads in one artefact: names, numbers, and what is refused. No GPU is needed."""
import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi

from schedules.arch import cuda_arch
from schedules.artefact import several
from schedules.artefact.cases import check_cases
from schedules.artefact.export import ExportError, export_artefact, read_manifest
from schedules.artefact.manifest import describe
from schedules.artefact.names import ALONE, Share
from schedules.artefact.several import PLACES, export_part, export_several, shares_of
from schedules.artefact.variant import Tuned
from schedules.buckets import Bucket
from schedules.build import kernel_names
from schedules.lowering.cuda_compile import cuda_compiler
from schedules.plan import Plan
from schedules.tuning.suites import SUITES
from scripts import cli, export
from scripts.kernels import answer, answer_gradients
from scripts.several import workloads_of, write_several
from te_defs import reference
from te_defs.workload import PRESETS, Shape, Workload, make_arguments
from tests.commands import command
from tests.faults import EndsItsProcess
from tests.stand_in_kernel import on_cpu, on_cuda, variant

OF_A_USER = "fwd_d16_dv8_f32_tests.of_a_user:DocumentCausal"
#: Their names hold all that no function's name may.
NAMES = ("fwd_d16_dv8_f32_full", "fwd_d32_dv16_f32_causal+softcap", OF_A_USER)
ENDINGS = ("d16_dv8_f32_full", "d32_dv16_f32_causal_softcap", "d16_dv8_f32_tests_of_a_user_DocumentCausal")
#: Of stand-ins, which tell one from the other by the number that they put into lse.
SMALL = tuple(Workload(16, 8, "float32", mask) for mask in ("full", "causal"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(path, output of the command) of three workloads with their gradients."""
    path = tmp_path_factory.mktemp("several") / "attention.so"
    what = "--target", "cpu", "--plan", "default", "--backward", "--workload", *NAMES, "--output", path
    with pytest.MonkeyPatch.context() as patch:
        without_own_folder(patch)
        return path, command("export", *what, code=0).stdout


def without_own_folder(patch):
    """Processes that this one starts import Python's `numbers` and not tests/numbers.py, whose folder pytest puts on the path."""
    patch.setattr(sys, "path", [path for path in sys.path if Path(path) != Path(__file__).parent])


def parts_of(workloads, folder, build=on_cpu, **described):
    """Parts of stand-ins, of which the one with number n puts (n + 1) * M into lse."""
    parts = []
    for number, (workload, share) in enumerate(zip(workloads, shares_of(workloads))):
        variants = [build(workload, place=share.first_place, factor=number + 1)]
        (folder / str(number)).mkdir(parents=True)
        manifest = {**describe(workload, variants, None, (), share), **described}
        parts.append(export_part(variants, workload, folder / str(number), manifest, check_cases(workload), (), share))
    return parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return parts_of(SMALL, tmp_path_factory.mktemp("parts"))


class TestNames:
    def test_are_those_of_the_workload(self):
        workloads = [Workload.parse(name) for name in NAMES]
        assert [share.forward for share in shares_of(workloads)] == [f"flash_attention_forward_{ending}" for ending in ENDINGS]
        assert [share.first_place for share in shares_of(workloads)] == [1, 1 + PLACES, 1 + 2 * PLACES]
        assert (ALONE.forward, ALONE.backward, ALONE.first_place) == ("flash_attention_forward", "flash_attention_backward", 1)

    @pytest.mark.parametrize("other", ["fwd_d64_dv64_f32_tests:of_a_user.halves", "fwd_d64_dv64_f32_tests.of_a_user:halves"])
    def test_that_two_would_have_are_refused(self, other):
        """Of these names no workload is made, so that neither module must be there."""
        one = Namespace(name="fwd_d64_dv64_f32_tests.of_a_user:halves")
        with pytest.raises(ExportError, match="names of their own, found flash_attention_forward_d64_dv64_f32_tests_of_a_user_halves of "
                                              f"{one.name} and of {other}: export one of them apart"):
            shares_of([one, Namespace(name=other)])

    @pytest.mark.parametrize("end", ["variant", "bucket"])
    def test_that_another_has_with_something_behind_are_refused(self, end):
        with pytest.raises(ExportError, match=rf"found flash_attention_forward_d8_x_{end} of fwd_d8_x and of fwd_d8_x\+{end}: export"):
            shares_of([Namespace(name="fwd_d8_x"), Namespace(name=f"fwd_d8_x+{end}")])


class TestNumbers:
    @pytest.mark.parametrize("name, ending", [*zip(NAMES, ENDINGS)])
    @pytest.mark.parametrize("scale", [0.3, -0.2])
    def test_are_those_of_the_workload(self, exported, name, ending, scale):
        workload, shape, module = Workload.parse(name), Shape(2, 4, 2, 37, 70), tvm.runtime.load_module(str(exported[0]))
        q, k, v = reference.make_inputs(workload, shape, 3)
        arguments = make_arguments(workload, shape, 3)
        answers = reference.forward(workload, q, k, v, scale, arguments)
        found = answer(module[f"flash_attention_forward_{ending}"], (q, k, v), scale, arguments)
        assert reference.mismatch(*found, *answers, *reference.tolerances(workload, q, k, v, scale, arguments, answers)) is None
        dout = np.random.default_rng(4).standard_normal(found[0].shape, np.float32)
        given, wanted, lse = reference.backward_case(workload, dout, q, k, v, scale, arguments)
        gradients = answer_gradients(module[f"flash_attention_backward_{ending}"], given, scale, arguments)
        bounds = reference.backward_tolerances(workload, dout, q, k, v, wanted, scale, arguments)
        assert reference.backward_mismatch(gradients, wanted, bounds, lse) is None

    def test_each_calls_its_own_kernels(self, parts, tmp_path):
        """Stand-ins of one shape, so that every one would take the calls of the others."""
        module = tvm_ffi.load_module(str(export_several(parts, tmp_path / "it.so")[0]))
        q, k, v = np.ones((1, 5, 2, 16), "float32"), np.ones((1, 7, 2, 16), "float32"), np.ones((1, 7, 2, 8), "float32")
        for number, ending in enumerate(("d16_dv8_f32_full", "d16_dv8_f32_causal"), 1):
            for scale in (0.5, -0.5):
                out, lse = answer(module[f"flash_attention_forward_{ending}"], (q, k, v), scale)
                assert (out == scale).all() and (lse == np.sign(scale) * number * 7).all()

    def test_none_is_reached_past_the_checks(self, parts, tmp_path):
        module = tvm_ffi.load_module(str(export_several(parts, tmp_path / "it.so")[0]))
        names = [name for place in (1, 1 + PLACES) for name in kernel_names(place)]
        assert not any(module.implements_function(name) for name in (*names, "flash_attention_forward"))
        with pytest.raises(TypeError, match="has a main function, found one of several: call a function that flash_attention_manifest na"):
            module.main(*[np.ones((1, 1, 1, 16), "float32")] * 5, 1.0)
        with pytest.raises(TypeError, match="^flash_attention_forward_d16_dv8_f32_causal: found 0 arguments, wanted 6: q, k, v"):
            module.flash_attention_forward_d16_dv8_f32_causal()


class TestExport:
    def test_tells_of_each_and_leaves_two_files(self, exported):
        path, output = exported
        told = json.loads(output.splitlines()[0])["workloads"]
        assert list(told) == list(NAMES) and all(it["family"] == "cpu" and it["backward"] for it in told.values())
        assert [line for line in output.splitlines() if line.endswith(": built")] == [f"{name}: built" for name in NAMES]
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["attention.check.npz", "attention.so"]

    def test_the_manifest_names_the_functions_of_each(self, exported):
        manifest = read_manifest(exported[0])
        assert manifest["schema"] == 4 and set(manifest) == {"schema", "workloads"} and set(manifest["workloads"]) == set(NAMES)
        for name, ending in zip(NAMES, ENDINGS):
            it = manifest["workloads"][name]
            directions = {direction: f"flash_attention_{direction}_{ending}" for direction in ("forward", "backward")}
            assert (it["schema"], it["workload"]["name"], it["functions"]) == (3, name, directions)
            assert it["signature"].startswith(f"{directions['forward']}(q, k, v, out, lse, scale")
            assert it["backward"]["signature"].startswith(f"{directions['backward']}(dout, q, k, v, out, lse, dq, dk, dv, scale")
        assert manifest["workloads"][OF_A_USER]["signature"].endswith("scale, documents)")

    def test_that_of_one_workload_is_as_it_was(self):
        workload, variants = SMALL[0], [on_cpu(SMALL[0])]
        alone, one_of_several = describe(workload, variants), describe(workload, variants, share=Share("_x", 1001))
        assert alone["signature"] == "flash_attention_forward(q, k, v, out, lse, scale)" and "functions" not in alone
        assert one_of_several == {**alone, "functions": {"forward": "flash_attention_forward_x", "backward": None},
                                  "signature": "flash_attention_forward_x(q, k, v, out, lse, scale)"}

    @pytest.mark.parametrize("step", ["compile_manifest", "join_cases"])
    def test_a_failure_leaves_what_was_there(self, parts, tmp_path, monkeypatch, step):
        path, cases = tmp_path / "kept.so", tmp_path / "kept.check.npz"
        path.write_text("old artefact")
        cases.write_text("old cases")

        def fail(*_, **__):
            raise ExportError("made to fail")
        monkeypatch.setattr(several, step, fail)
        with pytest.raises(ExportError, match="made to fail"):
            export_several(parts, path)
        assert (path.read_text(), cases.read_text()) == ("old artefact", "old cases") and len(list(tmp_path.iterdir())) == 2

    def test_equal_parts_make_equal_cases(self, parts, tmp_path):
        one, other = (export_several(parts, tmp_path / f"{name}.so")[1].read_bytes() for name in "ab")
        assert one == other

    def test_a_variant_of_the_wrong_place(self, tmp_path):
        with pytest.raises(ExportError, match=f"a module with a function attention_forward_variant{1 + PLACES} is needed, found none"):
            export_part([on_cpu(SMALL[1])], SMALL[1], tmp_path, {}, (), (), shares_of(SMALL)[1])
        with pytest.raises(ExportError, match=f"at most {PLACES} variants, found {PLACES + 1} of {SMALL[0].name}: export it alone"):
            export_part([None] * (PLACES + 1), SMALL[0], tmp_path, {}, (), (), ALONE)
        assert list(tmp_path.iterdir()) == []


class TestRun:
    def test_checks_and_times_all(self, exported):
        done = command("run", exported[0], "--lengths", "32", "--repeat", "1", code=0).stdout
        assert "66 of 66 check cases passed" in done
        timed = [line.split(", batch 1")[0].strip() for line in done.splitlines() if " ms (" in line]
        assert timed == [name for name in sorted(NAMES) for _ in ("forward", "backward")]

    def test_checks_those_that_are_named(self, exported):
        done = command("run", exported[0], "--lengths", "--workload", OF_A_USER, code=0).stdout
        assert "22 of 22 check cases passed" in done and NAMES[0] not in done
        wrong = command("run", exported[0], "--workload", "fwd_d8", code=1).stderr
        assert wrong == (f"error: --workload must name what {exported[0]} holds, which is {', '.join(sorted(NAMES))}, found fwd_d8: "
                         "correct it\n")

    def test_finds_the_one_that_is_wrong(self, exported, tmp_path):
        with np.load(exported[0].with_suffix(".check.npz")) as found:
            arrays = dict(found)
        arrays[f"{NAMES[1]}/ragged.dq"][0, 0, 0, 0] += 1
        np.savez(tmp_path / "changed.npz", **arrays)
        done = command("run", exported[0], "--check", tmp_path / "changed.npz", "--lengths", code=1)
        assert "65 of 66 check cases passed" in done.stdout and "1 check cases failed: do not use this artefact" in done.stderr

    def test_wants_the_cases_of_all(self, parts, tmp_path):
        path = export_several(parts, tmp_path / "both.so")[0]
        cases = export_several(parts[:1], tmp_path / "one.so")[1]
        done = command("run", path, "--check", cases, "--lengths", code=1)
        assert f"error: {cases} must hold check cases, found something else" in done.stderr

    @pytest.mark.parametrize("described, message", [
        ({"versions": {"tvm": "0.26.1", "tvm_ffi": tvm_ffi.__version__}}, f"was built with tvm 0.26.1, found tvm {tvm.__version__} here: "),
        ({"functions": {"forward": "flash_attention_forward_d8", "backward": None}},
         "tells of a function flash_attention_forward_d8, found none: export again")])
    def test_refuses_what_does_not_match(self, tmp_path, described, message):
        path = export_several(parts_of(SMALL[:1], tmp_path / "parts", **described), tmp_path / "it.so")[0]
        done = command("run", path, code=1)
        assert message in done.stderr and done.stderr.count("\n") == 1

    @pytest.mark.parametrize("described, message", [
        ({"versions": {"tvm": tvm.__version__, "tvm_ffi": "1.0"}}, "was built with tvm_ffi 1.0, found tvm_ffi "),
        ({"schema": 5}, "a manifest of schema 3 or 4 is wanted, found 5 in ")])
    def test_refuses_the_same_of_one_workload(self, tmp_path, described, message):
        variants = [on_cpu(SMALL[0])]
        path = export_artefact(variants, SMALL[0], tmp_path / "it.so", {**describe(SMALL[0], variants), **described}, ())[0]
        done = command("run", path, code=1)
        assert message in done.stderr and done.stderr.count("\n") == 1


class TestBuckets:
    def test_each_workload_has_its_own(self, tmp_path):
        """Stand-ins put into lse ten times the number of their workload, and their own."""
        parts = []
        for number, (workload, share, lengths) in enumerate(zip(SMALL, shares_of(SMALL), ((16, 256), (64, 128))), 1):
            tuned = [Tuned(Bucket(length, length), "stand-in", Plan(64, 32), {"seconds": 1e-3}) for length in lengths]
            variants = [replace(on_cpu(workload, share.first_place + place, 10 * number + place), tuned=(it,))
                        for place, it in enumerate(tuned)]
            (tmp_path / share.ending).mkdir()
            parts.append(export_part(variants, workload, tmp_path / share.ending, describe(workload, variants, None, (), share), (), (),
                                     share))
        module = tvm.runtime.load_module(str(export_several(parts, tmp_path / "it.so")[0]))
        for ending, factors in (("d16_dv8_f32_full", (10, 11)), ("d16_dv8_f32_causal", (20, 20))):
            forward = f"flash_attention_forward_{ending}"
            for length, factor in zip((20, 80), factors):
                assert module[f"{forward}_bucket"](length, length) == factor % 10
                _, lse = answer(module[forward], [np.ones((1, length, 2, size), "float32") for size in (16, 16, 8)], 0.5)
                assert (lse == factor * length).all()


class TestCommand:
    WHAT = "--target", "cpu", "--plan", "default"

    @pytest.mark.parametrize("arguments, code, message", [
        (["--workload", "d64_f32_full", "fwd_d64_dv64_f32_full"], 2, "--workload must name each workload once, found fwd_d64_dv64_f32_"),
        (["--workload", "d64_f32_full", "--all", "cpu"], 2, "--all names the workloads itself, found --workload d64_f32_full too: "),
        (["--all", "llm"], 2, "--all llm is for cuda, found "),
        (["--workload", "d64_f32_full", "d64_f32_causal"], 2, "--output must name the artefact of several workloads, found 2 and "),
        (["--workload", "d64_f32_full", "d64", "--output", "x.so"], 2, "a workload is named like fwd_d128_dv128_f16_causal, found 'd64'"),
        (["--workload", "d64_f32_full", "fwd_d64_dv64_f32_full+bias", "--backward", "--gradients-of", "bias", "--output", "x.so"], 1,
         "2 workloads were wanted in one artefact, found that 1 of them cannot be there, as told above (fwd_d64_dv64_f32_full): ")])
    def test_what_cannot_be_meant(self, arguments, code, message):
        done = command("export", *self.WHAT, *arguments, code=code)
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1

    def test_all_that_no_family_takes_are_told(self, tmp_path):
        done = command("export", "--target", "sm_75", "--plan", "default", "--all", "presets", "--output", tmp_path / "x.so", code=1)
        missing = [it.name for it in PRESETS.values() if it.dtype == "bfloat16"]
        assert f"found that {len(missing)} of them cannot be there, as told above ({', '.join(missing)}): name the oth" in done.stderr
        assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == missing and list(tmp_path.iterdir()) == []

    def test_all_without_a_log_are_told(self, tmp_path):
        done = command("export", "--target", "cpu", "--all", "cpu", "--logs", tmp_path, "--output", tmp_path / "x.so", code=1)
        assert "the gradients of suite cpu are left out: add --backward for them" in done.stdout
        for name in ("fwd_d64_dv64_f32_causal", "fwd_d64_dv64_f32_full"):
            assert f"{name}: a record of {name} for" in done.stdout and name in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_suite_names_workloads_once_and_those_with_gradients(self, capsys):
        device = replace(cli.find_device("cpu"), kind="cuda")
        workloads, with_gradients = workloads_of(export.make_parser().parse_args(["--all", "llm", "--backward"]), device)
        assert [it.name for it in workloads] == list(dict.fromkeys(
            entry.subject.workload.name for entry in SUITES["llm"].entries)) and len(workloads) == 5
        assert {it.name for it in with_gradients} == {"fwd_d128_dv128_f16_causal", "fwd_d64_dv64_f16_causal", "fwd_d128_dv128_f16_full"}
        assert capsys.readouterr().out == ""

    def test_a_process_that_ends_is_told(self, tmp_path, monkeypatch, capfd):
        without_own_folder(monkeypatch)
        with pytest.raises(ExportError, match="1 processes were to build 1 workloads, found that one ended before its time: free "):
            write_several([EndsItsProcess(SMALL[0], [Namespace(arch=cli.find_device("cpu").arch)])], tmp_path / "x.so", 0)
        assert list(tmp_path.iterdir()) == [] and capfd.readouterr().err == "it ends here\n"


class TestCuda:
    def test_device_code_of_all_is_found(self, toolkit, tmp_path):
        arch = cuda_arch("sm_80")

        def build(workload, place, factor):
            with cuda_compiler(toolkit, ("sm_80",)) as log:
                module = tvm.tirx.build(on_cuda(workload, place, factor), arch.target())
            return variant(module, arch, log.kernels)
        path = export_several(parts_of(SMALL, tmp_path / "parts", build), tmp_path / "cuda.so")[0]
        told = read_manifest(path)["workloads"]
        kernels = [{entry["kernel"] for entry in told[it.name]["variants"][0]["kernels"]} for it in SMALL]
        assert [len(some) for some in kernels] == [4, 4] and not set.intersection(*kernels)
        imports, content = tvm.runtime.load_module(str(path)).imports, path.read_bytes()
        assert all(sum(module.implements_function(name) for module in imports) == 1 for some in kernels for name in some)
        assert b"__global__" not in content and b"#include" not in content
