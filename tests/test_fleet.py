"""Tuning over a fleet, on loopback: TVM's tracker and two workers of this CPU, and what can happen to each of them."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from schedules import registry
from schedules.lowering.toolkit import run_c_compiler
from schedules.tuning import fleet, log
from schedules.tuning.build_worker import Job, make
from schedules.tuning.fleet import Fleet, FleetError, sound
from schedules.tuning.fleet_tools import FleetRunner
from schedules.tuning.run_worker import Setting
from schedules.tuning.subjects import ForwardPass
from scripts import cli, tune
from tests import stand_in
from tests.commands import command
from tests.fake_tuner import SHAPE, WORKLOAD, spaces

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SETTING = Setting("cpu", ForwardPass(WORKLOAD), SHAPE)
WHAT = ("--workload", WORKLOAD.name, "--length", "64", "--workers", "1")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def started(*arguments):
    """(process, what it says first) of a `scripts.fleet` command."""
    process = subprocess.Popen([sys.executable, "-m", "scripts.fleet", *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, "the command has ended"
    return process, json.loads(line)


class Place:
    """A tracker with workers: {"host:port": process}."""

    def __init__(self, workers):
        self.port, self.workers = free_port(), {}
        self.tracker, _ = started("tracker", "--port", self.port)
        for _ in range(workers):
            self.add()

    def add(self):
        process, told = started("worker", "--tracker", f"127.0.0.1:{self.port}", "--key", "cpus", "--target", "cpu", "--port", free_port())
        self.workers[told["listens"]] = process

    def fleet(self, key="cpus", unfit=lambda facts: None):
        return Fleet(("127.0.0.1", self.port), key, unfit, report=lambda sentence: None)

    def tune(self, *arguments, key="cpus"):
        return command("tune", *WHAT, "--rpc", f"127.0.0.1:{self.port}", "--key", key, *arguments)

    def end(self):
        for process in (*self.workers.values(), self.tracker):
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def two():
    """Two workers, which each test leaves as it finds them."""
    place = Place(2)
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
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))


def eventually(true, seconds=60):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.05)


def measured(held, path, label="a plan"):
    """What a Fleet finds of an artefact."""
    runner = FleetRunner(held)
    runner.begin(path, SETTING, label)
    return runner._found[path]


class TestARun:
    def test_completes_and_every_candidate_passes_the_gate_at_the_worker(self, two, tmp_path, only_stand_in):
        done = two.tune("--target", "cpu", "--logs", tmp_path, "--trials", 5)
        assert done.returncode == cli.DONE, done.stderr
        folder = tmp_path / cli.find_device("cpu").slug / WORKLOAD.name
        run, data = log.read_json(folder / log.RUN), log.read_json(folder / log.MEASURED)
        session, = run["sessions"]
        assert sorted(name.split()[0] for name in session["fleet"]["workers"]) == sorted(two.workers)
        assert session["fleet"]["lost"] == [] and session["workers"] == 1
        assert run["best"]["measured"] == "duel" and run["device"]["slug"] == folder.parent.name
        faults = {values[data["fields"]["stand_in"].index("fault")]: outcome for _, values, *outcome in data["plans"]}
        assert "is right: error" in faults[stand_in.WRONG][1] and "no such block" in faults[stand_in.UNSCHEDULABLE][1]
        assert faults[stand_in.SOUND][0] > 0 and len(data["plans"]) == 5

    def test_a_kernel_that_crashes_costs_no_worker(self, two, artefact, tmp_path):
        source, library = tmp_path / "bad.c", tmp_path / "bad.so"
        source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void load() { abort(); }\n")
        run_c_compiler(["-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)])
        held = two.fleet()
        try:
            assert measured(held, str(library)) == {"refused": "the kernel crashes"}
            assert len(measured(held, artefact)["seconds"]) == 3
            assert held.size == 2 and held.losses == []
        finally:
            held.close()


    @pytest.mark.parametrize("order", [(stand_in.SOUND, stand_in.WRONG, stand_in.SOUND), (stand_in.WRONG, stand_in.SOUND)])
    def test_no_kernel_is_taken_for_one_before_it(self, two, kernels, order):
        """They arrive under one name, and the loader knows libraries by their paths."""
        held = two.fleet()
        try:
            held._idle.pop()  # all by one worker
            assert ["refused" in measured(held, kernels[fault]) for fault in order] == [fault == stand_in.WRONG for fault in order]
            both = FleetRunner(held)
            both.setting = SETTING
            assert ["refused" in found for found in both.duel([kernels[fault] for fault in order], seed=0)] == [
                fault == stand_in.WRONG for fault in order]
        finally:
            held.close()


class TestLost:
    def kill_while_it_measures(self, held, path, victim):
        """What comes of an artefact while whose measurement `victim(link)` kills something; and the link's name."""
        found = []
        thread = threading.Thread(target=lambda: found.append(measured(held, path, "the plan at hand")))
        thread.start()
        eventually(lambda: len(held._idle) < held.size)
        link, = held._links - set(held._idle)
        eventually(lambda: self.at_work(victim(link)))
        os.kill(victim(link), signal.SIGKILL)
        thread.join(120)
        return found[0], link.name

    @staticmethod
    def at_work(pid):
        """Whether the process at the device has been started: the last of the worker's descendants."""
        return any("popen_worker" in " ".join(each.cmdline()) and each.parent().parent().pid != os.getpid()
                   for each in psutil.Process(pid).children(recursive=True) if each.is_running())

    def test_a_worker_killed_costs_its_candidate_one_more_try(self, artefact):
        place = Place(2)
        held = place.fleet()
        try:
            family = {pid: psutil.Process(process.pid).children(recursive=True)
                      for pid, process in ((process.pid, process) for process in place.workers.values())}
            found, name = self.kill_while_it_measures(held, artefact, lambda link: place.workers[link.name].pid)
            assert len(found["seconds"]) == 3
            loss, = held.losses
            assert (loss["worker"], loss["plan"]) == (name, "the plan at hand") and "connection" in loss["reason"]
            assert held.size == 1
            eventually(lambda: not any(each.is_running() for each in family[place.workers[name].pid]))
        finally:
            held.close()
            place.end()
