"""Who borrows whose plan: the nearest device like it, held against the machine that borrows, said in words, and never taken for its own."""
import json
from argparse import Namespace
from dataclasses import asdict

import pytest

from schedules import backward, registry
from schedules.arch import GPUS, cpu_arch, cuda_arch
from schedules.families import cpu, cpu_backward, simt
from schedules.tuning import nearest, records
from schedules.tuning.log import MEASURED, RUN, Log, Outcome, data_of
from schedules.tuning.nearest import Gain, Machine, gains_of, nearest_records, start_plans, told
from schedules.tuning.search import Limits
from schedules.tuning.subjects import BackwardPass, ForwardPass
from scripts import bench, cli, options, tune
from scripts.kernels import Planned
from te_defs.workload import Shape, Workload
from tests import stand_in
from tests.commands import command
from tests.fake_tuner import FakeBuilder, outcome_of, session, spaces
from tests.stand_in import StandInPlan

WORKLOAD = Workload(16, 8, "float32", "causal")
SUBJECT = ForwardPass(WORKLOAD)
SHAPE = Shape(1, 2, 2, 64, 64)
PLAN = StandInPlan(32, 16, spare=2)
HERE = cpu_arch("somelake", 256, 8)
HOPPER = cuda_arch("sm_90a")


@pytest.mark.parametrize("sessions, day", [([{"date": "2026-11-30T10:19:45+00:00"}], "2026-11-30"), ([], "at an unknown date"),
                                           ([{"date": "2026-11-29"}, {"date": 3}, "x"], "2026-11-29")])
def test_day_of_a_run(sessions, day):
    assert nearest.date_of({"sessions": sessions}) == day


@pytest.fixture(scope="module")
def declaration():
    return records.declaration_of(stand_in, WORKLOAD, PLAN)


@pytest.fixture
def lend(tmp_path, monkeypatch, declaration):
    """Function that writes a run.json of a device, {fields of the best plan's record that differ}; its `root` has the logs."""
    monkeypatch.setattr(registry, "FAMILIES", (stand_in, simt))

    def write(slug, arch, subject=SUBJECT, device=(), **best):
        told = {"slug": slug, **({"cpu": asdict(arch)} if arch.kind == "cpu" else {}), **dict(device)}
        best = {"family": "stand_in", "plan": PLAN.values(), "seconds": 1e-3, "declaration": declaration, **best}
        place = Log(tmp_path, slug, subject, arch)
        place.write_run({"workload": subject.name, "arch": arch.name, "device": told, "shape": data_of(SHAPE), "best": best,
                         "sessions": [{"date": "2026-11-30T10:19:45+00:00"}]})
        return place
    write.root = tmp_path
    return write


def lender_of(lend, here=HERE, slug="here"):
    return nearest_records(lend.root, SUBJECT, Machine(slug, here))[0].lender


