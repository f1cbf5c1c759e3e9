"""The commands as a user types them, the Makefile and what the README says about both. No GPU is needed."""
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tvm

from schedules import backward, build
from schedules.arch import cuda_arch
from schedules.artefact.export import read_manifest
from schedules.lowering import toolkit
from schedules.lowering.toolkit import driver_version
from schedules.nest import excerpt, loop_nest
from schedules.registry import FAMILIES, family_named
from scripts import bench, cli, options
from scripts.kernels import Planned, build_artefact
from te_defs.workload import Workload
from tests.commands import command, imported
from tests.source_alone import without_nvcc

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COMMANDS = ("tune", "fleet tracker", "fleet worker", "export", "run", "bench", "show")
README = (ROOT / "README.md").read_text()
NOTES = ROOT / "schedules" / "README.md"


def started(name, *arguments):
    """A finished `python -m scripts.<name>`, in a process of its own."""
    return subprocess.run([sys.executable, "-m", f"scripts.{name}", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


def echoed(output):
    """The resolved arguments: the first line of every command."""
    return json.loads(output.splitlines()[0])


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    """(path of a small CPU artefact, output of the export)."""
    path = tmp_path_factory.mktemp("export") / "attention.so"
    return path, command("export", "--target", "cpu", "--plan", "default", "--workload", "d64_bf16_causal", "--output", path, code=0).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_what_it_does_and_its_defaults(name):
    done = started(*name.split(), "--help")
    assert done.returncode == 0 and "default" in done.stdout, done.stderr
    assert done.stdout.startswith(f"usage: python -m scripts.{name}")


class TestRefused:
    @pytest.mark.parametrize("name, arguments, message", [
        ("export", ["--workload", "d64"], "a workload is named like fwd_d128_dv128_f16_causal, found 'd64': correct the name, or name"),
        ("export", ["--target", "sm_20"], "--target is auto, cpu or an architecture; a CUDA target is one of sm_75, "),
        ("export", ["--target", "cpu", "--output", "tests"], "--output must be a file that ends in .so, found 'tests'"),
        ("export", ["--target", "sm_80", "--plan", "default", "--archs", "sm_75"], "--archs must be served by mma, found that it declines"),
        ("export", ["--target", "sm_89", "--plan", "default", "--archs", "sm_80"], "--target must be the least of all architectures"),
        ("export", ["--target", "sm_80", "--plan", "default", "--workload", "fwd_d72_dv72_f32_full", "--archs", "sm_86"],
         "--archs must have room for the plan of "),
        ("export", ["--target", "cpu", "--also", "sm_80"], "--also is for a CUDA target, found target "),
        ("export", ["--target", "sm_90a", "--plan", "default", "--also", "sm_80", "sm_75"], "--also must be served by mma, found that it"),
        ("export", ["--target", "sm_90a", "--plan", "default", "--also", "sm_89", "sm_80"], "the first of --also must be the least of all"),
        ("export", ["--target", "sm_80", "--plan", "default", "--also", "sm_89"],
         "--also must add what the variants before it cannot serve, found that mma for sm_80 serves sm_89 too: name sm_89 before it, or"),
        ("export", ["--target", "sm_90a", "--gpu", "nvidia-h200", "--workload", "d128_f16_causal", "--family", "mma"],
         "--plan best takes the log's best plan, found one of wgmma and --family mma: use --plan default, or leave --family out"),
        ("tune", ["--target", "sm_90a", "--dry-run", "--family", "zz"], "--family is one of wgmma, mma, simt, simt_te, cpu, found 'zz'"),
        ("show", ["--target", "cpu", "--family", "zz"], "--family is one of wgmma, mma, simt, simt_te, cpu, found 'zz'"),
        ("show", ["nests", "--target", "cpu", "--blocks", "no"], "--blocks must name blocks of the nests, found 'no' in none"),
        ("bench", ["--target", "cpu", "--milliseconds", "nan"], "--rounds, --tokens, --hidden, --lengths and --milliseconds must be"),
        ("bench", ["--target", "cpu", "--json", "missing/a.json"], "--json must be a file in a folder that exists"),
        ("bench", ["--target", "cpu", "--json", "tests"], "--json must be a file in a folder that exists, found 'tests'"),
        *(("export", ["--target", "cpu", "--plan", "default", "--output", place],
           f"--output must be where a file can be written, found '{place}' (") for place in (
               "/proc/it.so", "/proc/new/it.so", "README.md/it.so")),
        ("export", ["--target", "cpu", "--archs", "sm_80"], "--archs are for a CUDA target, found target "),
        ("bench", ["--target", "cpu", "--rounds", "0"], "--rounds, --tokens, --hidden, --lengths and --milliseconds must be positive"),
        ("show", ["nest"], "a section is one of plan, nests, tir, source, resources, graph, found nest"),
    ])
    def test_what_cannot_be_meant(self, name, arguments, message):
        done = command(name, *arguments, code=2)
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1

    @pytest.mark.parametrize("lengths, remedy", [
        ("", r"run python -m scripts\.tune --workload fwd_d64_dv64_f32_causal, or use --plan default"),
        ("+keys", "use --plan default, since tune takes uniform lengths alone"),
        ("+packed", "use --plan default, since tune takes uniform lengths alone")])
    def test_no_record(self, tmp_path, lengths, remedy):
        what = "--target", "cpu", "--workload", f"d64_f32_causal{lengths}"
        done = command("export", *what, "--logs", tmp_path, "--output", tmp_path / "x.so", code=1)
        record = re.escape(f"fwd_d64_dv64_f32_causal{lengths}")
        assert re.match(rf"error: a record of {record} for \S+ was wanted, found none in .*: {remedy};", done.stderr)
        assert list(tmp_path.iterdir()) == []
        if lengths:
            assert "a workload with uniform lengths is wanted" in command("tune", *what, "--dry-run", code=2).stderr

    @pytest.mark.parametrize("call", [lambda strike: strike(), lambda strike: tvm.runtime.convert(strike)(), lambda strike: (
        tvm.transform.module_pass(lambda mod, _: tvm.runtime.convert(strike)() or mod, opt_level=0)(tvm.IRModule()))],
        ids=["ours", "called by TVM", "in a pass"])
    def test_ctrl_c_is_told_wherever_it_strikes(self, capsys, call):
        """TVM makes a RuntimeError without a word of it where it calls a function of ours."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
        assert cli.main(lambda _: call(lambda: os.kill(os.getpid(), signal.SIGINT)), None) == cli.FAILED
        assert capsys.readouterr().err == "error: interrupted\n"
        with pytest.raises(RuntimeError, match="another"):
            cli.main(lambda _: call(functools.partial(exec, "raise RuntimeError('another')")), None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_driver_that_is_too_old(self, monkeypatch):
        for module in (cli, toolkit):
            monkeypatch.setattr(module, "driver_version", lambda: (12, 4))
        with pytest.raises(toolkit.ToolkitError, match="needs an NVIDIA driver for CUDA 13.0 or later, found one for CUDA 12.4: update"):
            cli.find_device("auto")

    def test_tuned_plan_of_a_device_that_is_elsewhere(self):
        if driver_version() is not None:
            pytest.skip("this machine has a GPU")
        refusal = command("export", "--target", "sm_80", code=2).stderr
        assert "a tuned plan belongs to a device, found sm_80, of which this machine has none: name one with --gpu" in refusal
        assert "a benchmark needs a device that is there" in command("bench", "--target", "sm_80", code=2).stderr

    def test_tuned_plan_of_a_device_by_name(self):
        what = ("show", "plan", "--workload", "d64_f16_full", "--plan", "best", "--gpu", "nvidia-h200")
        best = json.loads((ROOT / "tuning_logs/nvidia-h200/fwd_d64_dv64_f16_full/run.json").read_text())["best"]["plan"]
        told = json.loads(command(*what, "--target", "sm_90a").stdout.splitlines()[0])["plan"]
        assert told == " ".join(f"{name}={value}" for name, value in best.items())
        assert "run.json must be of target sm_80, found sm_90a" in command(*what, "--target", "sm_80", code=1).stderr

    def test_family_that_does_not_take_the_workload(self):
        done = command("show", "plan", "--target", "sm_80", "--workload", "d64_f32_full", "--family", "mma", code=1)
        assert "mma does not take fwd_d64_dv64_f32_full on sm_80: tensor cores take 16-bit inputs" in done.stderr


class TestExportAndRun:
    def test_echo_and_files(self, artefact):
        path, output = artefact
        assert echoed(output)["workload"] == "fwd_d64_dv64_bf16_causal" and echoed(output)["family"] == "cpu"
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["attention.check.npz", "attention.so"]

    def test_run_needs_neither_project_nor_compiler(self, artefact, tmp_path):
        """scripts/run.py alone in an empty folder, with an import hook that would notice."""
        shutil.copy(ROOT / "scripts" / "run.py", tmp_path)
        code = ("import sys, run\n"
                "code = run.main(sys.argv[1:])\n"
                "ours = [name for name in sys.modules if name.split('.')[0] in ('te_defs', 'schedules', 'scripts')]\n"
                "libraries = [line for line in open('/proc/self/maps') if 'tvm_compiler' in line]\n"
                "print(json.dumps([code, ours, libraries]))").replace("import sys", "import json, sys")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TVM"))}
        done = subprocess.run([sys.executable, "-c", code, artefact[0], "--lengths", "64", "--repeat", "2"], cwd=tmp_path, env=environment,
                              capture_output=True, text=True)
        assert json.loads(done.stdout.splitlines()[-1]) == [0, [], []], done.stderr
        assert "11 of 11 check cases passed" in done.stdout
        assert re.search(r"batch 1, heads 8, length 64: \d+\.\d{3} ms", done.stdout)

    @pytest.mark.parametrize("array, message", [
        ("ragged.out", r"ragged .* out is off by 1\.0"), ("grouped.lse", "grouped .* lse is off by more than allowed")])
    def test_run_finds_wrong_results(self, artefact, tmp_path, array, message):
        with np.load(artefact[0].with_suffix(".check.npz")) as found:
            arrays = dict(found)
        arrays[array][(0,) * arrays[array].ndim] += 1
        np.savez(tmp_path / "changed.npz", **arrays)
        done = command("run", artefact[0], "--check", tmp_path / "changed.npz", "--lengths", code=1)
        assert re.search(message, done.stdout) and "10 of 11 check cases passed" in done.stdout
        assert done.stderr == "error: 1 check cases failed: do not use this artefact\n"

    def test_run_wants_a_row_without_keys_to_be_exact(self, artefact, tmp_path):
        with np.load(artefact[0].with_suffix(".check.npz")) as found:
            arrays = dict(found)
        arrays["ragged.lse"][0, 0, 0] = -np.inf
        np.savez(tmp_path / "changed.npz", **arrays)
        done = command("run", artefact[0], "--check", tmp_path / "changed.npz", "--lengths", code=1)
        assert "a row that sees no key is not out = 0 and lse = -inf" in done.stdout

    @pytest.mark.parametrize("path, message", [
        ("none.so", "found no file none.so: export one first"),
        ("LICENSE", "an artefact is a shared library, found LICENSE to be something else")])
    def test_run_names_what_is_no_artefact(self, path, message):
        assert message in command("run", path, code=1).stderr

    def test_run_names_what_was_cut_off(self, artefact, tmp_path):
        cut = tmp_path / "cut.so"
        cut.write_bytes(artefact[0].read_bytes()[:20000])
        assert f"found {cut} to be something else or cut off" in command("run", cut, code=1).stderr

    @pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut off"])
    def test_run_names_damaged_cases(self, artefact, tmp_path, content):
        (tmp_path / "bad.npz").write_bytes(content)
        done = command("run", artefact[0], "--check", tmp_path / "bad.npz", code=1)
        assert f"error: {tmp_path / 'bad.npz'} must hold check cases, found something else" in done.stderr

    def test_run_names_cases_of_another_workload(self, artefact, tmp_path):
        with np.load(artefact[0].with_suffix(".check.npz")) as found:
            arrays = dict(found)
        arrays["index"] = np.array(str(arrays["index"]).replace("_causal", "_full"))
        np.savez(tmp_path / "other.npz", **arrays)
        done = command("run", artefact[0], "--check", tmp_path / "other.npz", code=1)
        assert "complete check cases of fwd_d64_dv64_bf16_causal" in done.stderr

    def test_run_needs_the_cases(self, artefact, tmp_path):
        shutil.copy(artefact[0], tmp_path / "alone.so")
        assert "the check cases of the artefact are wanted, found no file" in command("run", tmp_path / "alone.so", code=1).stderr

    def test_run_refuses_sizes(self, artefact):
        assert "--heads must be a multiple of --kv-heads, found 8 and 3" in command("run", artefact[0], "--kv-heads", 3, code=2).stderr

    def test_cuda_without_a_gpu(self, toolkit, tmp_path):
        path = tmp_path / "cuda.so"
        output = command("export", "--target", "sm_80", "--archs", "sm_90a", "--plan", "default", "--workload",
                         "fwd_d16_dv16_f32_full+softcap", "--output", path, code=0).stdout
        assert echoed(output)["archs"] == ["sm_80", "sm_90a"]
        assert re.search(r"attention_forward_kernel on sm_80: \d+ registers, \d+ bytes of spills", output)
        if driver_version() is None:
            assert "a CUDA artefact needs an NVIDIA driver, found none" in started("run", path).stderr

    def test_variants_for_several_gpu_generations(self, toolkit, tmp_path):
        path = tmp_path / "cuda.so"
        with without_nvcc():
            output = command("export", "--target", "sm_90a", "--also", "sm_80", "sm_89", "--also", "sm_120", "--plan", "default",
                             "--workload", "d64_f16_full", "--output", path, code=0).stdout
        assert (echoed(output)["archs"], [it["archs"] for it in echoed(output)["also"]]) == (["sm_90a"], [["sm_80", "sm_89"], ["sm_120"]])
        for kernel in ("kernel on sm_90a", "variant2_kernel on sm_90a", "negative_scale_variant2_kernel on sm_90a",
                       "variant4_kernel on sm_90a", "variant5_kernel on sm_80", "variant7_kernel on sm_89", "variant10_kernel on sm_120"):
            assert re.search(rf"^attention_forward_{kernel}: \d+ registers", output, re.MULTILINE)
        variants = [(it["family"], it["target"]["lowered_for"], it["serves"]["strided"], it["serves"]["packed"])
                    for it in read_manifest(path)["variants"]]
        long_short_and_small_grids = [("wgmma", "sm_90a", True, False)] * 3
        assert variants == [("mma", "sm_90a", True, True), *long_short_and_small_grids, *(
            ("mma", name, *calls) for name in ("sm_80", "sm_120") for calls in ((True, True), (False, False), (True, False)))]

    def test_further_variants_are_tuned_where_a_log_is(self):
        workload, args = Workload(64, 64, "float16", "full"), Namespace(plan="best", logs=None)
        best = json.loads((ROOT / "tuning_logs/nvidia-h200/fwd_d64_dv64_f16_full/run.json").read_text())["best"]
        family, plan, measured = options.further_plan(args, workload, cuda_arch("sm_90a"))
        assert (family.NAME, asdict(plan), measured["device"]) == (best["family"], best["plan"], "nvidia-h200")
        family, plan, measured = options.further_plan(args, workload, cuda_arch("sm_80"))
        assert (plan, measured) == (family.default_plan(workload, cuda_arch("sm_80")), None)


class TestShow:
    def test_nests_of_some_blocks(self):
        output = command("show", "nests", "--workload", "d64_f32_full", "--target", "sm_80", "--family", "simt", "--blocks", "S",
                         code=0).stdout
        heads = re.findall(r"^--- (\d+) (.*)$", output, re.MULTILINE)
        assert [name for _, name in heads] == ["as declared", *(stage.__name__ for stage in family_named("simt").STAGES)]
        assert re.search(r"as declared\nqk\n  i in \d+\n    j in \d+\n      c in 64\n        S  ", output)

    def test_nests_of_the_tensor_expressions(self):
        """The FlashAttention nest and split-KV, both reached from the online softmax by primitives."""
        flash = command("show", "nests", "--workload", "d64_f32_full", "--target", "sm_80", "--family", "simt_te", code=0).stdout
        assert "state" in flash.split("--- ")[-1]
        split = command("show", "nests", "--workload", "d64_f32_full", "--target", "cpu", "--family", "split_kv", "--blocks", "state_rf",
                        code=0).stdout
        assert "b_h_i_0_t_0_fused in ...  parallel" in split.split("--- ")[-1]
        assert "split_kv has sections nests and tir, found plan" in command("show", "plan", "--family", "split_kv", code=2).stderr

    @pytest.mark.parametrize("family, limit", [
        ("wgmma", r"shared memory of plan .* must stay within 232448 bytes"), ("mma", "registers, about of plan .* must stay within 255")])
    def test_plan_with_the_papers_rule(self, family, limit):
        chosen = ["--family", family] if family != FAMILIES[0].NAME else []
        output = command("show", "plan", "--workload", "d128_f16_causal", "--target", "sm_90a", *chosen, code=0).stdout
        assert re.search(r"^cpu +declines: sm_90a is no CPU$", output, re.MULTILINE)
        assert "M = 116224 elements of shared memory, Bc = ceil(M / 4d) = 227, Br = min(Bc, d) = 128" in output
        assert re.search(rf"^largest Bc within the budget of {family}: \d+$", output, re.MULTILINE)
        assert re.search(rf"^the next larger one: {limit}", output, re.MULTILINE)

    def test_tir_and_assembly(self):
        output = command("show", "tir", "source", "--workload", "d64_f32_causal", "--target", "cpu", code=0).stdout
        assert "@T.prim_func" in output and "attention_forward" in output

    def test_cuda_source_and_resources(self, toolkit):
        output = command("show", "source", "resources", "--workload", "fwd_d16_dv16_f16_full", "--target", "sm_80", code=0).stdout
        assert "__global__" in output and "mma.sync" in output
        assert re.search(r"attention_forward_kernel on sm_80: \d+ registers", output)


class TestBench:
    def test_default_plan_on_the_cpu(self, tmp_path):
        done = started("bench", "--target", "cpu", "--workload", "d64_f32_full", "d64_f32_causal", "--lengths", 64, "--rounds", 2,
                       "--milliseconds", 1, "--logs", tmp_path, "--json", tmp_path / "rows.json", "--markdown")
        assert done.returncode == 0, done.stderr
        assert "no tuned plan: a record of fwd_d64_dv64_f32_full" in done.stdout
        assert re.search(r"^\| +fwd_d64_dv64_f32_causal \| +16 x 8 x 64 \| ", done.stdout, re.MULTILINE)
        told = json.loads((tmp_path / "rows.json").read_text())
        rows = [row for row in told["rows"] if row["contestant"] == "default"]
        assert [row["workload"] for row in rows] == ["fwd_d64_dv64_f32_full", "fwd_d64_dv64_f32_causal"]
        assert all(row["ms_least"] <= row["ms"] <= row["ms_most"] and row["tflops"] > 0 for row in rows)
        assert told["device"] and told["versions"]["tvm"] and "--markdown" in told["command"]

    def test_peers_that_cannot_take_part_are_named(self, tmp_path):
        """On a CPU, none of the GPU's kernels; ours are then alone in the table."""
        done = started("bench", "--target", "cpu", "--workload", "d64_f32_full", "--lengths", 32, 64, "--rounds", 1, "--milliseconds", 1,
                       "--logs", tmp_path, "--peers", "--json", tmp_path / "rows.json")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("FlashAttention-4 is left out of fwd_d64_dv64_f32_full: it is for cuda, found cpu\n") == 1
        assert re.search(r"^ *workload +batch x heads x length +contestant +\w+/s +ours / this +of peak +of exp bound +MHz +W$",
                         done.stdout, re.MULTILINE)
        assert re.search(r"^ *fwd_d64_dv64_f32_full +16 x 8 x 64 +default +\S+ +1.00x( +-){4}$", done.stdout, re.MULTILINE)
        told = json.loads((tmp_path / "rows.json").read_text())
        assert "cuDNN is left out of fwd_d64_dv64_f32_full: it is for cuda, found cpu" in told["left_out"]
        assert [row["watts"] for row in told["rows"] if row["contestant"] == "default"] == [None, None]

    def test_wrong_kernels_are_not_timed(self, tmp_path):
        full, causal, device = Workload(64, 64, "float32", "full"), Workload(64, 64, "float32", "causal"), cli.find_device("cpu")
        plan = family_named("cpu").default_plan(full, device.arch)
        path = build_artefact([Planned("cpu", plan)], full, device.arch, tmp_path / "full.so")
        with pytest.raises(bench.WrongKernel, match=f"the tuned plan of {causal.name} fails check case even: O"):
            bench.load_checked("tuned", causal, device, path)


class TestMake:
    def make(self, *arguments):
        return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def test_alone_it_prints_the_targets(self):
        targets = [line.split()[0] for line in self.make("--silent").splitlines()]
        assert targets == ["help", "demo", "test", "test-quick", "test-examples", "test-gpu", "setup", "clean"]

    @pytest.mark.parametrize("target", ["demo", "test", "test-quick", "test-examples", "test-gpu"])
    def test_a_ready_environment_is_taken_as_it_is(self, target):
        planned = self.make("--dry-run", target, "PYTHON=some/python")
        assert "venv" not in planned and "pip" not in planned and "some/python -m" in planned

    def test_demo_commands_are_accepted(self):
        lines = [shlex.split(line) for line in self.make("--dry-run", "demo", "PYTHON=python").splitlines() if "scripts." in line]
        assert [line[2] for line in lines] == ["scripts.tune", "scripts.export", "scripts.run", "scripts.bench"]
        for line in lines:
            accepted(line)


def accepted(words):
    """The arguments of `python -m scripts.X ...`, parsed by that command; a usage error fails the test."""
    module = imported(words[2].removeprefix("scripts."))
    parse = module.parse if words[2] == "scripts.run" else module.make_parser().parse_args
    return parse(words[3:])


class TestReadme:
    COMMANDS = re.findall(r"python -m scripts\.\w+[^`#\n]*", README)

    def test_is_short(self):
        assert len(README.splitlines()) <= 170

    @pytest.mark.parametrize("line", COMMANDS)
    def test_commands_are_accepted(self, line):
        accepted(shlex.split(line))

    @pytest.mark.parametrize("target", re.findall(r"\bmake ([a-z-]+)", README))
    def test_make_targets_exist(self, target):
        assert re.search(rf"^{target}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)

    def test_nest_is_true(self, request):
        found = re.search(r"`(python -m scripts\.show nests [^`]*)`[^`]*?\n\n((?:    .*\n)+)", NOTES.read_text())
        args = accepted(shlex.split(found[1]))
        device = cli.find_device(args.target)
        workload = options.workload_of(args.workload, device)
        it, = options.chosen_plans(args, device, workload)
        drawn = textwrap.indent(excerpt(loop_nest(build.schedule(family_named(it.family), workload, it.plan)), args.blocks), "    ") + "\n"
        if request.config.getoption("--update-nests"):
            NOTES.write_text(NOTES.read_text().replace(found[2], drawn))
        else:
            assert found[2] == drawn, "the nest has changed: run pytest --update-nests and look at the diff"

    def test_the_mask_of_a_user_is_one(self, tmp_path):
        """The example as it stands in a file, beside the one that the tests make of it."""
        name, code = re.search(r"here in a `(\w+)\.py` on PYTHONPATH:\n\n((?:    .*\n|\n)+)", README).groups()
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        probe = ("from te_defs.workload import Workload, make_arguments, Shape\nfrom tests.of_a_user import DocumentCausal\n"
                 f"mine = Workload.parse('fwd_d64_dv64_f16_{name}:DocumentCausal').mask_class\n"
                 "import numpy as np\nids = np.array([[0, 0, 1, 1, 2]])\n"
                 "a, b = (mask.of((ids,)).at(0).visible(4, 5) for mask in (mine, DocumentCausal))\n"
                 "assert (a == b).all() and a.sum() == 6\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_every_family_is_named(self):
        table = (ROOT / "schedules" / "README.md").read_text().split("| family |")[1]
        families = {*FAMILIES, *backward.OPERAND_FAMILIES, *(family for order in backward.FAMILIES.values() for family in order)}
        assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {family.NAME for family in families}
