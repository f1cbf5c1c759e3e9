"""`scripts.tune --suite`: many subjects share one budget; what the user is told of it, and what stays of it."""
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from html import escape

from schedules.tuning.log import LogError, locked, write_text
from schedules.tuning.rounds import Contender, Rounds
from schedules.tuning.search import Host, TuneError
from schedules.tuning.suites import SUITES
from scripts import cli
from scripts.page import STYLE
from scripts.report import REPORT

#: Options that say of one workload what a suite says of each of its own, and their values where they are not given.
OF_ONE = {"workload": ["auto"], "backward": None, "length": None, "lengths": None, "family": None}


def entries_of(args, device):
    """Entries of --suite; UsageError where it is none for the device, or options say something else than it."""
    suite = SUITES.get(args.suite)
    if suite is None:
        raise cli.UsageError(f"--suite is one of {', '.join(SUITES)}, found {args.suite!r}: choose one of these")
    given = [f"--{name}" for name, unset in OF_ONE.items() if getattr(args, name) != unset]
    if given:
        raise cli.UsageError(f"--suite names workloads, gradients and lengths itself, found {' and '.join(given)} too: leave one out")
    require_kind("--suite", args.suite, device)
    return suite.entries


def require_kind(option, name, device):
    """UsageError where a suite, which that option names, is not for the device."""
    if SUITES[name].kind != device.kind:
        kinds = ", ".join(f"{each} for {suite.kind}" for each, suite in SUITES.items())
        raise cli.UsageError(f"{option} {name} is for {SUITES[name].kind}, found {device.description}: choose another ({kinds}) or target")


def attempted(step):
    """What a step returns, or the exception that ends one workload of several."""
    try:
        return step()
    except cli.FAILURES as error:
        return error


def tune_suite(name, tools, entries, tasks, sit, writing):
    """Tune the entries of a suite until the budget is spent, and print a table; TuneError with the reasons of those that were not tuned.

    name     of the suite
    tools    what all workloads of a run share (scripts.tune)
    tasks    for each entry (Log, {part: spaces}, Shape that is timed), or the exception that says why there is none
    sit      function (tools, log, parts, shape) that takes a locked log up, for a scripts.tune.Sitting
    writing  seconds that each log takes to be written
    """
    begun, contenders, limits = time.monotonic(), [], tools.limits
    failed = {entry.title: task for entry, task in zip(entries, tasks) if isinstance(task, Exception)}
    logs = {entry: task[0] for entry, task in zip(entries, tasks) if entry.title not in failed}
    with ExitStack() as locks:
        for entry, task in zip(entries, tasks):
            if entry in logs:
                found = attempted(lambda: _contender(name, entry, locks.enter_context(_taken_up(task, tools, sit))))
                failed |= {entry.title: found} if isinstance(found, Exception) else {}
                contenders += [found] if entry.title not in failed else []
        if limits.seconds is not None:
            limits = replace(limits, seconds=max(limits.seconds - (time.monotonic() - begun), 0.0))
        rounds = Rounds(contenders, Host(time.monotonic, tools.stop, None, None), limits, writing, partial(print, flush=True), cli.FAILURES)
        rounds.run()
    shares = {contender.name: contender.seconds / (time.monotonic() - begun) for contender in contenders}
    rows = [_row(entry, log, shares.get(entry.title, 0.0)) for entry, log in logs.items()]
    print("\n".join(_table(rows)), flush=True)
    if rows:
        print(f"suite {name}: with links to all of it in {_write_index(name, logs, rows)}", flush=True)
    failed |= rounds.failed
    if failed and not tools.stop():
        raise TuneError(f"{len(failed)} of {len(entries)} subjects of suite {name} were not tuned: "
                        + "; ".join(f"{title}: {error}" for title, error in failed.items()))


@contextmanager
def _taken_up(task, tools, sit):
    """The Sitting of a task, whose log is locked meanwhile."""
    log, parts, shape = task
    with locked(log.path):
        yield sit(tools, log, parts, shape)


def _contender(suite, entry, sitting):
    """The Contender of an entry that is taken up."""
    def finish(times):
        begun = time.monotonic()
        try:
            winner = sitting.session.finish(times)
        except TuneError as error:
            sitting.tell_of_refusals()
            if not sitting.session.known:
                raise TuneError("the time was up before its first plan was measured: allow more --minutes") from error
            raise
        sitting.conclude(winner, {"seconds": round(contender.seconds + time.monotonic() - begun, 1),
                                  "suite": {"name": suite, "weight": entry.weight}})

    contender = Contender(entry.title, entry.weight, sitting.session, sitting.settle, finish, sitting.measured == "duel")
    return contender


#: The columns of a suite's table.
HEAD = ("subject", "default ms", "tuned ms", "tuned / default (least to most)", "share of the budget")


def _row(entry, log, share):
    """Texts of a line of the table, from what is on record of an entry."""
    try:
        best = (log.read_run() or {}).get("best") or {}
    except LogError:  # which is among the reasons
        best = {}
    tuned, default = (best.get(told) for told in ("last_round", "default_plan"))
    ratio = tuned and default and (f"{default['median'] / tuned['median']:.3f}x ({default['least'] / tuned['most']:.3f} to "
                                   f"{default['most'] / tuned['least']:.3f})")
    return (entry.title, *(f"{1e3 * told['median']:.4f}" if told else "-" for told in (default, tuned)), ratio or "-",
            f"{100 * share:.0f} %")


def _table(rows):
    """Lines of the table."""
    widths = [max(map(len, column)) for column in zip(HEAD, *rows)]
    for row in (HEAD, *rows):
        yield "  ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))])


def _write_index(name, logs, rows):
    """Write the page of a suite beside the logs of its device; its path."""
    folder = next(iter(logs.values())).path.parent
    links = [f'<a href="{escape(log.name)}/{REPORT}">{escape(row[0])}</a>' if (log.path / REPORT).is_file() else escape(row[0])
             for log, row in zip(logs.values(), rows)]
    body = "\n".join("<tr>" + "".join(f"<td>{text}</td>" for text in (link, *map(escape, row[1:]))) + "</tr>"
                     for link, row in zip(links, rows))
    head = "".join(f"<th>{text}</th>" for text in HEAD)
    write_text(folder / f"suite-{name}.html", f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Suite {escape(name)} on {escape(folder.name)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>Suite {escape(name)} on {escape(folder.name)}</h1>
<div class="scroll"><table>
<tr>{head}</tr>
{body}
</table></div>
</body>
</html>
""")
    return folder / f"suite-{name}.html"
