"""Why a plan is refused: one of a few kinds, then a sentence, as the log has it: "hangs: not measured within 10 s"."""
import re
from collections import Counter

WRONG, CRASHES, HANGS, FAILS, SPILLS, NOT_BUILT = KINDS = "wrong", "crashes", "hangs", "fails", "spills", "not built"
#: Of reasons that name no kind.
OTHER = "other"
#: Not a reason: the session's time ended before the kernel was through, so nothing is known of the plan.
OUT_OF_TIME = "out of time"
#: Likewise how it is said that no plan can be measured any more.
LOST = "the device must give back a number that it was sent"
#: What reasons of logs of schema 1, which name no kind, were of; the first that is found counts.
_EARLIER = ((r"may spill \d+ bytes", SPILLS), (r"not measured within", HANGS), (r"the kernel crashes", CRASHES),
            (r"not built within|the build process ended|^(?!TVMError|InternalError)\w+Error: ", NOT_BUILT),
            (r"is right|two runs|writes past|a row that sees no key|exceeds", WRONG), ("", FAILS))


def reason(kind, text):
    """A reason of a kind."""
    return f"{kind}: {text}"


def kind_of(text):
    """The kind of a reason."""
    kind = text.partition(":")[0]
    return kind if kind in KINDS else OTHER


def of_schema_1(text):
    """A reason of a log of schema 1 as it is written now."""
    return reason(next(kind for form, kind in _EARLIER if re.search(form, text)), text)


def counts(outcomes):
    """{kind: number of outcomes that are refused for it}, the most frequent first."""
    return dict(Counter(kind_of(outcome.refused) for outcome in outcomes if outcome.refused is not None).most_common())


def told(outcomes):
    """These counts in words, with the first reason of each kind; "none" where nothing is refused."""
    first = {kind_of(outcome.refused): outcome.refused for outcome in reversed(list(outcomes)) if outcome.refused is not None}
    return ", ".join(f"{count} {kind} ({first[kind].removeprefix(f'{kind}: ')})" for kind, count in counts(outcomes).items()) or "none"
