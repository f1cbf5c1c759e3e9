"""What a machine of a fleet does: it answers a tuner's requests through TVM's RPC server, by the local runner with its gate.

Requests and answers are JSON texts, so that an answer runs nothing on the tuner's machine. The reverse does not hold: a worker loads and
runs the kernels that it is sent, and TVM's server does whatever else a client asks for, with the rights of the worker's user.

TVM's server forks a process for each session. CUDA does not survive a fork, so neither the server nor what it forks ever touches the
device: GatedRunner's process does. Each ends when the one that started it is killed, since a kernel that hangs would keep the device.
"""
import ctypes
import hashlib
import json
import platform
import signal
import threading
from dataclasses import asdict
from pathlib import Path

import tvm
import tvm_ffi
from tvm.s_tir import meta_schedule as ms

from schedules.tuning import run_worker
from schedules.tuning.fleet_link import ASK
from schedules.tuning.log import shape_of
from schedules.tuning.reasons import LOST
from schedules.tuning.runner import GatedRunner
from schedules.tuning.subjects import subject_named

#: Linux's prctl: which signal a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1


def facts_of(kind, arch, slug, description, sms, driver):
    """What a worker tells of itself, as plain data.

    kind, arch, slug, description  of the device, as scripts.cli.Device has them
    sms, driver                    multiprocessors of a GPU and version of its driver, None on a CPU
    """
    told = asdict(arch) if kind == "cpu" else {"name": arch.name, "capability": list(arch.capability)}
    return {"kind": kind, "arch": told, "slug": slug, "name": description, "sms": sms, "driver": driver, "node": platform.node(),
            "versions": own_versions()}


def own_versions():
    """What must be the same at both ends: the instruction set of what is sent, TVM, which loads it, and our sources, which judge it."""
    return {"machine": platform.machine(), "tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__, "sources": _digest()}


def _digest():
    """Of all that may have a part in the judgement of a kernel: the Python files of te_defs and schedules."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for package in ("te_defs", "schedules") for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def die_with_parent():
    """Have this process killed when the one that started it ends, whatever ends that one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def offer(facts, toolkit):
    """Let the sessions of this process, TVM's server, answer requests for the device of which these are the facts.

    toolkit  Toolkit for CUDA, None for CPU kernels
    """
    die_with_parent()
    threading.excepthook = lambda told: None  # TVM's listener ends by an exception; who watches the server says so
    desk = _Desk(facts, toolkit)
    tvm_ffi.register_global_func(ASK, desk.answer, override=True)


def listening():
    """Whether the server of this process still takes clients: it ends when a session of it is killed, and the process stays."""
    from tvm.rpc.server import PopenRPCServerState
    return PopenRPCServerState.current.thread.is_alive()


class _Desk:
    """Answers requests. The runner is made in the session's process, at the first request that needs it."""

    def __init__(self, facts, toolkit):
        self.facts, self.toolkit, self._runner = facts, toolkit, None

    def answer(self, text):
        """Text of the answer to a request's text: facts, what `run_worker.measure` or `duel` tells, or {"failed": why} where this worker
        cannot deal with it, whatever the kernel is."""
        request = json.loads(text)
        if request["do"] == "facts":
            die_with_parent()
            return json.dumps(self.facts)
        paths = [self._alone(name) for name in request["files"]]
        try:
            found = self._measured(request, paths)
        except Exception as error:  # such as a mask's module that is not here
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        return json.dumps(found)

    @staticmethod
    def _alone(name):
        """Path of a file that was sent, named for its content: see run_worker.load. One that was sent before stays what it is, so that the
        best kernel so far is loaded once; the session's folder goes with it."""
        sent = Path(tvm.get_global_func("tvm.rpc.server.workpath")(name))
        kept = sent.with_name(f"kernel-{hashlib.sha256(sent.read_bytes()).hexdigest()}.so")
        if kept.exists():
            sent.unlink()
        else:
            sent.rename(kept)
        return str(kept)

    def _measured(self, request, paths):
        if self._runner is None:
            self._runner = GatedRunner(self.facts["kind"], self.toolkit)
        runner, asked = self._runner, request["setting"]
        runner.setting = run_worker.Setting(asked["kind"], subject_named(asked["subject"]), shape_of(asked["shape"]))
        if request["do"] == "duel":
            return runner.duel(paths, request["seed"], lambda: request["seconds"])
        runner.left = lambda: request["seconds"]
        path, best_path = (*paths, None)[:2]
        runner.best = request["best"], best_path
        result = runner.run([ms.runner.RunnerInput(path, asked["kind"], [])])[0].result()
        if result.error_msg is not None:
            return {"failed" if result.error_msg.startswith(LOST) else "refused": str(result.error_msg)}
        return {"seconds": [float(x) for x in result.run_secs], **runner.found.pop(path)}
