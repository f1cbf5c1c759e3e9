"""Tuning of gradients: what is tuned and how it is named, the gate, sessions of several functions, the command and who reads its record."""
import concurrent.futures
import itertools
import json
import re
import shutil

import numpy as np
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from schedules import backward
from schedules.arch import cpu_arch, cuda_arch
from schedules.artefact.export import read_manifest
from schedules.backward_parts import parts_of, plans_of
from schedules.families import cpu, cpu_backward, mma_backward, simt_backward, wgmma_backward, wgmma_fused_backward
from schedules.space import decisions
from schedules.tuning import gate, log, results
from schedules.tuning.build_worker import Built
from schedules.tuning.last_round import Winner
from schedules.tuning.search import Host, Limits, TuneError
from schedules.tuning.several import Sessions, session_of
from schedules.tuning.subjects import BackwardPass, ForwardPass, subject_named
from scripts import bench, cli, export, options, tune
from scripts.kernels import Planned
from te_defs import reference
from te_defs.workload import Shape, Workload
from tests.commands import command
from tests.fake_tuner import SHAPE, WORKLOAD, Clock

CPU, ARCH, HOPPER = tvm.cpu(), cpu_arch("x86-64-v4", 512, 2), cuda_arch("sm_90a")
SUBJECT = BackwardPass(WORKLOAD)
FAMILIES = [(order, family) for order, families in backward.FAMILIES.items() for family in families]
NAME = "bwd_d16_dv8_f32_causal"
SMALL = ("--workload", WORKLOAD.name, "--backward", "--target", "cpu", "--length", "64")


def arch_of(family):
    return ARCH if family is cpu_backward else HOPPER


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("order, family", FAMILIES, ids=lambda it: getattr(it, "NAME", it))
def test_spaces_begin_with_the_default_plan_and_offer_others_that_fit(order, family, head_dim):
    subject = BackwardPass(Workload(head_dim, head_dim, "float16", "causal"), order)
    if family.decline(subject.workload, arch_of(family)) is not None:
        pytest.skip(f"{family.NAME} does not take {head_dim} channels")
    parts = subject.parts((family,), arch_of(family))
    defaults = backward.default_plans(family, subject.workload, arch_of(family))
    for (part, own), spaces in zip(subject.split((family.NAME, defaults)).items(), parts.values()):
        assert (spaces[0].family.NAME, spaces[0].seed) == own and parts[part] is spaces
        assert all(space.fits(space.seed) for space in spaces) and sum(len(space.fitting_plans()) for space in spaces) > 3
        assert len({space.seed for space in spaces}) == len(spaces)
    assert subject.offers((family.NAME, defaults), arch_of(family))


class TestSubjects:
    @pytest.mark.parametrize("subject, name", [
        (ForwardPass(WORKLOAD), WORKLOAD.name), (SUBJECT, NAME), (BackwardPass(WORKLOAD, backward.ANY_ORDER), f"{NAME}+any-order"),
        (BackwardPass(Workload(64, 64, "float16", "full", "softcap", True)), "bwd_d64_dv64_f16_full+softcap+sink")])
    def test_names_say_which(self, subject, name):
        assert subject.name == name and subject_named(name) == subject

    @pytest.mark.parametrize("family, head_dim", [(wgmma_backward, 128), (wgmma_backward, 256), (mma_backward, 64), (cpu_backward, 64)],
                             ids=lambda it: getattr(it, "NAME", it))
    def test_plans_are_read_back_from_a_record(self, family, head_dim):
        workload = Workload(head_dim, head_dim)
        plans = backward.default_plans(family, workload, arch_of(family))
        values = json.loads(json.dumps(plans.values()))
        assert plans_of(family, workload, values) == plans and all(type(value) is int for value in values.values())
        for other in ({**values, "dq.gone": 1}, dict(list(values.items())[1:]), {}):
            assert BackwardPass(workload).key_of(family.NAME, other) is None
        assert BackwardPass(workload).key_of("gone", values) is None

    def test_operations_are_those_of_five_products(self):
        assert SUBJECT.operations(SHAPE) == 2.5 * ForwardPass(WORKLOAD).operations(SHAPE)

    def test_a_measurement_is_of_the_plans_of_the_other_functions_too(self):
        dk_dv, dq = parts_of(simt_backward, Workload(64, 64, "float32"))
        plans = backward.default_plans(simt_backward, Workload(64, 64, "float32"), HOPPER)
        of_dq = dq.declaration(Workload(64, 64, "float32"), HOPPER, plans.dq.but(unroll=4))
        assert str(plans.dk_dv) in of_dq and str(plans.dq) not in of_dq
        assert of_dq != dk_dv.declaration(Workload(64, 64, "float32"), HOPPER, plans.dk_dv)


