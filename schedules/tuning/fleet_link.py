"""A connection to one worker of a fleet, in a process of its own: a call over TVM's RPC cannot be given up, a process can be ended."""
import json
import os
import signal
import socket
import struct

from tvm import rpc
from tvm.rpc import base

#: Name of the function that a worker's session offers: text of a request -> text of the answer (fleet_worker).
ASK = "flashtir.ask"
#: Seconds that a tracker may take for each step of a conversation.
TRACKER_SECONDS = 5.0

#: What this process keeps: its session with the worker.
_session = None


class NoTracker(Exception):
    """What was found at an address where a tracker was wanted; the message is a few words."""


def ask_tracker(address, code, *arguments):
    """The answer of TVM's tracker at (host, port) to a message (tvm.rpc.base.TrackerCode); NoTracker where there is none.

    TVM's own client waits a minute for a tracker that is not there, and for ever for a worker that never comes.
    """
    try:
        with socket.create_connection(address, timeout=TRACKER_SECONDS) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            if struct.unpack("<i", base.recvall(connection, 4))[0] != base.RPC_TRACKER_MAGIC:
                raise NoTracker("something that is no tracker of TVM")
            base.sendjson(connection, [code, *arguments])
            told, answer = base.recvjson(connection)
    except (OSError, OverflowError) as error:
        raise NoTracker(f"none ({getattr(error, 'strerror', None) or error})") from error
    except (TypeError, ValueError) as error:
        raise NoTracker("something that does not speak as TVM's tracker does") from error
    if told != base.TrackerCode.SUCCESS:
        raise NoTracker("one that refuses to answer")
    return answer


def start():
    """Prepare the process. Ctrl-C is for the main process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def connect(tracker, key):
    """(id of this process, "host:port" of the worker that the tracker gives, its facts)."""
    global _session
    host, port, match_key = ask_tracker(tracker, base.TrackerCode.REQUEST, key, "", 1)
    _session = rpc.connect(host, port, match_key)
    return os.getpid(), f"{host}:{port}", ask({"do": "facts"})


def ask(request, paths=()):
    """The worker's answer to a request about these artefacts, which are sent along."""
    names = [f"{number}.so" for number in range(len(paths))]
    for path, name in zip(paths, names):
        _session.upload(path, name)
    return json.loads(_session.get_function(ASK)(json.dumps({**request, "files": names})))
