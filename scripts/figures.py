"""The figures of a report as inline SVG: no library, no script, no colour of their own (a page's style has them, for light and dark).

Each has a title and a description for those who do not see it, and a tooltip on each mark.
"""
import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
#: Room for labels: left, right, top, bottom.
LEFT, RIGHT, TOP, BOTTOM = 68, 20, 22, 46
#: Pixels that one line of labels needs.
LINE = 15
#: Candidates that are drawn as the best few.
BEST = 5


@dataclass(frozen=True)
class Unit:
    """How one kind of quantity is written: a value in base units times `factor`, with so many decimals, and the name of the unit."""

    name: str
    factor: float
    decimals: int

    @classmethod
    def of(cls, value, names):
        """The largest unit of {name: factor} in which a value is at least one tenth, else the last; four digits of the value."""
        name, factor = next((it for it in names.items() if value * it[1] >= 0.1), list(names.items())[-1])
        return cls(name, factor, max(0, 3 - math.floor(math.log10(max(value * factor, 1e-9)))))

    def number(self, value):
        return f"{value * self.factor:.{self.decimals}f}"

    def told(self, value):
        return f"{self.number(value)} {self.name}"


def time_unit(seconds):
    """The Unit for times around so many seconds."""
    return Unit.of(seconds, {"s": 1, "ms": 1e3, "µs": 1e6})