@pytest.fixture(scope="module")
def gate_cases():
    return gate.cases(SUBJECT, CPU, shapes=gate.SHAPES[:2] + gate.SHAPES[4:])


def by_reference(change=lambda dq, dk, dv: None):
    """A call that computes with NumPy and lets `change` spoil what it writes."""
    def call(dout, q, k, v, out, lse, dq, dk, dv, scale):
        exact = [x.astype(np.float32) for x in reference.backward(WORKLOAD, *(x.numpy() for x in (dout, q, k, v, out, lse)), scale)]
        change(*exact)
        for output, found in zip((dq, dk, dv), exact):
            output.copyfrom(found)
    return call


class TestGate:
    def test_right_gradients_pass(self, gate_cases):
        assert gate.check(by_reference(), gate_cases, CPU) < 1e-5

    @pytest.mark.parametrize("number, name", list(enumerate(("dQ", "dK", "dV"))))
    def test_each_gradient_is_judged(self, gate_cases, number, name):
        with pytest.raises(gate.Refused, match=rf"{name}\[.*\] is .* exceeds .* \(N = 77, M = 90\)"):
            gate.check(by_reference(lambda *found: found[number].__iadd__(0.01)), gate_cases, CPU)
        with pytest.raises(gate.Refused, match=rf"{name}\[.*\] is nan"):
            gate.check(by_reference(lambda *found: found[number].fill(np.nan)), gate_cases, CPU)

    def test_two_runs_must_agree_in_order_only_but_both_be_right(self, gate_cases):
        def turns(*factors):
            factor = itertools.cycle(factors)
            return by_reference(lambda dq, dk, dv: dq.__imul__(np.float32(next(factor))))
        with pytest.raises(gate.Refused, match="two runs on the same inputs differ"):
            gate.check(turns(1, 1 + 2**-23), gate_cases, CPU, same_bits=SUBJECT.same_bits)
        any_order = BackwardPass(WORKLOAD, backward.ANY_ORDER)
        gate.check(turns(1, 1 + 2**-23), gate_cases, CPU, same_bits=any_order.same_bits)
        with pytest.raises(gate.Refused, match=r"dQ\[.*\] is .* where .* is right"):
            gate.check(turns(1, 2), gate_cases, CPU, same_bits=any_order.same_bits)


def seconds_of(plans):
    """A made-up time of a whole gradient: small tiles are fast, and two vectors best; default plans are not the best."""
    apart = plans.by_role().values() if hasattr(plans, "by_role") else [plans]
    return 1e-6 * sum((plan.q_tile + plan.kv_tile) * (1 + abs(getattr(plan, "panel_vectors", 2) - 2)) for plan in apart)


class Builder:
    """Builds nothing; an artefact's path is the values of its plans."""

    eager = False

    def __init__(self, clock=lambda: 0, takes=0):
        self.workers, self.spaces, self.built, self.begun, self.clock, self.takes = 2, (), {}, [], clock, takes

    def begin(self, mod, whole=False):
        _, family, values = decisions(mod)
        space = next(space for space in self.spaces if space.owns(family, type(space.seed)(**values)))
        return self.begin_plan(space, type(space.seed)(**values), whole)

    def begin_plan(self, space, plan, whole=False):
        plans, future = space.family.plans(space.workload, space.arch, plan), concurrent.futures.Future()
        self.begun.append((plans, whole))
        future.set_result(plans)
        for _ in range(self.takes):
            self.clock()
        return future

    def result(self, future):
        path = json.dumps(future.result().values())
        self.built[path] = Built(path, "declared")
        return ms.builder.BuilderResult(path, None)

    def declarations(self, spaces):
        return {space.name: "declared" for space in spaces}

    def discard(self, path):
        self.built.pop(path, None)


