"""Charts as SVG: lines with bands, bars and coloured cells. They need no library and no script.

A chart in a page takes its colours from :data:`CSS`, by day and by night. A chart in a file of its
own brings the colours of the day with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

from fedmodels.console.printable import Unit, printable, text_of

WIDTH, HEIGHT, TOP, RIGHT = 380.0, 190.0, 20.0, 12.0
"""Pixels: the width of a chart, the height of its plot, the room above and to the right of it."""
LETTER = 5.6
"""Pixels that a letter takes; fonts differ, so this is rather much."""
LONGEST_NAME, LONGEST_LABEL, LONGEST_OF_MANY, MANY_LABELS = 14, 60, 28, 8
"""Letters of a tick; of a label in a legend; of one of many, which are more than the last."""

MAX_BARS = 40
"""Of more places than this, bars become a curve in the order of their values."""
MANY_POINTS, MANY_CELLS, MAX_SIDE, MAX_POINTS = 25, 144, 200, 400
"""A line of so many points has no dots; more cells than this show no numbers; of more rows, columns
or points than this, every n-th is drawn."""

# Okabe and Ito's palette, which everybody can tell apart. Beyond it the strokes differ.
DAY = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b37a00", "#2f96d1", "#5b6670", "#8c6bb1")
NIGHT = ("#5fb0e5", "#ff8f40", "#2fc79b", "#e49cc5", "#e6b13a", "#9fd3f2", "#a3adb7", "#b79be0")
STROKES = ("", "5 3", "1.5 2.5", "7 3 1.5 3")
SMALL = 8
"""Size of the numbers in cells; other texts have 9.5."""
LEVELS = 24
"""Shades of a cell."""


def _css(colours: Sequence[str], ink: str, soft: str, line: str, on: str) -> str:
    rules = "".join(f".c{n}{{color:{colour}}}" for n, colour in enumerate(colours))
    return (
        f"{rules}.chart text{{fill:{soft}}}.chart text.t{{fill:{ink}}}.chart text.on{{fill:{on}}}"
        f".g{{stroke:{line}}}"
    )


_DAY = _css(DAY, "#39424c", "#5b6670", "#dfe4e8", "#fff")
_NIGHT = _css(NIGHT, "#e3e7eb", "#a3adb7", "#37404a", "#10141b")
_BOTH = (
    ".chart{font:9.5px system-ui,'DejaVu Sans',sans-serif}.l{fill:none;stroke:currentColor;"
    "stroke-width:1.6;stroke-linejoin:round}.b{fill:currentColor;fill-opacity:.15}"
    ".f{fill:currentColor}.g{fill:none;stroke-width:1}.w{stroke:currentColor;stroke-opacity:.6}"
)
CSS = f"{_BOTH}{_DAY}@media(prefers-color-scheme:dark){{{_NIGHT}}}@media print{{{_DAY}}}"
"""What a page with charts has to say of their looks."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over the seeds of runs, and how many seeds there were."""

    mean: float
    std: float = 0.0
    n: int = 1


@dataclass(frozen=True)
class Chart:
    """What a chart shows."""

    caption: str
    kind: Literal["lines", "bars", "cells"]
    values: Mapping[str, Mapping[Any, Spread]]
    """By label and place. The place is a number on the x axis. Of cells it is a row and a column;
    the first label is drawn, and the others are columns of the table."""
    x: str
    y: str
    unit: Unit = ""
    x_names: Mapping[Any, str] = field(default_factory=dict)
    """Names of places on the x axis, where they have some."""
    y_names: Mapping[Any, str] = field(default_factory=dict)
    is_log: bool = False
    """Whether shades of cells go by the logarithm of their values, which are then positive."""
    moments: Mapping[int, str] = field(default_factory=dict)
    """Of lines: places on the x axis at which something happened, and what."""

    @property
    def is_telling(self) -> bool:
        """Whether there is something to see: a number other than zero; of cells, two numbers."""
        if self.kind == "cells":
            return len({spread.mean for spread in self.cells.values()}) > 1
        return any(spread.mean for line in self.values.values() for spread in line.values())

    @property
    def cells(self) -> Mapping[tuple[Any, Any], Spread]:
        """Return the cells that are drawn."""
        return next(iter(self.values.values()), {})

    @property
    def file_name(self) -> str:
        """Return what the file of the numbers is called; templates of pages ask for it."""
        words = "".join(c if c.isalnum() else " " for c in self.caption).split()
        return f"{'-'.join(words)}.csv"

    def table(self) -> list[Sequence[object]]:
        """Return the numbers as rows, heads first."""
        if self.kind == "cells":
            columns = self.values.values()
            return [
                (self.y, self.x, *(label or "value" for label in self.values)),
                *(
                    (
                        self.y_names.get(row, row),
                        self.x_names.get(column, column),
                        *(cells[row, column].mean for cells in columns),
                    )
                    for row, column in sorted(self.cells)
                ),
            ]
        return [
            ("line", self.x, f"{self.y}, mean", "standard deviation", "runs"),
            *(
                (label, self.x_names.get(at, at), spread.mean, spread.std, spread.n)
                for label, line in self.values.items()
                for at, spread in sorted(line.items())
            ),
        ]


