"""`python -m scripts.tune` as a user meets it: what it says, what it leaves behind, and its exit code, whatever comes in between."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schedules import registry
from schedules.tuning import log, records, runner
from schedules.tuning.log import ForeignLog
from schedules.tuning.nearest import Machine, machine_of
from schedules.tuning.subjects import ForwardPass
from scripts import cli, tune
from scripts.report import REPORT
from tests import stand_in
from tests.commands import command as command_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
#: A workload and a length that take moments.
SMALL = ("--workload", "fwd_d16_dv8_f32_causal", "--target", "cpu", "--length", "64", "--workers", "1")
NAME = "fwd_d16_dv8_f32_causal"


def command(*arguments):
    """Exit code of the command in this process."""
    try:
        return cli.main(tune.run, tune.make_parser().parse_args([str(argument) for argument in arguments]))
    except SystemExit as stop:
        return stop.code


@pytest.fixture(autouse=True)
def short_duels(monkeypatch):
    """Who wins is not asked here: sessions in this process end with one round, not with seconds of timing."""
    monkeypatch.setattr(runner, "DUEL_ROUNDS", 1)


@pytest.fixture
def only_stand_in(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder of logs, output) after a first session of 3 trials; the families are real ones."""
    logs = tmp_path_factory.mktemp("logs")
    what = [*SMALL, "--workers", "2", "--logs", str(logs), "--trials", "3", "--seed", "3"]
    done = subprocess.run([sys.executable, "-m", "scripts.tune", *what], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return logs, done.stdout


def folder_of(logs):
    return next(Path(logs).glob(f"*/{NAME}"))


class TestDryRun:
    def test_says_what_a_run_would_do_and_does_nothing(self, capsys, tmp_path):
        assert command("--workload", "d128_f16_causal", "--target", "sm_80", "--logs", tmp_path, "--trials", "5", "--dry-run") == 0
        text = capsys.readouterr().out
        first = json.loads(text.splitlines()[0])
        assert (first["target"], first["workload"], first["trials"], first["minutes"]) == ("sm_80", ["fwd_d128_dv128_f16_causal"], 5, None)
        for part in ("lowered for sm_80", "mma       takes it", "cpu       declines: sm_80 is no CPU", "plans fit",
                     "first plan: mma q_tile=128", "shared memory", "limits: 5 trials, no minutes", f"log: {tmp_path}"):
            assert part in text
        assert list(tmp_path.iterdir()) == []

    def test_one_family_alone(self, capsys):
        assert command("--workload", "d128_f16_causal", "--target", "sm_90a", "--dry-run", "--family", "mma") == 0
        spaces = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  space ")]
        assert spaces and all(line.startswith("  space mma ") for line in spaces)

    def test_time_is_limited_unless_trials_are(self, capsys):
        assert command(*SMALL, "--dry-run") == 0
        assert "limits: no trials, 3 minutes" in capsys.readouterr().out


def test_a_champion_whose_record_is_lost_is_measured_again(tuned, tmp_path):
    """It was the best of three plans; a session of one trial without them must not put another in its place unseen."""
    logs = tmp_path / "logs"
    shutil.copytree(tuned[0], logs)
    best = json.loads((folder_of(logs) / "run.json").read_text())["best"]
    (folder_of(logs) / log.MEASURED).unlink()
    assert command(*SMALL, "--logs", logs, "--trials", "1") == 0
    data = json.loads((folder_of(logs) / log.MEASURED).read_text())
    plans = [dict(zip(data["fields"][family], values)) for family, values, *_ in data["plans"] if family == best["family"]]
    assert best["plan"] in plans


class TestRefused:
    @pytest.mark.parametrize("arguments, message", [
        (("--workload", "d128_f16_casual"), "correct the name, or name a preset (d64_f16_full, "),
        (("--workload", "fwd_d7_dv8_f16_full"), "head_dim must be a multiple of 8 from 8 to 256, found 7"),
        (("--target", "sm_1"), "a CUDA target is one of sm_75"),
        (("--logs", "/nowhere/at/all"), "--logs must be a folder, or a new one inside a folder that exists, found '/nowhere/at/all'"),
        (("--trials", "0"), "a number above 0 is wanted, found 0"),
        (("--minutes", "-1"), "a number above 0 is wanted, found -1"),
        (("--minutes", "nan"), "a number above 0 is wanted, found nan"),
    ])
    def test_bad_arguments_give_code_2_and_one_sentence(self, capsys, arguments, message):
        assert command(*SMALL, *arguments) == cli.USAGE
        assert message in capsys.readouterr().err

    def test_a_device_that_is_not_there(self, capsys, monkeypatch):
        monkeypatch.setattr(cli, "_gpu", lambda: None)
        assert command("--workload", "d64_f16_full", "--target", "sm_80") == cli.USAGE
        assert "tuning needs the device itself, found sm_80, of which this machine has none" in capsys.readouterr().err

    def test_a_gpu_without_a_row(self, capsys, monkeypatch):
        monkeypatch.setattr(cli, "_gpu", lambda: ("NVIDIA Future", (13, 7), 200))
        assert command("--workload", "d64_f16_full") == cli.USAGE
        assert "compute capability 13.7 has no row in schedules/arch.py" in capsys.readouterr().err

    def test_a_workload_that_no_family_takes(self, capsys, only_stand_in):
        assert command("--workload", "d64_f16_full", "--target", "sm_80", "--dry-run") == cli.FAILED
        assert "every family declined (stand_in: sm_80 is no CPU)" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_written(self, capsys, tmp_path):
        (tmp_path / cli.find_device("cpu").slug).write_text("in the way")
        assert command(*SMALL, "--logs", tmp_path) == cli.FAILED
        assert "must be a folder that can be written" in capsys.readouterr().err

    def test_nothing_that_passes(self, capsys, tmp_path, only_stand_in, monkeypatch):
        faulty = stand_in.StandInPlan(16, 16, fault=stand_in.UNSCHEDULABLE)
        monkeypatch.setattr(stand_in, "tile_choices", lambda workload, arch: (faulty,))
        monkeypatch.setattr(stand_in, "default_plan", lambda workload, arch: faulty)
        assert command(*SMALL, "--logs", tmp_path, "--trials", "2") == cli.FAILED
        assert re.match(rf"error: no plan of {NAME} has passed so far, found 2 of 2 refused: 2 not built \(ScheduleError: .*\)\n",
                        capsys.readouterr().err)
        assert not (folder_of(tmp_path) / log.RUN).exists()
        assert "ScheduleError" in (folder_of(tmp_path) / REPORT).read_text()


class TestSession:
    def test_says_how_it_goes(self, tuned):
        _, text = tuned
        lines = text.splitlines()
        assert json.loads(lines[0])["seed"] == 3
        assert "tried, 0 refused, best " in lines[1] and "GFLOP/s, cpu q_tile=" in lines[1]
        assert lines[-2].startswith(f"{NAME}: best of 3 plans by duel: ")
        assert re.fullmatch(rf"{NAME}: (the default plan stays|\d\.\d+x as fast as the default plan in the last round): [\d.]+ ms \(.*\)",
                            lines[-1])

    def test_leaves_a_log_with_its_birth_certificate(self, tuned):
        folder = folder_of(tuned[0])
        assert {path.name for path in folder.iterdir()} == {log.MEASURED, log.RUN, *log.DATABASE, REPORT}
        run = json.loads((folder / log.RUN).read_text())
        assert run["device"]["slug"] == folder.parent.name
        assert machine_of(folder) == Machine(folder.parent.name, cli.find_device("cpu").arch)
        assert (run["trials"], run["best"]["measured"], run["best"]["family"]) == (3, "duel", "cpu")
        assert 0 < run["best"]["largest_error"] < 1e-5
        session, = run["sessions"]
        assert (session["seed"], session["trials"]) == (3, 3)
        assert {"python", "tvm", "tvm_ffi", "numpy", "xgboost"} == set(session["versions"])

    def test_is_small_and_names_no_path(self, tuned):
        folder = folder_of(tuned[0])
        assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
        assert not any(str(ROOT) in path.read_text() for path in folder.iterdir())

    def test_tells_in_a_page_what_the_log_alone_tells(self, tuned, tmp_path):
        command_of("report", "--logs", tuned[0], "--workload", NAME, "--output", tmp_path / "page.html", code=cli.DONE)
        assert (tmp_path / "page.html").read_bytes() == (folder_of(tuned[0]) / REPORT).read_bytes()
        page, run = (tmp_path / "page.html").read_text(), json.loads((folder_of(tuned[0]) / log.RUN).read_text())
        assert all(f'<data value="{run["best"][key]["median"]}">' in page for key in ("last_round", "default_plan"))
        assert "seconds of tuning" in page and f"{cli.find_device('cpu').arch.vector_bits} bits" in page

    def test_the_record_is_found_again(self, tuned):
        device, workload = cli.find_device("cpu"), cli.parse_workload(NAME)
        record, = records.best_records(tuned[0], device.slug, workload, device.arch)
        assert record.family == "cpu" and record.shape.q_len == 64

    def test_a_second_one_goes_on(self, tuned, capsys):
        logs, _ = tuned
        before = json.loads((folder_of(logs) / log.RUN).read_text())
        assert command(*SMALL, "--logs", logs, "--trials", "2") == cli.DONE
        assert f"which has {before['trials']} plans" in capsys.readouterr().out
        after = json.loads((folder_of(logs) / log.RUN).read_text())
        assert after["trials"] == before["trials"] + 2
        assert len(after["sessions"]) == len(before["sessions"]) + 1

    def test_another_length_is_refused(self, tuned, capsys):
        assert command(*SMALL, "--length", "96", "--logs", tuned[0], "--trials", "1") == cli.FAILED
        assert "name that --length, or another --logs folder" in capsys.readouterr().err

    def test_a_log_of_another_device_is_refused(self, tuned):
        folder = folder_of(tuned[0])
        place = log.Log(tuned[0], "another-device", ForwardPass(cli.parse_workload(NAME)), cli.find_device("cpu").arch)
        place.path.parent.mkdir()
        place.path.symlink_to(folder)
        with pytest.raises(ForeignLog, match="must be of device another-device"):
            place.read_run()


@pytest.mark.parametrize("name", log.DATABASE)
def test_a_damaged_database_is_refused_before_anything_is_built(tmp_path, capsys, name):
    folder = tmp_path / cli.find_device("cpu").slug / NAME
    folder.mkdir(parents=True)
    (folder / name).write_text('["1", "half a li')
    assert command(*SMALL, "--logs", tmp_path, "--trials", "1") == cli.FAILED
    assert "found line 1 damaged: restore the file, or delete both database files" in capsys.readouterr().err


def started_tuning(folder, *arguments, until):
    """The process of a tune command in a session of its own, once it has printed a line that starts with `until`."""
    started = subprocess.Popen([sys.executable, "-m", "scripts.tune", *SMALL, "--logs", str(folder), *arguments], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not started.stdout.readline().startswith(until):
        assert started.poll() is None, "the command has ended"
    return started


def test_ctrl_c_keeps_what_there_is(tmp_path):
    started = started_tuning(tmp_path, "--minutes", "5", until="[")
    os.killpg(started.pid, signal.SIGINT)
    _, complaints = started.communicate(timeout=120)
    assert started.returncode == cli.FAILED
    assert complaints.splitlines()[-1].startswith("error: interrupted: what was tuned so far is kept in ")
    assert "Traceback" not in complaints
    folder = folder_of(tmp_path)
    assert {path.name for path in folder.iterdir()} == {log.MEASURED, log.RUN, *log.DATABASE, REPORT}
    run = json.loads((folder / log.RUN).read_text())
    assert run["best"]["measured"] == "search"
    assert run["trials"] == len(json.loads((folder / log.MEASURED).read_text())["plans"]) >= 1


def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    started = started_tuning(tmp_path, "--minutes", "5", until="[")
    os.kill(started.pid, signal.SIGINT)
    assert started.stderr.readline() == "stopping once the kernels at hand are done\n"
    os.kill(started.pid, signal.SIGINT)
    _, complaints = started.communicate(timeout=30)
    assert started.returncode == cli.FAILED
    assert complaints == "" or complaints.startswith(("ended at once", "error: interrupted"))


def test_ctrl_c_before_the_first_result_writes_nothing(tmp_path):
    started = started_tuning(tmp_path, until="{")
    os.killpg(started.pid, signal.SIGINT)
    _, complaints = started.communicate(timeout=120)
    assert started.returncode == cli.FAILED
    assert complaints.splitlines()[-1].startswith("error: interrupted")
    assert list(tmp_path.rglob("*.json")) == []
