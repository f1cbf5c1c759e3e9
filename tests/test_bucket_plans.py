"""Plans of several lengths from the log to the call: kernels of an artefact, their numbers, and what the commands say. No GPU is needed."""
import itertools
import json
import random
import re
from dataclasses import asdict

import numpy as np
import pytest
import tvm

from schedules.arch import cpu_arch, cuda_arch
from schedules.artefact.export import read_manifest
from schedules.artefact.kernels import kinds_of_kernels, merged
from schedules.buckets import Bucket, bucket_named, nearest
from schedules.families import cpu, wgmma
from schedules.tuning import records
from schedules.tuning.log import MEASURED, Log, Outcome, data_of
from schedules.tuning.nearest import Machine, nearest_records
from schedules.tuning.subjects import BackwardPass, ForwardPass, subject_named
from scripts import bench, cli, options
from scripts.kernels import Gradients, Planned, answer, answer_gradients, build_artefact, default_gradients
from te_defs import reference
from te_defs.workload import Shape, Workload, standard_shape
from tests.commands import command

HERE = cpu_arch("x86-64-v4", 512, 2)
WORKLOAD = Workload(32, 16, "float32", "causal")


def plan_with(kv_tile, arch=HERE):
    """A plan for a CPU with tiles of 64 queries and so many keys."""
    return next(plan for plan in cpu.tile_choices(WORKLOAD, arch) if (plan.q_tile, plan.kv_tile) == (64, kv_tile))


#: Two plans that add in another order, so that their results differ in some bits.
SMALL, LARGE = plan_with(64), plan_with(128)
AT = {"16x16": SMALL, "256x256": LARGE, "1x64": SMALL}
#: Query and key rows: around the border of 16 and 256, which is 64, 0 and 1, longer than all, and queries and keys apart.
LENGTHS = [(0, 0), (0, 9), (1, 0), (1, 1), (1, 33), (16, 16), (63, 63), (64, 64), (65, 65), (63, 65), (256, 256), (700, 700), (1, 700),
           (700, 1)]


def planned(text, plan, seconds=1e-3, family="cpu"):
    it = bucket_named(text)
    shape = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": it.q_len, "kv_len": it.kv_len}
    return Planned(family, plan, {"seconds": seconds, "shape": shape, "device": "somelake-2c", "date": "2026-12-01", "record": "a/b"})


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    """(path of an artefact with both plans at three lengths, {plan: module of an artefact of its own})."""
    folder = tmp_path_factory.mktemp("buckets")
    several = build_artefact([planned(*it) for it in AT.items()], WORKLOAD, HERE, folder / "several.so")
    alone = {plan: tvm.runtime.load_module(str(build_artefact([planned("16", plan)], WORKLOAD, HERE, folder / f"{plan.kv_tile}.so")))
             for plan in (SMALL, LARGE)}
    return several, alone


class TestNumbers:
    @pytest.mark.parametrize("q_len, kv_len", LENGTHS)
    @pytest.mark.parametrize("scale", [0.2, -0.2])
    def test_are_those_of_the_plan_that_is_taken(self, artefacts, q_len, kv_len, scale):
        path, alone = artefacts
        inputs = reference.make_inputs(WORKLOAD, Shape(2, 4, 2, q_len, kv_len))
        taken = AT[str(nearest([bucket_named(text) for text in AT], q_len, kv_len))]
        found = answer(tvm.runtime.load_module(str(path))["flash_attention_forward"], inputs, scale)
        wanted = answer(alone[taken]["flash_attention_forward"], inputs, scale)
        assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]
        answers = reference.forward(WORKLOAD, *inputs, scale)
        assert reference.mismatch(*found, *answers, *reference.tolerances(WORKLOAD, *inputs, scale, (), answers)) is None

    def test_would_show_the_other_plan(self, artefacts):
        inputs = reference.make_inputs(WORKLOAD, Shape(2, 4, 2, 200, 200))
        one, other = (answer(module["flash_attention_forward"], inputs, 0.2)[0] for module in artefacts[1].values())
        assert one.tobytes() != other.tobytes()

    def test_views_go_to_the_same_plan(self, artefacts):
        path, alone = artefacts
        for length, plan in ((17, SMALL), (300, LARGE)):
            inputs = reference.make_inputs(WORKLOAD, Shape(2, 4, 2, length, length))
            found, wanted = (answer(module["flash_attention_forward"], inputs, 0.2, storage="bhnd")
                             for module in (tvm.runtime.load_module(str(path)), alone[plan]))
            assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]


