"""Fleets on loopback: TVM's tracker and workers of this machine."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def started(*arguments):
    """(process, what it says first) of a `scripts.fleet` command."""
    process = subprocess.Popen([sys.executable, "-m", "scripts.fleet", *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "TVM_NUM_THREADS": "1"})
    line = process.stdout.readline()
    assert line, "the command has ended"
    return process, json.loads(line)


class Place:
    """A tracker with workers of a target: {"host:port": process}."""

    def __init__(self, workers, target="cpu"):
        self.port, self.target, self.workers = free_port(), target, {}
        self.key = f"{target}s"
        self.tracker, _ = started("tracker", "--port", self.port)
        for _ in range(workers):
            self.add()

    @property
    def address(self):
        return "127.0.0.1", self.port

    def add(self):
        process, told = started("worker", "--tracker", f"127.0.0.1:{self.port}", "--key", self.key, "--target", self.target,
                                "--port", free_port())
        self.workers[told["listens"]] = process

    def end(self):
        for process in (*self.workers.values(), self.tracker):
            process.kill()
            process.wait()
            process.stdout.close()
