"""MetaSchedule's runner: one process at the device, which gates every kernel before it is timed, and starts anew after a crash.

Each failure is of one kernel: what breaks a process, or the context of a GPU, takes nothing of the next kernel, and a kernel that fails in
a process which served others before is asked once more in one of its own, since the fault may have been theirs.
"""
import statistics
import threading

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from schedules.tuning import run_worker
from schedules.tuning.processes import Worker
from schedules.tuning.reasons import CRASHES, FAILS, HANGS, LOST, OUT_OF_TIME, kind_of, reason
from schedules.tuning.search import TuneError

#: Seconds that gate and timing of one kernel may take, inputs included; for a duel, of each kernel in it.
TIMEOUT = 60
#: With inputs at hand: a kernel that hangs on a GPU shall not take a session's time.
LATER = {"cuda": 10, "cpu": TIMEOUT}
DUEL_ROUNDS = 7


@derived_object
class GatedRunner(ms.runner.PyRunner):
    """Measures the artefacts of a PoolBuilder for one Setting after the other.

    kind          "cuda" or "cpu"
    toolkit       Toolkit for CUDA, None for CPU kernels, whose number of threads the environment variable TVM_NUM_THREADS says
    setting       the Setting
    best          (seconds, artefact) of the best so far; each is None where there is none
    left          function that says how many seconds a measurement may still take; None: as many as it needs
    found         {path: {"error", "spread", "proven"}} of kernels that passed: largest error, (most - least) / median of the seconds, and
                  whether it answered the large set too, which all that are faster than the best must
    """

    def __init__(self, kind, toolkit):
        super().__init__()
        self._kind, self._worker = kind, Worker(run_worker.start, (kind, toolkit))
        self.setting, self.best, self.left = None, (None, None), lambda: None
        self.found = {}
        self._settled = None  # the setting of which the process has its inputs
        self._preparing = None  # the thread that waits for the process to make them
        self._suspect = True  # whether the device must show that it is there: at first, and after a kernel that broke or hung its process

    def prepare(self):
        """Have the process make inputs and right answers of the setting, while the first kernels are built; who asks it next waits."""
        self._wait_until_prepared()
        if self._settled != self.setting:
            left = self.left()
            self._preparing = threading.Thread(target=self._prepare, args=(TIMEOUT if left is None else min(TIMEOUT, left), self.setting))
            self._preparing.start()

    def _prepare(self, timeout, setting):
        try:
            self._worker.ask(timeout, run_worker.prepare, setting)
        except Exception:  # whatever it is, the first measurement meets it again, and says so
            self._worker.restart()
        else:
            self._settled = setting

    def _wait_until_prepared(self):
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def run(self, runner_inputs):
        return [self._measure(str(entry.artifact_path)) for entry in runner_inputs]

    def _measure(self, path):
        self._wait_until_prepared()
        if (lost := self._lost()) is not None:
            return ms.runner.LocalRunnerFuture(None, lost)
        found = self._told(run_worker.measure, path, self.setting, *self.best)
        if "refused" in found:
            return ms.runner.LocalRunnerFuture(None, found["refused"])
        median = statistics.median(found["seconds"])
        proven = self.best[0] is None or median < self.best[0]
        proof = self._told(run_worker.prove, path, self.setting) if proven else {"error": found["error"]}
        if "refused" in proof:
            return ms.runner.LocalRunnerFuture(None, proof["refused"])
        spread = (max(found["seconds"]) - min(found["seconds"])) / median
        self.found[path] = {"error": proof["error"], "spread": spread, "proven": proven}
        return ms.runner.LocalRunnerFuture(found["seconds"], None)

    def duel(self, paths, seed, left=lambda: None):
        """Prove several artefacts, each by itself, and measure those that pass in turns: for each {"seconds": [...], "error"} or
        {"refused"}. None where they were not through in the seconds that `left` tells, or broke the process together; TuneError where the
        device is lost."""
        self._wait_until_prepared()
        self.left, results = left, []
        for path in paths:
            if (lost := self._lost()) is not None:
                raise TuneError(lost)
            results.append(self._told(run_worker.prove, path, self.setting))
        passed = [index for index, result in enumerate(results) if "refused" not in result]
        timed = self._told(run_worker.duel, [paths[index] for index in passed], self.setting, DUEL_ROUNDS, seed) if passed else []
        if isinstance(timed, dict) or any(result.get("refused") == OUT_OF_TIME for result in results):
            return None
        for index, entry in zip(passed, timed):
            results[index] = results[index] | entry
        return results

    def _told(self, function, *arguments):
        """What a function says, or {"refused": why} where the process breaks, twice if it had served others before."""
        alone = self._worker.served == 0
        found = self._ask(function, *arguments)
        if not alone and _broken(found, CRASHES, FAILS):
            found = self._ask(function, *arguments)
        self._suspect = _broken(found, CRASHES, FAILS, HANGS)
        return found

    def _ask(self, function, *arguments):
        at_hand = function is run_worker.measure and self._settled == self.setting
        usual, left = LATER[self._kind] if at_hand else TIMEOUT, self.left()
        usual *= len(arguments[0]) if function is run_worker.duel else 1
        self._settled, timeout = None, usual if left is None else min(usual, left)
        try:
            found = self._worker.ask(timeout, function, *arguments)
            self._settled = self.setting
            return found
        except TimeoutError:
            return {"refused": reason(HANGS, f"not measured within {usual} s") if timeout == usual else OUT_OF_TIME}
        except ChildProcessError:
            return {"refused": reason(CRASHES, "the kernel crashes its process")}
        except Exception as error:
            self._worker.restart()  # after an error the CUDA context is of no more use
            return {"refused": reason(FAILS, _last_line(error))}

    def _lost(self):
        """None, or a sentence where the device is not there, or not any more: no plan shall be refused for it."""
        if not self._suspect:
            return None
        self._suspect = False
        try:
            sound, found = self._worker.ask(TIMEOUT, run_worker.answers, self._kind), "another number"
        except Exception as error:  # whatever it is, no kernel is to blame
            sound, found = False, _last_line(error)
        return None if sound else f"{LOST}, found {found}: see to the device and run the same command again; what was measured is kept"

    def close(self):
        """End the process, whatever it is at."""
        self._worker.end()
        self._wait_until_prepared()
        self._worker.restart()


def _broken(found, *kinds):
    """Whether what came back is a refusal of one of some kinds."""
    return isinstance(found, dict) and kind_of(found.get("refused", "")) in kinds


def _last_line(error):
    """What an error that crossed processes says: its text is a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