class TestManifest:
    def test_lists_buckets_and_each_distinct_plan_once(self, artefacts):
        manifest = read_manifest(artefacts[0])
        assert [variant["plan"]["kv_tile"] for variant in manifest["variants"]] == [64, 128]
        told = [(it["q_len"], it["kv_len"], it["plan"]["kv_tile"], it["family"], it["variants"]) for it in manifest["buckets"]]
        assert told == [(1, 64, 64, "cpu", [0]), (16, 16, 64, "cpu", [0]), (256, 256, 128, "cpu", [1])]
        assert {it["measured"]["seconds"] for it in manifest["buckets"]} == {1e-3}

    def test_one_length_is_no_bucket(self, tmp_path):
        paths = [build_artefact([it], WORKLOAD, HERE, tmp_path / f"{name}.so")
                 for name, it in (("tuned", planned("16", SMALL)), ("default", Planned("cpu", SMALL)))]
        for path in paths:
            assert "buckets" not in read_manifest(path) and len(read_manifest(path)["variants"]) == 1
            assert not tvm.runtime.load_module(str(path)).implements_function("flash_attention_forward_bucket")


class TestMerged:
    @pytest.mark.parametrize("seed", range(30))
    def test_keeps_the_order_of_each(self, seed):
        rng = random.Random(seed)
        wanted = {text: rng.sample("abcdefg", rng.randint(1, 7)) for text in ("1x1", "2x2", "3x3", "4x1")[:rng.randint(2, 4)]}
        plans = [planned(text, SMALL) for text in wanted]
        found = merged(plans, lambda it: wanted[str(it.bucket)])
        for it in plans:
            assert [kind for kind, tuned in found if it.tuned in tuned] == wanted[str(it.bucket)]
        assert [kind for kind, _ in merged(plans[:1], lambda it: wanted["1x1"])] == wanted["1x1"]

    def test_what_is_the_same_stands_once(self):
        found = merged([planned("1", SMALL), planned("2", SMALL)], lambda it: "abc")
        assert [(kind, len(tuned)) for kind, tuned in found] == [("a", 2), ("b", 2), ("c", 2)]

    def test_kernels_of_hopper(self):
        """Each distinct plan once, with one for small grids; that for grouped heads is shared; the architecture has no word on lengths."""
        workload, arch = Workload(64, 64, "float16"), cuda_arch("sm_90a")
        seed = wgmma.default_plan(workload, arch)
        other = seed.but(stages=3)
        plans = [planned(text, plan, family="wgmma") for text, plan in (("512", other), ("4096", seed), ("16384", seed))]
        found = merged(plans, lambda it: kinds_of_kernels(workload, arch, it, alone=False))
        assert [(kind[0].NAME, kind[1].q_tile, [it.bucket.q_len for it in tuned]) for kind, tuned in found] == [
            ("mma", 64, [512, 4096, 16384]), ("wgmma", other.q_tile, [512]), ("wgmma", 64, [512]),
            ("wgmma", seed.q_tile, [4096, 16384]), ("wgmma", 64, [4096, 16384])]
        assert [kind[1] for kind, _ in found if kind[1].q_tile > 64] == [other, seed]
        assert {kind[2].queries for kind, _ in found} == {0}


