"""The plane of a study of change: what rows gain on the present task against the next one.

A point is a row minus the study's reference row, its cross the 95 % intervals of both paired
differences. The reference row itself, just trained, is a point of its own: it gains nothing on
the next task, which clients meet with what they received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedmodels.console.charts import DAY, file_of, ticks, words
from fedplugins.studies.outcome import Outcome, values_of
from fedplugins.studies.plan import Cell
from fedsrv.report.frame import Difference, difference

NEXT, PRESENT, TRAINED = "metrics.prequential", "metrics.present", "metrics.present_trained"
WIDTH, HEIGHT, LEFT, TOP = 640.0, 420.0, 52.0, 28.0
ROW = 15.0
Point = tuple[Difference, Difference]


def is_plane(outcome: Outcome) -> bool:
    """Tell whether a study compares rows with several, on the present and on the next task."""
    return bool(outcome.beside) and {NEXT, PRESENT} <= {*outcome.columns.values()}


def points(outcome: Outcome) -> dict[str, Point]:
    """Return by row what it has over the reference row: on the next task, on the present one."""
    after, now, trained = (values_of(path, outcome.runs) for path in (NEXT, PRESENT, TRAINED))
    base = Cell("", outcome.against)
    found: dict[str, Point] = {}
    for cell in outcome.cells:
        pair = _pair(after.get(cell, {}), after[base], now.get(cell, {}), now[base])
        if pair and cell != base:
            found[cell.row] = pair
    if pair := _pair(after[base], after[base], trained.get(base, {}), now[base]):
        found[f"{outcome.against}, just trained"] = pair
    return found


def _pair(*values: Mapping[int, float | None]) -> Point | None:
    ahead, present = difference(*values[:2]), difference(*values[2:])
    enough = ahead and present and min(ahead.pairs, present.pairs) > 1
    return (ahead, present) if enough and ahead and present else None


def picture(outcome: Outcome) -> str:
    """Return the plane as an SVG file."""
    found = points(outcome)
    return file_of("".join(_marks(found, outcome.against)), WIDTH + 230, HEIGHT + 60, "plane")


def _marks(found: Mapping[str, Point], base: str) -> Iterator[str]:
    """Yield grid, axes, crosses and a legend of numbers."""
    across, up = (
        ticks(min(0.0, *(one[i].low for one in found.values())),
              max(0.0, *(one[i].high for one in found.values())))
        for i in (0, 1)
    )  # fmt: skip

    def x(value: float) -> str:
        return f"{LEFT + (value - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT):.1f}"

    def y(value: float) -> str:
        return f"{TOP + (up[-1] - value) / (up[-1] - up[0]) * HEIGHT:.1f}"

    for value in across:
        width = 2 if value == 0 else 1
        yield f'<path class="g" stroke-width="{width}" d="M{x(value)} {y(up[0])}V{y(up[-1])}"/>'
        yield words(float(x(value)), HEIGHT + TOP + 14, f"{value:+g}", "middle")
    for value in up:
        width, line = 2 if value == 0 else 1, f"M{x(across[0])} {y(value)}H{x(across[-1])}"
        yield f'<path class="g" stroke-width="{width}" d="{line}"/>'
        yield words(LEFT - 6, float(y(value)) + 3, f"{value:+g}", "end")
    yield words(4, 12, f"present task, points over {base}", "start", "t")
    yield words(WIDTH, HEIGHT + TOP + 30, f"next task, points over {base}", "end", "t")
    for number, (row, (ahead, present)) in enumerate(found.items()):
        colour = f"c{number % len(DAY)}"
        at = x(ahead.mean), y(present.mean)
        yield f'<g class="{colour}"><title>{row}</title>'
        yield f'<path class="l" d="M{x(ahead.low)} {at[1]}H{x(ahead.high)}"/>'
        yield f'<path class="l" d="M{at[0]} {y(present.low)}V{y(present.high)}"/></g>'
        yield words(float(at[0]) + 3, float(at[1]) - 3, str(number + 1), "start", "t")
        yield words(WIDTH + 14, TOP + ROW * number, f"{number + 1}  {row}", "start", "t")