class Runner:
    """Measures by `seconds_of`; in the last round, which is not through in time where it is `late`, the default plans are best where these
    are `upset`."""

    def __init__(self, upset=False, late=False, refuse=lambda plans: False, family=cpu_backward):
        self.upset, self.late, self.refuse, self.family, self.duels, self.found = upset, late, refuse, family, [], {}

    def prepare(self):
        pass

    def of(self, path):
        return plans_of(self.family, WORKLOAD, json.loads(path))

    def run(self, inputs):
        plans = self.of(str(inputs[0].artifact_path))
        self.found[str(inputs[0].artifact_path)] = {"error": 1e-7, "spread": 0.0, "proven": True}
        return [ms.runner.LocalRunnerFuture(*((None, "wrong") if self.refuse(plans) else ([seconds_of(plans)], None)))]

    def duel(self, paths, seed, left=None):
        self.duels.append([self.of(path) for path in paths])
        default = backward.default_plans(cpu_backward, WORKLOAD, ARCH)
        made = [1e-9 if self.upset and plans == default else seconds_of(plans) for plans in self.duels[-1]]
        return None if self.late else [{"seconds": [x, 0.9 * x, 2 * x], "error": 1e-7} for x in made]


def sessions(runner=None, builder=None, clock=lambda: 0.0, champion=None, known=None, stop=lambda: False):
    host = Host(clock, stop, report=lambda progress: None, save=lambda: None)
    return session_of(SUBJECT, SUBJECT.parts((cpu_backward,), ARCH), champion, SHAPE, builder or Builder(), runner or Runner(), host,
                      {} if known is None else known, {})


DEFAULT = backward.default_plans(cpu_backward, WORKLOAD, ARCH)


class TestSessions:
    def test_each_function_is_searched_beside_the_default_plans_of_the_others(self):
        builder = Builder()
        made = sessions(builder=builder)
        winner = made.run(Limits(trials=12))
        assert isinstance(made, Sessions) and made.tried == 12 and len(made.known) == 12
        searched = [plans for plans, whole in builder.begun if not whole]
        assert all(plans.dq == DEFAULT.dq or plans.dk_dv == DEFAULT.dk_dv for plans in searched)
        assert {name for name, _ in made.known} == {"cpu_backward.dk_dv", "cpu_backward.dq"}
        assert winner.measured == "duel" and winner.key[0] == "cpu_backward"
        assert winner.key[1].dq != DEFAULT.dq and winner.key[1].dk_dv != DEFAULT.dk_dv, "what was found apart meets"

    def test_it_never_ends_below_the_default_plans(self):
        winner = sessions(Runner(upset=True)).run(Limits(trials=8))
        assert winner.key == ("cpu_backward", DEFAULT)
        assert tune.gain(winner, winner.key) == "the default plan stays: 0.0000 ms (0.0000 to 0.0000)"

    def test_the_gain_is_told_with_its_spread(self):
        made = sessions()
        winner = made.run(Limits(trials=12))
        assert re.fullmatch(r"2\.000x as fast as the default plan in the last round: [\d.]+ ms \([\d.]+ to [\d.]+\) against .*",
                            tune.gain(winner, made.default))
        assert results._against(winner, made.default)["default_plan"]["median"] == pytest.approx(seconds_of(DEFAULT))

    def test_the_champion_of_earlier_sessions_takes_part(self):
        champion = "cpu_backward", DEFAULT.but(dq=DEFAULT.dq.but(unroll=4))
        runner = Runner()
        sessions(runner, champion=champion).run(Limits(trials=4))
        assert runner.duels[0][:2] == [DEFAULT, champion[1]]

    @pytest.mark.parametrize("seconds", [40, 90, 200])
    @pytest.mark.parametrize("takes", [0, 1])
    def test_it_ends_in_time(self, seconds, takes):
        clock = Clock()
        made = sessions(builder=Builder(clock, takes), clock=clock)
        made.run(Limits(seconds=seconds))
        assert clock.now <= seconds + 3 + 2 * 6 * takes, "a step and the builds of the last round after the end, at most"
        assert all(session.tried for session in made.sessions.values())

    def test_where_the_last_round_comes_too_late_one_function_is_tuned(self):
        winner = sessions(Runner(late=True)).run(Limits(trials=12))
        assert winner.measured == "search" and winner.score is None
        assert (winner.key[1].dq == DEFAULT.dq) != (winner.key[1].dk_dv == DEFAULT.dk_dv)
        assert tune.gain(winner, ("cpu_backward", DEFAULT)) == "not measured beside the default plan"

    def test_a_stop_ends_it_without_a_last_round(self):
        builder, runner = Builder(), Runner()
        sessions(runner, builder, stop=lambda: len(builder.begun) > 3).run(Limits())
        assert runner.duels == []

    def test_says_so_where_nothing_passes(self):
        with pytest.raises(TuneError, match=f"no plan of {NAME} has passed so far, found 2 of 2 refused: 2 wrong"):
            sessions(Runner(refuse=lambda plans: True)).run(Limits(trials=4))

    def test_one_function_with_a_plan_is_searched_alike(self):
        subject = BackwardPass(Workload(64, 64), backward.ANY_ORDER)
        host, runner = Host(lambda: 0.0, lambda: False, lambda progress: None, lambda: None), Runner(family=wgmma_fused_backward)
        made = session_of(subject, subject.parts((wgmma_fused_backward,), HOPPER), None, SHAPE, Builder(), runner, host, {}, {})
        winner = made.run(Limits(trials=8))
        assert made.tried == 8 and winner.measured == "duel" and made.default in winner.scores
        assert (winner.key[1].q_tile, winner.key[1].kv_tile) == (64, 64) and winner.seconds < winner.scores[made.default].seconds
        (space, plans), = made.kept(winner)
        assert plans[0] == (winner.seconds, winner.key[1]) and space.owns(*winner.key)

    @pytest.mark.parametrize("family, other", [(wgmma_backward, mma_backward), (wgmma_backward, wgmma_fused_backward),
                                               (wgmma_fused_backward, wgmma_backward)], ids=lambda it: it.NAME)
    def test_plans_of_two_families_meet_in_the_last_round_only(self, family, other, monkeypatch):
        monkeypatch.setitem(backward.FAMILIES, backward.IN_ORDER, (wgmma_fused_backward, wgmma_backward, mma_backward))
        gpu = Workload(64, 64, "float16")
        subject = BackwardPass(gpu)
        champion = other.NAME, backward.default_plans(other, gpu, HOPPER)
        host = Host(lambda: 0.0, lambda: False, lambda progress: None, lambda: None)
        made = session_of(subject, subject.parts((family,), HOPPER), champion, SHAPE, Builder(), Runner(), host, {}, {})
        assert all(space.family.family is family for session in made.sessions.values() for space in session.spaces)
        assert [space.family.NAME for space, _ in made._finalists().values()] == [family.NAME, other.NAME]
        kept = made.kept(Winner("duel", ((1e-3, champion),), log.Outcome(1e-3), {}))
        assert [(space.family.NAME, plans[0][1]) for space, plans in kept] == list(subject.split(champion).values())


