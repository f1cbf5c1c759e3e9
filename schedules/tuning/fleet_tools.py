"""Builder and runner of a session whose kernels are measured by a fleet: what is built here is sent away at once, several at a time.

To the session, a kernel is built once it is measured as well: its future is done then, and the runner has the result at hand.
"""
import concurrent.futures
import os
from contextlib import contextmanager

from tvm.s_tir import meta_schedule as ms

from schedules.space import decisions
from schedules.tuning.fleet import Over, limit_of
from schedules.tuning.log import data_of
from schedules.tuning.reasons import OUT_OF_TIME

#: Measurements that are under way or wait for a worker, at most.
AT_ONCE = 64


class FleetRunner:
    """GatedRunner of a session, for a Fleet.

    best   (seconds, artefact), as GatedRunner's; always set as a whole, since other threads read it
    found  {path: {"error", "spread", "proven"}}, as GatedRunner's
    """

    def __init__(self, fleet):
        self.fleet, self.setting, self.best, self.left = fleet, None, (None, None), lambda: None
        self.found, self._answers, self._phase = {}, {}, 0

    def prepare(self):
        """Workers make inputs and right answers when they are first asked, each at its own time."""

    def next_phase(self):
        """Begin another search, or the last round: nobody asks any more for what still waits for a worker."""
        self._phase += 1

    def until_next_phase(self):
        """A function that says whether the phase is still that of now."""
        phase = self._phase
        return lambda: phase == self._phase

    def begin(self, path, setting, label, seconds=None, wanted=lambda: True):
        """Gate and time an artefact, in turn with the best as far as it is known; `run` then has the result. Over.

        seconds  that it may take; None: as many as it needs, and a session that is over does not wait for it
        wanted   function that says whether it is still worth waiting for a worker
        """
        best_seconds, best_path = self.best
        request = {**_about(setting), "do": "measure", "best": best_seconds, "seconds": seconds}
        with _held(best_path, f"{path}.best") as best:
            answer = self.fleet.run(request, [path, *best], limit_of(1, seconds), label, seconds, wanted)
        self._answers[path] = {"refused": OUT_OF_TIME} if answer is None else answer

    def run(self, runner_inputs):
        return [self._told(str(entry.artifact_path)) for entry in runner_inputs]

    def _told(self, path):
        if path not in self._answers:  # a plan that was built whole
            try:
                self.begin(path, self.setting, "the best plan of earlier sessions", self.left())
            except Over:
                self._answers[path] = {"refused": OUT_OF_TIME}
        answer = self._answers.pop(path)
        if "refused" in answer:
            return ms.runner.LocalRunnerFuture(None, answer["refused"])
        self.found[path] = {"error": answer["error"], "spread": answer.get("spread", 0.0), "proven": answer.get("proven") is True}
        return ms.runner.LocalRunnerFuture(answer["seconds"], None)

    def duel(self, paths, seed, left=lambda: None):
        """As GatedRunner's, by one worker. None also where it was lost: nothing is refused for that."""
        self.next_phase()
        seconds = left()
        request = {**_about(self.setting), "do": "duel", "seed": seed, "seconds": seconds}
        try:
            found = self.fleet.run(request, paths, limit_of(len(paths), seconds), "the last round", seconds)
        except Over:
            return None
        return found if isinstance(found, list) and len(found) == len(paths) else None

    def close(self):
        """Give the workers back."""
        self.fleet.close()


@contextmanager
def _held(path, name):
    """The file under another name, in a list: the session removes a best plan's artefact once there is a better one. An empty list where
    it has gone, or there is none."""
    try:
        if path is not None:
            os.link(path, name)
    except FileNotFoundError:
        path = None
    yield [] if path is None else [name]
    if path is not None:
        os.unlink(name)


class FleetBuilder:
    """PoolBuilder of a session that hands what it has built to a FleetRunner.

    builder  PoolBuilder
    runner   FleetRunner
    """

    eager = True

    def __init__(self, builder, runner):
        self._builder, self._runner = builder, runner
        self._threads = concurrent.futures.ThreadPoolExecutor(AT_ONCE)

    @property
    def workers(self):
        """How many plans can be at hand at the same time: one a build process and one a worker of the fleet."""
        return self._builder.workers + self._runner.fleet.size

    @property
    def spaces(self):
        return self._builder.spaces

    @spaces.setter
    def spaces(self, spaces):
        self._builder.spaces = spaces
        self._runner.next_phase()

    @property
    def built(self):
        return self._builder.built

    def begin(self, mod, whole=False):
        """As PoolBuilder's; the future is done once the kernel is measured."""
        _, family, values = decisions(mod)
        label = f"{family} {' '.join(f'{field}={value}' for field, value in values.items())}"
        asked = self._runner.setting, label, None, self._runner.until_next_phase()
        future = _Measured(self._builder.begin(mod, whole))
        future.building.add_done_callback(lambda _: self._threads.submit(self._send, future, asked))
        return future

    def begin_plan(self, space, plan, whole=False):
        """As PoolBuilder's: for the last round, which measures what it has built in turns."""
        return self._builder.begin_plan(space, plan, whole)

    def _send(self, future, asked):
        """Have a kernel measured that is built. Where the fleet is over its future stays as it is: the plan is not known yet.

        asked  what FleetRunner.begin takes behind the path
        """
        if future.building.cancelled() or not future.set_running_or_notify_cancel():
            return
        try:
            built = future.building.result()
            if not isinstance(built, str):
                self._runner.begin(built.path, *asked)
            future.set_result(built)
        except Over:
            pass
        except BaseException as error:
            future.set_exception(error)

    def declarations(self, spaces):
        return self._builder.declarations(spaces)

    def result(self, future):
        return self._builder.result(future)

    def discard(self, path):
        self._builder.discard(path)

    def close(self):
        """End the build processes, and what still waits for the fleet."""
        self._builder.close()
        self._runner.close()
        self._threads.shutdown(cancel_futures=True)


class _Measured(concurrent.futures.Future):
    """A kernel that is built and then measured. It can be cancelled as long as its building can."""

    def __init__(self, building):
        super().__init__()
        self.building = building

    def cancel(self):
        return self.building.cancel() and super().cancel()


def _about(setting):
    return {"setting": {"kind": setting.kind, "subject": setting.subject.name, "shape": data_of(setting.shape)}}
