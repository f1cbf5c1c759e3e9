"""What `scripts.tune` works with: processes that build and measure, a folder for what they build, and signals that ask it to stop."""
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from schedules.lowering.toolkit import find_toolkit
from schedules.tuning.builder import PoolBuilder
from schedules.tuning.fleet_tools import FleetBuilder, FleetRunner
from schedules.tuning.log import LogError, locked
from schedules.tuning.runner import GatedRunner
from scripts import cli

#: How folders of artefacts are called, in the system's folder of temporary files.
SCRATCH = "flashtir-tune-"
#: How long such a folder has been as it is before it counts as left behind.
STALE_SECONDS = 3600


@contextmanager
def processes(device, workers, fleet):
    """Builder and runner with their processes, and a folder for artefacts; all gone afterwards."""
    toolkit = find_toolkit(os.environ) if device.kind == "cuda" else None
    _clear_scratch()
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch, locked(Path(scratch)):
        builder = PoolBuilder(workers, toolkit, Path(scratch, "stub"), scratch)
        runner = GatedRunner(device.kind, toolkit) if fleet is None else FleetRunner(fleet)
        builder = builder if fleet is None else FleetBuilder(builder, runner)
        try:
            yield builder, runner
        finally:
            builder.close()
            runner.close()


def _clear_scratch():
    """Remove the folders of tuners that were killed: nobody holds them, and nothing has changed there for long."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        try:
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                with locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        except (LogError, OSError):  # a tuner that runs, another user's, or gone by now
            pass


@contextmanager
def stoppable():
    """A function that says whether Ctrl-C or a request to terminate has come. A second Ctrl-C ends the process at once."""
    asked = []

    def ask(number, frame):
        if asked:  # not by an exception: TVM's process pool would wait for its workers for ever
            print("ended at once: what was saved until now is kept", file=sys.stderr, flush=True)
            os._exit(cli.FAILED)
        asked.append(number)
        print("stopping once the kernels at hand are done", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
