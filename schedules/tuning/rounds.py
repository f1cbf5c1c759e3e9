"""One budget of time for the searches of many subjects: whose slice is next is decided by what a second more of it is expected to save.

The subjects are needs of one user, so that what they save adds up by weight. (The tile shapes of one subject are alternatives, among which
its own session chooses.) As in Ansor's task scheduler (https://arxiv.org/abs/2006.06762, section 6) a search is expected to go on as it did
of late, and hoped to bring something where it was tried little. All of it follows from what is on record, so that a run that was ended goes
on where it was; within a run sessions stay as they are while others have their turns.
"""
from dataclasses import dataclass

from schedules.tuning.last_round import DUEL_SECONDS, DUEL_SHARE, Times, past
from schedules.tuning.reasons import LOST
from schedules.tuning.search import Limits, TuneError

#: Seconds of a slice. To change the subject takes the process at the device some seconds for inputs and right answers.
SLICE = 30.0
#: Plans over which a gain is recent.
RECENT = 24
#: What is hoped for: the part of its time that a subject saves by as much tuning as it has had, whatever it gained so far.
HOPE = 0.02


@dataclass(eq=False)
class Contender:
    """A subject that shares a budget.

    name     of what is tuned
    weight   part of the user's time that it stands for, against the others'
    session  its Session, or Sessions of gradients
    settle   function that tells the runner what is measured from now on
    finish   function (Times of the last round) that holds it and writes the log
    ready    whether a last round is on record, so that one is held only once there are new plans
    seconds  that it had in this run
    """

    name: str
    weight: float
    session: object
    settle: object
    finish: object
    ready: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class Search:
    """A search for the plan of one function.

    name       for people
    contender  Contender whose it is
    session    Session
    spent      seconds that it has had, in all runs together
    """

    name: str
    contender: Contender
    session: object
    spent: float

    def gained(self):
        """(part of the time that the last plans have saved, how many these are)."""
        recent = self.session.course()[-RECENT - 1:]
        before = next(filter(None, recent), None)
        return (1 - recent[-1] / before if before else 0.0), max(len(recent) - 1, 0)

    def outlook(self):
        """Part of the user's time that a second more is expected to save, up to a factor that all searches share."""
        (gained, plans), course = self.gained(), self.session.course()
        spent, default = max(self.spent, 1.0), self.session.known.get(self.session.default)
        left = course[-1] / default.seconds if default and default.seconds else 1.0  # of what it takes by the default plan
        of_late = gained / plans * len(course) / spent if plans else 0.0
        return self.contender.weight * left * (of_late + HOPE / spent)


def searches_of(contender):
    """The Searches of a Contender. What earlier runs took is on record for all together, and dealt out by plans."""
    known, sessions = contender.session.known, contender.session.searches
    before = max((outcome.after or 0.0 for outcome in known.values()), default=0.0)
    return [Search(contender.name if role is None else f"{contender.name}, {role}", contender, session,
                   before * len(session.course()) / max(len(known), 1)) for role, session in sessions.items()]


