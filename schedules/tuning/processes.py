"""Processes that work for the tuner, and can be ended whatever they are at. TVM's PopenWorker asks a process politely: the process itself
watches the time, so one that does not come to it is waited for without end, and closing waits until the work at hand is done."""
import concurrent.futures
import os
import pickle
import struct
import subprocess
import sys
import threading

from tvm.support.popen_pool import PopenWorker, kill_child_processes

#: Seconds beyond its time after which a process is killed from outside, and what one that has to start first may take longer.
GRACE, START = 3, 60
#: Seconds between a process's looks for its parent.
LOOK = 0.5


#: What a process runs: TVM's loop of tasks. tvm_ffi imports PyTorch where that is installed, which takes longer than all else and serves
#: nothing here; what comes later, such as the module of a user's mask, may have it.
_MAIN = "import sys; sys.modules['torch'] = None; from tvm.exec.popen_worker import main; del sys.modules['torch']; main()"


class Process(PopenWorker):
    """TVM's process, started by _MAIN, whose words nobody hears."""

    def _start(self):
        if self._proc is None:
            (answers, answering), (asked, asking) = os.pipe(), os.pipe()
            self._proc = subprocess.Popen([sys.executable, "-c", _MAIN, str(asked), str(answering)], pass_fds=(asked, answering),
                                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            os.close(asked)
            os.close(answering)
            self._reader, self._writer = os.fdopen(answers, "rb"), os.fdopen(asking, "wb")


class Worker:
    """A process that does one task after the other. It starts with its first task, and anew after it has ended.

    start      function that prepares it, called with `arguments`
    served     how many tasks the process has been given that now runs; 0 where none runs
    """

    def __init__(self, start, arguments):
        self._popen = Process(_begin, (os.getpid(), start, arguments))
        self._closed = False
        self.served = 0

    def ask(self, timeout, function, *arguments):
        """What a function returns there within `timeout` seconds, or raises. TimeoutError or ChildProcessError where the process had to be
        ended or ended itself."""
        late = threading.Event()
        watchdog = threading.Timer(timeout + (GRACE if self.served else START), self._overdue, [late])
        watchdog.daemon = True
        watchdog.start()
        self.served += 1
        try:
            self._popen.send(function, arguments, timeout=timeout)
            if self._closed:
                self._kill()
            return self._popen.recv()
        except TimeoutError:
            self.served = 0
            raise
        except (ChildProcessError, EOFError, struct.error, pickle.UnpicklingError) as error:  # the end came before, or within, an answer
            self.served = 0
            self._popen.kill()
            raise (TimeoutError if late.is_set() else ChildProcessError)("the process has ended") from error
        finally:
            watchdog.cancel()

    def _overdue(self, late):
        late.set()
        self._kill()

    def _kill(self):
        process = self._popen._proc
        if process is not None:
            kill_child_processes(process.pid)
            process.kill()

    def restart(self):
        """End the process; the next task gets a new one."""
        self.served = 0
        self._kill()
        self._popen.kill()

    def end(self):
        """End the process from any thread: whoever waits for it gets a ChildProcessError."""
        self._closed = True
        self._kill()


class Pool:
    """Workers that take tasks as they come; a task whose process ends is tried once more, since it may be the machine that ended it.

    count    how many
    timeout  seconds that a task may take
    """

    def __init__(self, count, timeout, start, arguments):
        self._threads = concurrent.futures.ThreadPoolExecutor(count)
        self._timeout, self._start, self._arguments = timeout, start, arguments
        self._own, self._workers, self._closing = threading.local(), [], False

    def submit(self, function, *arguments):
        """Future of a task."""
        return self._threads.submit(self._run, function, arguments)

    def _run(self, function, arguments):
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(self._start, self._arguments)
            self._workers.append(self._own.worker)
        try:
            return self._own.worker.ask(self._timeout, function, *arguments)
        except ChildProcessError:
            if self._closing:
                raise
            return self._own.worker.ask(self._timeout, function, *arguments)

    def close(self):
        """End the processes at once; what they were at is lost."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.restart()


def _begin(parent, start, arguments):
    """Prepare a process, which ends by itself soon after its parent has, even by SIGKILL in the middle of a kernel that hangs."""
    def watch():
        while os.getppid() == parent:
            threading.Event().wait(LOOK)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
    start(*arguments)
