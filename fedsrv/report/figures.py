"""Drawings of a report as inline SVG: lines with bands, bars, and heat maps.

Only this module imports matplotlib, and nothing imports this module before a page is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    MaxNLocator,
    PercentFormatter,
    ScalarFormatter,
)

from fedsrv.report.run_record import Spread

Unit = Literal["percent", "bytes", "seconds", ""]
Grid = npt.NDArray[np.float64]

WIDTH, HEIGHT = 4.6, 3.0
"""Inches of a figure without its legend."""

MAX_BARS = 40
"""Clients beyond this many are drawn as a curve in order of their value."""

MANY_POINTS, MANY_CELLS = 25, 144
"""From so many on, points have no markers; beyond so many, cells have no numbers."""

EDGE, LABEL, GRID, TICK = "#99a3ad", "#39424c", "#e6eaee", "#5b6670"
IN_CSS = {EDGE: "--edge", LABEL: "--ink", GRID: "--line", TICK: "--soft"}
"""Colours that a page says by CSS variables, since they differ by day and night."""

# Okabe and Ito's palette: told apart by everybody. Beyond it the strokes differ.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", TICK, "#8c6bb1")
STROKES = ("-", "--", ":", "-.")
HEAT = LinearSegmentedColormap.from_list(
    "heat", [to_rgba(COLOURS[0], 0.0), to_rgba(COLOURS[0], 1.0)]
).with_extremes(bad=to_rgba(EDGE, 0.3))
"""From transparent to the full colour, so that cells can be read on a light and on a dark page."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedtide",  # ids are hashes of what they name: equal runs, equal pages
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],  # every text of an SVG names all of them
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": EDGE,
    "text.color": LABEL,
    "axes.labelcolor": LABEL,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": TICK,
    "ytick.color": TICK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
}


@matplotlib.rc_context(STYLE)
def curves(lines: Mapping[str, Mapping[int, Spread]], *, x: str, y: str, unit: Unit = "") -> str:
    """Draw one line per label over integers, with a band of one standard deviation."""
    figure, axes = _blank(len(lines))
    for index, (label, points) in enumerate(lines.items()):
        at = sorted(points)
        mean = np.array([points[i].mean for i in at])
        std = np.array([points[i].std for i in at])
        colour, stroke = _look(index)
        marker = "o" if len(at) < MANY_POINTS else ""
        axes.plot(at, mean, stroke, color=colour, label=label, marker=marker, markersize=3)
        if std.any():
            axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, x, y, unit, list(lines))
    return _svg(figure, f"{y} over {x}")


@matplotlib.rc_context(STYLE)
def bars(
    series: Mapping[str, Mapping[int, Spread]], *, y: str, x: str = "client", unit: Unit = ""
) -> str:
    """Draw one bar per client, or ``x``, and label, with its deviation; many as curves."""
    clients = sorted({client for values in series.values() for client in values})
    figure, axes = _blank(len(series))
    if len(clients) > MAX_BARS:
        for index, (label, values) in enumerate(series.items()):
            colour, stroke = _look(index)
            axes.plot(sorted(v.mean for v in values.values()), stroke, color=colour, label=label)
        x = f"{x}, in order of value ({len(clients)} in all)"
    else:
        _grouped_bars(axes, series, clients)
    _finish(figure, axes, x, y, unit, list(series))
    return _svg(figure, f"{y} per {x}")


@matplotlib.rc_context(STYLE)
def heat_map(cells: Mapping[tuple[int, int], float], *, x: str, y: str, unit: Unit = "") -> str:
    """Draw ``{(row, column): value}`` as coloured cells; a cell without a value stays grey."""
    rows, columns = sorted({r for r, _ in cells}), sorted({c for _, c in cells})
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, column), value in cells.items():
        grid[rows.index(row), columns.index(column)] = value
    figure, axes = _blank(0)
    axes.grid(False)
    top = 1.0 if unit == "percent" else max(float(np.nanmax(grid)), 1e-12)
    low = min(0.0, float(np.nanmin(grid)))
    image = axes.imshow(grid, cmap=HEAT, vmin=low, vmax=top, aspect="auto", interpolation="nearest")
    figure.colorbar(image, format=_formatter(unit))
    _ticks(axes, rows, columns)
    if grid.size <= MANY_CELLS:
        _write_values(axes, grid, unit, low + 0.8 * (top - low))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return _svg(figure, f"{y} by {x}")


def _blank(labels: int) -> tuple[Figure, Axes]:
    """Return an empty figure that is high enough for a legend of so many labels."""
    legend_rows = (labels + 1) // 2 if labels > 1 else 0
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.2 * legend_rows), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, name: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    return _inline(file.getvalue(), name)


_COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"')
_TOO_FINE = re.compile(r"(?<=\.\d\d)\d+")
"""Digits beyond a hundredth of a point, which nobody sees."""


def _inline(document: str, name: str) -> str:
    """Strip an SVG document of what a page does not need, and give it a name for screen readers."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| transform="rotate\(-0 [^"]*"', "", svg)
    svg = _COORDINATES.sub(lambda found: _TOO_FINE.sub("", found[0]), svg)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    for colour, variable in IN_CSS.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1).strip()


def _look(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], STROKES[index // len(COLOURS) % len(STROKES)]


def _grouped_bars(
    axes: Axes, series: Mapping[str, Mapping[int, Spread]], clients: Sequence[int]
) -> None:
    width = 0.8 / max(len(series), 1)
    for index, (label, values) in enumerate(series.items()):
        own = [client for client in clients if client in values]
        at = [clients.index(c) + (index - (len(series) - 1) / 2) * width for c in own]
        std = [values[c].std for c in own]
        axes.bar(
            at, [values[c].mean for c in own], width * 0.92, color=_look(index)[0], label=label,
            yerr=std if any(std) else None, error_kw={"elinewidth": 0.8, "ecolor": LABEL},
        )  # fmt: skip
    step = 1 + len(clients) // 20
    axes.set_xticks(range(0, len(clients), step), [str(c) for c in clients[::step]])
    axes.grid(False, axis="x")


def _finish(figure: Figure, axes: Axes, x: str, y: str, unit: Unit, labels: Sequence[str]) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if unit:
        axes.yaxis.set_major_formatter(_formatter(unit))
    if unit in ("bytes", "seconds"):
        axes.set_ylim(bottom=0)
    if len(labels) > 1:
        columns = 2 if max(map(len, labels)) > 14 else min(len(labels), 4)
        figure.legend(loc="outside lower center", ncols=columns)


def _formatter(unit: Unit) -> Formatter:
    if unit == "percent":
        return PercentFormatter(1.0)
    return EngFormatter({"bytes": "B", "seconds": "s"}[unit]) if unit else ScalarFormatter()


def _ticks(axes: Axes, rows: Sequence[int], columns: Sequence[int]) -> None:
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = 1 + (len(names) - 1) // 15
        axis.set_ticks(range(0, len(names), step), [str(n) for n in names[::step]])


def _write_values(axes: Axes, grid: Grid, unit: Unit, dark: float) -> None:
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{100 * value:.1f}" if unit == "percent" else f"{value:.2f}"
            text = text if value else "0"
            colour = "white" if value > dark else LABEL
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)
