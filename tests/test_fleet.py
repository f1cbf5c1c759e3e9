"""Tuning over a fleet, on loopback: TVM's tracker and two workers of this CPU, and what can happen to each of them."""
import concurrent.futures
import json
import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tvm.rpc.base import TrackerCode

from schedules import registry
from schedules.arch import CUDA_ARCHS
from schedules.lowering.toolkit import run_c_compiler
from schedules.tuning import fleet, fleet_tools, fleet_worker, log, reasons
from schedules.tuning.build_worker import Job, make
from schedules.tuning.fleet import Fleet, FleetError, Over, sound
from schedules.tuning.fleet_link import ask_tracker
from schedules.tuning.features import token
from schedules.tuning.fleet_tools import FleetBuilder, FleetRunner
from schedules.tuning.run_worker import Setting
from schedules.tuning.runner import GatedRunner
from schedules.tuning.subjects import ForwardPass
from scripts import cli, options, remote, tune
from tests import stand_in
from tests.commands import command
from tests.fake_tuner import SHAPE, WORKLOAD, spaces
from tests.fleets import Place, free_port

pytestmark = pytest.mark.slow

SETTING = Setting("cpu", ForwardPass(WORKLOAD), SHAPE)
WHAT = ("--workload", WORKLOAD.name, "--length", "64", "--workers", "1")


class Cpus(Place):
    """A tracker with workers of this CPU."""

    def fleet(self):
        """All workers, once those that another test had are back."""
        def free():
            return ask_tracker(self.address, TrackerCode.SUMMARY)["queue_info"].get("cpus", {}).get("free")
        eventually(lambda: free() == len(self.workers))
        return self.held()

    def held(self):
        return Fleet(self.address, "cpus", lambda facts: None, report=lambda sentence: None)

    def tune(self, *arguments):
        return command("tune", *WHAT, "--rpc", f"127.0.0.1:{self.port}", "--key", "cpus", *arguments)


@pytest.fixture(scope="module")
def two():
    """Two workers, which each test leaves as it finds them."""
    place = Cpus(2)
    yield place
    place.end()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """{fault: path} of a sound kernel and a wrong one."""
    folder, seeds = tmp_path_factory.mktemp("kernels"), {space.seed.fault: space for space in spaces()}
    paths = {fault: str(folder / f"{fault}.so") for fault in (stand_in.SOUND, stand_in.WRONG)}
    for fault, path in paths.items():
        assert not isinstance(make(Job(seeds[fault], seeds[fault].seed, path)), str)
    return paths


@pytest.fixture(scope="module")
def artefact(kernels):
    """A sound kernel."""
    return kernels[stand_in.SOUND]


@pytest.fixture
def only_stand_in(monkeypatch):
    """A family and a shape that take moments."""
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))
    monkeypatch.setitem(options.TOKENS, "cpu", 64)
    monkeypatch.setitem(options.HIDDEN, "cpu", 32)


def eventually(true, seconds=60):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.05)


def measured(held, path, label="a plan"):
    """What a Fleet finds of an artefact: beside a best that nothing comes near, so that it is gated, and one look at it is enough."""
    runner = FleetRunner(held)
    runner.best = 1e-9, None
    runner.begin(path, SETTING, label)
    return runner._answers[path]


class TestARun:
    def test_completes_and_every_candidate_passes_the_gate_at_the_worker(self, two, tmp_path, only_stand_in):
        done = two.tune("--target", "cpu", "--logs", tmp_path, "--trials", 4)
        assert done.returncode == cli.DONE, done.stderr
        folder = tmp_path / cli.find_device("cpu").slug / WORKLOAD.name
        run, data = log.read_json(folder / log.RUN), log.read_json(folder / log.MEASURED)
        session, = run["sessions"]
        assert sorted(name.split()[0] for name in session["fleet"]["workers"]) == sorted(two.workers)
        assert session["fleet"]["lost"] == [] and session["workers"] == 1
        assert run["best"]["measured"] == "duel" and run["device"]["slug"] == folder.parent.name
        faults = {values[data["fields"]["stand_in"].index("fault")]: outcome for _, values, *outcome in data["plans"]}
        assert "is right: error" in faults[stand_in.WRONG][1] and "no such block" in faults[stand_in.UNSCHEDULABLE][1]
        assert faults[stand_in.SOUND][0] > 0 and len(data["plans"]) == 4


@pytest.fixture(scope="class")
def held(two):
    """A fleet of all workers there are."""
    made = two.fleet()
    yield made
    made.close()


