"""Charts: what is drawn, where, in which colour, and that names stay text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from fedmodels.console.charts import (
    DAY,
    LETTER,
    MAX_BARS,
    MAX_SIDE,
    WIDTH,
    Chart,
    Spread,
    document,
    svg,
    ticks,
)
from fedmodels.console.printable import text_of


def of(*values: float) -> dict[int, Spread]:
    return {at: Spread(value) for at, value in enumerate(values, 1)}


def cells(*rows: list[float], unit: str = "") -> Chart:
    values = {(r, c): Spread(value) for r, row in enumerate(rows) for c, value in enumerate(row)}
    return Chart("cells", "cells", {"": values}, "x", "y", unit)  # type: ignore[arg-type]


def texts(drawn: str) -> list[str]:
    """Return every text without the hint that belongs to it."""
    return [[*node.itertext()][-1] for node in ElementTree.fromstring(drawn).iter("text")]


def marks(drawn: str, tag: str) -> list[dict[str, str]]:
    """Return the attributes of every element of a kind, with the class of its group."""
    root = ElementTree.fromstring(drawn)
    groups = [(group, node) for group in root.iter("g") for node in group.iter(tag)]
    return [{**node.attrib, "of": group.attrib["class"]} for group, node in groups]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 0.97, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.694, 0.847, [0.65, 0.7, 0.75, 0.8, 0.85]),
        (-0.161, 0.43, [-0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (5.0, 5.0, [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
        (0.0, 0.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_numbers_that_cover_the_values(low, high, expected):
    assert ticks(low, high) == expected


def test_ticks_of_rounds_are_whole_rounds():
    assert ticks(1, 15, whole=True) == [2, 4, 6, 8, 10, 12, 14]
    assert ticks(1, 2, whole=True) == [1, 2]
    assert ticks(1, 1, whole=True) == [1]


def test_a_line_keeps_its_colour_where_another_has_no_values():
    drawn = svg(Chart("c", "lines", {"a": {}, "b": of(1.0, 2.0)}, "round", "loss"))
    assert {mark["of"] for mark in marks(drawn, "path")} == {"c1"}
    assert "b" in texts(drawn)
    assert "a" not in texts(drawn)
    bars = marks(svg(Chart("c", "bars", {"a": {}, "b": of(1.0)}, "task", "loss")), "rect")
    assert [bar["of"] for bar in bars] == ["c1"]
    whole = document([Chart("c", "lines", {n: of(1.0, 2.0)}, "x", "y") for n in ("a", "b")])
    assert re.findall(r'class="c(\d)"><path class="l" d', whole) == ["0", "1"]


def test_beyond_the_palette_strokes_differ():
    lines = {str(n): of(1.0, n) for n in range(len(DAY) + 1)}
    drawn = svg(Chart("c", "lines", lines, "round", "loss"))
    dashed = [g.attrib.get("stroke-dasharray") for g in ElementTree.fromstring(drawn).iter("g")]
    assert dashed.count(None) == 2 * len(DAY), "a line and its label in the legend"
    assert dashed.count("5 3") == 2


def test_bars_stand_on_zero_and_say_their_values():
    """From −0.5 to 1 the plot has 190 pixels below 20: zero lies at 20 + 190 × 1 / 1.5."""
    chart = Chart("c", "bars", {"a": of(1.0, -0.5)}, "task", "lost", "percent")
    up, down = marks(svg(chart), "rect")
    assert (float(up["y"]), float(up["height"])) == pytest.approx((20, 126.7))
    assert (float(down["y"]), float(down["height"])) == pytest.approx((146.7, 63.3))
    assert "<title>a, task 1: 100.0 %</title>" in svg(chart)


def test_an_axis_of_accuracies_goes_from_0_to_100_percent():
    """One from 77 to 82 % made a point look like everything; of points themselves, it may."""
    line = {"a": {1: Spread(0.79, 0.3, 3), 2: Spread(0.8, 0.3, 3)}}
    accuracy = svg(Chart("c", "lines", line, "round", "accuracy", "percent"))
    assert {"0 %", "100 %"} <= {*texts(accuracy)}
    assert not {"120 %", "-20 %"} & {*texts(accuracy)}, "of a deviation"
    lost = texts(svg(Chart("c", "lines", {"a": of(0.01, 0.03)}, "round", "lost", "points")))
    assert "100 points" not in lost
    assert "3 points" in lost


def test_too_many_bars_are_a_curve_in_the_order_of_values():
    drawn = svg(Chart("c", "bars", {"up": of(*range(MAX_BARS, -1, -1))}, "client", "bytes"))
    assert not marks(drawn, "rect")
    assert f"client, in the order of the value ({MAX_BARS + 1} in all)" in texts(drawn)
    heights = re.findall(r"[ML][\d.]+ ([\d.]+)", drawn.partition('class="l"')[2].partition("/>")[0])
    assert heights == sorted(heights, key=float, reverse=True)


@pytest.mark.parametrize(
    ("columns", "numbers"), [(4, {"58.3"}), (12, {"58.3"}), (15, {"58"}), (24, {"58"}), (36, set())]
)
def test_numbers_in_cells_are_as_short_as_the_cells_are_narrow(columns, numbers):
    """At 18 interactions the numbers ran into each other."""
    drawn = svg(cells([0.583] * columns, [0.4] * columns, unit="percent"))
    assert {*texts(drawn)} & {"58", "58.3"} == numbers


def test_cells_that_lie_close_together_have_a_scale_of_their_own():
    """0.24 to 0.27 on a scale from zero would be one colour."""
    shades = {m["fill-opacity"] for m in marks(svg(cells([0.24, 0.27], [0.25, 0.26])), "path")}
    assert shades == {"0.33", "0.67", "1"}, "the lowest of four is blank"
    wide = {m["fill-opacity"] for m in marks(svg(cells([0.1, 0.8], [0.4, 0.2])), "path")}
    assert wide == {"0.12", "0.5", "0.25", "1"}


def test_shares_have_the_whole_as_their_scale():
    drawn = svg(cells([0.0, 0.25], [0.5, 0.5], unit="percent"))
    assert {m["fill-opacity"] for m in marks(drawn, "path")} == {"0.25", "0.5"}
    assert {"0", "25", "50", "100 %", "0 %"} <= set(texts(drawn))


def test_what_has_nothing_to_show_says_so():
    assert not cells([0.5, 0.5]).is_telling
    assert cells([0.5, 0.6]).is_telling
    assert not Chart("c", "lines", {"a": of(0.0, 0.0)}, "x", "y").is_telling
    assert Chart("c", "lines", {"a": of(0.0, 0.1)}, "x", "y").is_telling
    assert not Chart("c", "bars", {"a": {}}, "x", "y").is_telling


def test_of_many_rows_every_nth_is_drawn_and_the_last():
    """Each row has a shade or two; 1,000 rows of 2 cells would be 2,000 squares."""
    many = cells(*([n / 1000, 1 - n / 1000] for n in range(1000)))
    squares = sum(m["d"].count("h1v1h-1z") for m in marks(svg(many), "path"))
    assert MAX_SIDE < squares <= 2 * MAX_SIDE


def test_long_names_slant_and_are_cut():
    names = dict(enumerate(["airplane", "automobile", "a name that is far too long"] * 4, 1))
    drawn = svg(Chart("c", "bars", {"": of(*range(12))}, "class", "accuracy", "", names))
    assert "a name that is…" not in texts(drawn)
    assert "a name that i…" in texts(drawn)
    assert drawn.count("rotate(-35") == 12
    assert "class a name that is far too long: 2" in drawn, "the whole name on hover"


def test_names_stay_text():
    forged = "</text><script>x</script>\x1b[2J&"
    chart = Chart(forged, "bars", {forged: of(1.0, 2.0)}, forged, forged, "", {1: forged})
    for drawn in (svg(chart), svg(cells([1.0, 2.0])), document([chart, chart])):
        assert "<script" not in drawn
        assert "\x1b" not in drawn
        ElementTree.fromstring(drawn)


def test_a_file_has_colours_of_its_own_and_is_the_same_each_time():
    chart = Chart("one", "lines", {"a": of(1.0, 2.0)}, "round", "loss")
    whole = document([chart] * 4)
    assert whole == document([chart] * 4)
    assert "var(" not in whole
    assert f".c0{{color:{DAY[0]}}}" in whole
    assert whole.count(">one</text>") == 4


def test_a_file_may_hold_lines_and_cells():
    lines = Chart("lines", "lines", {"only": of(1.0, 2.0)}, "round", "loss")
    whole = document([lines, cells([1.0, 2.0])])
    assert whole.count("h1v1h-1z") == 2
    assert "only, round 1: 1" in whole
    assert ">only</text>" not in whole, "one line needs no legend"


def test_the_table_of_a_chart_has_its_names():
    chart = Chart("c", "bars", {"a": {1: Spread(0.5, 0.1, 3)}}, "class", "accuracy", "", {1: "cat"})
    assert chart.table()[1] == ("a", "cat", 0.5, 0.1, 3)
    assert cells([1.0, 2.0]).table() == [("y", "x", "value"), (0, 0, 1.0), (0, 1, 2.0)]


def test_numbers_have_the_unit_that_suits_them():
    assert [text_of(n, "bytes") for n in (999, 1234, 5e9, 2e15)] == [
        "999 B", "1.234 kB", "5 GB", "2000 TB",
    ]  # fmt: skip
    assert text_of(0.123, "percent") == "12.3 %"
    assert text_of(12.345, "seconds") == "12.35 s"


def test_a_line_that_lies_on_another_lets_it_be_seen():
    def line(*values):
        return {at: Spread(value) for at, value in enumerate(values)}

    lines = {"down": line(70.1, 70.1), "up": line(70.2, 70.1), "apart": line(10.0, 90.0)}
    drawn = svg(Chart("bytes", "lines", lines, "round", "bytes"))
    dashed = ['stroke-dasharray="6 6"' in part for part in drawn.split('<path class="l"')[1:4]]
    assert dashed == [False, True, False]


def test_the_numbers_of_a_scale_stay_in_the_figure():
    """A number of nine letters ended behind the edge."""
    cells = {(0, at): Spread(value) for at, value in enumerate((1.234e-05, 1.299e-05))}
    drawn = svg(Chart("norms", "cells", {"": cells}, "round", "client"))
    for left, text in re.findall(r'<text x="([\d.]+)"[^>]*>(1\.2\d*e-05)<', drawn):
        assert float(left) + LETTER * len(text) <= WIDTH
    assert "1.299e-05" in drawn