class TestGradients:
    def test_are_those_of_the_plan_that_is_taken(self, tmp_path):
        first = default_gradients(WORKLOAD, HERE)
        other = type(first.plan)(*(plan.but(q_tile=plan.q_tile // 2, kv_tile=plan.kv_tile // 2) for plan in first.plan.by_role().values()))
        given = [Gradients(first.family, plan, planned(text, plan).measured) for text, plan in (("16", other), ("256", first.plan))]
        forward = [Planned("cpu", SMALL)]
        several = build_artefact(forward, WORKLOAD, HERE, tmp_path / "several.so", given)
        told = read_manifest(several)
        assert [it["q_len"] for it in told["backward"]["buckets"]] == [16, 256] and "buckets" not in told
        several, *alone = (tvm.runtime.load_module(str(path)) for path in (
            several, *(build_artefact(forward, WORKLOAD, HERE, tmp_path / f"{it.bucket}.so", [it]) for it in given)))
        ask, bits = several["flash_attention_backward_bucket"], []
        for length, place in ((1, 0), (63, 0), (64, 1), (300, 1)):
            q, k, v = reference.make_inputs(WORKLOAD, Shape(1, 2, 2, length, length))
            out, lse = answer(several["flash_attention_forward"], (q, k, v), 0.2)
            dout = np.random.default_rng(1).standard_normal(out.shape, np.float32)
            found, *wanted = ([x.tobytes() for x in answer_gradients(module["flash_attention_backward"], (dout, q, k, v, out, lse), 0.2)]
                              for module in (several, *alone))
            assert ask(length, length) == place and found == wanted[place]
            bits.append(wanted[0] != wanted[1])
        assert any(bits), "the plans must differ in bits for this to be a test"


@pytest.fixture
def logs(tmp_path):
    """Function that writes a log with a best plan of the CPU that is here, at lengths; it is the first log where no bucket is named."""
    device = cli.find_device("cpu")

    def write(text, kv_tile=64, bucket=None, slug=device.slug, arch=device.arch, **best):
        at, plan, subject = bucket_named(text), plan_with(kv_tile, arch), ForwardPass(WORKLOAD)
        shape = standard_shape(WORKLOAD, at.q_len, 1024, 64, at.kv_len)
        place = Log(tmp_path / "logs", slug, subject, arch, bucket and bucket_named(bucket))
        place.write_run({
            "workload": subject.name, "arch": arch.name, "device": {"slug": slug, "cpu": asdict(arch)}, "shape": data_of(shape),
            "best": {"family": "cpu", "plan": plan.values(), "seconds": 1e-3,
                     "declaration": subject.declaration_of(("cpu", plan), arch), **best},
            "sessions": [{"date": "2026-12-01"}]})
        return place
    write.root, write.device = tmp_path / "logs", device
    return write


def plans_of(logs):
    found = records.best_records(logs.root, logs.device.slug, WORKLOAD, logs.device.arch)
    return [(str(it.bucket), it.plan.kv_tile) for it in found]


class TestLogs:
    def test_an_old_one_is_the_bucket_of_its_length(self, logs):
        logs("48")
        assert plans_of(logs) == [("48x48", 64)]

    def test_further_ones_stand_beside_it(self, logs):
        logs("48"), logs("512", 128, "512"), logs("1x64", 128, "1x64"), logs("16", 64, "16")
        assert plans_of(logs) == [("48x48", 64), ("1x64", 128), ("16x16", 64), ("512x512", 128)]
        assert subject_named("fwd_d32_dv16_f32_causal@1x64") == ForwardPass(WORKLOAD)
        assert subject_named("bwd_d32_dv16_f32_causal+any-order@16x16") == BackwardPass(WORKLOAD, "any-order")

    def test_of_one_bucket_the_faster_counts(self, logs):
        logs("48", seconds=2e-3), logs("48", 128, "48"), logs("9", 64, "9")
        assert plans_of(logs) == [("9x9", 64), ("48x48", 128)]

    def test_one_without_a_best_plan_is_left_out(self, logs):
        logs("48")
        logs("64", 128, "64").path.joinpath("run.json").unlink()
        place = Log(logs.root, logs.device.slug, ForwardPass(WORKLOAD), logs.device.arch, Bucket(9, 9))
        place.write_measured({("cpu", SMALL): Outcome(refused="spill: 9")}, {}, Shape(1, 2, 2, 9, 9))
        assert plans_of(logs) == [("48x48", 64)]

    @pytest.mark.parametrize("best, message", [(dict(declaration="1"), "the declaration has changed since"),
                                               (dict(family="gone"), "there is no family gone any more")])
    def test_one_that_no_longer_fits_is_refused_by_name(self, logs, best, message):
        logs("48"), logs("512", 128, "512", **best)
        with pytest.raises(records.StaleRecord, match=rf"the record in .*{WORKLOAD.name}@512x512 must be of the sources .* {message}"):
            plans_of(logs)

    def test_one_of_other_lengths_than_its_name_is_refused(self, logs):
        logs("48"), logs("64", 128, "512")
        with pytest.raises(records.ForeignLog, match="run.json must be timed at 512x512, as its folder says, found 64x64: rename the"):
            plans_of(logs)

    @pytest.mark.parametrize("end, message", [("@old", "found 'fwd_.*@old'"), ("@0x5", "found 'fwd_.*@0x5'"),
                                              ("@9999999999x5", "from 1 to 10.* are wanted, found 9999999999x5")])
    def test_a_folder_with_another_name_is_refused(self, logs, end, message):
        place = logs("48")
        place.path.rename(place.path.with_name(place.name + end))
        with pytest.raises((records.LogError, cli.WorkloadError), match=message):
            plans_of(logs)

    def test_all_of_a_lender_are_lent(self, logs):
        lender = cpu_arch("otherlake", HERE.vector_bits, 8)
        for text, kv_tile in (("16", 64), ("512", 128)):
            logs(text, kv_tile, text, slug="near-8c", arch=lender)
        logs("64", 128, "64", slug="near-8c", arch=lender, declaration="1")
        here = cpu_arch("somelake", HERE.vector_bits, 4)
        found = nearest_records(logs.root, ForwardPass(WORKLOAD), Machine("here", here))
        assert [(str(it.record.bucket), it.record.plan.kv_tile) for it in found] == [("16x16", 64), ("512x512", 128)]
        sentence, = found[0].passed_over
        assert sentence.startswith("near-8c is passed over: the record in ") and "@64x64 must be of the sources" in sentence


@pytest.fixture
def exported(logs, tmp_path):
    """(output of scripts.export, path) for three lengths, two of which have one plan."""
    logs("16"), logs("256", 128, "256"), logs("1x64", 64, "1x64")
    path = tmp_path / "it.so"
    return command("export", "--workload", WORKLOAD.name, "--target", "cpu", "--logs", logs.root, "--output", path, code=0).stdout, path


class TestCommands:
    def test_export_and_run(self, exported):
        output, path = exported
        told = json.loads(output.splitlines()[0])
        assert set(told["buckets"]) == {"16x16", "256x256", "1x64"} and told["buckets"]["256x256"].startswith("cpu q_tile=64 kv_tile=128 ")
        assert len(read_manifest(path)["variants"]) == 2
        ran = command("run", path, "--lengths", 16, 300, "--repeat", 1, code=0).stdout
        assert re.search(r"lengths near 256x256: cpu, kv_tile=128 .*, tuned on .*, 1\.000 ms", ran)
        assert re.search(r"length 16, plan of 16x16: \d", ran) and re.search(r"length 300, plan of 256x256: \d", ran)
        assert "33 of 33 check cases passed" in ran, "each variant sees each case"

    def test_show(self, exported, logs):
        what = ("show", "plan", "--workload", WORKLOAD.name, "--target", "cpu", "--logs", logs.root, "--plan", "best")
        for lengths, tile in (((), 64), (("--length", "300"), 128), (("--length", "1x64"), 64)):
            output = command(*what, *lengths, code=0).stdout
            assert f"kv_tile={tile} " in json.loads(output.splitlines()[0])["plan"]
            assert len(re.findall(r"^  (16x16|256x256|1x64) +cpu: q_tile=64", output, re.MULTILINE)) == 3
            assert all(f"kv_tile={tile} " in line for line in output.splitlines() if line.endswith(", shown below"))

    def test_export_of_a_plan_that_no_longer_fits(self, logs, tmp_path):
        logs("16"), logs("256", 128, "256", declaration="1")
        done = command("export", "--workload", WORKLOAD.name, "--target", "cpu", "--logs", logs.root, "--output", tmp_path / "x.so", code=1)
        assert re.match(r"error: the record in .*@256x256 must be of the sources as they are, found that the declaration", done.stderr)
        assert not (tmp_path / "x.so").exists()

    def test_bench_says_which_it_timed(self):
        row = {"workload": "w", "batch": 1, "heads": 2, "tflops": 1.0, "ours_over_this": 1.0,
               **dict.fromkeys(("of_peak", "of_exp_bound", "mhz", "watts"))}
        rows = [{**row, "length": length, "contestant": name, "ms": 1.0} for length in (8, 300) for name in ("default", "tuned")]
        plans = [planned("16", SMALL), planned("256", LARGE)]
        labelled = [*bench.labelled(rows[:2], plans, 8), *bench.labelled(rows[2:], plans, 300)]
        head, *lines = bench.table(labelled).splitlines()
        assert head.endswith("tuned at") and [line.split()[-1] for line in lines] == ["16x16", "256x256"]
        assert [" ".join(line.split()[6:-6]) for line in bench.peer_table(labelled).splitlines()[1:]] == [
            "default", "tuned at 16x16", "default", "tuned at 256x256"]
        assert "tuned at" not in bench.table([*bench.labelled(rows, plans[:1], 8)])

    def test_report_and_merge_know_the_logs(self, logs, tmp_path):
        logs("16"), logs("256", 128, "256")
        for place in records.logs_of(logs.root, logs.device.slug, ForwardPass(WORKLOAD), logs.device.arch):
            place.write_measured({("cpu", SMALL): Outcome(seconds=1e-3)}, {}, Shape(**place.read_run()["shape"]))
        page = tmp_path / "page.html"
        command("report", "--logs", logs.root, "--workload", f"{WORKLOAD.name}@256x256", "--output", page, code=0)
        assert WORKLOAD.name in page.read_text()
        assert len(command("report", "--logs", logs.root, code=0).stdout.splitlines()) == 3


SMALL_RUN = ("--workload", "fwd_d16_dv8_f32_full", "--target", "cpu", "--workers", "1")


class TestTune:
    @pytest.mark.parametrize("arguments, message", [
        (("--lengths",), "expected at least one argument"),
        (("--lengths", "0"), "lengths are wanted as query rows x key rows, such as 1x8192, or 512 for both, found '0'"),
        (("--lengths", "64", "1x"), "found '1x'"), (("--lengths", "64", "99999999999"), "found '99999999999'"),
        (("--lengths", "1x9999999999"), "from 1 to 10^9 are wanted, found 1x9999999999"),
        (("--length", "64", "--lengths", "64"), "not allowed with argument --length")])
    def test_bad_lengths(self, arguments, message):
        assert message in command("tune", *SMALL_RUN, *arguments, code=2).stderr

    def folders(self, *arguments):
        output = command("tune", *SMALL_RUN, "--dry-run", *arguments, code=0).stdout
        return [line.split("/")[-1] for line in re.findall(r"^  log: (.*)$", output, re.MULTILINE)]

    def test_each_has_a_log_and_the_usual_length_the_first(self, tmp_path):
        name = "fwd_d16_dv8_f32_full"
        assert self.folders("--logs", tmp_path) == [name]
        assert self.folders("--logs", tmp_path, "--lengths", "64", "1024", "1x512", "64") == [f"{name}@64x64", name, f"{name}@1x512"]

    def test_the_first_log_goes_on_at_its_length(self, tmp_path):
        subject, device = subject_named("fwd_d16_dv8_f32_full"), cli.find_device("cpu")
        first = Log(tmp_path, device.slug, subject, device.arch)
        first.write_measured({}, {}, standard_shape(subject.workload, 64, options.TOKENS["cpu"], options.HIDDEN["cpu"]))
        assert self.folders("--logs", tmp_path, "--lengths", "64", "1024") == [subject.name, f"{subject.name}@1024x1024"]
        (first.path / MEASURED).write_text(json.dumps({"plans": [], "shape": [1]}))
        done = command("tune", *SMALL_RUN, "--dry-run", "--logs", tmp_path, "--lengths", "64", code=1)
        assert "measured.json must have the shape that was timed, found another form" in done.stderr

    def test_the_shape_has_as_many_tokens(self):
        at = {text: standard_shape(WORKLOAD, it.q_len, 1024, 64, it.kv_len) for text in ("64", "1x512", "512x1")
              for it in (bucket_named(text),)}
        assert [(it.batch, it.q_heads, it.q_len, it.kv_len) for it in at.values()] == [(16, 2, 64, 64), (2, 2, 1, 512), (2, 2, 512, 1)]

    @pytest.mark.slow
    def test_a_session_for_two_lengths_ends_in_one_artefact(self, tmp_path):
        logs, path = tmp_path / "logs", tmp_path / "it.so"
        what = ("--workload", "fwd_d16_dv8_f32_full", "--target", "cpu")
        done = command("tune", *SMALL_RUN, "--logs", logs, "--lengths", "32", "1x96", "--trials", "2", code=0).stdout
        assert all(f"fwd_d16_dv8_f32_full@{name}: best of 2 plans" in done for name in ("32x32", "1x96"))
        command("export", *what, "--logs", logs, "--output", path, code=0)
        assert [(it["q_len"], it["kv_len"]) for it in read_manifest(path)["buckets"]] == [(1, 96), (32, 32)]
        assert "check cases passed" in command("run", path, "--lengths", "32", "--repeat", 1, code=0).stdout