def rate_unit(rate):
    """The Unit for speeds around so many operations a second."""
    return Unit.of(rate, {"TFLOP/s": 1e-12, "GFLOP/s": 1e-9, "MFLOP/s": 1e-6})


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` along the pixels from `start` to `end`, `log` in equal ratios."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value):
        low, high, value = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, count=5):
        """Round values within the axis."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            choices = ([digit * 10.0**decade for decade in decades for digit in digits if self.low <= digit * 10.0**decade <= self.high]
                       for digits in ((1,), (1, 2, 5), range(1, 10)))
            return next((found for found in choices if len(found) >= count - 1), [self.low, self.high])
        step = 10.0**math.floor(math.log10((self.high - self.low) / count))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (factor * step) <= count)
        return [number * step for number in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def axis_around(values, start, end):
    """An Axis with some air on both sides of positive values: by equal ratios where the largest is many times the least."""
    low, high = min(values), max(values)
    if high > 4 * low:
        return Axis(low / 1.15, high * 1.15, start, end, log=True)
    air = 0.08 * (high - low) or 0.1 * high
    return Axis(low - air, high + air, start, end)


def _figure(name, title, description, parts, width=WIDTH, height=HEIGHT):
    """An accessible SVG element; `name` makes its identifiers unique."""
    name = escape(name)
    return (f'<svg viewBox="0 0 {width} {height}" style="min-width:{0.9 * width:.0f}px;max-width:{1.3 * width:.0f}px" role="img" '
            f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(title)}</title>'
            f'<desc id="{name}-desc">{escape(description)}</desc>\n'
            + "\n".join(parts) + "\n</svg>")


def _text(x, y, text, anchor="start", kind="label"):
    return f'<text class="{kind}" x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1, y1, x2, y2, kind):
    return f'<line class="{kind}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>'


def _path(points, kind, tip=""):
    drawn = "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points)
    return f'<path class="{kind}" d="{drawn}">{_tip(tip)}</path>'


def _mark(x, y, kind, tip, shape="circle"):
    """A mark with a tooltip: a circle, the diamond of a winner, or the cross of what was refused. Their shapes differ, not only colours."""
    x, y = float(_px(x)), float(_px(y))
    if shape == "circle":
        return f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="4">{_tip(tip)}</circle>'
    drawn = {"diamond": "m0 -8l8 8l-8 8l-8 -8z", "cross": "m-4 -4l8 8m0 -8l-8 8"}[shape]
    return f'<path class="{kind}" d="M{x:g} {y:g}{drawn}">{_tip(tip)}</path>'


def _tip(text):
    return f"<title>{escape(text)}</title>" if text else ""


def _px(value):
    return f"{value:.1f}".removesuffix(".0")


def _frame(x, y, x_label, y_label, x_text, y_text, right):
    """Grid, ticks and names of two axes; `x_text` and `y_text` write a tick's value."""
    parts = [_line(LEFT, y.at(tick), right, y.at(tick), "grid") for tick in y.ticks()]
    parts += [_text(LEFT - 8, y.at(tick) + 4, y_text(tick), "end") for tick in y.ticks()]
    parts += [_line(x.at(tick), y.start, x.at(tick), y.start + 5, "axis") for tick in x.ticks()]
    parts += [_text(x.at(tick), y.start + 19, x_text(tick), "middle") for tick in x.ticks()]
    return [*parts, _line(LEFT, y.start, right, y.start, "axis"), _text((LEFT + right) / 2, HEIGHT - 6, x_label, "middle"),
            _text(4, 14, y_label)]


def progress(story, unit):
    """Every candidate when it was known, refused ones at the top, and the best so far as a line."""
    times = [it.outcome.after if story.timed else it.number for it in story.candidates]
    x = Axis(0, max(1.01 * max(times), 1), LEFT, WIDTH - RIGHT) if story.timed else Axis(0.5, max(times) + 0.5, LEFT, WIDTH - RIGHT)
    y = axis_around([it.outcome.seconds for it in story.passed], HEIGHT - BOTTOM, TOP + 2 * LINE)
    marks, steps, best = [], [], math.inf
    for time, it in zip(times, story.candidates):
        told = f"candidate {it.number}, {it.family} {it.plan}"
        if it.outcome.seconds is None:
            marks.append(_mark(x.at(time), TOP + LINE, "refused", f"{told}: refused, {it.outcome.refused}", "cross"))
            continue
        if it.outcome.seconds < best:
            steps += [(x.at(time), y.at(best if steps else it.outcome.seconds)), (x.at(time), y.at(it.outcome.seconds))]
            best = it.outcome.seconds
        kind, shape = ("winner", "diamond") if story.is_winner(it) else ("dot", "circle")
        marks.append(_mark(x.at(time), y.at(it.outcome.seconds), kind, f"{told}: {unit.told(it.outcome.seconds)}", shape))
    steps.append((WIDTH - RIGHT, y.at(best)))
    parts = _frame(x, y, "seconds of tuning" if story.timed else "candidates, in the order of the log", f"{unit.name} a call",
                   lambda tick: f"{tick:g}", lambda tick: f"{unit.factor * tick:.4g}", WIDTH - RIGHT)
    refused = len(story.candidates) - len(story.passed)
    if refused:
        parts.append(_text(LEFT - 8, TOP + LINE + 4, "refused", "end"))
    slowest = unit.told(story.passed[-1].outcome.seconds)
    told = f"{len(story.passed)} candidates that passed, from {slowest} down to {unit.told(best)} a call, {refused} refused"
    return _figure("progress", "Best so far", f"{told}; a line follows the best so far.", [*parts, _path(steps, "best"), *marks])


def knobs(name, candidates, fields, unit, is_winner):
    """Parallel coordinates of candidates of one family that passed: a line a plan through the value of each knob to its latency.

    candidates  the fastest first
    fields      names of the knobs that differ among them
    """
    width, top, foot = max(WIDTH, 84 * (len(fields) + 1) + 40), TOP + 2 * LINE, HEIGHT - 18
    places = [40 + (width - 110) * number / len(fields) for number in range(len(fields) + 1)]
    values = {field: sorted({getattr(it.plan, field) for it in candidates}) for field in fields}
    last = axis_around([it.outcome.seconds for it in candidates], foot, top)
    parts = []
    for number, (place, field) in enumerate(zip(places, [*fields, f"{unit.name} a call"])):
        parts += [_line(place, top - 6, place, foot + 6, "axis"), _text(place, TOP - 6 + LINE * (number % 2), field, "middle")]

    def level(field, value):
        count = len(values[field])
        return foot - (foot - top) * (values[field].index(value) + 0.5) / count

    lines = []
    for rank, it in reversed(list(enumerate(candidates))):  # the best on top
        apart = 12 * (rank / max(len(candidates) - 1, 1) - 0.5)  # so that lines through one value can be told apart
        points = [(place, level(field, getattr(it.plan, field)) + apart) for place, field in zip(places, fields)]
        kind = "line winner-line" if is_winner(it) else "line best-line" if rank < BEST else "line"
        tip = f"rank {rank + 1}: {unit.told(it.outcome.seconds)}, {it.plan}"
        lines.append((is_winner(it), _path([*points, (places[-1], last.at(it.outcome.seconds))], kind, tip)))
    parts += [line for _, line in sorted(lines, key=lambda entry: entry[0])]
    for place, field in zip(places, fields):
        parts += [_text(place + 6, level(field, value) + 4, str(value), kind="label halo") for value in values[field]]
    parts += [_text(places[-1] + 6, last.at(tick) + 4, f"{unit.factor * tick:.4g}", kind="label halo") for tick in last.ticks()]
    best = ", ".join(f"{field} {getattr(candidates[0].plan, field)}" for field in fields)
    return _figure(f"knobs-{name}", f"Knobs of {name}", f"Parallel coordinates of {len(candidates)} plans over {', '.join(fields)} and the "
                   f"latency; the fastest has {best} and takes {unit.told(candidates[0].outcome.seconds)}.", parts, width)


def roofline(story, points):
    """Bounds of the chip over operations a byte, and what was reached.

    points  [(name, seconds a call, whether it is the winner)], all at the shape that was tuned at
    """
    work, limits = story.work, {limit.name: limit for limit in story.limits}
    rates = {name: story.tflops(limit.seconds) for name, limit in limits.items()}
    slope, right = rates.pop("memory") / work.intensity, WIDTH - 200
    reached = [(name, story.tflops(seconds), winner) for name, seconds, winner in points]
    peak, least = max(rates.values()), min([*rates.values(), *(rate for _, rate, _ in reached)])
    y = Axis(least / 3, peak * 1.6, HEIGHT - BOTTOM, TOP, log=True)
    x = Axis(min(y.low / slope, work.intensity / 2), max(work.intensity, peak / slope) * 4, LEFT, right, log=True)
    corner = max(x.low, y.low / slope)
    parts = _frame(x, y, "operations a byte of memory", "TFLOP/s", lambda tick: f"{tick:g}", lambda tick: f"{tick:g}", right)
    parts += [_path([(x.at(corner), y.at(corner * slope)), (x.at(peak / slope), y.at(peak))], "bound", f"memory: {slope:.3g} TB/s"),
              _text(x.at(corner) + 10, y.at(corner * slope) - 8, f"memory {slope:.3g} TB/s", kind="label halo")]
    labels = []
    for name, rate in rates.items():
        kind = "bound together" if name == "one after the other" else "bound"
        parts.append(_path([(x.at(max(rate / slope, x.low)), y.at(rate)), (right, y.at(rate))], kind, f"{name}: {rate:.4g} TFLOP/s"))
        labels.append((y.at(rate), f"{name} {rate:.4g}", "label"))
    for name, rate, winner in reached:
        parts.append(_mark(x.at(work.intensity), y.at(rate), "winner" if winner else "dot", f"{name}: {rate:.4g} TFLOP/s",
                           "diamond" if winner else "circle"))
        labels.append((y.at(rate), f"{name} {rate:.4g}", "label strong" if winner else "label"))
    free = TOP
    for height, label, kind in sorted(labels):
        free = max(height + 4, free + LINE)
        parts += [_line(right + 2, height, right + 14, free - 4, "leader"), _text(right + 18, free, label, kind=kind)]
    told = ", ".join(f"{name} {rate:.4g} TFLOP/s" for name, rate in rates.items())
    return _figure("roofline", "Roofline", f"At {work.intensity:.4g} operations a byte: bounds {told}, memory {slope:.3g} TB/s; reached "
                   + ", ".join(f"{name} {rate:.4g} TFLOP/s" for name, rate, _ in reached) + ".", parts)
