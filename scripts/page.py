"""A Story as one HTML page that needs nothing else: no network, no script; light, dark, narrow and printed.

The same log gives the same bytes. Numbers that a table shows stand in `<data value=...>` as the log has them.
"""
from html import escape

from scripts.figures import knobs, progress, rate_unit, roofline, time_unit

STYLE = """
:root{--page:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d0d7de;--panel:#f6f8fa;--main:#0a58a8;--bad:#a4261d;color-scheme:light dark}
@media (prefers-color-scheme:dark){
:root{--page:#11151a;--ink:#e6e9ec;--soft:#a3adb8;--rule:#3a424c;--panel:#1a2027;--main:#79b8ff;--bad:#ff938a}}
@media print{:root{--page:#fff;--ink:#000;--soft:#444;--rule:#bbb;--panel:#fff;--main:#0a58a8;--bad:#a4261d;color-scheme:light}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:64rem;padding:1rem;background:var(--page);color:var(--ink);font:1rem/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--rule)}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{max-width:46rem}
a{color:var(--main)}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;list-style:none}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.5rem;margin:1rem 0}
dl div{background:var(--panel);border:1px solid var(--rule);border-radius:.4rem;padding:.5rem .75rem}
dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-weight:600;overflow-wrap:anywhere}
figure{margin:1rem 0}
figcaption,.note{color:var(--soft);font-size:.9rem}
.scroll{overflow-x:auto}
.note{margin:.5rem 0}
.scroll:focus-visible{outline:2px solid var(--main)}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .6rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{vertical-align:bottom}
.words{text-align:left}
td.words{white-space:normal;min-width:14rem}
tr.winner td{font-weight:700;background:var(--panel)}
.bar{display:block;height:.6rem;min-width:1px;background:var(--main)}
.bar-cell{width:9rem;min-width:9rem}
.bad .bar{background:var(--bad)}
pre{margin:0;padding:.75rem;background:var(--panel);border:1px solid var(--rule);font:.8rem/1.35 ui-monospace,monospace}
.nest{max-height:32rem;overflow:auto}
svg{display:block;height:auto;width:100%}
svg .label{font:12px system-ui,sans-serif;fill:var(--ink)}
svg .strong{font-weight:700}
svg .halo{paint-order:stroke;stroke:var(--page);stroke-width:4px}
svg .axis{stroke:var(--soft)}
svg .grid,svg .leader{stroke:var(--rule)}
svg .dot{fill:var(--page);stroke:var(--main);stroke-width:1.5}
svg .winner{fill:var(--main);stroke:var(--page)}
svg .refused{stroke:var(--bad);stroke-width:2;fill:none}
svg .best,svg .bound{stroke:var(--main);stroke-width:2;fill:none}
svg .together{stroke-dasharray:6 4}
svg .line{stroke:var(--soft);stroke-opacity:.35;fill:none}
svg .best-line{stroke:var(--main);stroke-opacity:.7;stroke-width:1.5}
svg .winner-line{stroke:var(--main);stroke-opacity:1;stroke-width:4}
@media print{
body{max-width:none;padding:0;font-size:10pt}nav{display:none}.scroll,.nest{overflow:visible;max-height:none}
svg{min-width:0!important;max-width:100%!important}figure,tr{break-inside:avoid}pre{white-space:pre-wrap}
table{font-size:7pt;width:100%}th,td,td.words{padding:1px 3px;min-width:0}
th,td.words{white-space:normal;overflow-wrap:anywhere}.bar-cell{width:3rem;min-width:3rem}.bar{print-color-adjust:exact}}
""".strip()


