"""What a session tries next: the default plan, what is known to be good elsewhere, and then what MetaSchedule's search picks."""
import concurrent.futures

#: A space whose best is this many times slower than the best of all gets no further plans while others have some.
RIVAL = 1.15


class Proposals:
    """Plans to try of several spaces, the alternatives of one session.

    tasks     schedules.tuning.task.Tasks of the spaces, that of the default plan first
    known     {(family name, plan): Outcome} of the session
    first     keys of plans to try behind the default plan, before the others' seeds
    space_of  function (key) -> the space that owns it, None where none does
    apart     whether MetaSchedule's search runs in a thread of its own: it takes as long as several builds, and kernels can be measured
              meanwhile. Where nothing else may run while a kernel is measured it is not, and then its draws are repeatable
    """

    def __init__(self, tasks, known, first, space_of, apart):
        self._tasks, self._known, self._first, self._space_of = tasks, known, first, space_of
        self._turns = {task: 0 for task in tasks}
        self._thread = concurrent.futures.ThreadPoolExecutor(1) if apart else None

    def begin(self, count, taken):
        """Future of up to `count` (task, plan) beside the keys in `taken`: seeds, then those of the next task."""
        seeds = self.seeds(taken)[:max(count, 0)]
        task = self._next_task(taken) if count > 0 and not seeds else None
        if task is not None:
            self._turns[task] += 1
            if self._thread is not None:
                return self._thread.submit(_proposed, task, count, taken)
        future = concurrent.futures.Future()
        future.set_result(seeds if task is None else _proposed(task, count, taken))
        return future

    def seeds(self, taken=()):
        """[(task, plan)] that a search begins with and that are neither known nor among `taken` keys."""
        default, *others = [task.key(task.space.seed) for task in self._tasks]
        keys = [default, *self._first, *others]
        wanted = [(task, key[1]) for key in keys for task in self._tasks if task.space is self._space_of(key)]
        return [(task, plan) for task, plan in dict.fromkeys(wanted) if task.key(plan) not in {*self._known, *taken}]

    def _next_task(self, taken):
        """The rival space that had the fewest turns; once rivals are exhausted, the best of the others."""
        best = {task: task.measured()[0][0] if task.measured() else float("inf") for task in self._tasks}
        open_tasks = [task for task in self._tasks if task.unknown(taken)]
        # A space of one plan, such as that of another family's champion, is no measure of where a search pays.
        least = min((best[task] for task in self._tasks if task.space.size > 1), default=float("inf"))
        rivals = [task for task in open_tasks if best[task] <= RIVAL * least]
        if rivals:
            return min(rivals, key=lambda task: (self._turns[task], best[task]))
        return min(open_tasks, key=best.get, default=None)


def _proposed(task, count, taken):
    return [(task, plan) for plan in task.propose(count, taken)]
