"""The commands in this process: a process of their own would spend seconds on importing TVM."""
import contextlib
import importlib
import io
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from scripts import cli

ROOT = Path(__file__).parent.parent


def command(name, *arguments, code=None):
    """What `python -m scripts.<name>` does in the project's folder, as a CompletedProcess; its exit code must be `code` where that is
    given."""
    arguments, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    at_broken_pipe = signal.getsignal(signal.SIGPIPE)  # scripts.show wants to end by it, tests do not
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            found = main(name)(arguments)
        except SystemExit as stop:
            found = stop.code
        finally:
            signal.signal(signal.SIGPIPE, at_broken_pipe)
    assert code is None or found == code, err.getvalue()
    return CompletedProcess(["python", "-m", f"scripts.{name}", *arguments], found, out.getvalue(), err.getvalue())


def main(name):
    """Function (arguments) -> exit code of a command."""
    module = imported(name)
    return module.main if name == "run" else lambda arguments: cli.main(module.run, module.make_parser().parse_args(arguments))


def imported(name):
    """The module of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_USE_RUNTIME_LIB", "1")  # as scripts.run sets it; put back, for the processes that tests start
        return importlib.import_module(f"scripts.{name}")
