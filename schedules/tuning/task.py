"""MetaSchedule's side of one space: its static declaration, an evolutionary search over it, and what the search has learnt.

MetaSchedule cannot search over symbolic shapes: its key is the declaration specialised to the shape that is timed, which is never built.
"""
import logging
import random
import sys
import types
from contextlib import contextmanager
from functools import cached_property

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from schedules.space import decisions, schedule_in
from schedules.tuning.features import token
from schedules.tuning.forms import schedule_static, static_form, symbolic_form

#: How many measured plans become parents, and the sizes of the evolution: small, since a space has tens to hundreds of plans.
PARENTS = 4
POPULATION = 24
GENERATIONS = 2
UNBOUNDED = 1 << 30
#: Plans of a space that may be refused before one passes.
HOPELESS = 4


class Task:
    """The search over one space. Declaring and scheduling take seconds, so nothing of it happens before the first `propose`.

    space    schedules.space.Space
    shape    te_defs.workload.Shape that is timed
    model    cost model, shared by all tasks
    known    {(family name, plan): Outcome}, shared by all tasks: what is in it is not proposed again
    seed     of this task's draws
    threads  of MetaSchedule's search
    """

    def __init__(self, space, shape, model, known, seed, threads):
        self.space, self.shape, self.model, self.known = space, shape, model, known
        self.fitting = space.fitting_plans()
        self._threads, self._seed, self._rng = threads, seed, random.Random(seed)
        self._database = ms.database.MemoryDatabase()
        self._learnt, self._candidates, self._recorded, self._searchable = set(), {}, set(), True

    def key(self, plan):
        return self.space.family.NAME, plan

    def unknown(self, pending=()):
        """Fitting plans that are neither known nor among `pending` keys; none once the first few were all refused."""
        refused = [self.known[key].refused is not None for key in map(self.key, self.fitting) if key in self.known]
        if len(refused) >= HOPELESS and all(refused):
            return []
        return [plan for plan in self.fitting if self.key(plan) not in self.known and self.key(plan) not in pending]

    def measured(self):
        """[(seconds, plan)] of this space, the best first."""
        found = ((self.known[key].seconds, key[1]) for key in map(self.key, self.fitting) if key in self.known)
        return sorted((entry for entry in found if entry[0] is not None), key=lambda entry: entry[0])

    def propose(self, count, pending=()):
        """Up to `count` plans to measure next: those that MetaSchedule's search picks, filled up at random; all where few are left."""
        left = self.unknown(pending)
        if len(left) <= count:
            return left
        picked = []
        for candidate in self._candidates_of_search():
            plan = self._plan_of(candidate.sch.mod)
            self._candidates[plan] = candidate
            if plan in left and plan not in picked:
                picked.append(plan)
        rest = [plan for plan in left if plan not in picked]
        return (picked + self._rng.sample(rest, len(rest)))[:count]

    def _candidates_of_search(self):
        """MetaSchedule's proposals; none from now on where a stage fails on some plan, since such a plan ends a whole round of it."""
        if self._searchable:
            try:
                self._learn()
                return self._search.generate_measure_candidates() or ()
            except (RuntimeError, ValueError, TypeError) as error:
                self._searchable = False
                logging.getLogger(__name__).warning("no more search over %s: %s", self.space.name, str(error).splitlines()[-1:])
        return ()

    def _plan_of(self, mod):
        return type(self.space.seed)(**decisions(mod)[2])

    @cached_property
    def symbolic(self):
        """Module of the declaration with variable sizes: the one that is built."""
        return symbolic_form(self.space)

    @cached_property
    def static(self):
        """Module of the declaration at the shape that is timed: what MetaSchedule calls the workload."""
        return static_form(self.symbolic, self.space.workload, self.shape)

    @cached_property
    def _search(self):
        """MetaSchedule's context of the search, ready to generate candidates."""
        space = ms.space_generator.ScheduleFn(lambda sch: schedule_in(sch, self.space, self.space.seed), sch_rules=[],
                                              postprocs=[WithinBudget(self)], mutator_probs={FlipOneKnob(self): 1.0})
        design = schedule_static(self.static)
        schedule_in(design, self.space, self.space.seed)
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=POPULATION, init_measured_ratio=PARENTS / POPULATION, init_min_unmeasured=1, genetic_num_iters=GENERATIONS,
            genetic_mutate_prob=0.9, eps_greedy=0.1)
        logging.getLogger(ms.__name__).setLevel(logging.ERROR)
        with _without_stock_intrinsics():
            context = ms.TuneContext(self.static, target=self.space.arch.target(), space_generator=space, search_strategy=strategy,
                                     task_name=self.space.name, rand_state=self._seed + 1, num_threads=self._threads)
        context.pre_tuning(UNBOUNDED, POPULATION, [design], self._database, self.model)
        return context

    def _learn(self):
        """Tell the cost model of outcomes that are new, and file the best plans as records, which become parents."""
        fresh = [plan for plan in self.fitting if self.key(plan) in self.known and plan not in self._learnt]
        if fresh:
            self._learnt.update(fresh)
            outcomes = [self.known[self.key(plan)] for plan in fresh]
            results = [ms.runner.RunnerResult(None if entry.seconds is None else [entry.seconds], entry.refused) for entry in outcomes]
            self.model.update(self._search, [ms.MeasureCandidate(token(self.space, plan), []) for plan in fresh], results)
        for seconds, plan in self.measured()[:PARENTS]:
            if plan not in self._recorded:
                self._recorded.add(plan)
                self._record(plan, seconds)

    def _record(self, plan, seconds):
        candidate = self._candidates.get(plan)
        if candidate is None:
            sch = schedule_static(self.static)
            schedule_in(sch, self.space, plan)
            candidate = ms.MeasureCandidate(sch, ms.arg_info.ArgInfo.from_entry_func(self.static, False))
        workload = self._database.commit_workload(self.static)
        self._database.commit_tuning_record(ms.database.TuningRecord(
            candidate.sch.trace.simplified(True), workload, [seconds], self.space.arch.target(), candidate.args_info))


