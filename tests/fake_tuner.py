"""A tuner without processes: builder and runner that make their results up, for tests of the loop and of what it leaves behind."""
import concurrent.futures
import json

from tvm.s_tir import meta_schedule as ms

from schedules.arch import cpu_arch
from schedules.space import decisions, spaces_of
from schedules.tuning import log
from schedules.tuning.build_worker import Built
from schedules.tuning.search import Host, Session
from te_defs.workload import Shape, Workload
from tests import stand_in
from tests.stand_in import StandInPlan

WORKLOAD = Workload(16, 8, "float32", "causal")
ARCH = cpu_arch("x86-64-v3", 256, 2)
SHAPE = Shape(1, 2, 2, 64, 64)
SLUG = "x86-64-somelake-2c"


def spaces():
    """Three spaces: two sound ones and, last, those with faults."""
    return spaces_of((stand_in,), WORKLOAD, ARCH)


def outcome_of(plan):
    """A made-up measurement: more lanes are faster, spare 2 is best."""
    return log.Outcome(seconds=1e-3 / plan.lanes * (1 + abs(plan.spare - 2)))


class FakeBuilder:
    """Builds nothing; the artefact's path is the plan."""

    eager = False

    def __init__(self, workers=2, fail=()):
        self.workers, self.fail, self.spaces, self.built, self.begun = workers, fail, (), {}, []

    def begin(self, mod, whole=False):
        return self.begin_plan(None, StandInPlan(**decisions(mod)[2]), whole)

    def begin_plan(self, _space, plan, whole=False):
        self.begun.append((plan, whole))
        future = concurrent.futures.Future()
        future.set_result(plan)
        return future

    def result(self, future):
        plan = future.result()
        if plan in self.fail:
            return ms.builder.BuilderResult(None, "ValueError: cannot be built")
        path = json.dumps([plan.q_tile, plan.kv_tile, plan.lanes, plan.spare, plan.fault])
        self.built[path] = Built(path, f"declaration {plan.q_tile}")
        return ms.builder.BuilderResult(path, None)

    def declarations(self, wanted):
        return {space.name: f"declaration {space.seed.q_tile}" for space in wanted}

    def discard(self, path):
        del self.built[path]


class FakeRunner:
    """Measures by `outcome_of`; the duel turns the order round where `upset`, and is not through in time where `late`."""

    def __init__(self, upset=False, refuse=lambda plan: plan.fault, late=False):
        self.upset, self.refuse, self.late, self.measured, self.found = upset, refuse, late, [], {}
        self.best = None, None

    def prepare(self):
        pass

    def run(self, inputs):
        plan = StandInPlan(*json.loads(str(inputs[0].artifact_path)))
        self.measured.append(plan)
        result = (None, "wrong") if self.refuse(plan) else ([outcome_of(plan).seconds], None)
        proven = self.best[0] is None or outcome_of(plan).seconds < self.best[0]
        self.found[str(inputs[0].artifact_path)] = {"error": 1e-7, "spread": 0.0, "proven": proven}
        return [ms.runner.LocalRunnerFuture(*result)]

    def duel(self, paths, seed, left=None):
        if self.late:
            return None
        seconds = [outcome_of(StandInPlan(*json.loads(path))).seconds for path in paths]
        return [{"seconds": [-x if self.upset else x], "error": 1e-7} for x in seconds]


class Clock:
    """Goes on by one second with each look."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


def session(builder=None, runner=None, known=None, declarations=None, stop=lambda: False, clock=lambda: 0.0, champion=None, hints=()):
    if known and declarations is None:  # as a log has them beside what is known
        declarations = FakeBuilder().declarations(spaces())
    host = Host(clock, stop, report=lambda progress: None, save=lambda: None)
    return Session(WORKLOAD.name, spaces(), SHAPE, builder or FakeBuilder(), runner or FakeRunner(), host, {} if known is None else known,
                   {} if declarations is None else declarations, champion=champion, hints=hints)
