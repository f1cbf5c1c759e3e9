"""The tuning of gradients: a search for one function with a plan after the other, then the last round among whole gradients, in which plans
stand together that were found apart, and those of another family may win."""
import itertools
from dataclasses import replace

from schedules.backward import default_plans
from schedules.backward_parts import Part
from schedules.space import Space
from schedules.tuning.last_round import Times, Winner, last_round, ranked
from schedules.tuning.log import Outcome
from schedules.tuning.search import FINALISTS, Session

#: Of several functions, plans of each that meet in the last round: the fastest by the search's measurements.
BEST = 2


class Sessions:
    """Sessions of the functions, with what scripts.tune asks of a Session.

    subject   schedules.tuning.subjects.BackwardPass
    whole     schedules.space.Space of all functions together, whose seed are the default plans
    sessions  {role: Session}, {None: Session} where a family has one function with a plan; they share what is known
    champion  key of the best plans of earlier sessions; None where there is none
    """

    def __init__(self, subject, whole, sessions, champion=None):
        self.subject, self.whole, self.sessions, self.champion = subject, whole, sessions, champion
        first = next(iter(sessions.values()))
        self.builder, self.runner, self.host, self.seed = first.builder, first.runner, first.host, first.seed
        self.known = first.known

    @property
    def tried(self):
        return sum(session.tried for session in self.sessions.values())

    @property
    def refused(self):
        return sum(session.refused for session in self.sessions.values())

    @property
    def ended_early(self):
        return all(session.ended_early for session in self.sessions.values())

    def run(self, limits):
        """As Session.run: functions share trials and time alike, and the time that is kept back for the last round is theirs together."""
        begun, count = self.host.clock(), len(self.sessions)
        times, searched = Times.of(begun, limits.seconds), 0
        for number, session in enumerate(self.sessions.values(), 1):
            own = replace(limits, trials=limits.trials and max(limits.trials * number // count - searched, 1))
            session.search(own, self._part_of(times, begun, number / count), begun)
            searched += session.tried
        return self.finish(times)

    def finish(self, times):
        """As Session.finish."""
        for session in self.sessions.values():
            session.put_away()
        return (None if self.host.stop() else self._duel(times)) or self.leader()

    @property
    def searches(self):
        """As Session.searches: that of each function."""
        return self.sessions

    @staticmethod
    def _part_of(times, begun, share):
        """The Times of a search that begins when those before it end, and ends when its share of the searches' time is over."""
        if times.end is None:
            return times
        return replace(times, build=begun + share * (times.build - begun), measure=begun + share * (times.measure - begun))

    def leader(self):
        """The Winner by the searches' measurements alone: gradients of which one function has a plan of its own, which was compared with
        the default plans. TuneError where there is none."""
        searched = [role for role, session in self.sessions.items() if session.proven() and not session.uncompared] or [
            next(iter(self.sessions))]
        found = [(*self.sessions[role].leader().ranking[0], role) for role in searched]
        seconds, (_, plan), role = min(found, key=lambda it: it[0])
        key = self.whole.family.NAME, self._together({role: plan})
        return Winner("search", ((seconds, key),), self.sessions[role].leader().outcome, {})

    def _together(self, plans):
        """Plans of whole gradients: the default plans with some {role: plan}."""
        return plans[None] if None in plans else self.whole.seed.but(**plans)

    def _finalists(self):
        """{key: (space, plans)} of the default plans, the champion, and the best of each function with the best of the others."""
        count = BEST if len(self.sessions) > 1 else FINALISTS
        best = [[(role, key[1]) for key in (session.ranking() or [session.default])[:count]] for role, session in self.sessions.items()]
        plans = [self._together(dict(chosen)) for chosen in itertools.product(*best)]
        keys = [self.default, *([self.champion] if self.champion else []), *((self.whole.family.NAME, it) for it in plans)]
        return {(name, it): (self.whole if name == self.whole.family.NAME else self._alone(Part(self.subject.families()[name]), it), it)
                for name, it in keys}

    def _alone(self, member, plan):
        """The space of one plan."""
        return Space(member, self.whole.workload, self.whole.arch, plan, ())

    def _duel(self, times):
        """Winner among whole gradients; None where a stop came first, or the end of the time, or none passes."""
        if not any(session.ranking() for session in self.sessions.values()):
            return None  # nothing has passed, as the leader says
        found = last_round(self._finalists(), self.builder, self.runner, self.host, self.seed, times)
        if found is None or not found[0]:
            return None
        ranking = ranked(found[0])
        outcomes = [self.known.get(own) for own in self.subject.split(ranking[0][1]).values()]
        most = max(filter(None, outcomes), key=lambda it: it.registers or 0, default=Outcome())
        return Winner("duel", ranking, most, found[0])

    @property
    def default(self):
        """Key of the default plans."""
        return self.whole.family.NAME, self.whole.seed

    def kept(self, winner):
        """As Session.kept: each function's plan of the winner, then what else is best in its space."""
        kept, own = [], self.subject.split(winner.key)
        if winner.key[0] != self.whole.family.NAME:  # a champion that another family's search has left
            return [(self._alone(self.subject.members()[name], plan), [(winner.seconds, plan)]) for name, plan in own.values()]
        for role, key in own.items():
            session = self.sessions[role]
            space = session.space_of(key)
            others = [(session.known[other].seconds, other[1]) for other in session.ranking() if other != key and space.owns(*other)]
            kept.append((space, [(winner.seconds, key[1]), *others]))
        return kept

    def declaration(self, winner):
        return self.subject.declaration_of(winner.key, self.whole.arch)


def session_of(subject, parts, champion, shape, builder, runner, host, known, declarations, hints=None, **options):
    """The Session of what is tuned; for gradients Sessions.

    parts     {part: spaces}, as `subject.parts`
    champion  key of the best plan of earlier sessions, which a winner must beat; None where there is none
    hints     {part: keys of plans to try before others}; None: none
    options   further arguments of Session
    """
    first, own = next(iter(parts.values()))[0], {} if champion is None else subject.split(champion)
    if subject.order is not None and champion is not None and champion[0] != first.family.family.NAME:
        own = {}  # functions of two families make no gradient
    sessions = {}
    for part, spaces in parts.items():
        if part in own and not any(space.owns(*own[part]) for space in spaces):  # it is not searched around
            spaces = (*spaces, Space(subject.members()[own[part][0]], subject.workload, first.arch, own[part][1], ()))
        sessions[part] = Session(subject.name, spaces, shape, builder, runner, host, known, declarations, champion=own.get(part),
                                 hints=(hints or {}).get(part, ()), **options)
    if subject.order is None:
        return sessions[part]
    family = first.family.family
    whole = Space(Part(family), subject.workload, first.arch, default_plans(family, subject.workload, first.arch), ())
    return Sessions(subject, whole, sessions, champion)
