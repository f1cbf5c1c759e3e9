"""What tuning leaves behind: the log with its database, and the record that others find in it."""
import base64
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm_ffi

from schedules import registry
from schedules.arch import cpu_arch
from schedules.space import decisions
from schedules.tuning import log, records
from schedules.tuning.database import replay, write_database
from schedules.tuning.forms import static_form, symbolic_form
from schedules.tuning.nearest import machine_of
from schedules.tuning.results import champion_of, conclude
from schedules.tuning.search import Limits
from schedules.tuning.subjects import ForwardPass, subject_named
from te_defs.workload import Shape, Workload
from tests import stand_in
from tests.fake_tuner import ARCH, SHAPE, SLUG, WORKLOAD, session, spaces
from tests.stand_in import StandInPlan


@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))
    return {"stand_in": stand_in}


@pytest.fixture(scope="module")
def one_session(tmp_path_factory):
    """(folder of logs, Session, Winner) after one session."""
    made, root = session(), tmp_path_factory.mktemp("logs")
    winner = made.run(Limits(trials=8))
    made.declarations[made.space_of(winner.key).name] = records.declaration_of(stand_in, WORKLOAD, winner.key[1])
    place = log.Log(root, SLUG, ForwardPass(WORKLOAD), ARCH)
    place.write_measured(made.known, made.declarations, SHAPE)
    conclude(place, made, SHAPE, None, winner, {"slug": SLUG}, {"seed": 0})
    return root, made, winner


@pytest.fixture
def tuned(tmp_path, families, one_session):
    """A copy of that session's log."""
    root, made, winner = one_session
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return SimpleNamespace(log=log.Log(tmp_path, SLUG, ForwardPass(WORKLOAD), ARCH), session=made, winner=winner, root=tmp_path)


class TestLog:
    def test_gives_back_what_was_measured(self, tuned, families):
        known, declarations = tuned.log.read_measured(families, SHAPE)
        assert known == tuned.session.known
        assert declarations == tuned.session.declarations

    def test_of_another_shape_is_refused(self, tuned, families):
        with pytest.raises(log.ForeignLog, match="name that --length, or another --logs folder"):
            tuned.log.read_measured(families, Shape(1, 1, 1, 32, 32))

    @pytest.mark.parametrize("text", ["{", "[]", '{"plans": 3}', "\x00"])
    def test_damaged_is_said_to_be(self, tuned, families, text):
        path = tuned.log.path / log.MEASURED
        path.write_text(text)
        with pytest.raises((log.DamagedLog, log.ForeignLog), match="measured.json must"):
            tuned.log.read_measured(families, SHAPE)

    def test_a_write_that_fails_leaves_what_was_there(self, tuned, monkeypatch):
        path = tuned.log.path / log.RUN
        before = path.read_text()
        monkeypatch.setattr(log.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError):
            tuned.log.write_run({})
        assert path.read_text() == before
        assert [entry.name for entry in tuned.log.path.iterdir() if entry.name.startswith(".")] == []

    def test_two_tuners_do_not_share_a_folder(self, tmp_path):
        with log.locked(tmp_path / "gpu" / "workload"):
            with pytest.raises(log.LogError, match="in use by another tuner"):
                with log.locked(tmp_path / "gpu" / "workload"):
                    pass

    def test_a_folder_that_stays_empty_is_not_left_behind(self, tmp_path):
        with log.locked(tmp_path / "gpu"):
            pass
        assert not (tmp_path / "gpu").exists()

    def test_a_file_in_the_way_is_said_to_be(self, tmp_path):
        (tmp_path / "gpu").write_text("")
        with pytest.raises(log.LogError, match="must be a folder that can be written"):
            with log.locked(tmp_path / "gpu" / "workload"):
                pass