class TestAtTheWorkers:
    def test_a_kernel_that_crashes_costs_none(self, held, artefact, tmp_path):
        source, library, before = tmp_path / "bad.c", tmp_path / "bad.so", (held.size, len(held.losses))
        source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void load() { abort(); }\n")
        run_c_compiler(["-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)])
        assert "the kernel crashes" in measured(held, str(library))["refused"]
        assert len(measured(held, artefact)["seconds"]) == 1
        assert (held.size, len(held.losses)) == before

    def test_no_kernel_is_taken_for_one_before_it(self, held, kernels):
        """They arrive at a worker under one name, and the loader knows libraries by their paths."""
        order = (stand_in.SOUND, stand_in.WRONG, stand_in.SOUND)
        assert ["refused" in measured(held, kernels[fault]) for fault in order] == [False, True, False], "by the worker that was idle last"
        runner = FleetRunner(held)
        runner.setting = SETTING
        assert ["refused" in found for found in runner.duel([kernels[fault] for fault in order], seed=0)] == [False, True, False]

    def test_the_best_so_far_is_sent_along_and_the_first_to_pass_is_proved(self, held, artefact, tmp_path):
        runner, best = FleetRunner(held), tmp_path / "best.so"
        best.write_bytes(Path(artefact).read_bytes())

        def answer(*known):
            runner.best = known
            runner.begin(artefact, SETTING, "a plan")
            assert not Path(f"{artefact}.best").exists()
            return runner._answers.pop(artefact)
        alone = answer(None, None)
        assert len(alone["seconds"]) == 3 and alone["proven"] is True
        assert 0.05 < min(answer(1.0, str(best))["seconds"]), "as long as a best of one second: the kernel itself takes far less"
        best.unlink()  # by the session, which has a better one
        assert max(answer(1.0, str(best))["seconds"]) < 0.05
        assert answer(1e-9, None)["proven"] is False

    def test_the_last_round_waits_for_nothing_that_is_not_wanted_any_more(self, held, artefact):
        runner, link = FleetRunner(held), held._idle.pop()
        runner.setting, others, late = SETTING, [held._idle.pop() for _ in held._idle[:]], "late.so"
        wanted = runner.until_next_phase()
        waiting = threading.Thread(target=runner.begin, args=(late, SETTING, "a plan", None, wanted))
        waiting.start()
        last = threading.Thread(target=lambda: runner.found.update(duel=runner.duel([artefact], seed=0)))
        last.start()
        eventually(lambda: not wanted())
        waiting.join(5)
        assert runner._answers == {late: {"refused": reasons.OUT_OF_TIME}} and "duel" not in runner.found
        for each in (link, *others):
            held._give_back(each)
        last.join(60)
        assert len(runner.found["duel"][0]["seconds"]) == 7

    def test_another_tuner_finds_them_busy(self, two, held, monkeypatch):
        monkeypatch.setattr(fleet, "FIRST_LOOKS", 1)
        with pytest.raises(FleetError, match=f"found {held.size} that are busy: wait for them, or start more"):
            two.held()

    @pytest.mark.parametrize("change, why", [
        (lambda facts: facts["versions"].update(sources="others"), "one with sources others where this machine has "),
        (lambda facts: facts["versions"].update(tvm="0.26"), "one with tvm 0.26 where this machine has "),
        (lambda facts: facts["versions"].update(machine="aarch64"), "one with machine aarch64 where this machine has "),
        (lambda facts: facts["versions"].pop("tvm"), "one that does not tell what it is"),
        (lambda facts: facts.update(slug="nvidia-h100"), "a nvidia-h100 where the first is a "),
        (lambda facts: facts["arch"].update(cores=99), "a .* where the first is a "),
        (lambda facts: None, "None"),
    ])
    def test_those_that_differ_are_not_taken(self, held, change, why):
        facts = json.loads(json.dumps(held.facts))
        change(facts)
        assert re.match(why, str(held._why_not(facts)))

    def test_one_that_stands_still_is_given_up_and_comes_back_once_its_session_is_killed(self, two, held, artefact, tmp_path, monkeypatch):
        for name, value in (("ATTEMPTS", 1), ("QUESTIONS", 1), ("TIMEOUT", 5), ("SLACK", 5)):
            monkeypatch.setattr(fleet, name, value)
        session = lambda link: psutil.Process(two.workers[link.name].pid).children()[0].children()[0]  # noqa: E731
        found, name, (stopped, *_) = at_work(held, artefact, tmp_path, session, signal.SIGSTOP)
        assert found["refused"] == "fails: lost with 1 workers, the last of which: no answer within 10 s"
        stopped.kill()
        monkeypatch.undo()
        other = held._idle.pop()  # let it be busy
        assert len(measured(held, artefact)["seconds"]) == 1
        assert [entry.split()[0] for entry in held.names].count(name) == 2
        held._give_back(other)

    def test_one_that_is_killed_costs_its_candidate_one_more_try(self, two, held, artefact, tmp_path):
        before = held.size
        worker = lambda link: psutil.Process(two.workers[link.name].pid)  # noqa: E731
        found, name, (_, *below) = at_work(held, artefact, tmp_path, worker, signal.SIGKILL)
        two.workers.pop(name).wait()
        assert len(found["seconds"]) == 1
        loss = held.losses[-1]
        assert (loss["worker"], loss["plan"]) == (name, "the plan at hand") and "the connection broke" in loss["reason"]
        assert held.size == before - 1
        assert len(below) == 3, "server, session and the process at the device"
        eventually(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))


def at_work(held, artefact, folder, victim, number):
    """What comes of an artefact in whose measurement `victim(link)`, a psutil.Process, gets a signal; the link's name; and the victim with
    the processes below it."""
    path, first, found = slow_once(artefact, folder), folder / "first", []
    thread = threading.Thread(target=lambda: found.append(measured(held, path, "the plan at hand")))
    thread.start()
    eventually(lambda: not first.exists())
    link, = held._links - set(held._idle)
    family = [victim(link), *victim(link).children(recursive=True)]
    family[0].send_signal(number)
    thread.join(120)
    return found[0], link.name, family


def slow_once(artefact, folder):
    """Path of the same kernel in a library that takes a minute to load where the file `first` still is, which it removes."""
    source, library = folder / "slow.c", folder / "slow.so"
    (folder / "first").touch()
    source.write_text("#include <unistd.h>\n__attribute__((constructor)) static void load() "
                      f'{{ if (unlink("{folder / "first"}") == 0) sleep(60); }}\n')
    run_c_compiler(["-x", "c", "-shared", "-fPIC", str(source), "-Wl,--no-as-needed", "-x", "none", artefact, "-o", str(library)])
    return str(library)


def test_what_is_cancelled_before_it_is_built_is_not_refused():
    """Whatever comes first: what is done with the plan, or what its building's end calls."""
    building = concurrent.futures.Future()
    runner = SimpleNamespace(setting=SETTING, until_next_phase=lambda: None)
    made = FleetBuilder(SimpleNamespace(begin=lambda mod, whole: building), runner)
    made._threads = SimpleNamespace(submit=lambda function, *arguments: function(*arguments))
    future = made.begin(token(spaces()[0], spaces()[0].seed).mod)
    assert future.cancel() and future.cancelled()


def test_workers_that_can_measure_nothing_are_put_aside_and_no_plan_is_refused_for_them(two, artefact, monkeypatch):
    monkeypatch.setattr(fleet, "PATIENCE", 2.0)
    held = two.fleet()
    try:
        runner, count = FleetRunner(held), held.size
        with pytest.raises(Over):
            runner.begin(artefact, Setting("cpu", SimpleNamespace(name="fwd_d16_dv8_f32_nowhere:Mask"), SHAPE), "a plan")
        assert runner._answers == {} and held.size == 0 and len(held.losses) == count
        assert re.fullmatch(r"a worker that fits was wanted at tracker .*, found one that can measure nothing \(.*nowhere.*\): start .*",
                            held.lost), held.lost
    finally:
        held.close()


@pytest.mark.parametrize("what", ["measure", "duel"])
def test_a_device_that_is_gone_is_no_fault_of_the_kernel(what, artefact, monkeypatch):
    def ask(timeout, function, *arguments):
        raise ChildProcessError("the process has ended")
    desk = fleet_worker._Desk({"kind": "cpu"}, None)
    desk._runner = GatedRunner("cpu", None)
    desk._runner._worker = SimpleNamespace(served=0, ask=ask)
    monkeypatch.setattr(desk, "_alone", lambda path: path)
    asked = {"do": what, "files": [artefact], "seconds": None, "best": None, "seed": 0, **fleet_tools._about(SETTING)}
    assert reasons.LOST in json.loads(desk.answer(json.dumps(asked)))["failed"]


def test_without_tracker_it_goes_on_and_without_workers_it_keeps_what_there_is(tmp_path, only_stand_in, monkeypatch):
    place, tried = Cpus(1), []

    def show(lines, progress):
        tried.append(progress.tried)
        if len(tried) == 1:
            place.tracker.kill()
        if len(tried) == 3:
            next(iter(place.workers.values())).kill()
    monkeypatch.setattr(tune.Lines, "show", show)
    monkeypatch.setattr(fleet, "PATIENCE", 2.0)
    try:
        done = place.tune("--logs", tmp_path)
    finally:
        place.end()
    assert done.returncode == cli.FAILED and done.stderr.count("\n") == 1
    assert re.fullmatch(r"error: a tracker was wanted at 127.0.0.1:\d+, found none \(.*\): start .*: what was tuned so far is kept "
                        r"in .*, the same command goes on there\n", done.stderr), done.stderr
    folder = tmp_path / cli.find_device("cpu").slug / WORKLOAD.name
    data, run = log.read_json(folder / log.MEASURED), log.read_json(folder / log.RUN)
    assert len(data["plans"]) >= 3 and run["best"]["measured"] == "search"
    assert not any("lost" in str(outcome) for _, _, *outcome in data["plans"]), "what was at hand is not known, and tried again"
    assert len(run["sessions"][0]["fleet"]["lost"]) == 1


@pytest.mark.parametrize("arch", CUDA_ARCHS.values(), ids=lambda arch: arch.name)
def test_a_gpu_at_a_worker_is_taken_for_what_the_same_gpu_here_would_be(arch):
    facts = json.loads(json.dumps(fleet_worker.facts_of("cuda", arch, "a-gpu", "A GPU", 7, "580")))
    for target, row in CUDA_ARCHS.items():
        fits = remote._unfit(facts, target, row) is None
        assert fits == (row.capability == arch.capability)
        if fits:
            device = remote.device_of(SimpleNamespace(facts=facts), target)
            assert (device.kind, device.arch, device.slug, device.gpu.sms) == ("cuda", row, "a-gpu", 7)
    assert remote.device_of(SimpleNamespace(facts=facts), "auto").arch == arch
    assert remote._unfit(facts, "cpu", None) is not None


class TestRefused:
    """In one sentence, with nothing left behind."""

    @pytest.mark.parametrize("arguments, message", [
        (("--key", "gpus"), "a free worker with key gpus was wanted at tracker 127.0.0.1:{port}, found none but some with cpus: start "
                            "python -m scripts.fleet worker --tracker 127.0.0.1:{port} --key gpus"),
        (("--target", "sm_80"), "a worker that fits was wanted at tracker 127.0.0.1:{port}, found a {slug} ({arch}) where --target is "
                                "sm_80"),
        (("--target", "sm_1"), "--target is auto, cpu or an architecture; a CUDA target is one of sm_75"),
        (("--rpc", "127.0.0.1:{free}"), "a tracker was wanted at 127.0.0.1:{free}, found none (Connection refused): start python -m "
                                        "scripts.fleet tracker there, or correct --rpc"),
        (("--rpc", "nowhere"), "HOST:PORT is wanted, such as 10.0.0.1:9190, found 'nowhere'"),
        (("--key", "a b"), "a word of letters, digits, '-', '_' and '.' is wanted, found 'a b'"),
    ])
    def test_a_fleet_that_is_not_there(self, two, tmp_path, arguments, message):
        device = cli.find_device("cpu")
        values = {"port": two.port, "free": free_port(), "slug": device.slug, "arch": device.arch.name}
        done = two.tune("--logs", tmp_path, *(argument.format(**values) for argument in arguments))
        assert done.returncode != cli.DONE and message.format(**values) in done.stderr
        assert done.stderr.count("error: ") == 1 and list(tmp_path.iterdir()) == []

    def test_a_key_without_a_tracker(self):
        done = command("tune", *WHAT, "--key", "cpus")
        assert done.returncode == cli.USAGE and "--rpc and --key name a fleet together" in done.stderr

    def test_something_else_than_a_tracker(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400"), daemon=True).start()
            with pytest.raises(FleetError, match="found something that is no tracker of TVM"):
                Fleet(server.getsockname(), "cpus", lambda facts: None, print)

    @pytest.mark.parametrize("what, message", [
        (("tracker", "--port", "{port}"), "the tracker must listen at 127.0.0.1:{port}, found that it cannot"),
        (("worker", "--tracker", "127.0.0.1:{free}", "--key", "c", "--target", "cpu"),
         "a tracker was wanted at 127.0.0.1:{free}, found none"),
        (("worker", "--tracker", "10.0.0.1:9190", "--key", "c", "--target", "cpu"),
         "a worker of the tracker at 10.0.0.1 must listen where other machines reach it, found --host 127.0.0.1"),
    ])
    def test_a_part_of_a_fleet_that_cannot_start(self, two, what, message):
        values = {"port": two.port, "free": free_port()}
        done = command("fleet", *(argument.format(**values) for argument in what))
        assert done.returncode != cli.DONE and message.format(**values) in done.stderr

    @pytest.mark.parametrize("found", [{}, [], 3, "x", {"seconds": []}, {"seconds": [0.0], "error": 0.0}, {"seconds": [float("nan")]},
                                       {"seconds": [float("inf")], "error": 0.0}, {"seconds": [1.0]}, {"refused": 1}])
    def test_an_answer_that_is_none(self, found):
        assert not sound(found)
        assert sound({"seconds": [1.0], "error": 0.0}) and sound({"refused": "wrong"}) and sound(None)