class TestCommand:
    def test_dry_run_says_what_there_is(self, capsys):
        assert main("--workload", "d128_f16_full", "--backward", "any-order", "--target", "sm_90a", "--dry-run") == cli.DONE
        text = capsys.readouterr().out
        for part in ("bwd_d128_dv128_f16_full+any-order on sm_90a", "wgmma_fused_backward takes it",
                     "first plan: wgmma_fused_backward q_tile=64", "/bwd_d128_dv128_f16_full+any-order"):
            assert part in text

    @pytest.mark.parametrize("arguments, code, message", [
        (("--backward", "any-order"), cli.FAILED, "a schedule for the gradients of fwd_d16_dv8_f32_causal, any-order, on"),
        (("--backward", "--family", "cpu"), cli.USAGE,
         f"--family is one of {', '.join(it.NAME for it in backward.FAMILIES[backward.IN_ORDER])}, found 'cpu': choose one of these"),
        (("--backward", "--family", "simt_backward"), cli.FAILED, f"simt_backward does not take {NAME} on "),
        (("--backward", "backwards"), cli.USAGE, "invalid choice: 'backwards'"),
        (("--backward", "--workload", "fwd_d64_dv64_f16_causal+packed"), cli.USAGE, "leave out its +packed")])
    def test_bad_arguments_are_told_in_a_sentence(self, capsys, arguments, code, message):
        assert main("--workload", WORKLOAD.name, "--target", "cpu", "--dry-run", *arguments) == code
        assert message in capsys.readouterr().err