def page(story):
    """The page as ASCII text, whatever stands in the log."""
    sections = [(name, title, body) for name, title, tell in SECTIONS if (body := tell(story))]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
    parts = [f'<section id="{name}">\n<h2>{title}</h2>\n{body}\n</section>' for name, title, body in sections]
    title = f"{story.subject.name} on {story.device}"
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{summary(story)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
""" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _data(value, text):
    return f'<data value="{value}">{escape(text)}</data>'


def _table(head, rows, note, label):
    """A note, and a table that scrolls sideways on its own. Cells are HTML; head holds (text, kind of cells: "words", "bar-cell" or "")."""
    cells = "".join(f'<th scope="col" class="{kind}">{escape(text)}</th>' for text, kind in head)
    body = "\n".join(f'<tr class="{mark}">' + "".join(f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(row, head)) + "</tr>"
                     for mark, row in rows)
    note = f'<p class="note">{note}</p>\n' if note else ""
    return (f'{note}<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n<table aria-label="{escape(label)}">\n'
            f"<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>")


def _figure(drawing, caption, label):
    return (f'<figure>\n<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n{drawing}\n</div>\n'
            f"<figcaption>{caption}</figcaption>\n</figure>")


def _bar(share):
    """A bar of a share of its cell; the number beside it says the same."""
    return f'<span class="bar" aria-hidden="true" style="width:{100 * share:.1f}%"></span>'


def _facts(entries):
    return "<dl>\n" + "\n".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in entries) + "\n</dl>"


def summary(story):
    """What everybody looks for first."""
    best, shape, facts = story.best, story.shape, []
    if best:
        seconds, rate = best["seconds"], story.work.operations / best["seconds"]
        facts += [("best latency", _data(seconds, time_unit(seconds).told(seconds))), ("speed", _data(rate, rate_unit(rate).told(rate)))]
        facts += [(f"of the peak of {story.limits[0].name}", f"{story.limits[0].seconds / seconds:.1%}")] if story.limits else []
        if "default_plan" in best:
            facts.append(("over the default plan, last round", f"{best['default_plan']['median'] / seconds:.3f}x"))
    heads = f"{shape.q_heads}" if shape.q_heads == shape.kv_heads else f"{shape.q_heads} over {shape.kv_heads}"
    facts += [("batch, heads, queries, keys", f"{shape.batch}, {heads}, {shape.q_len}, {shape.kv_len}"),
              ("candidates", f"{len(story.candidates)}, {len(story.candidates) - len(story.passed)} refused")]
    if story.run:
        facts.append(("lowered for", escape(story.run["arch"])))
    gone = (story.run or {}).get("trials", 0) - len(story.candidates)
    notes = [f"{gone} more were of families or plans that the sources no longer have."] if gone > 0 else []
    notes += ["No plan has won so far."] if not best else []
    return _facts(facts) + "".join(f'<p class="note">{note}</p>' for note in notes)


def tell_search(story):
    """When each candidate was known."""
    if not story.passed:
        return ""
    unit = time_unit(story.passed[0].outcome.seconds)
    when = ("Time is that of all sessions together." if story.timed else
            "The log tells no times, so that candidates stand in its order.")
    return _figure(progress(story, unit), f"A circle is a candidate that passed, a cross one that was refused, the diamond the winner"
                   f"{'s, one a function' if story.subject.order and len(story.parts) > 1 else ''}. {when} These are times of the search; "
                   "the last round measures its finalists anew.", "Best so far")


def tell_refusals(story):
    """Refused candidates by reason."""
    if not story.refusals:
        return f"<p>No candidate of {len(story.candidates)} was refused.</p>" if story.candidates else ""
    most = len(story.refusals[0])
    rows = [("bad", (_data(len(group), str(len(group))), _bar(len(group) / most), escape(group[0].outcome.refused),
                     escape(f"{group[0].family} {group[0].plan}"))) for group in story.refusals]
    return _table([("candidates", ""), ("", "bar-cell"), ("reason", "words"), ("such as", "words")], rows,
                  "Reasons that differ in their numbers alone count as one; the first of each is shown.", "Refused candidates")


def tell_candidates(story):
    """All candidates that passed, the fastest first: for each family the knobs as parallel coordinates and a table."""
    parts = []
    for family in dict.fromkeys(it.family for it in story.passed):
        ranked = [it for it in story.passed if it.family == family]
        names = [name for name in ranked[0].plan.values() if len({getattr(it.plan, name) for it in ranked}) > 1]
        unit = time_unit(ranked[0].outcome.seconds)
        parts.append(f"<h3>{escape(family)}</h3>")
        if names:
            parts.append(_figure(knobs(family, ranked, names, unit, story.is_winner), "A line is a plan; the strong one is the winner, "
                                 "coloured ones are the fastest few. Lines through one value are spread a little.", f"Knobs of {family}"))
        parts.append(_ranked_table(story, ranked, names, unit))
    told = ("<p>Each candidate is a whole gradient, in which the other functions have their default plans.</p>"
            if story.subject.order and len({it.family for it in story.passed}) > 1 else "")
    return told + "\n".join(parts)


def _ranked_table(story, ranked, names, unit):
    slowest, best = ranked[-1].outcome.seconds, ranked[0].outcome.seconds
    rate = rate_unit(story.work.operations / best)
    head = [("rank", ""), ("no.", ""), (unit.name, ""), ("latency", "bar-cell"), (rate.name, ""), ("over best", ""), ("registers", ""),
            ("spilled bytes", ""), *((name, "") for name in names)]
    rows = []
    for rank, it in enumerate(ranked, 1):
        seconds, own = it.outcome.seconds, [str(getattr(it.plan, name)) for name in names]
        rows.append(("winner" if story.is_winner(it) else "", (
            str(rank), str(it.number), _data(seconds, unit.number(seconds)), _bar(seconds / slowest),
            rate.number(story.work.operations / seconds), f"{seconds / best:.3f}x", _known(it.outcome.registers),
            _known(it.outcome.spill_bytes), *own)))
    same = ", ".join(f"{name} {value}" for name, value in ranked[0].plan.values().items() if name not in names)
    return _table(head, rows, escape("No. is the place in the order of the search; registers and spills are of a thread."
                                     + (f" All have {same}." if same else "")), f"Candidates of {ranked[0].family}")


def _known(value):
    return "-" if value is None else _data(value, str(value))


def tell_limits(story):
    """The roofline, and the least time by each limit."""
    work = story.work
    told = (f"A call has {work.operations / 1e9:.4g} GFLOP of products, {work.exponentials / 1e6:.4g} million exponentials (one a score "
            f"that the mask keeps) and {work.bytes / 1e6:.4g} MB of tensors, each read or written once: {work.intensity:.4g} operations a "
            "byte.")
    if not story.limits:
        return f"<p>{told} {_of_cpu(story)}</p>"
    best, rows = story.best, []
    for limit in story.limits:
        unit = time_unit(limit.seconds)
        rows.append(("", (limit.name, _data(limit.seconds, unit.told(limit.seconds)), f"{story.tflops(limit.seconds):.4g}",
                          f"{limit.seconds / best['seconds']:.1%}" if best else "-")))
    table = _table([("limit", "words"), ("least time", ""), ("TFLOP/s", ""), ("share of it that is reached", "")], rows,
                   _peak_told(story), "Limits of the chip")
    points = [("winner", best["seconds"], True)] if best else []
    if best and "default_plan" in best:
        points.append(("default plan", best["default_plan"]["median"], False))
    points += [(peer.row["contestant"], peer.row["ms"] / 1e3, False) for peer in story.peers
               if story.is_shape_of(peer) and peer.row["contestant"] not in ("default", "tuned")]
    drawing = _figure(roofline(story, points), "Bounds by each unit alone; dashed: products and exponentials one after the other, which a "
                      "plan that overlaps them can beat.", "Roofline")
    return f"<p>{told}</p>\n{drawing}\n{table}"


def _peak_told(story):
    peak = story.arch.peak
    of = (f"{peak.tensor_tflops:g} TFLOP/s of tensor cores" if story.work.tensor_cores else
          f"{peak.fma_per_clock} float32 multiply-adds a clock and multiprocessor")
    return (f"Of the fastest chip of {escape(story.arch.name)}: {of}, {peak.exp2_per_clock} exponentials a clock and multiprocessor, "
            f"{peak.sms} multiprocessors at {peak.boost_ghz:g} GHz, {peak.memory_tbytes:g} TB/s of memory. A chip at a higher clock, or a "
            "plan that computes some exponentials by polynomials, can exceed them.")


def _of_cpu(story):
    """What is known of a CPU: what a clock of its cores can do, not how many clocks there are; of a GPU without a peak nothing."""
    arch = story.arch
    if arch is None or arch.kind != "cpu":
        return "No peak of this chip is written down in schedules/arch.py, so that there is no roofline."
    clock = arch.cores * 2 * arch.vector_bits // 32
    caches = f"{arch.l1_bytes // 1024} KiB of L1 and {arch.l2_bytes // 1024} KiB of L2 a core"
    reached = (f" The winner's speed would be theirs at {story.work.operations / story.best['seconds'] / clock / 1e9:.3g} GHz."
               if story.best else "")
    return (f"Of this CPU are known {arch.cores} cores, vectors of {arch.vector_bits} bits, {caches}: with one multiply-add of vectors a "
            f"clock and core, {clock} operations a clock.{reached} Its clock, its number of units and its memory's speed are not known, so "
            "that there is no roofline.")


def tell_winner(story):
    """The winner: figures, what it takes of each resource, its loop nest."""
    best = story.best
    if not best:
        return ""
    facts = [("family", escape(best["family"])), ("measured by", escape(str(best.get("measured"))))]
    for name, key in (("last round: winner", "last_round"), ("last round: default plan", "default_plan")):
        if key in best:
            unit = time_unit(best[key]["median"])
            facts.append((name, f"{_data(best[key]['median'], unit.told(best[key]['median']))} "
                          f"({unit.number(best[key]['least'])} to {unit.number(best[key]['most'])})"))
    facts += [("largest error in the gate", f"{best['largest_error']:.2g}")] if best.get("largest_error") is not None else []
    facts += [("registers a thread", _known(best.get("registers"))), ("spilled bytes a thread", _known(best.get("spill_bytes")))]
    plan = ", ".join(f"{name} {value}" for name, value in best["plan"].items())
    parts = [_facts(facts), f"<p>Plan: {escape(plan)}.</p>"]
    if story.stale:
        parts.append(f'<p class="note">The record is not of the sources as they are: {escape(story.stale)}.'
                     + (" The loop nest is that of the sources as they are.</p>" if story.parts else "</p>"))
    for part in story.parts:
        parts.append(f"<h3>{escape(part.name)}</h3>")
        if part.budget:
            rows = [("", (escape(name), f"{used} of {limit} {escape(unit)}", f"{used / max(limit, 1):.0%}"))
                    for name, used, limit, unit in part.budget]
            parts.append(_table([("resource", "words"), ("planned", ""), ("share", "")], rows,
                                "What the plan's budget takes of each resource.", f"Budget of {part.name}"))
        parts.append('<p>Loop nest: loops with extent and binding, blocks with the buffer that they write; "..." is a size known at run '
                     'time.</p>\n<div class="scroll nest" tabindex="0" role="region" aria-label="Loop nest">'
                     f"<pre>{escape(part.nest)}</pre></div>")
    return "\n".join(parts)


def tell_peers(story):
    """What benchmarks of this device say of others."""
    notes = [f'<p class="note">{escape(name)} is not what scripts.bench --json writes and was left out.</p>' for name in story.unread]
    rows = []
    for peer in story.peers:
        row, here = peer.row, story.best and story.is_shape_of(peer)
        unit = time_unit(row["ms"] / 1e3)
        rows.append(("", (
            escape(f"{row['batch']} x {row['heads']} x {row['length']}"), escape(row["contestant"]),
            _data(row["ms"], unit.told(row["ms"] / 1e3)), rate_unit(1e12 * row["tflops"]).told(1e12 * row["tflops"]),
            _data(row["ms"] / 1e3 / story.best["seconds"], f"{row['ms'] / 1e3 / story.best['seconds']:.3f}x") if here else "-",
            _data(peer.ratio, f"{peer.ratio:.3f}x"), escape(peer.ours), escape(peer.date))))
    table = _table([("batch x heads x length", "words"), ("contestant", "words"), ("latency", ""), ("speed", ""),
                    ("winner / this", ""), ("ours / this", ""), ("ours", "words"), ("date", "words")], rows,
                   "Winner / this: how many times as fast the winner of this log is, at the shape that it was tuned at; the two were "
                   "measured apart. Ours / this: the same for ours of the run that the row is of, in turns.", "Peers") if rows else ""
    return table + "".join(notes)


def tell_sessions(story):
    """Each session with its circumstances."""
    rows = []
    for session in (story.run or {}).get("sessions", ()):
        versions = ", ".join(f"{name} {version}" for name, version in session.get("versions", {}).items())
        rows.append(("", tuple(escape(str(session.get(name, "-"))) for name in ("date", "trials", "refused", "seconds", "seed", "workers"))
                     + (escape(str(session.get("commit") or "-")), escape(versions))))
    driver = (story.run or {}).get("device", {}).get("driver")
    notes = [f"Driver {escape(driver)}."] if driver else []
    notes += [_fleet(session) for session in (story.run or {}).get("sessions", ()) if "fleet" in session]
    head = [("date", "words"), ("candidates", ""), ("refused", ""), ("seconds", ""), ("seed", ""), ("workers", ""), ("commit", "words"),
            ("versions", "words")]
    return _table(head, rows, " ".join(notes), "Sessions") if rows else ""


def _fleet(session):
    """Who measured for a session, and what was lost."""
    fleet = session["fleet"]
    lost = "; ".join(f"{each['worker']} with {each['plan']}: {each['reason']}" for each in fleet["lost"])
    return escape(f"In that of {session.get('date', '-')} a fleet measured: {', '.join(fleet['workers'])}. Lost: {lost or 'none'}.")


#: (name, title, function that tells it; an empty text leaves it out) in their order.
SECTIONS = (("search", "Search", tell_search), ("refused", "Refused", tell_refusals), ("limits", "Limits", tell_limits),
            ("winner", "Winner", tell_winner), ("peers", "Peers", tell_peers), ("candidates", "Candidates", tell_candidates),
            ("sessions", "Sessions", tell_sessions))
