"""What goes wrong in a tuner's processes: functions that they are asked to run, in a module that is quick to import there; and a process
that is none, which answers by a script."""
import ctypes
import os
from pathlib import Path


def prepare():
    """Nothing to prepare."""


def process_id():
    return os.getpid()


def hang_with_the_lock():
    """Let no other thread of the process run."""
    ctypes.PyDLL(None).sleep(600)


def end_the_first_time(marker):
    """As if the machine had ended the process for want of memory, once."""
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(9)
    return "done"


def end_the_process():
    os._exit(9)


class EndsItsProcess:
    """An Order of scripts.choices that a process is ended by which builds it."""

    def __init__(self, workload, choices):
        self.workload, self.choices = workload, choices

    def build(self, share):
        os.write(2, b"it ends here\n")
        end_the_process()


class ScriptedWorker:
    """In the place of a Worker: each task gets the next answer, which is raised where it is an error; served counts as of a real one."""

    def __init__(self, *script, served=1):
        self.script, self.served, self.asked = list(script), served, []

    def ask(self, timeout, function, *arguments):
        self.asked.append((function.__name__, self.served == 0, timeout))
        self.served += 1
        answer = self.script.pop(0)
        if isinstance(answer, (ChildProcessError, TimeoutError)):
            self.served = 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart(self):
        self.served = 0
