"""The workers of a fleet as the tuner sees them: found by TVM's tracker, each held by a connection until the session ends.

A worker that is held measures for nobody else. Workers that come later are taken when all others are busy. One that is lost costs what it
had at hand, which goes to another one, a few times at most. One that says itself that it can measure nothing is put aside.
"""
import concurrent.futures
import contextlib
import os
import signal
import threading

from tvm.rpc.base import TrackerCode

from schedules.tuning import fleet_link
from schedules.tuning.fleet_worker import own_versions
from schedules.tuning.processes import Process
from schedules.tuning.reasons import FAILS, reason
from schedules.tuning.runner import TIMEOUT
from schedules.tuning.search import TuneError

#: Workers that one kernel may be lost with before it is refused.
ATTEMPTS = 3
#: Seconds until a worker that was free must have answered a first time, and what sending and waiting may add to the runner's own limit.
CONNECT_SECONDS, SLACK = 30, 30
#: How often the runner may ask its process about a kernel, each time for TIMEOUT; and what a transfer adds where time is short.
QUESTIONS, TRANSFER = 4, 5
#: Seconds between looks for more workers while work waits, and without any worker until the fleet is given up.
LOOK, PATIENCE = 1.0, 30.0
#: Looks at workers that are all busy before a tuner says so: one that has just started, or was just given back, is free in a moment.
FIRST_LOOKS = 5
#: Workers that are connected to at the same time, at most.
AT_ONCE = 8


class FleetError(TuneError):
    """A fleet that cannot be used; the message is one sentence."""


class Over(Exception):
    """There is no fleet any more to ask: it was closed, or lost."""


class _Lost(Exception):
    """A worker that did not answer, or not as it should; the message says how."""


class Fleet:
    """The workers that registered with a tracker under a key, all of one device.

    tracker  (host, port)
    key      text
    unfit    function of a worker's facts: None, or a few words that say why it is not wanted
    report   function that is called with a sentence where a worker is lost or not taken
    FleetError where the tracker is not there or has no worker that fits.
    """

    def __init__(self, tracker, key, unfit, report):
        self.tracker, self.key, self._unfit, self._report = tracker, key, unfit, report
        self.facts = self.lost = None  # of the first worker; why there is none any more
        self.losses, self.names = [], []
        self._idle, self._links, self._unwanted = [], set(), {}
        self._changed, self._enlisting, self._closed = threading.Condition(), threading.Lock(), False
        self._busy = False  # whether the last look found workers of the key, none of them free
        why = self._enlist()
        for _ in range(FIRST_LOOKS):
            with self._changed:
                if not self._busy or self._changed.wait(LOOK):
                    break
            why = self._enlist()
        if not self._links:
            self.close()
            raise FleetError(why)

    @property
    def size(self):
        """How many workers there are now."""
        return len(self._links)

    def about(self):
        """For run.json: who measured, and what was lost."""
        return {"fleet": {"workers": list(self.names), "lost": list(self.losses)}}

    def run(self, request, paths, seconds, label, patience=None, wanted=lambda: True):
        """What a worker answers about artefacts; None where none was free for `patience` seconds or as long as the answer is `wanted`,
        {"refused": why} where the work was lost ATTEMPTS times. Over where the fleet is.

        request  as fleet_worker answers it, without `files`
        seconds  that the answer may take
        label    of what is measured, for people
        """
        lost = 0
        while lost < ATTEMPTS:
            link = self._take(patience, wanted)
            if link is None:
                return None
            try:
                found = link.ask(seconds, fleet_link.ask, request, paths)
                if isinstance(found, dict) and "failed" in found:  # whatever the kernel is: it is not to blame
                    self._lose(link, label, str(found["failed"]), aside=True)
                    continue
                if not all(map(sound, found if isinstance(found, list) else [found])):
                    raise _Lost(f"it answered {str(found)[:80]}")
            except _Lost as error:
                why, lost = str(error), lost + 1
                self._lose(link, label, why)
                continue
            self._give_back(link)
            return found
        return {"refused": reason(FAILS, f"lost with {ATTEMPTS} workers, the last of which: {why}")}

    def close(self):
        """Give all workers back. Who waits for one gets Over."""
        with self._changed:
            self._closed = True
            links = [*self._links, *self._unwanted]
            self._changed.notify_all()
        for link in links:
            link.end()

    def _take(self, patience, wanted):
        """An idle link; None after `patience` seconds, or once it is not `wanted` any more. Over."""
        waited = alone = 0.0
        while wanted() and (patience is None or waited < patience):
            with self._changed:
                if self._closed or self.lost:
                    raise Over
                if self._idle:
                    return self._idle.pop()
            why = None
            if self._enlisting.acquire(blocking=False):
                try:
                    why = self._enlist()
                finally:
                    self._enlisting.release()
            with self._changed:
                if not self._idle and not self._changed.wait(LOOK):
                    waited += LOOK
                    alone = 0.0 if self._links else alone + LOOK
                    if alone >= PATIENCE and why is not None:
                        self.lost = why
                        self._changed.notify_all()
        return None

    def _give_back(self, link):
        with self._changed:
            self._idle.append(link)
            self._changed.notify()

    def _lose(self, link, label, why, aside=False):
        """Go on without a worker, which stays connected where it is put `aside`: the tracker would offer it again and again."""
        with self._changed:
            if self._closed:
                raise Over
            self._links.discard(link)
            self.losses.append({"worker": link.name, "plan": label, "reason": why})
            if aside:
                self._unwanted[link] = f"one that can measure nothing ({why})"
        if not aside:
            link.end()
        self._report(f"lost worker {link.name} with {label}: {why}")

    def _enlist(self):
        """Connect to all workers that are free. Where there is none that fits, why not, as a sentence."""
        try:
            told = fleet_link.ask_tracker(self.tracker, TrackerCode.SUMMARY)
        except fleet_link.NoTracker as error:
            return (f"a tracker was wanted at {_spelt(self.tracker)}, found {error}: start python -m scripts.fleet tracker there, or "
                    "correct --rpc")
        free = told["queue_info"].get(self.key, {"free": 0})["free"]
        keys = [entry["key"].removeprefix("server:") for entry in told["server_info"]]
        self._busy = not free and self.key in keys
        if not free:
            return self._missing(keys)
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
            reasons = [why for why in threads.map(self._connect, range(free)) if why is not None]
        return self._none_fits(reasons) if reasons else None

    def _none_fits(self, reasons):
        return (f"a worker that fits was wanted at tracker {_spelt(self.tracker)}, found {'; '.join(dict.fromkeys(reasons))}: start "
                "others, or correct --target")

    def _missing(self, keys):
        if self._unwanted:
            return self._none_fits(self._unwanted.values())
        wanted = f"a free worker with key {self.key} was wanted at tracker {_spelt(self.tracker)}, found"
        if self.key in keys:
            return f"{wanted} {keys.count(self.key)} that are busy: wait for them, or start more"
        others = f" but some with {', '.join(sorted(set(keys)))}" if keys else ""
        return f"{wanted} none{others}: start python -m scripts.fleet worker --tracker {_spelt(self.tracker)} --key {self.key}"

    def _connect(self, _):
        """Hold one more worker; a few words where it does not fit or does not answer."""
        link = _Link()
        try:
            facts = link.connect(self.tracker, self.key)
        except _Lost as error:
            link.end()
            return f"one that cannot be reached ({error})"
        with self._changed:
            if self._closed:
                link.end()
                return None
            why = self._why_not(facts)
            if why is None:
                self.facts = self.facts or facts
                self._links.add(link)
                self._idle.append(link)
                self.names.append(f"{link.name} ({facts['node']})")
                self._changed.notify()
                return None
            self._unwanted[link] = why  # held, or the tracker would offer it again and again
        self._report(f"worker {link.name} is not taken: it is {why}")
        return why

    def _why_not(self, facts):
        """Why a worker is not wanted; None where it is."""
        try:
            for name, wanted in own_versions().items():
                if facts["versions"][name] != wanted:
                    return f"one with {name} {facts['versions'][name]} where this machine has {wanted}"
            if self.facts is not None and (facts["slug"], facts["arch"]) != (self.facts["slug"], self.facts["arch"]):
                return f"a {facts['slug']} where the first is a {self.facts['slug']}"
            return self._unfit(facts)
        except (KeyError, TypeError) as error:
            return f"one that does not tell what it is ({error!r})"


