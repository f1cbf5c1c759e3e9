"""MetaSchedule's runner: one process at the device, which gates every kernel before it is timed, and starts anew after a crash."""
import subprocess

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.support.popen_pool import PopenWorker

from schedules.tuning import run_worker

#: Seconds that gate and timing of one kernel may take, inputs included; for a duel, of each kernel in it.
TIMEOUT = 60
#: With inputs at hand: a kernel that hangs on a GPU shall not take a session's time.
LATER = {"cuda": 10, "cpu": TIMEOUT}
DUEL_ROUNDS = 7


@derived_object
class GatedRunner(ms.runner.PyRunner):
    """Measures the artefacts of a PoolBuilder for one Setting after the other.

    kind     "cuda" or "cpu"
    toolkit  Toolkit for CUDA, None for CPU kernels, whose number of threads the environment variable TVM_NUM_THREADS says
    start    function (kind, toolkit) that prepares the process
    """

    def __init__(self, kind, toolkit, start=run_worker.start):
        super().__init__()
        self._worker = PopenWorker(start, (kind, toolkit), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.setting = None
        self.best_seconds = None
        self.errors = {}
        self._settled = None  # the setting of which the process has its inputs

    def run(self, runner_inputs):
        return [self._measure(str(entry.artifact_path)) for entry in runner_inputs]

    def _measure(self, path):
        timeout, self._settled = (LATER[self.setting.kind] if self._settled == self.setting else TIMEOUT), self.setting
        try:
            found = self._ask(timeout, run_worker.measure, path, self.setting, self.best_seconds)
        except TimeoutError:
            found = {"refused": f"not measured within {timeout} s"}
        if "refused" in found:
            return ms.runner.LocalRunnerFuture(None, found["refused"])
        self.errors[path] = found["error"]
        return ms.runner.LocalRunnerFuture(found["seconds"], None)

    def duel(self, paths, seed, seconds=None):
        """Seconds of several artefacts measured in turns: for each a dict as of `run_worker.measure`. None where they were not through
        after so many seconds."""
        most = TIMEOUT * len(paths)
        try:
            found = self._ask(min(most, seconds or most), run_worker.duel, paths, self.setting, DUEL_ROUNDS, seed)
        except TimeoutError:
            if seconds is not None and seconds < most:
                return None
            found = {"refused": f"not measured within {most} s"}
        return [found] * len(paths) if isinstance(found, dict) else found

    def _ask(self, timeout, function, *arguments):
        """Result of a function in the device's process, or {"refused": why}; TimeoutError, after which there is a new process."""
        try:
            self._worker.send(function, arguments, timeout=timeout)
            return self._worker.recv()
        except TimeoutError:
            self._settled = None
            raise
        except ChildProcessError:
            self._settled = None
            return {"refused": "the kernel crashes"}
        except Exception as error:
            # After an error the CUDA context is of no more use: the next kernel gets a new process.
            self.close()
            return {"refused": _last_line(error)}

    def close(self):
        """End the process."""
        self._settled = None
        self._worker.kill()


def _last_line(error):
    """What an error that crossed processes says: its text is a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