def svg(chart: Chart) -> str:
    """Return a chart for a page that has :data:`CSS`."""
    marks, height = _draw(chart)
    return _element(marks, WIDTH, height, chart.caption)


def document(charts: Sequence[Chart], across: int = 3) -> str:
    """Return charts side by side, with their captions and one legend, as an SVG file."""
    lines = [chart for chart in charts if chart.kind != "cells"]
    labels = list(dict.fromkeys(label for chart in lines for label in chart.values))
    charts = [
        replace(c, values={n: c.values.get(n, {}) for n in labels}) if c in lines else c
        for c in charts
    ]
    across = min(across, len(charts))
    parts, top = [], 0.0
    for first in range(0, len(charts), across):
        row = [_draw(chart, legend=False) for chart in charts[first : first + across]]
        for place, (chart, (marks, _)) in enumerate(zip(charts[first:], row, strict=False)):
            left = place * (WIDTH + 10)
            title = words(WIDTH / 2, 14, chart.caption, "middle", "t", size=12)
            parts.append(f'<g transform="translate({_n(left)} {_n(top)})">{title}')
            parts.append(f'<g transform="translate(0 16)">{marks}</g></g>')
        top += max(height for _, height in row) + 26
    width = across * (WIDTH + 10)
    named, height = _legend(dict(enumerate(labels)), top, width) if len(labels) > 1 else ("", 0)
    name = ", ".join(chart.caption for chart in charts)
    return file_of("".join(parts) + named, width, top + height, name)


def file_of(marks: str, width: float, height: float, name: str) -> str:
    """Return marks as an SVG file of this size in pixels, which a screen reader calls ``name``.

    It has the colours of the day and a white ground.
    """
    style = f"<style>{_BOTH}{_DAY}</style><rect width='100%' height='100%' fill='#fff'/>"
    size = f'xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}"'
    whole = _element(style + marks, width, height, name)
    return whole.replace("<svg", f"<svg {size}", 1) + "\n"


def _element(marks: str, width: float, height: float, name: str) -> str:
    box = f'viewBox="0 0 {_n(width)} {_n(height)}"'
    return f'<svg class="chart" role="img" aria-label="{_escape(name)}" {box}>{marks}</svg>'


def _draw(chart: Chart, *, legend: bool = True) -> tuple[str, float]:
    """Return the marks of a chart, and its height."""
    if chart.kind == "cells":
        return _cells(chart)
    if not any(chart.values.values()):
        return words(WIDTH / 2, TOP + 20, "nothing yet", "middle"), TOP + 40
    kind, places = chart.kind, _places(chart)
    if kind == "bars" and len(places) > MAX_BARS:
        chart, kind = _in_order(chart, len(places)), "lines"
        places = _places(chart)
    axes = _Axes.of(chart, places, is_bars=kind == "bars")
    marks = "".join(axes.frame(chart))
    draw = _bars if kind == "bars" else _lines
    marks += "".join(draw(chart, axes, places))
    height = axes.height
    if legend and len(chart.values) > 1:
        labels = {index: label for index, label in enumerate(chart.values) if chart.values[label]}
        named, more = _legend(labels, height)
        marks, height = marks + named, height + more
    return marks, height