class Rounds:
    """The rounds of several Contenders.

    contenders  list of Contender
    host        schedules.tuning.search.Host: its clock and stop
    limits      Limits: trials of each contender, seconds of all together
    writing     seconds that each log takes to be written
    tell        function that is called with a sentence before each slice
    failures    exceptions that end one contender; what was found of it stays on record
    failed      {name: exception} of those that were ended so
    """

    def __init__(self, contenders, host, limits, writing, tell, failures):
        self.host, self.limits, self.writing, self.tell, self.failures = host, limits, writing, tell, failures
        self.failed, self._open, self._begun = {}, list(contenders), host.clock()
        self._end = None if limits.seconds is None else self._begun + limits.seconds
        self._searches = [search for contender in contenders for search in searches_of(contender)]

    def run(self):
        """First plans of all, slices by outlook, last rounds. TuneError where the device is lost."""
        waiting = list(self._searches)
        while waiting:
            search = waiting.pop(0)
            seeds, end = len(search.session.seeds()), self._search_end(search.contender)
            if seeds and search.contender in self._open and not self._over(search):
                share = None if end is None else (end - self.host.clock()) / (1 + len(waiting))
                self._slice(search, share, search.session.tried + seeds, "its first plans")
        while (search := self._next()) is not None and not self._over(search):
            gained, plans = search.gained()
            why = f"it gained {100 * gained:.1f} % by its last {plans} plans and had {search.spent:.0f} s so far"
            self._slice(search, SLICE, None, why)
        while self._open:  # what searches do not need is theirs, too
            left = None if self._end is None else (self._end - self.host.clock()) / max(self._rounds_left(), 1)
            self._finish(self._open[0], left)

    def _has_new(self, contender):
        """Whether a last round is to be held: there are new plans, or none is on record."""
        return not contender.ready or any(search.session.tried for search in self._of(contender))

    def _rounds_left(self, coming=None):
        """How many last rounds are still to be held once a contender has had a slice."""
        return sum(self._has_new(contender) or contender is coming for contender in self._open)

    def _search_end(self, coming):
        """When the time begins that is kept back for last rounds, that of a contender who comes now among them; None without a limit."""
        kept = DUEL_SECONDS + self.writing
        return None if self._end is None else self._end - min(kept * self._rounds_left(coming), DUEL_SHARE * self.limits.seconds)

    def _over(self, search):
        """Whether no time is left for a slice."""
        return self.host.stop() or past(self._search_end(search.contender), self.host)

    def _next(self):
        """The search with the best outlook; None where all have ended. A contender whose searches have ended has its last round at once."""
        for contender in list(self._open):
            if all(map(self._ended, self._of(contender))):
                end = self._search_end(contender)
                self._finish(contender, None if end is None else (self._end - end) / self._rounds_left(contender))
        return max((search for search in self._searches if search.contender in self._open and not self._ended(search)),
                   key=Search.outlook, default=None)

    def _of(self, contender):
        return [search for search in self._searches if search.contender is contender]

    def _ended(self, search):
        session, most = search.session, self._most(search)
        return session.ended_early or session.exhausted or most is not None and session.tried >= most

    def _most(self, search):
        """Plans that it may try, None: any number. Functions of a gradient share them."""
        return self.limits.trials and max(self.limits.trials // len(self._of(search.contender)), 1)

    def _slice(self, search, seconds, trials, why):
        """Have a search go on for some seconds and plans; None: no limit."""
        contender, end = search.contender, self._search_end(search.contender)
        ends = [moment for moment in (None if seconds is None else self.host.clock() + seconds, end) if moment is not None]
        most = min((count for count in (trials, self._most(search)) if count is not None), default=None)
        # What a slice has begun may take longer than the slice: a kernel that hangs must be refused for it, or it would come again.
        times = Times(build=min(ends, default=None), measure=end, ready=end, end=end)
        self.tell(f"{search.name}: next{f', for {seconds:.0f} s' if seconds else ''}, {why}")
        search.spent += self._timed(contender, lambda: search.session.search(Limits(most, self.limits.seconds), times, self._begun))

    def _finish(self, contender, seconds):
        """Hold its last round, with the writing of its log within some seconds, and close it."""
        times = Times.of_last_round(self.host.clock(), None if seconds is None else max(seconds - self.writing, 1.0))
        if self._has_new(contender):
            self._timed(contender, lambda: contender.finish(times))
        if contender in self._open:
            self._open.remove(contender)

    def _timed(self, contender, step):
        """Seconds of a step of a contender, which its failure closes."""
        begun = self.host.clock()
        try:
            contender.settle()
            step()
        except self.failures as error:
            if isinstance(error, TuneError) and str(error).startswith(LOST):
                raise
            self.failed[contender.name] = error
            self._open.remove(contender)
        finally:
            contender.seconds += self.host.clock() - begun
        return self.host.clock() - begun
