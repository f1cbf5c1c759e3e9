"""`python -m scripts.logs merge`: logs of several machines as one, and what is refused instead."""
import json
import shutil
from dataclasses import replace

import pytest
import tvm
import tvm_ffi

from schedules import registry
from schedules.space import decisions
from schedules.tuning import log, records
from schedules.tuning.database import replay
from schedules.tuning.results import conclude
from schedules.tuning.search import Limits
from schedules.tuning.subjects import ForwardPass
from scripts import cli
from tests import stand_in
from tests.commands import command
from tests.fake_tuner import ARCH, SHAPE, SLUG, WORKLOAD, FakeRunner, session
from tests.stand_in import StandInPlan

SUBJECT = ForwardPass(WORKLOAD)
VERSIONS = {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__}


class Slower(FakeRunner):
    """Slower in the last round, in which it likes other plans than FakeRunner does."""

    def duel(self, paths, seed, seconds=None):
        return [{**found, "seconds": [1e-3 - x for x in found["seconds"]]} for found in super().duel(paths, seed)]


def tuned(root, trials, runner, date):
    """A log under a root after a session; declarations are true, as those of the tuner are."""
    made = session(runner=runner)
    winner = made.run(Limits(trials=trials))
    for space in made.spaces:
        if space.name in made.declarations:
            made.declarations[space.name] = records.declaration_of(stand_in, WORKLOAD, space.seed)
    place = log.Log(root, SLUG, SUBJECT, ARCH)
    place.write_measured(made.known, made.declarations, SHAPE)
    conclude(place, made, SHAPE, None, winner, {"slug": SLUG, "name": root.name}, {"date": date, "versions": VERSIONS})


@pytest.fixture(scope="module")
def session_logs(tmp_path_factory):
    root = tmp_path_factory.mktemp("sessions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", (stand_in,))
        tuned(root / "a", 9, FakeRunner(), "2026-12-01")
        tuned(root / "b", 11, Slower(), "2026-11-30")
    return root