@derived_object
class FlipOneKnob(ms.mutator.PyMutator):
    """Decide one draw anew, so that a plan results that fits and, where there is one, is not known. MetaSchedule's own mutators know
    tile sizes and the like, and no draw in general."""

    def __init__(self, task, seed=0):
        super().__init__()
        self.task, self.seed = task, seed
        self.rng = random.Random(seed)

    def _initialize_with_tune_context(self, context):
        pass

    def apply(self, trace, _):
        space = self.task.space
        draws = [(inst, int(trace.decisions[inst])) for inst in trace.insts if inst.kind.name == "SampleCategorical"]
        fields = [(field, candidates) for field, candidates in space.knobs if len(candidates) > 1]
        plan = space.seed.but(**{field: candidates[decision] for (field, candidates), (_, decision) in zip(fields, draws)})
        flips = [(inst, decision, plan.but(**{field: value})) for (field, candidates), (inst, now) in zip(fields, draws)
                 for decision, value in enumerate(candidates) if decision != now]
        flips = [flip for flip in flips if space.fits(flip[2])]
        flips = [flip for flip in flips if self.task.key(flip[2]) not in self.task.known] or flips
        if not flips:
            return None
        inst, decision, _ = self.rng.choice(flips)
        return trace.with_decision(inst, decision, remove_postproc=True)

    def clone(self):
        return FlipOneKnob(self.task, self.seed + 1)


@derived_object
class WithinBudget(ms.postproc.PyPostproc):
    """Drop a candidate whose plan does not fit, before anything is lowered."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def _initialize_with_tune_context(self, context):
        pass

    def apply(self, sch):
        return self.task.space.fits(type(self.task.space.seed)(**decisions(sch.mod)[2]))

    def clone(self):
        return WithinBudget(self.task)


@contextmanager
def _without_stock_intrinsics():
    """TuneContext imports tvm.s_tir.tensor_intrin for its side effect: 300 intrinsics that nothing here uses, 20 seconds of work."""
    name = "tvm.s_tir.tensor_intrin"
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]
