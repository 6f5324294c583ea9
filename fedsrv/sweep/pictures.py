"""The outcome of a sweep as a picture: scores against length, and after each round."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from statistics import fmean, pstdev

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedmodels.files import replacing
from fedsrv.sweep.plan import Cell
from fedsrv.sweep.tables import Outcome, curve_means

LINES = ("-", "--", ":", "-.")
"""Line styles; rows that share a colour differ in these."""


def draw(outcome: Outcome, path: Path) -> bool:
    """Write a picture as SVG, with the same bytes for the same outcome.

    Returns:
        Whether there was anything to draw.
    """
    laddered = len(set(outcome.lengths.values())) > 1
    scores = [h for h, p in outcome.columns.items() if p.startswith("metrics.")] if laddered else []
    panels = [*scores, *outcome.curves]
    if not panels or not outcome.runs:
        return False
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    named = 3 if across == 3 else 2  # columns of the legend
    lines = -(-len({cell.row for cell in outcome.cells}) // named)
    size = (max(4.2 * across, 7.5), 3.2 * down + 0.3 + 0.2 * lines)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    for place, heading in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, place)
        (_draw_ladder if heading in scores else _draw_curve)(axes, outcome, heading)
        axes.set_title(heading)
        axes.grid(alpha=0.3)
    shown = {label: line for axes in figure.axes
             for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=named, fontsize="small"
    )
    with replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "fedtide"}):
        figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
    return True


def _style(outcome: Outcome) -> dict[str, tuple[str, str]]:
    """Return colour and line of each row, the same in all panels."""
    rows = dict.fromkeys(cell.row for cell in outcome.cells)
    pairs = ((f"C{n}", line) for line in cycle(LINES) for n in range(10))
    return dict(zip(rows, pairs, strict=False))


def _draw_ladder(axes: Axes, outcome: Outcome, heading: str) -> None:
    """Draw means over seeds against length, with the standard deviations of the tables."""
    for row, (colour, line) in _style(outcome).items():
        points = [
            (length, known)
            for setting, length in outcome.lengths.items()
            if (found := outcome.values[heading].get(Cell(setting, row)))
            and (known := [value for value in found.values() if value is not None])
        ]
        if points:
            bars = [pstdev(known) for _, known in points]
            x, y = [length for length, _ in points], [fmean(known) for _, known in points]
            axes.errorbar(x, y, bars, color=colour, linestyle=line, capsize=2, label=row)
    lengths = sorted(set(outcome.lengths.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"×{n}" for n in lengths])
    axes.set_xlabel("length")


def _draw_curve(axes: Axes, outcome: Outcome, heading: str) -> None:
    """Draw means over seeds after each round; where runs differ in length, of the longest ones."""
    style, longest = _style(outcome), max(outcome.lengths.values(), default=1)
    for cell, line in curve_means(outcome, outcome.curves[heading]).items():
        if outcome.lengths.get(cell.setting, 1) == longest:
            colour, dashes = style[cell.row]
            rounds, means = list(line), list(line.values())
            axes.plot(rounds, means, color=colour, linestyle=dashes, label=cell.row)
    axes.set_xlabel("round")