def _places(chart: Chart) -> list[Any]:
    return sorted({place for line in chart.values.values() for place in line})


def _in_order(chart: Chart, places: int) -> Chart:
    """Return a chart of too many bars as curves in the order of their values."""
    values = {
        label: {
            at: Spread(mean) for at, mean in enumerate(sorted(s.mean for s in line.values()), 1)
        }
        for label, line in chart.values.items()
    }
    x = f"{chart.x}, in the order of the value ({places} in all)"
    return Chart(chart.caption, "lines", values, x, chart.y, chart.unit)


# --- axes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axes:
    """Where values lie in a plot."""

    left: float
    x0: float
    x1: float
    y0: float
    y1: float
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    slant: bool = False
    """Whether names of the x axis are too long to stand level."""

    @classmethod
    def of(cls, chart: Chart, places: Sequence[Any], *, is_bars: bool) -> _Axes:
        """Return the axes of lines or bars."""
        ends = [
            end
            for line in chart.values.values()
            for s in line.values()
            for end in (s.mean - s.std, s.mean + s.std)
        ]
        low, high = min(ends), max(ends)
        if is_bars or chart.unit in ("bytes", "seconds"):
            low, high = min(low, 0.0), max(high, 0.0)
        if chart.unit == "percent":  # parts of a whole; a deviation beyond is cut off
            means = [s.mean for line in chart.values.values() for s in line.values()]
            low, high = min(*means, 0.0), max(*means, 1.0)
        y_ticks = ticks(low, high)
        y0, y1 = min(low, y_ticks[0]), max(high, y_ticks[-1])
        marked = [(y, _round(y, chart.unit)) for y in y_ticks]
        left = 8 + LETTER * max(len(text) for _, text in marked)
        if is_bars:
            positions = dict(zip(places, range(len(places)), strict=True))
            x0, x1 = -0.5, len(places) - 0.5
        else:
            positions = {place: place for place in places}
            x0, x1 = places[0], places[-1]
            x0, x1 = (x0 - 0.5, x1 + 0.5) if x0 == x1 else (x0, x1)
        named, slant = _named(chart, places, WIDTH - left - RIGHT, is_bars=is_bars)
        x_ticks = [(positions.get(place, place), text) for place, text in named]
        return cls(left, x0, x1, y0, y1, x_ticks, marked, slant)

    @property
    def height(self) -> float:
        """Return how much room plot and axes take."""
        longest = max((len(text) for _, text in self.x_ticks), default=0)
        return TOP + HEIGHT + 32 + (0.6 * LETTER * longest if self.slant else 0)

    def x(self, value: float) -> float:
        """Return how far right a value lies."""
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        """Return how far down a value lies, at an end of the axis if it is beyond."""
        value = min(max(value, self.y0), self.y1)
        return TOP + (self.y1 - value) / (self.y1 - self.y0) * HEIGHT

    def frame(self, chart: Chart) -> Iterator[str]:
        """Yield grid, ticks and the names of both axes."""
        yield words(4, 10, chart.y, "start", "t")
        for value, text in self.y_ticks:
            y = self.y(value)
            yield f'<path class="g" d="M{_n(self.left)} {_n(y)}H{_n(WIDTH - RIGHT)}"/>'
            yield words(self.left - 5, y + 3, text, "end")
        for at, text in chart.moments.items():
            if self.x0 <= at <= self.x1 and chart.kind == "lines":
                line = f'd="M{_n(self.x(at))} {_n(TOP)}V{_n(TOP + HEIGHT)}"'
                yield f'<path class="g" stroke-dasharray="3 3" {line}>{_title(text)}</path>'
        for value, text in self.x_ticks:
            yield _tick(self.x(value), TOP + HEIGHT + 13, text, slant=self.slant)
        yield words((self.left + WIDTH - RIGHT) / 2, self.height - 4, chart.x, "middle", "t")


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers, evenly spaced, that cover a range; ``whole`` ones lie within it."""
    if low == high:
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    rough = (high - low) / (8 if whole else 6)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for n in (1, 2, 5, 10) if (step := n * power) >= rough * 0.999)
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _named(
    chart: Chart, places: Sequence[Any], room: float, *, is_bars: bool
) -> tuple[list[tuple[Any, str]], bool]:
    """Return the places of the x axis that are named, and whether names have to slant."""
    if not is_bars and not chart.x_names:
        return [(at, f"{at:g}") for at in ticks(places[0], places[-1], whole=True)], False
    names = [_short(chart.x_names.get(place, str(place))) for place in places]
    return _fitting(list(zip(places, names, strict=True)), room)


def _fitting(named: list[tuple[Any, str]], room: float) -> tuple[list[tuple[Any, str]], bool]:
    """Return the names that fit into a row, and whether they have to slant for it."""
    widest = max((len(text) for _, text in named), default=0) * LETTER + 8
    slant = any(not text.isdecimal() for _, text in named) and widest * len(named) > room
    step = max(1, math.ceil((12 if slant else widest) * len(named) / room))
    return named[::step], slant


def _tick(x: float, y: float, text: str, *, slant: bool) -> str:
    if not slant:
        return words(x, y, text, "middle")
    turned = f' transform="rotate(-35 {_n(x)} {_n(y)})"'
    return words(x, y - 4, text, "end").replace("<text", f"<text{turned}", 1)


def _legend(labels: Mapping[int, str], top: float, width: float = WIDTH) -> tuple[str, float]:
    """Return labels in columns, by the number of their line, and how much room they take."""
    is_narrow = len(labels) > MANY_LABELS and width <= WIDTH
    most = LONGEST_OF_MANY if is_narrow else LONGEST_LABEL
    names = [_short(label, most) for label in labels.values()]
    room = 32 + LETTER * max(map(len, names))
    columns = max(1, min(int((width - 8) // room), len(names)))
    parts = []
    for at, ((index, label), name) in enumerate(zip(labels.items(), names, strict=True)):
        x, y = 8 + at % columns * room, top + 10 + 14 * (at // columns)
        mark = f'<path class="l" stroke-width="3" d="M{_n(x)} {_n(y - 3)}h16"/>'
        parts.append(_group(index, mark) + words(x + 20, y, name, "start", title=label))
    return "".join(parts), 16 + 14 * math.ceil(len(names) / columns)


# --- marks --------------------------------------------------------------------------------------


def _covering(chart: Chart, axes: _Axes) -> set[int]:
    """Return the numbers of lines that lie on an earlier one: dashes let that one be seen."""
    lines = [{at: axes.y(s.mean) for at, s in line.items()} for line in chart.values.values()]
    return {
        index
        for index, line in enumerate(lines)
        for before in lines[:index]
        if len(line) > 1
        and line.keys() == before.keys()
        and max(abs(line[at] - before[at]) for at in line) < 1
    }


def _lines(chart: Chart, axes: _Axes, places: Sequence[Any]) -> Iterator[str]:
    covering = _covering(chart, axes)
    for index, (label, line) in enumerate(chart.values.items()):
        if not (points := _every(sorted(line.items()), MAX_POINTS)):
            continue
        path = "L".join(f"{_n(axes.x(at))} {_n(axes.y(s.mean))}" for at, s in points)
        dashes = ' stroke-dasharray="6 6"' if index in covering else ""
        marks = f'<path class="l"{dashes} d="M{path}"/>'
        if any(s.std for _, s in points):
            edge = [(at, s.mean + s.std) for at, s in points]
            edge += [(at, s.mean - s.std) for at, s in reversed(points)]
            band = "L".join(f"{_n(axes.x(at))} {_n(axes.y(y))}" for at, y in edge)
            marks += f'<path class="b" d="M{band}Z"/>'
        for at, s in points if len(points) < MANY_POINTS else ():
            title = f"{label + ', ' if label else ''}{chart.x} {chart.x_names.get(at, at)}: "
            title += _said(s, chart.unit)
            where = f'cx="{_n(axes.x(at))}" cy="{_n(axes.y(s.mean))}"'
            marks += f'<circle class="f" {where} r="2.2">{_title(title)}</circle>'
        yield _group(index, marks)


def _bars(chart: Chart, axes: _Axes, places: Sequence[Any]) -> Iterator[str]:
    shown = [label for label, line in chart.values.items() if line]
    slot = (axes.x(1) - axes.x(0)) * 0.8 / len(shown)
    zero = axes.y(0)
    for index, (label, line) in enumerate(chart.values.items()):
        marks = ""
        beside = shown.index(label) - (len(shown) - 1) / 2 if line else 0.0
        for at, s in sorted(line.items()):
            middle = axes.x(places.index(at)) + beside * slot
            top, bottom = sorted((axes.y(s.mean), zero))
            title = f"{label + ', ' if label else ''}{chart.x} {chart.x_names.get(at, at)}: "
            where = f'x="{_n(middle - slot * 0.46)}" y="{_n(top)}" width="{_n(slot * 0.92)}"'
            marks += f'<rect class="f" {where} height="{_n(max(bottom - top, 0.5))}">'
            marks += f"{_title(title + _said(s, chart.unit))}</rect>"
            if s.std:
                ends = f"M{_n(middle)} {_n(axes.y(s.mean - s.std))}V{_n(axes.y(s.mean + s.std))}"
                marks += f'<path class="g" style="stroke:currentColor" d="{ends}"/>'
        yield _group(index, marks, strokes=False)


def _cells(chart: Chart) -> tuple[str, float]:
    """Return coloured cells with a scale beside them, and their height."""
    cells = chart.cells
    rows = _every(sorted({row for row, _ in cells}))
    columns = _every(sorted({column for _, column in cells}))
    names = {row: _short(chart.y_names.get(row, str(row))) for row in rows}
    left = 10 + LETTER * max(map(len, names.values()))
    values = [spread.mean for spread in cells.values()]
    low, top = (min(values) / 2, max(values)) if chart.is_log else _scale(values, chart.unit)
    ends = (min(values), top) if chart.is_log else (low, top)
    beside = max(62.0, 22 + LETTER * max(len(_round(end, chart.unit)) for end in ends))
    named, slant = _fitting(
        [(column, _short(chart.x_names.get(column, str(column)))) for column in columns],
        WIDTH - left - beside,
    )
    height = min(max(15.0 * len(rows), 90.0), 240.0)
    wide, high = (WIDTH - left - beside) / len(columns), height / len(rows)
    numbered = len(rows) * len(columns) <= MANY_CELLS
    numbers = _numbers_in(cells, chart.unit, wide) if numbered else {}
    shades: dict[int, str] = {}
    texts = []
    for down, row in enumerate(rows):
        for right, column in enumerate(columns):
            if (spread := cells.get((row, column))) is None:
                continue
            level = round(LEVELS * _share(spread.mean, low, top, chart))
            if level > 0:
                shades[level] = shades.get(level, "") + f"M{right} {down}h1v1h-1z"
            if numbers:
                x, y = left + (right + 0.5) * wide, TOP + (down + 0.5) * high + 3
                title = f"{chart.y} {chart.y_names.get(row, row)}, "
                title += f"{chart.x} {chart.x_names.get(column, column)}: "
                kind = "on" if level > 0.55 * LEVELS else "t"
                title += text_of(spread.mean, chart.unit)
                texts.append(
                    words(x, y, numbers[row, column], "middle", kind, size=SMALL, title=title)
                )
    paths = "".join(
        f'<path fill-opacity="{_n(level / LEVELS, 2)}" d="{d}"/>'
        for level, d in sorted(shades.items())
    )
    where = f"translate({_n(left)} {TOP:g}) scale({_n(wide, 4)} {_n(high, 4)})"
    marks = f'<g class="c0 f" transform="{where}">{paths}</g>' + "".join(texts)
    edge = f"M{_n(left)} {TOP:g}h{_n(wide * len(columns))}v{_n(height)}h{_n(-wide * len(columns))}z"
    marks += f'<path class="g" d="{edge}"/>' + words(4, 12, chart.y, "start", "t")
    step = math.ceil(11 / high)
    for down, row in list(enumerate(rows))[::step]:
        marks += words(left - 5, TOP + (down + 0.5) * high + 3, names[row], "end")
    below = TOP + height + 13
    for column, text in named:
        x = left + (columns.index(column) + 0.5) * wide
        marks += _tick(x, below, text, slant=slant)
    longest = max(len(text) for _, text in named)
    whole = below + 19 + (0.6 * LETTER * longest if slant else 0)
    marks += words(left + wide * len(columns) / 2, whole - 4, chart.x, "middle", "t")
    return marks + _colour_scale(WIDTH - beside + 10, height, *ends, chart.unit), whole


def _every(places: list[Any], most: int = MAX_SIDE) -> list[Any]:
    """Return every n-th of too many places, with the last one."""
    return places[::-1][:: math.ceil(len(places) / most) or 1][::-1]


def _share(value: float, low: float, top: float, chart: Chart) -> float:
    """Return where a value lies between the palest and the darkest cell."""
    if chart.is_log:
        return math.log(value / low) / math.log(top / low)
    return (value - low) / (top - low)


def _scale(values: Sequence[float], unit: Unit) -> tuple[float, float]:
    """Return the values of the palest and of the darkest cell.

    They begin at zero, unless all values are nearly the same: then all would have one colour.
    """
    low, high = min(values), max(values)
    if low > high / 2 or high <= 0:
        return (low, high) if low < high else (low - 1, high)
    return min(low, 0.0), max(high, 1.0) if unit == "percent" else high


def _numbers_in(
    cells: Mapping[tuple[Any, Any], Spread], unit: Unit, wide: float
) -> dict[tuple[Any, Any], str]:
    """Return what stands in cells of this width: fewer digits where they are narrow, or nothing."""
    for digits in (1, 0) if unit in ("percent", "points") else (1,):
        found = {at: _in_a_cell(spread.mean, unit, digits) for at, spread in cells.items()}
        if max(map(len, found.values())) * LETTER * SMALL / 9.5 + 2 <= wide:
            return found
    return {}


def _in_a_cell(value: float, unit: Unit, digits: int) -> str:
    if value >= 1 and value == int(value) and not unit:
        return f"{value:.0f}"
    if unit in ("percent", "points"):
        return f"{100 * value:.{digits}f}".removesuffix(".0")
    return f"{value:.2f}" if value else "0"


def _colour_scale(left: float, height: float, low: float, high: float, unit: Unit) -> str:
    """Return the scale beside cells."""
    steps = 12
    rects = "".join(
        f'<rect fill-opacity="{_n((n + 0.5) / steps, 2)}" x="{_n(left)}" width="8" '
        f'y="{_n(TOP + height - (n + 1) * height / steps)}" height="{_n(height / steps)}"/>'
        for n in range(steps)
    )
    ends = ((TOP + 7, high), (TOP + height, low))
    texts = "".join(words(left + 11, y, _round(v, unit), "start") for y, v in ends)
    return f'<g class="c0 f">{rects}</g>{texts}'


# --- pieces -------------------------------------------------------------------------------------


def _group(index: int, marks: str, *, strokes: bool = True) -> str:
    """Return marks in the colour and with the strokes of a line."""
    stroke = STROKES[index // len(DAY) % len(STROKES)] if strokes else ""
    dashes = f' stroke-dasharray="{stroke}"' if stroke else ""
    return f'<g class="c{index % len(DAY)}"{dashes}>{marks}</g>'


def words(
    x: float, y: float, text: str, anchor: str, kind: str = "", size: float = 0, title: str = ""
) -> str:
    """Return a text at a place; ``title`` is shown on hover."""
    more = f' class="{kind}"' if kind else ""
    more += f' font-size="{size:g}"' if size else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    said = _title(title) if title else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{where}{more}>{said}{_escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{_escape(text)}</title>"


def _said(spread: Spread, unit: Unit) -> str:
    text = text_of(spread.mean, unit)
    return f"{text} ± {text_of(spread.std, unit)} over {spread.n} seeds" if spread.std else text


def _round(value: float, unit: Unit) -> str:
    return text_of(value, unit).replace(".0 ", " ")


def _short(text: str, most: int = LONGEST_NAME) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _escape(text: str) -> str:
    return escape(printable(text))


def _n(value: float, digits: int = 1) -> str:
    """Return a coordinate, to a tenth of a pixel."""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