def main(*arguments):
    try:
        return cli.main(tune.run, tune.make_parser().parse_args(list(map(str, arguments))))
    except SystemExit as stop:
        return stop.code


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder of logs, output) after a session of 3 trials with real processes."""
    logs = tmp_path_factory.mktemp("logs")
    done = command("tune", *SMALL, "--workers", "1", "--logs", logs, "--trials", "3", code=cli.DONE)
    return logs, done.stdout


@pytest.fixture
def copied(tuned, tmp_path):
    """(a copy of these logs, its run.json)"""
    shutil.copytree(tuned[0], tmp_path / "logs")
    return tmp_path / "logs", next((tmp_path / "logs").glob(f"*/{NAME}/{log.RUN}"))


class TestRecord:
    def given(self, logs, plan="best"):
        """Arguments of a command that reads a log, and the device."""
        arguments = ["--workload", WORKLOAD.name, "--target", "cpu", "--backward", "--logs", str(logs), "--plan", plan]
        return export.make_parser().parse_args(arguments), cli.find_device("cpu")

    def chosen(self, logs, plan="best"):
        args, device = self.given(logs, plan)
        return options.chosen_gradients(args, device, WORKLOAD)

    def test_is_of_whole_gradients_that_were_proved(self, tuned):
        run = json.loads(next(tuned[0].glob(f"*/{NAME}/{log.RUN}")).read_text())
        assert (run["workload"], run["trials"], run["refused"]) == (NAME, 3, 0)
        assert run["best"]["measured"] == "duel" and 0 < run["best"]["largest_error"] < 1e-4
        assert run["best"]["seconds"] == run["best"]["last_round"]["median"] <= run["best"]["default_plan"]["median"]
        measured = json.loads(next(tuned[0].glob(f"*/{NAME}/{log.MEASURED}")).read_text())
        assert {family for family, *_ in measured["plans"]} == {"cpu_backward.dk_dv", "cpu_backward.dq"}
        assert tuned[1].splitlines()[-1].startswith(f"{NAME}: ")

    def test_goes_into_an_artefact_that_names_it(self, tuned, tmp_path, monkeypatch):
        monkeypatch.setattr(options, "tuned_plans", lambda args, *what: [Planned(cpu.NAME, options.default_plan(args, *what)[1])])
        made = command("export", "--workload", WORKLOAD.name, "--target", "cpu", "--backward", "--logs", tuned[0], "--output",
                       tmp_path / "it.so", code=cli.DONE)
        (gradients,), record = self.chosen(tuned[0]), f"{cli.find_device('cpu').slug}/{NAME}"
        assert json.loads(made.stdout.splitlines()[0])["backward"][0]["record"] == record
        variant, = read_manifest(tmp_path / "it.so")["backward"]["variants"]
        assert variant["measured"] == gradients.measured and variant["measured"]["record"] == record
        assert variant["plan"] == {role: plan.values() for role, plan in gradients.plan.by_role().items()}

    def test_is_a_contestant_beside_the_default_plans(self, tuned):
        device = cli.find_device("cpu")
        args = bench.make_parser().parse_args(["--workload", WORKLOAD.name, "--backward", "--logs", str(tuned[0])])
        plans = bench.our_plans(args, device, WORKLOAD)
        assert list(plans) == ["default", "tuned"] and plans["default"][0] == plans["tuned"][0]
        assert plans["tuned"][1] == self.chosen(tuned[0]) and plans["default"][1] == self.chosen(tuned[0], "default")

    def test_none_means_default_plans_and_is_said(self, tmp_path, capsys):
        gradients, = self.chosen(tmp_path)
        assert [gradients] == self.chosen(tmp_path, "default") and gradients.measured is None
        assert f"a record of {NAME} for" in capsys.readouterr().out

    @pytest.mark.parametrize("change, message", [
        (lambda best: best.update(declaration="1"), "the declaration has changed since"),
        (lambda best: best.update(family="gone"), "there is no family gone any more"),
        (lambda best: best["plan"].pop("dq.unroll"), "plans of cpu_backward have other fields than"),
        (lambda best: best["plan"].update({"dq.unroll": 3}), "cpu_backward offers no plan")])
    def test_of_other_sources_is_refused_by_name(self, copied, change, message):
        logs, path = copied
        run = json.loads(path.read_text())
        change(run["best"])
        path.write_text(json.dumps(run))
        with pytest.raises(log.LogError, match=rf"the record in .*{NAME} must be of the sources as they are, found that {message}"):
            self.chosen(logs)

    def test_is_not_that_of_the_other_order(self, tuned):
        args, device = self.given(tuned[0])
        args.backward = backward.ANY_ORDER
        with pytest.raises(log.LogError, match=r"a record of .*\+any-order for .* was wanted, found none in .*--backward any-order"):
            options.tuned_gradients(args, device, WORKLOAD)


def test_the_timed_call_has_probabilities():
    """Without an LSE of about the right size P would be infinite or nothing, and a GPU draws other power."""
    dout, q, k, v, out, lse, *_ = SUBJECT.timed(Shape(1, 1, 1, 64, 64), CPU)
    scores = np.einsum("bihd,bjhd->bhij", q.numpy(), k.numpy()) * WORKLOAD.head_dim**-0.5
    assert 0.5 < np.exp(scores - lse.numpy()[..., None]).sum(axis=-1).mean() < 2