class TestRecords:
    def best(self, tuned, slug=SLUG, arch=ARCH, workload=WORKLOAD):
        record, = records.best_records(tuned.root, slug, workload, arch)
        return record

    def edit(self, tuned, change):
        path = tuned.log.path / log.RUN
        run = json.loads(path.read_text())
        change(run)
        path.write_text(json.dumps(run))

    def test_the_best_is_the_winner(self, tuned):
        record = self.best(tuned)
        assert (record.family, record.plan) == tuned.winner.key
        assert (record.seconds, record.shape) == (tuned.winner.seconds, SHAPE)
        assert record.run["best"]["measured"] == "duel"
        assert champion_of(record.run, ForwardPass(WORKLOAD)) == tuned.winner.key

    def test_none_is_said_to_be_missing(self, tuned):
        with pytest.raises(records.NoRecord, match="a record of fwd_d64_dv64_f16_full for .* was wanted, found none in .*: run python -m"):
            self.best(tuned, workload=Workload(64, 64))

    def test_another_device_has_no_record(self, tuned):
        with pytest.raises(records.NoRecord):
            self.best(tuned, slug="x86-64-otherlake-2c")

    def test_of_another_target_is_refused(self, tuned):
        with pytest.raises(records.ForeignLog, match="must be of target x86-64-v4, found x86-64-v3"):
            self.best(tuned, arch=cpu_arch("x86-64-v4", 512, 2))

    def test_copied_from_another_device_is_refused(self, tuned):
        tuned.log.path.parent.rename(tuned.root / "another")
        with pytest.raises(records.ForeignLog, match=f"must be of device another, found {SLUG}"):
            self.best(tuned, slug="another")

    @pytest.mark.parametrize("change, message", [
        (lambda run: run["best"].update(declaration="1"), "the declaration has changed since"),
        (lambda run: run["best"]["plan"].update(warps=4), "plans of stand_in have other fields than"),
        (lambda run: run["best"].update(family="gone"), "there is no family gone any more"),
        (lambda run: run["best"]["plan"].update(lanes=64), "stand_in offers no plan"),
    ])
    def test_of_other_sources_is_stale(self, tuned, change, message):
        self.edit(tuned, change)
        with pytest.raises(records.StaleRecord, match=message):
            self.best(tuned)

    @pytest.mark.parametrize("change, entry", [
        (lambda run: run.update(device="x"), "device"), (lambda run: run.update(device={}), "device"),
        (lambda run: run.update(best=[1]), "best"), (lambda run: run["best"].pop("plan"), "plan"),
        (lambda run: run["best"].update(family=[]), "family"), (lambda run: run["best"].update(seconds="abc"), "seconds"),
        (lambda run: run["best"].update(seconds=-1.0), "seconds"), (lambda run: run["best"]["plan"].update(lanes=8.0), "whole numbers"),
        (lambda run: run["shape"].update(batch=-1), "shape"), (lambda run: run["shape"].update(kv_len=0), "shape"),
        (lambda run: run.update(sessions=None), "sessions"),
        (lambda run: run.update(schema=99), "schema"),
    ])
    def test_damaged_run_is_refused(self, tuned, change, entry):
        self.edit(tuned, change)
        with pytest.raises(records.DamagedLog, match=rf"run\.json must .*{entry}.*, found"):
            self.best(tuned)

    @pytest.mark.parametrize("name", log.DATABASE)
    @pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: text + "{}\n", lambda text: "no JSON\n" + text])
    def test_a_damaged_line_is_named(self, tuned, name, damage):
        path = tuned.log.path / name
        path.write_text(damage(path.read_text()))
        with pytest.raises(records.DamagedLog, match=f"{name} must hold one record a line, found line [1-3] damaged"):
            self.best(tuned)

    def test_all_runs_are_listed(self, tuned):
        (path, run), = records.read_runs(tuned.root)
        assert (path, run["workload"]) == (tuned.log.path, WORKLOAD.name)

    def test_a_root_that_is_missing_is_said_to_be(self, tmp_path):
        with pytest.raises(records.LogError, match="found none at"):
            records.read_runs(tmp_path / "nowhere")


class TestDatabase:
    def test_the_trace_is_that_of_the_best_plan(self, tuned):
        space = tuned.session.space_of(tuned.winner.key)
        found = replay(tuned.log.path, space, SHAPE)
        record, sch = found[0]
        assert float(record.run_secs[0]) == pytest.approx(tuned.winner.seconds)
        assert str(record.target.attrs["mcpu"]) == ARCH.name
        assert StandInPlan(**decisions(sch.mod)[2]) == tuned.winner.key[1]

    def test_of_another_declaration_gives_nothing(self, tuned):
        other = next(space for space in spaces() if not space.owns(*tuned.winner.key))
        assert replay(tuned.log.path, other, SHAPE) == []

    def test_names_no_file_of_this_machine_and_is_small(self, tmp_path):
        space = spaces()[0]
        write_database(tmp_path, [(space, [(1e-3, plan) for plan in space.fitting_plans()])], SHAPE)
        texts = [(tmp_path / name).read_text() for name in log.DATABASE]
        graph = base64.b64decode(json.loads(texts[0])[1])
        assert b".py" not in graph
        assert sum(map(len, texts)) < 400_000

    def test_its_hash_is_metaschedules_own(self, tmp_path):
        space = spaces()[0]
        write_database(tmp_path, [(space, [(1e-3, space.seed)])], SHAPE)
        stored = json.loads((tmp_path / log.DATABASE[0]).read_text())[0]
        assert stored == str(tvm_ffi.structural_hash(static_form(symbolic_form(space), WORKLOAD, SHAPE)))


COMMITTED = sorted(path.parent for path in (Path(__file__).parent.parent / "tuning_logs").glob(f"*/*/{log.RUN}"))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_committed_log_is_of_these_sources(folder):
    run, subject = log.read_json(folder / log.RUN), subject_named(folder.name)
    arch = machine_of(folder).arch
    record = records.record_in(records.log_at(folder, arch), arch)
    parts = subject.parts((subject.families()[record.family],), record.arch)
    for part, (name, plan) in subject.split((record.family, record.plan)).items():
        space = next(space for space in parts[part] if space.owns(name, plan))
        record_in_database, sch = replay(folder, space, record.shape)[0]
        assert str(record_in_database.target.attrs["arch" if arch.kind == "cuda" else "mcpu"]) == run["arch"]
        assert type(plan)(**decisions(sch.mod)[2]) == plan