class TestOrder:
    def test_a_cpu_asks_the_nearest_number_of_cores(self, lend):
        for cores in (2, 4, 16):
            lend(f"otherlake-{cores}c", cpu_arch("otherlake", 256, cores))
        assert lender_of(lend) == "otherlake-4c"
        assert lender_of(lend, cpu_arch("somelake", 256, 64)) == "otherlake-16c"

    def test_of_equal_numbers_the_same_kind_comes_first(self, lend):
        lend("otherlake-8c", cpu_arch("otherlake", 256, 8))
        lend("somelake-8c-too", HERE)
        assert lender_of(lend) == "somelake-8c-too"

    @pytest.mark.parametrize("arch", [cpu_arch("wide", 512, 8), cpu_arch("arm", 256, 8, machine="aarch64"), HOPPER], ids=lambda it: it.name)
    def test_other_vectors_instructions_and_kinds_are_not_asked(self, lend, arch):
        lend("other", arch)
        with pytest.raises(records.NoRecord, match="^no device like here lends one of fwd_d16_dv8_f32_causal$"):
            lender_of(lend)

    def test_what_is_here_is_not_borrowed(self, lend):
        lend("here", HERE)
        with pytest.raises(records.NoRecord):
            lender_of(lend)

    def test_a_gpu_asks_by_multiprocessors_then_memory_and_last_who_says_neither(self):
        def machine(slug, arch=HOPPER):
            return Machine(slug, arch, GPUS.get(slug))
        others = [machine(slug) for slug in ("a-secret", "nvidia-h100-pcie", "nvidia-h100-80gb-hbm3", "nvidia-h200")]
        here = Machine("nvidia-h20", HOPPER, nearest.gpu_named("nvidia-h20", "sm_90a", 78))
        near_h20 = sorted(others, key=here.distance)
        assert [it.slug for it in near_h20] == ["nvidia-h100-pcie", "nvidia-h100-80gb-hbm3", "nvidia-h200", "a-secret"]
        near_h200 = sorted(others[:3], key=machine("nvidia-h200").distance)
        assert [it.slug for it in near_h200] == ["nvidia-h100-80gb-hbm3", "nvidia-h100-pcie", "a-secret"]

    def test_exact_code_is_for_its_own_architecture(self):
        exact, plain = Machine("a", HOPPER), Machine("b", cuda_arch("sm_90"))
        assert not exact.lends(plain) and not plain.lends(exact) and exact.lends(Machine("c", HOPPER))
        assert not Machine("d", cuda_arch("sm_80")).lends(Machine("e", cuda_arch("sm_86")))

    @pytest.mark.parametrize("slug, gpu", GPUS.items(), ids=GPUS)
    def test_rows_of_gpus_are_of_known_architectures(self, slug, gpu):
        assert cli.slug_of(slug) == slug and gpu.sms > 0 and gpu.memory_gbytes > 0
        assert cuda_arch(gpu.arch) in (cuda_arch("sm_75"), *map(cuda_arch, ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")))


class TestBadInput:
    @pytest.mark.parametrize("change, reason", [
        (dict(declaration="1"), "the declaration has changed since"),
        (dict(family="gone"), "there is no family gone any more"),
        (dict(plan={**PLAN.values(), "warps": 4}), "plans of stand_in have other fields than"),
        (dict(plan={**PLAN.values(), "lanes": 64}), "stand_in offers no plan .* on somelake"),
        (dict(family="simt", plan=simt.SimtPlan(64, 32, 8, 8).values()), "simt declines: somelake is no CUDA GPU"),
        (dict(seconds=-1.0), "must have a best plan of whole numbers with its seconds"),
        (dict(plan=[]), "must have 'plan' of type dict")], ids=str)
    def test_a_record_that_does_not_fit_is_passed_over_with_its_reason(self, lend, change, reason):
        lend("near-8c", cpu_arch("otherlake", 256, 8), **change)
        with pytest.raises(records.NoRecord, match=f"no device like here lends one of {WORKLOAD.name}; near-8c is passed over: .*{reason}"):
            lender_of(lend)
        lend("far-64c", cpu_arch("otherlake", 256, 64))
        found, = nearest_records(lend.root, SUBJECT, Machine("here", HERE))
        assert (found.lender, found.record.plan, found.date) == ("far-64c", PLAN, "2026-11-30")
        sentence, = found.passed_over
        assert sentence.startswith("near-8c is passed over: ")

    @pytest.mark.parametrize("text, reason", [
        (lambda run: "{", "must be JSON"), (lambda run: json.dumps({**run, "schema": 3}), "must be of schema 1"),
        (lambda run: json.dumps({**run, "device": {"slug": "near-8c"}}), "must say what CPU it is of"),
        (lambda run: json.dumps({**run, "device": {"slug": "near-8c", "cpu": {**asdict(HERE), "cores": "8"}}}), "must say what CPU"),
        (lambda run: json.dumps({**run, "device": {**run["device"], "slug": "copied"}}), "must be of device near-8c, found copied"),
        (lambda run: json.dumps({**run, "best": None}), "was wanted, found none in")])
    def test_so_is_a_log_that_cannot_be_read(self, lend, text, reason):
        lend("far-64c", cpu_arch("otherlake", 256, 64))
        path = lend("near-8c", cpu_arch("otherlake", 256, 8)).path / RUN
        path.write_text(text(json.loads(path.read_text())))
        found, = nearest_records(lend.root, SUBJECT, Machine("here", HERE))
        assert found.lender == "far-64c" and reason in found.passed_over[0]

    def test_a_gpu_that_tells_nonsense_is_only_far(self, lend):
        place = lend("a-gpu", cuda_arch("sm_80"), device={"sms": "many"})
        assert nearest.machine_of(place.path) == Machine("a-gpu", cuda_arch("sm_80"))

    def test_no_folder_of_logs_is_no_lender(self, tmp_path):
        with pytest.raises(records.NoRecord):
            nearest_records(tmp_path / "nowhere", SUBJECT, Machine("here", HERE))


class TestPlansOnAnotherMachine:
    """The real families for CPUs: a plan names its threads, and must fit the caches of the machine that borrows it."""
    LARGE, SMALL = (cpu_arch("otherlake", 512, cores, 48 << 10, 2048 << 10) for cores in (64, 16))

    def record(self, tmp_path, here, subject, family, plan):
        key = (family.NAME, plan)
        Log(tmp_path, "lender", subject, self.LARGE).write_run({
            "workload": subject.name, "arch": "otherlake", "device": {"slug": "lender", "cpu": asdict(self.LARGE)}, "shape": data_of(SHAPE),
            "best": {"family": family.NAME, "plan": plan.values(), "seconds": 1e-3, "declaration": subject.declaration_of(key, self.LARGE)},
            "sessions": []})
        return nearest_records(tmp_path, subject, Machine("here", here))[0]

    def test_takes_the_threads_that_are_here(self, tmp_path):
        plan = cpu.default_plan(WORKLOAD, self.LARGE)
        found = self.record(tmp_path, cpu_arch("somelake", 512, 2), SUBJECT, cpu, plan)
        assert (plan.threads, found.record.plan) == (64, plan.but(threads=2)) and found.date == "at an unknown date"

    def test_so_does_each_function_of_a_gradient(self, tmp_path):
        plans = backward.default_plans(cpu_backward, WORKLOAD, self.LARGE)
        found = self.record(tmp_path, cpu_arch("somelake", 512, 2), BackwardPass(WORKLOAD), cpu_backward, plans)
        assert {plan.threads for plan in found.record.plan.by_role().values()} == {2}

    def test_is_passed_over_where_a_cache_is_too_small(self, tmp_path):
        plan = next(plan for plan in cpu.tile_choices(WORKLOAD, self.LARGE) if (plan.q_tile, plan.kv_tile) == (128, 256))
        with pytest.raises(records.NoRecord, match="lender is passed over: .* cpu offers no plan q_tile=128 kv_tile=256 .* on somelake"):
            self.record(tmp_path, cpu_arch("somelake", 512, 2, 48 << 10, 256 << 10), SUBJECT, cpu, plan)


def in_turns(tuned, default):
    return {name: dict(zip(("least", "median", "most"), seconds)) for name, seconds in (("last_round", tuned), ("default_plan", default))}


class TestGains:
    def test_are_those_of_last_rounds(self, lend):
        lend("it", HERE, **in_turns((1.0, 2.0, 3.0), (3.5, 4.0, 9.0)))
        lend("it", HERE, ForwardPass(Workload(64, 64)), **in_turns((1.0, 2.0, 3.0), (1.5, 2.2, 3.0)))
        lend("it", HERE, BackwardPass(WORKLOAD), **in_turns((1.0, 1.0, 1.0), (5.0, 5.0, 5.0)))
        lend("another", HERE, **in_turns((1.0, 1.0, 1.0), (9.0, 9.0, 9.0)))
        gains = gains_of(lend.root, "it")
        assert sorted(gains, key=lambda it: it.ratio) == [Gain(pytest.approx(1.1), True, False), Gain(2.0, True, True)]
        assert gains_of(lend.root, "it", backward.IN_ORDER) == [Gain(5.0, True, True)]
        assert told(gains).startswith("the tuned plans of 2 workloads there were 1.100x to 2.000x as fast as the default plans, 1.550x in "
                                      "the median (2 measured in turns, 1 of them beyond the spread), which tuning here would likely gain")

    def test_are_those_of_a_search_where_no_last_round_tells(self, lend):
        default = stand_in.default_plan(WORKLOAD, HERE)
        place = lend("it", HERE)
        place.write_measured({("stand_in", default): Outcome(3e-3), ("stand_in", PLAN): Outcome(2e-3),
                              ("stand_in", PLAN.but(lanes=4)): Outcome(refused="wrong")}, {}, SHAPE)
        assert gains_of(lend.root, "it") == [Gain(pytest.approx(1.5), False, False)]
        assert "(0 measured in turns, 0 of them beyond the spread), so tuning here would likely gain nothing that shows;" in told(
            gains_of(lend.root, "it"))

    @pytest.mark.parametrize("best", [{}, in_turns((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)), {"last_round": 3, "default_plan": 4}], ids=str)
    def test_where_nothing_tells_there_is_no_number(self, lend, best):
        lend("it", HERE, **best)
        (lend.root / "it" / "notes").mkdir()
        (lend.root / "it" / "notes" / RUN).write_text("{}")
        assert told(gains_of(lend.root, "it")) == ("no log there tells of both the tuned and the default plan, so what tuning here would "
                                                   "gain is not known")


class TestSearch:
    def lent(self, lend):
        place = lend("near-8c", cpu_arch("otherlake", 256, 8))
        measured = [(PLAN.but(lanes=lanes, spare=1), 1e-3 / lanes) for lanes in (4, 8)]
        place.write_measured({("stand_in", plan): Outcome(seconds) for plan, seconds in measured}, {}, SHAPE)
        return place

    def test_begins_with_the_best_of_the_lender_that_fit(self, lend):
        place = self.lent(lend)
        parts = {None: spaces()}
        found, = nearest_records(lend.root, SUBJECT, Machine("here", HERE))
        keys = [("stand_in", plan) for plan in (PLAN, PLAN.but(lanes=8, spare=1), PLAN.but(lanes=4, spare=1))]
        assert start_plans(found, parts) == {None: keys}
        assert start_plans(found, {None: spaces()[:1]}) == {None: []}
        (place.path / MEASURED).write_text("torn")
        assert start_plans(found, parts) == {None: keys[:1]}

    def test_says_so_and_takes_no_measurement_over(self, lend, capsys):
        self.lent(lend)
        device = cli.Device("cpu", HERE, "here", "here")
        place = Log(lend.root, "here", SUBJECT, HERE)
        lend("damaged-8c", HERE, declaration="1")
        hints = tune.lent_plans(place, {None: spaces()}, SHAPE, device)
        passed, begun = capsys.readouterr().out.splitlines()
        assert passed.startswith("damaged-8c is passed over: ")
        assert begun == f"{WORKLOAD.name}: the search begins with 3 plans that were best on near-8c, 2026-11-30"
        builder, known = FakeBuilder(), {}
        session(builder, known=known, hints=hints[None]).run(Limits(trials=4))
        tried = [plan for plan, whole in builder.begun if not whole][:4]
        assert set(tried[:4]) == {stand_in.default_plan(WORKLOAD, HERE), *(plan for _, plan in hints[None])}
        assert {known["stand_in", plan].seconds for plan in tried} == {outcome_of(plan).seconds for plan in tried}
        assert tune.lent_plans(Log(lend.root / "none", "here", SUBJECT, HERE), {None: spaces()}, SHAPE, device) == {}


class TestCommands:
    def args(self, logs, **given):
        return Namespace(**{"logs": str(logs), "plan": "best", "family": None, "backward": None, **given})

    def test_a_borrowed_plan_is_labelled(self, lend, capsys):
        lend("near-8c", cpu_arch("otherlake", 256, 8), **in_turns((1.0, 2.0, 3.0), (3.5, 4.0, 9.0)))
        lend("nearer-8c", HERE, declaration="1")
        device = cli.Device("cpu", HERE, "here", "here")
        found, = options.tuned_plans(self.args(lend.root), device, WORKLOAD)
        assert (found.family, found.plan) == ("stand_in", PLAN)
        assert found.measured == {"seconds": 1e-3, "shape": data_of(SHAPE), "device": "near-8c", "date": "2026-11-30",
                           "record": f"near-8c/{WORKLOAD.name}", "borrowed_for": "here"}
        passed, sentence = capsys.readouterr().out.splitlines()
        assert passed.startswith("nearer-8c is passed over: ")
        assert sentence.startswith(f"the plan of {WORKLOAD.name} was measured on near-8c, 2026-11-30, and is borrowed for here, on which "
                                   "it was not tuned: the tuned plans of 1 workload there were 2.000x to 2.000x as fast")

    def test_a_plan_of_ones_own_is_not(self, lend, capsys):
        lend("near-8c", cpu_arch("otherlake", 256, 8))
        lend("here", HERE)
        found, = options.tuned_plans(self.args(lend.root), cli.Device("cpu", HERE, "here", "here"), WORKLOAD)
        figures = found.measured
        assert figures["device"] == "here" and "borrowed_for" not in figures and capsys.readouterr().out == ""

    def test_one_of_ones_own_that_no_longer_fits_is_refused_not_replaced(self, lend):
        lend("near-8c", cpu_arch("otherlake", 256, 8))
        lend("here", HERE, declaration="1")
        with pytest.raises(records.StaleRecord):
            options.tuned_plans(self.args(lend.root), cli.Device("cpu", HERE, "here", "here"), WORKLOAD)

    def test_a_device_that_is_only_named_borrows_nothing_unless_it_is_known(self, lend, monkeypatch):
        lend("near-8c", cpu_arch("otherlake", 256, 8))
        with pytest.raises(records.NoRecord, match="a record of .* for somewhere was wanted, found none in .*: run python -m scripts.tune"):
            options.tuned_plans(self.args(lend.root, gpu="somewhere"), cli.Device("cpu", HERE, "here", "here"), WORKLOAD)
        device = cli.Device("cuda", HOPPER, None, "sm_90a, of which this machine has none", is_here=False)
        monkeypatch.setattr(options, "nearest_records", lambda *what: pytest.fail("it borrows"))
        for slug in ("nvidia-h2000", "nvidia-a30"):
            with pytest.raises(records.NoRecord):
                options.tuned_plans(self.args(lend.root, gpu=slug), device, WORKLOAD)

    def test_a_gpu_that_is_known_borrows_from_the_nearest(self):
        shown = command("show", "plan", "--workload", "d64_f16_full", "--plan", "best", "--gpu", "nvidia-h100-pcie", "--target", "sm_90a",
                        code=0)
        assert shown.stdout.startswith("the plan of fwd_d64_dv64_f16_full was measured on nvidia-h200, 2026-11-30, and is borrowed for "
                                      "nvidia-h100-pcie, on which it was not tuned: the tuned plans of 12 workloads there were 1.000x to ")

    def test_an_artefact_says_what_is_borrowed(self, tmp_path):
        subject, workload = SUBJECT, WORKLOAD
        here = cli.find_device("cpu")
        lender = cpu_arch("otherlake", here.arch.vector_bits, 64, here.arch.l1_bytes, here.arch.l2_bytes, here.arch.machine)
        plan = cpu.default_plan(workload, lender)
        Log(tmp_path, "otherlake-64c", subject, lender).write_run({
            "workload": subject.name, "arch": "otherlake", "device": {"slug": "otherlake-64c", "cpu": asdict(lender)},
            "shape": data_of(SHAPE), "sessions": [{"date": "2026-11-30"}],
            "best": {"family": "cpu", "plan": plan.values(), "seconds": 1e-3,
                     "declaration": subject.declaration_of(("cpu", plan), lender)}})
        output = tmp_path / "it.so"
        made = command("export", "--target", "cpu", "--workload", workload.name, "--logs", tmp_path, "--output", output, code=0).stdout
        assert f"measured on otherlake-64c, 2026-11-30, and is borrowed for {here.slug}" in made
        assert "no log there tells of both" in made and '"tuned_on": "otherlake-64c"' in made
        ran = command("run", output, "--lengths", code=0).stdout
        assert f"threads={here.arch.cores}" in ran and "borrowed: measured on otherlake-64c, 2026-11-30" in ran

    def test_a_table_says_where_a_plan_was_tuned(self):
        row = {"workload": "w", "length": 8, "batch": 1, "heads": 2, "tflops": 1.0, "ours_over_this": 1.0, "of_peak": None,
               "of_exp_bound": None, "mhz": None, "watts": None}
        rows = [{**row, "contestant": "default", "ms": 2.0}, {**row, "contestant": "tuned", "ms": 1.0}]
        lent = [Planned("cpu", None, {"device": "nvidia-h200", "borrowed_for": "here", "shape": {"q_len": 8, "kv_len": 8}})]
        assert bench.labelled(rows, None, 8) == rows and "tuned on" not in bench.table(rows)
        own = [{**it, "workload": "own"} for it in rows]
        untuned = [{**rows[0], "workload": "untuned"}]
        head, *lines = bench.table([*bench.labelled(rows, lent, 8), *own, *untuned]).splitlines()
        assert head.endswith("tuned on") and [line.split()[-1] for line in lines] == ["nvidia-h200", "device", "-"]
        assert [line.split()[6:-6] for line in bench.peer_table(bench.labelled(rows, lent, 8)).splitlines()[1:]] == [
            ["default"], ["tuned", "on", "nvidia-h200"]]