@pytest.fixture
def roots(tmp_path, session_logs, monkeypatch):
    """(folder of logs a, folder of logs b), to change at will."""
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))
    for name in ("a", "b"):
        shutil.copytree(session_logs / name, tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def folder(root):
    return root / SLUG / WORKLOAD.name


def merged(*roots):
    """The Log of what is merged, and what the command says."""
    output = roots[0].parent / "c"
    done = command("logs", "merge", *roots, "--output", output, code=cli.DONE)
    return log.Log(output, SLUG, SUBJECT, ARCH), done.stdout


def known_in(root):
    return log.Log(root, SLUG, SUBJECT, ARCH).read_measured({"stand_in": stand_in}, SHAPE)[0]


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refuse_best(root, by):
    """Have the log under `by` refuse the best plan of the one under `root`."""
    best = log.read_json(folder(root) / log.RUN)["best"]["plan"]
    key, place = ("stand_in", StandInPlan(**best)), log.Log(by, SLUG, SUBJECT, ARCH)
    outcomes, declarations = place.read_measured({"stand_in": stand_in}, SHAPE)
    place.write_measured({**outcomes, key: log.Outcome(refused="wrong: planted")}, declarations, SHAPE)


class TestMerge:
    def test_each_plan_is_there_once_by_its_fewest_seconds(self, roots):
        a, b = map(known_in, roots)
        place, text = merged(*roots)
        both = known_in(place.path.parent.parent)
        assert set(both) == {*a, *b} and set(a) & set(b) and set(a) ^ set(b)
        assert f"{len(both)} plans of 2 logs, {len(a) + len(b) - len(both)} duplicates dropped" in text
        for key, outcome in both.items():
            assert replace(outcome, proven=None) in [replace(each[key], proven=None) for each in (a, b) if key in each]
            every = [each[key] for each in (a, b) if key in each]
            assert outcome.refused is not None if any(each.refused for each in every) else outcome.seconds == min(
                each.seconds for each in every)

    def test_the_best_is_on_record_and_metaschedule_finds_it(self, roots):
        place, _ = merged(*roots)
        record, = records.best_records(place.path.parent.parent, SLUG, WORKLOAD, ARCH)
        best = min((log.read_json(folder(root) / log.RUN)["best"] for root in roots), key=lambda best: best["seconds"])
        assert record.seconds == best["seconds"] and record.plan == StandInPlan(**best["plan"])
        space = next(space for space in session().spaces if space.owns("stand_in", record.plan))
        assert StandInPlan(**decisions(replay(place.path, space, SHAPE)[0][1].mod)[2]) == record.plan
        assert [each["date"] for each in place.read_run()["sessions"]] == ["2026-11-30", "2026-12-01"]
        assert place.read_run()["trials"] == len(known_in(place.path.parent.parent))

    def test_in_either_order_the_same_is_found(self, roots):
        place, _ = merged(*roots)
        forth = {name: log.read_json(place.path / log.RUN)[name] for name in ("best", "sessions", "trials", "refused", "device")}
        known = known_in(place.path.parent.parent)
        shutil.rmtree(place.path.parent.parent)
        place, _ = merged(*reversed(roots))
        assert known == known_in(place.path.parent.parent)
        assert forth == {name: log.read_json(place.path / log.RUN)[name] for name in forth}

    def test_with_a_copy_of_itself_nothing_changes(self, roots):
        a, b = roots
        shutil.rmtree(b)
        shutil.copytree(a, b)
        place, _ = merged(a, b)
        assert {path.name: path.read_text() for path in place.path.iterdir()} == {
            path.name: path.read_text() for path in folder(a).iterdir()}

    def test_what_only_one_has_is_taken_as_it_is(self, roots):
        a, b = roots
        (b / SLUG).rename(b / "another-device")
        edit(b / "another-device" / WORKLOAD.name / log.RUN, lambda run: run["device"].update(slug="another-device"))
        place, text = merged(a, b)
        assert text.count("plans of 1 logs, 0 duplicates dropped") == 2
        assert (place.path / log.RUN).read_text() == (folder(a) / log.RUN).read_text()

    def test_a_best_plan_that_another_log_refused_is_none(self, roots):
        a, b = roots
        refuse_best(a, by=b)
        place, _ = merged(a, b)
        assert place.read_run()["best"] == log.read_json(folder(b) / log.RUN)["best"]
        shutil.rmtree(place.path.parent.parent)
        refuse_best(b, by=a)
        place, text = merged(a, b)
        assert "no best plan, since each log's was refused by another" in text
        with pytest.raises(records.NoRecord):
            records.best_records(place.path.parent.parent, SLUG, WORKLOAD, ARCH)


class TestRefused:
    @pytest.mark.parametrize("name, change, message", [
        (log.RUN, lambda run: run["sessions"][0]["versions"].update(tvm="0.26"), rf"must be of tvm {tvm.__version__}, found 0.26"),
        (log.RUN, lambda run: run["sessions"][0]["versions"].update(nvcc="13.1"), "must be of nvcc None, found 13.1"),
        (log.RUN, lambda run: run["sessions"][0].pop("versions"), "found None: tune again"),
        (log.RUN, lambda run: run.update(schema=0), "must be of schema 1 or 2"),
        (log.RUN, lambda run: run["best"].update(declaration="1"), "must have a best plan of the sources as they are, found stand_in"),
        (log.RUN, lambda run: run["best"].update(family="gone"), "must have a best plan of the sources as they are, found gone"),
        (log.RUN, lambda run: run["device"].update(slug="another"), f"must be of device {SLUG}, found another"),
        (log.MEASURED, lambda data: data["declarations"].update({next(iter(data["declarations"])): "1"}),
         "must be of the declaration as it is, found that of stand_in q_tile="),
        (log.MEASURED, lambda data: data["fields"].update(stand_in=["q_tile", "warps"]), "found stand_in with q_tile, warps"),
        (log.MEASURED, lambda data: data["fields"].update(gone=["q_tile"]), "found gone with q_tile"),
        (log.MEASURED, lambda data: data.update(schema=0), "must be of "),
        (log.MEASURED, lambda data: data.update(plans=3), "must list plans and outcomes"),
        (log.DATABASE[0], lambda data: data.append(1), "must hold one record a line"),
    ])
    def test_what_is_of_others_by_name(self, roots, name, change, message):
        path = folder(roots[1]) / name
        if name in log.DATABASE:
            path.write_text(path.read_text()[:100])
        else:
            edit(path, change)
        self.refused(roots, message, names=folder(roots[1]))

    def test_another_shape(self, roots):
        for name in (log.RUN, log.MEASURED):
            edit(folder(roots[1]) / name, lambda data: data["shape"].update(q_len=96))
        self.refused(roots, "tune with that --length", names=folder(roots[1]))

    def test_a_log_without_a_session(self, roots):
        (folder(roots[1]) / log.RUN).unlink()
        self.refused(roots, "must have a run.json, found none", names=folder(roots[1]))

    def test_a_folder_without_logs(self, roots):
        shutil.rmtree(roots[1] / SLUG)
        self.refused(roots, "a folder of tuning logs was wanted, found none at", names=roots[1])

    def test_one_folder_alone(self, roots):
        self.refused((roots[0], roots[0]), "two folders of logs or more are put together", names=roots[0], code=cli.USAGE)

    def test_an_output_that_is_there(self, roots):
        done = command("logs", "merge", *roots, "--output", roots[0], code=cli.USAGE)
        assert "--output must be a new folder" in done.stderr and folder(roots[0]).is_dir()

    def refused(self, roots, message, names, code=cli.FAILED):
        """One sentence that names the log, and nothing is left."""
        before = set(roots[0].parent.iterdir())
        done = command("logs", "merge", *roots, "--output", roots[0].parent / "c", code=code)
        assert done.stderr.count("\n") == 1 and message in done.stderr and str(names) in done.stderr
        assert set(roots[0].parent.iterdir()) == before