class _Link:
    """One worker, asked by a process of its own."""

    def __init__(self):
        self._process = Process(fleet_link.start)
        self._id = self.name = None

    def connect(self, tracker, key):
        """Facts of a worker that the tracker gives; _Lost."""
        self._id, self.name, facts = self.ask(CONNECT_SECONDS, fleet_link.connect, tracker, key)
        return facts

    def ask(self, seconds, function, *arguments):
        """Result of a function in the link's process; _Lost."""
        try:
            self._process.send(function, arguments, timeout=seconds)
            return self._process.recv()
        except TimeoutError as error:
            self._id = None  # PopenWorker has ended the process
            raise _Lost(f"no answer within {seconds:g} s") from error
        except ChildProcessError as error:
            self._id = None
            raise _Lost("the connection's process ended") from error
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise _Lost(f"the connection broke ({lines[-1] if lines else type(error).__name__})") from error

    def end(self):
        """End the process, and with it the connection. Another thread may be waiting for it: PopenWorker.kill would wait as well."""
        if self._id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._id, signal.SIGKILL)


def limit_of(kernels, seconds=None):
    """Seconds that an answer about so many kernels may take, where the session has `seconds` left."""
    most = QUESTIONS * TIMEOUT * kernels + SLACK
    return most if seconds is None else min(most, seconds + TRANSFER)


def sound(found):
    """Whether an entry of an answer has the form of those of `run_worker.measure`; None stands for a duel that was not through."""
    if found is None or isinstance(found, dict) and isinstance(found.get("refused"), str):
        return True
    return (isinstance(found, dict) and isinstance(found.get("error"), (int, float)) and isinstance(found.get("seconds"), list)
            and len(found["seconds"]) > 0 and all(isinstance(x, float) and 0 < x < float("inf") for x in found["seconds"]))


def _spelt(address):
    return f"{address[0]}:{address[1]}"
