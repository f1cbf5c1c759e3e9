"""On a GPU: the tuner with faults planted into CUDA kernels, what its sensors read, whole runs, a worker of a fleet, and tuned lengths."""
import re

import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from schedules.artefact.export import read_manifest
from schedules.buckets import bucket_named, nearest
from schedules.families import mma
from schedules.lowering import cuda_compile
from schedules.space import spaces_of
from schedules.tuning import build_worker, log
from schedules.tuning.run_worker import Setting
from schedules.tuning.runner import LATER, GatedRunner
from schedules.tuning.sensors import Sensors
from schedules.tuning.subjects import ForwardPass
from scripts import cli
from scripts.kernels import answer
from te_defs import reference
from te_defs.workload import Shape, Workload
from tests.commands import command
from tests.fleets import Place

pytestmark = pytest.mark.gpu

WORKLOAD = Workload(64, 64, "float16", "causal")
WHAT = ("--workload", WORKLOAD.name, "--family", "mma")
#: What the first block of a kernel does before all else, and what stands in the reason that it is refused with.
FAULTS = {
    "traps": ("__trap();", "fails: .*CUDA"),
    "writes where nothing is": ("*(volatile int*)64 = 1;", "fails: .*CUDA"),
    "hangs": ("while (clock64() != 1) __nanosleep(1000);", f"hangs: not measured within {LATER['cuda']} s"),
    "leaves out rows, and is faster": ("return;", "wrong: .* is right"),
}


@pytest.fixture(scope="module")
def kernels(toolkit, gpu_arch, tmp_path_factory):
    """{fault, or None: path} of the default plan of mma, built as the tuner builds it."""
    folder, space = tmp_path_factory.mktemp("kernels"), spaces_of((mma,), WORKLOAD, gpu_arch)[0]
    compile_cuda, paths, planted = cuda_compile.compile_cuda, {}, ""

    def compile_planted(code, *rest):
        first = "if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {" + planted + "}"
        code, count = re.subn(r"(__global__ void __launch_bounds__[^{]*\{)", lambda found: found[1] + first, code)
        assert count == 1, "one kernel"
        return compile_cuda(code, *rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_worker, "_toolkit", toolkit)
        patch.setattr(cuda_compile, "compile_cuda", compile_planted)
        for fault, (planted, _) in {None: ("", None), **FAULTS}.items():
            made = build_worker.make(build_worker.Job(space, space.seed, str(folder / f"{len(paths)}.so")))
            assert not isinstance(made, str), made
            paths[fault] = made.path
    return paths


@pytest.fixture
def device_runner(toolkit):
    made = GatedRunner("cuda", toolkit)
    made.setting = Setting("cuda", ForwardPass(WORKLOAD), Shape(2, 4, 4, 512, 512))
    yield made
    made.close()


def measured(made, path):
    return made.run([ms.runner.RunnerInput(path, "cuda", [])])[0].result()


class TestFaults:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_one_is_refused_by_name_and_the_next_is_measured(self, device_runner, kernels, fault):
        assert measured(device_runner, kernels[None]).error_msg is None
        assert re.match(FAULTS[fault][1], measured(device_runner, kernels[fault]).error_msg)
        again = measured(device_runner, kernels[None])
        assert again.error_msg is None and all(0 < float(it) < 1e-2 for it in again.run_secs)

    def test_a_finalist_that_traps_takes_no_other_with_it(self, device_runner, kernels):
        first, trap, last = device_runner.duel([kernels[None], kernels["traps"], kernels[None]], seed=0)
        assert re.match("fails: .*CUDA", trap["refused"]) and len(first["seconds"]) == len(last["seconds"]) > 1

    def test_sensors_tell_of_a_duel(self, device_runner, kernels):
        found = device_runner.duel([kernels[None]], seed=0)[0]["sensors"]
        assert 300 < found["sm_mhz"] < 3000 and 30 < found["watts"] < 1500 and 10 < found["celsius"] < 110
        assert Sensors().read().keys() == found.keys()


def tuned(folder, *arguments):
    """{name of a log: run.json} of a run of `scripts.tune` with a few plans."""
    command("tune", *WHAT, "--logs", folder, *arguments, code=0)
    return {path.parent.name: log.read_json(path) for path in folder.glob(f"*/*/{log.RUN}")}


class TestRuns:
    def test_a_run_ends_in_a_duel_with_sensors_and_a_report(self, tmp_path):
        run = tuned(tmp_path, "--length", 512, "--trials", 6)[WORKLOAD.name]
        assert run["best"]["measured"] == "duel" and run["trials"] == 6 and run["best"]["last_round"]["sensors"]["sm_mhz"] > 300
        page, = tmp_path.glob("*/*/report.html")
        assert "http" not in re.sub(r"http://www.w3.org/\S+", "", page.read_text()), "no network is needed"

    def test_a_worker_of_a_fleet_measures_on_its_gpu(self, tmp_path):
        place = Place(1, "auto")
        try:
            run = tuned(tmp_path, "--length", 512, "--trials", 4, "--rpc", f"127.0.0.1:{place.port}", "--key", place.key)[WORKLOAD.name]
        finally:
            place.end()
        assert run["best"]["measured"] == "duel" and len(run["sessions"][0]["fleet"]["workers"]) == 1
        assert run["device"]["slug"] == cli.find_device("auto").slug

    def test_lengths_end_in_one_artefact_and_each_call_goes_to_the_nearest(self, tmp_path):
        lengths, path = ("512", "64x2048"), tmp_path / "it.so"
        assert len(tuned(tmp_path / "logs", "--lengths", *lengths, "--trials", 3)) == 2
        command("export", *WHAT[:2], "--logs", tmp_path / "logs", "--output", path, code=0)
        buckets, module = [bucket_named(text) for text in lengths], tvm.runtime.load_module(str(path))
        told = read_manifest(path)["buckets"]
        for n, m in ((1, 1), (40, 900), (63, 2100), (300, 300), (700, 699), (0, 5)):
            it = told[module["flash_attention_forward_bucket"](n, m)]
            assert (it["q_len"], it["kv_len"]) == tuple(vars(nearest(buckets, n, m)).values())
            inputs = reference.make_inputs(WORKLOAD, Shape(2, 4, 2, n, m))
            found = answer(module["flash_attention_forward"], inputs, 0.125, (), tvm.cuda(0))
            assert reference.complaint(found, WORKLOAD, *inputs, 0.125, (), reference.forward(WORKLOAD, *inputs, 0.125)) is None
