"""Recordings as people have them: of any style and rate, unsorted, with holes and gaps."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data.own.csv_style import style_of
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.resolution import experiment_of

pandas = pytest.importorskip("pandas")


def loaded(root: Path, **columns: Any) -> Dataset:
    return load(Data(name="table", root=str(root), columns=Columns(**columns)))


def every(found: Dataset) -> np.ndarray:
    return np.concatenate([found.train.x, found.test.x])


# --- how a CSV is written

PLAIN = "ax,label,who\n" + "".join(f"{i}.5,{'xy'[i % 2]},Jürgen\n" for i in range(8))
COMMA = PLAIN.replace(",", ";").replace(".", ",")
STYLES = {
    "plain": (PLAIN, "utf-8", ""),
    "mark": (PLAIN, "utf-8-sig", ""),
    "semicolons": (PLAIN.replace(",", ";"), "utf-8", "semicolons between columns"),
    "decimal comma": (COMMA, "utf-8", "semicolons between columns, a decimal comma"),
    "Excel": (COMMA, "cp1252", "semicolons between columns, a decimal comma, the encoding cp1252"),
    "tabs": (PLAIN.replace(",", "\t"), "utf-8", "tabs between columns"),
    "bars": (PLAIN.replace(",", "|"), "utf-8", "bars between columns"),
    "quoted commas": (
        "ax,label,who\n" + "".join(f'"{i},5",{"xy"[i % 2]},Jürgen\n' for i in range(8)),
        "utf-8", "a decimal comma",
    ),
    "utf-16": (PLAIN, "utf-16", "the encoding utf-16"),
    "windows": (PLAIN.replace("\n", "\r\n"), "utf-8", ""),
}  # fmt: skip
"""A file's text, its encoding, and how a note names what is unlike the usual."""


@pytest.mark.parametrize(("text", "encoding", "told"), STYLES.values(), ids=STYLES)
def test_a_csv_is_read_however_it_is_written(tmp_path, caplog, text, encoding, told):
    file = tmp_path / "a.csv"
    file.write_bytes(text.encode(encoding))
    found = loaded(file, client="who")
    assert sorted(every(found)[:, 0]) == [i + 0.5 for i in range(8)]
    assert found.group_names == ("Jürgen",)
    assert (f"note: {file}: it is read with {told}\n" in caplog.text) == bool(told)
    assert ("is read with" in caplog.text) == bool(told)


@pytest.mark.parametrize(
    ("words", "encoding", "found"),
    [
        ("grün rot", "cp1252", "cp1252"),
        ("naïve déjà", "latin-1", "cp1252"),
        ("5 °C", "cp1252", "cp1252"),
        ("сидеть идти лежать", "cp1251", "cp1251"),
        ("歩く 座る 走る", "shift_jis", "cp932"),
        ("chodzić siedzieć leżeć", "cp1250", "cp1250"),
        ("grün Höhe", "mac_roman", "mac_roman"),
        ("Straße", "mac_roman", "mac_roman"),
        ("5 °C", "mac_roman", "mac_roman"),
        ("días 5€", "cp1252", "cp1252"),
    ],
)
def test_an_encoding_is_found_by_its_words(tmp_path, words, encoding, found):
    pytest.importorskip("charset_normalizer")
    text = "ax,label\n" + "".join(f"1,{word}\n" for word in words.split()) * 5
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    style = style_of(tmp_path / "a.csv", Columns())
    assert style.encoding == found
    assert text.encode(encoding).decode(style.encoding) == text


@pytest.mark.parametrize(
    ("cells", "sign"),
    [
        (["1,5", "2"], ","),
        (["1", "2"], "."),
        (["1,000", "2,5"], ","),
        (["0,000", "1"], ","),
        (["-1,5e3"], ","),
        (["1,5,2"], "."),
    ],
)
def test_a_decimal_comma_is_found_where_it_can_be_nothing_else(tmp_path, cells, sign):
    (tmp_path / "a.csv").write_text("ax;label\n" + "".join(f"{cell};x\n" for cell in cells))
    assert style_of(tmp_path / "a.csv", Columns()).marks.decimal == sign


def test_what_is_given_goes_before_what_is_found(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes("ax,label\n1,сон\n2,дом\n".encode("koi8_r"))
    given = Columns(encoding="koi8_r", delimiter=",", decimal=".")
    assert style_of(file, given).encoding == "koi8_r"
    for unknown in ("utf8000", "zlib_codec", "rot13"):  # the last two are for no text
        with pytest.raises(DataError, match=f"encoding = '{unknown}' is none that Python knows"):
            loaded(file, encoding=unknown)
    with pytest.raises(DataError, match=r"is not in undefined: .*undefined encoding"):
        loaded(file, encoding="undefined")
    with pytest.raises(DataError, match=r"a.csv is not in ascii: ordinal not in range"):
        loaded(file, encoding="ascii")
    file.write_text("ax;label\n" + "1;x\n2;y\n" * 3)
    with pytest.raises(DataError, match=r"has no column 'label'\..* It has: ax;label"):
        loaded(file, delimiter=",")


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    file = tmp_path / "a.csv"
    file.write_bytes("ax,label\n1,сон\n".encode("cp1251"))
    with pytest.raises(DataError, match=r"takes a package more: pip install .*'pandas>="):
        loaded(file)
    file.write_bytes(PLAIN.encode("cp1252"))
    assert len(loaded(file).train.y) == 6


def test_an_error_names_the_line_of_a_file_in_any_style(tmp_path):
    text = COMMA.replace("4,5;x", "?;x").replace("Jürgen\n", '"Jürgen\nK."\n', 1)
    (tmp_path / "a.csv").write_bytes(text.encode("utf-16"))
    with pytest.raises(DataError, match=r"column 'ax' holds '\?' in line 7, and numbers elsewh"):
        loaded(tmp_path / "a.csv")


ABOVE = "Recorder 3\nrate;50\n\n"
LED = {
    "lines above": ("# made by 3\n# 50 Hz, dry\nt;ax;label\n{rows}", 3, ""),
    "a title": (ABOVE + "t;ax;label\n{rows}", 4, ""),
    "units": ("t;ax;label\ns;m/s²;\n{rows}", 1, "a row of units below these"),
    "both": (ABOVE + "t;ax;label\ns;g;-\n{rows}", 4, "a row of units below these"),
    "titles of all columns": ("one;two;three\nt;ax;label\n{rows}", 2, ""),
    "a Mac's ends of lines": ("t;ax;label\n{rows}".replace("\n", "\r"), 1, ""),
}
"""A file, the line that names its columns, and what a note says of what follows it."""


@pytest.mark.parametrize(("text", "line", "told"), LED.values(), ids=LED)
def test_a_table_may_begin_below_other_lines(tmp_path, caplog, text, line, told):
    file, end = tmp_path / "a.csv", "\r" if "\r" in text else "\n"
    rows = "".join(f"{i};{i},5;x{end}" for i in range(8))
    file.write_bytes(text.format(rows=rows).encode())
    found = loaded(file)
    assert found.columns == ("t", "ax")
    assert sorted(every(found)[:, 1]) == [i + 0.5 for i in range(8)]
    assert (f"the names of columns in line {line}" in caplog.text) == (line > 1)
    assert told in caplog.text
    file.write_bytes(text.format(rows=f"1;?;x{end}" + rows).encode())
    at = line + 1 + ("units" in told)
    with pytest.raises(DataError, match=rf"'ax' holds '\?' in line {at}, and numbers"):
        loaded(file)


# --- empty cells

HOLEY = "ax,ay,label\n" + "".join(
    f"{'' if i in (2, 3, 7) else i},{10 * i},{'x' if i < 10 else 'y'}\n" for i in range(20)
)


def test_an_empty_cell_is_an_error_unless_a_config_says_what_becomes_of_it(tmp_path, caplog):
    file = tmp_path / "a.csv"
    file.write_text(HOLEY)
    line = "column 'ax' is empty in line 4 and in 2 more: set .* missing = 'drop', 'interpolate' or"
    for missing in (None, "error"):
        with pytest.raises(DataError, match=line):
            loaded(file, missing=missing)
    dropped = loaded(file, missing="drop")
    assert sorted(every(dropped)[:, 0]) == [i for i in range(20) if i not in (2, 3, 7)]
    between = loaded(file, missing="interpolate")
    assert sorted(every(between)[:, 0]) == list(range(20))
    mean = loaded(file, missing="mean")
    train = [i for i in (*range(8), *range(10, 18)) if i not in (2, 3, 7)]
    assert mean.train.x[2, 0] == mean.train.x[3, 0] == pytest.approx(np.mean(train))
    assert mean.transform is not None
    assert mean.transform["fill"] == pytest.approx(
        [np.mean(train), np.mean([10 * i for i in (*range(8), *range(10, 18))])]
    )
    for note in (
        "3 rows with an empty cell are left out",
        "3 empty cells are filled by interpolation",
        "3 empty cells are filled by the mean",
    ):
        assert f"note: {file}: {note}\n" in caplog.text


def test_no_window_goes_over_a_row_that_is_left_out(tmp_path):
    (tmp_path / "a.csv").write_text(HOLEY)
    found = loaded(tmp_path / "a.csv", missing="drop", window=3, hop=1, features=["ax"])
    windows = every(found)[:, :, 0]
    assert (np.diff(windows) == 1).all()
    assert sorted(windows[windows[:, 0] < 10, 0]) == [4]  # 4, 5, 6 is the one of ten rows of x


def test_interpolation_stays_within_a_recording(tmp_path):
    rows = [("a", 0, 1.0), ("a", 1, ""), ("b", 2, 100.0), ("b", 3, ""), ("b", 4, 104.0)]
    text = "who,t,ax,label\n" + "".join(f"{w},{t},{x},z\n" for w, t, x in rows)
    (tmp_path / "a.csv").write_text(text)
    found = loaded(tmp_path / "a.csv", missing="interpolate", client="who", features=["ax"])
    assert sorted(every(found)[:, 0]) == [1, 1, 100, 102, 104]
    (tmp_path / "a.csv").write_text(text.replace("1.0", ""))
    with pytest.raises(DataError, match="column 'ax' is empty in line 2, and in all rows of that"):
        loaded(tmp_path / "a.csv", missing="interpolate", client="who", features=["ax"])


def test_rows_without_a_label_are_left_out_where_asked(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("ax,label\n" + "".join(f"{i},{'' if i == 3 else 'x'}\n" for i in range(8)))
    with pytest.raises(DataError, match="column 'label' is empty in line 5"):
        loaded(file, missing="mean")
    assert sorted(every(loaded(file, missing="drop"))[:, 0]) == [0, 1, 2, 4, 5, 6, 7]


def test_a_column_without_a_number_in_training_has_no_mean(tmp_path):
    rows = "".join(f"{i},{i if i > 7 else ''},x\n" for i in range(10))
    (tmp_path / "a.csv").write_text("ax,ay,label\n" + rows)
    with pytest.raises(DataError, match="column 'ay' is empty in all training rows"):
        loaded(tmp_path / "a.csv", missing="mean", features=["ax", "ay"])


# --- a file for each person or class


def test_a_file_may_be_a_person_and_its_folder_a_class(tmp_path):
    for folder in ("sit", "walk"):
        (tmp_path / folder).mkdir()
        for person in ("ann", "ben"):
            (tmp_path / folder / f"{person}.csv").write_text("ax\n" + "1\n2\n3\n" * 3)
    found = loaded(tmp_path, client_from="file", label_from="folder", window=3)
    assert (found.group_names, found.class_names) == (("ann", "ben"), ("sit", "walk"))
    assert len(every(found)) == 12
    line = "Where the file's name or its folder's says it, set client_from = 'file' or 'folder' in"
    with pytest.raises(DataError, match=f"has no column 'who'.*It has: ax. {line}"):
        loaded(tmp_path, client="who", label_from="folder")
    with pytest.raises(ConfigError, match="client_from stands in place of client: give one"):
        Columns(client="who", client_from="file")


# --- order, sessions, gaps


def recording(rows: list[tuple[Any, ...]], path: Path, header: str = "t,ax,label") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def test_rows_are_put_in_the_order_of_their_times(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(i / 50, i, "x") for i in range(40)]
    for unit, factor in ((None, 1), ("ms", 1e3)):
        shuffled = [(factor * rows[i][0], *rows[i][1:]) for i in rng.permutation(40)]
        file = recording(shuffled, tmp_path / "a.csv")
        found = loaded(file, time="t", time_unit=unit, window=4, features=["ax"])
        assert (np.diff(every(found)[:, :, 0]) == 1).all()
        assert len(every(found)) == 10


@pytest.mark.parametrize(
    "times",
    [
        [f"2026-05-31T12:00:{i:02}.5" for i in range(12)],
        [f"2026-05-31 11:59:{50 + i}Z" for i in range(10)] + ["2026-05-31 12:00:00Z"] * 1,
        [f"00:00:{i:02}" for i in range(12)],
        [f"{i},5" for i in range(12)],
        [f"{25 + i // 6}.02.2023 12:00:{i:02},5" for i in range(12)],
        [f"1/{25 + i // 6}/23 11:59:{i:02} PM" for i in range(12)],
        [f"03/04/2023 0:00:{i:02}" for i in range(12)],  # all of one day, whichever it is
        [f"2026-05-31 12:00:{i:02},25" for i in range(12)],
    ],
    ids=["iso", "zone", "clock", "decimal comma", "day", "month", "either", "comma"],
)
def test_times_may_be_texts(tmp_path, times):
    rows = [f"{time};{i};x\n" for i, time in enumerate(times)]
    (tmp_path / "a.csv").write_text("t;ax;label\n" + "".join(reversed(rows)))
    found = loaded(tmp_path / "a.csv", time="t", window=2, features=["ax"])
    assert (np.diff(every(found)[:, :, 0]) == 1).all()


def test_days_and_months_that_cannot_be_told_apart_are_asked_for(tmp_path):
    """The second recording is of the next day, or of the next month."""
    days = ["03/04/2023", "03/04/2023", "04/04/2023", "04/04/2023"]
    rows = [f"{day} 0:00:{i:02};{i};x\n" for i, day in enumerate(days)]
    (tmp_path / "a.csv").write_text("t;ax;label\n" + "".join(rows))
    how: dict[str, Any] = {"time": "t", "features": ["ax"], "window": 2}
    line = "holds '03/04/2023 0:00:00' in line 2, of which either number may be the day: set"
    with pytest.raises(DataError, match=line):
        loaded(tmp_path / "a.csv", **how)
    day, month = (
        loaded(tmp_path / "a.csv", day_first=first, rate=1e-4, gap=1e9, **how | {"window": None})
        for first in (True, False)
    )
    assert (len(every(day)), len(every(month))) == (9, 268)  # a day, and 31 of them


@pytest.mark.parametrize(
    ("time", "keys", "line"),
    [
        (
            "noon",
            {},
            "column 't' holds 'noon' in line 5, which is no time: write numbers",
        ),
        ("", {}, "column 't' holds nan in line 5, which is no time"),
        ("noon", {"time_unit": "ms"}, "column 't' holds no numbers: leave out time_unit"),
    ],
)
def test_what_is_no_time_is_named(tmp_path, time, keys, line):
    file = recording([(time if i == 3 else i, i, "x") for i in range(6)], tmp_path / "a.csv")
    with pytest.raises(DataError, match=line):
        loaded(file, time="t", **keys)


def test_no_window_goes_over_a_gap(tmp_path, caplog):
    """Ten usual steps, or as long as a config says."""
    times = [*range(6), *range(9, 15), *range(100, 106)]
    file = recording([(t, t, "x") for t in times], tmp_path / "a.csv")
    for gap, most, count in ((None, 4, 1), (2.5, 1, 2), (1000, 86, 0)):
        caplog.clear()
        found = loaded(file, time="t", gap=gap, window=3, hop=1, features=["ax"])
        assert np.diff(every(found)[:, :, 0]).max() <= most
        assert (f"{count} gaps, over which no window goes" in caplog.text) == bool(count)


def test_sessions_are_kept_apart_and_their_rows_together(tmp_path):
    """Times begin anew in each; rows of two of them may alternate."""
    rows = [(i // 2, 100 * (i % 2) + i // 2, "x", "ab"[i % 2]) for i in range(24)]
    file = recording(rows, tmp_path / "a.csv", "t,ax,label,trial")
    line = "column 't' has the time of another row in line 3 and in 11 more: .* name the column"
    with pytest.raises(DataError, match=line):
        loaded(file, time="t", window=4)
    for keys in ({"time": "t"}, {}):
        found = loaded(file, session="trial", window=4, features=["ax"], **keys)
        windows = every(found)[:, :, 0]
        assert (np.diff(windows) == 1).all()
        assert len(windows) == 6


def test_groups_stay_in_one_part(tmp_path):
    rows = [(10 * s + i, "xy"[i % 2], f"s{s}", "ab"[s % 2]) for s in range(6) for i in range(4)]
    file = recording(rows, tmp_path / "a.csv", "ax,label,trial,who")
    found = loaded(file, group="trial", client="who", features=["ax"])
    assert sorted({*(found.test.x[:, 0] // 10)}) == [4, 5]  # the last session of a and of b
    assert not {*(found.train.x[:, 0] // 10)} & {4, 5}
    with pytest.raises(DataError, match="that takes a client with two values of column 'who'"):
        loaded(file, group="who", client="who", features=["ax"])


# --- rates


def test_recordings_are_resampled_to_a_rate(tmp_path):
    rows = [(t, 2 * t, "x") for t in np.arange(0, 4, 0.01)]  # 100 a second
    file = recording(rows, tmp_path / "a.csv")
    for rate, count in ((50, 200), (25, 100), (200, 799)):
        found = loaded(file, time="t", rate=rate, features=["ax"])
        x = np.sort(every(found)[:, 0])
        assert len(x) == count
        inner = slice(2, -2)  # at the ends there is nothing to average with
        assert x[inner] == pytest.approx(2 * np.arange(count)[inner] / rate, abs=0.011)


@pytest.mark.parametrize("rate", [25, 1e12, 1e300])
def test_a_rate_that_makes_far_too_many_rows_is_refused(tmp_path, rate):
    """Milliseconds taken for seconds; or a server that asks for all memory of a site."""
    file = recording([(20 * i, i, "xy"[i >= 200]) for i in range(400)], tmp_path / "ms.csv")
    with pytest.raises(DataError, match=r"ms\.csv: .* rate = .* rows of 400: say with time_unit"):
        loaded(file, time="t", rate=rate, features=["ax"])
    assert len(every(loaded(file, time="t", time_unit="ms", rate=25, features=["ax"]))) == 200


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"window": 20, "hop": 1},
            "21 windows of 20 rows take 13.44 kB of memory, and 6 kB are free",
        ),
        ({"rate": 50, "time": "t", "features": ["ax"]}, "1.95e+03 rows take 31.22 kB of memory"),
    ],
)
def test_what_finds_no_room_in_memory_is_refused(tmp_path, monkeypatch, keys, line):
    """Windows that overlap, and rows of a high rate, take many times a file's own size."""
    file = recording([(i, i, "x") for i in range(40)], tmp_path / "a.csv")
    monkeypatch.setattr("fedcli.data.arrays.free_bytes", lambda: 6000)
    with pytest.raises(DataError, match=re.escape(line)):
        loaded(file, **keys)


def test_two_rates_become_one(tmp_path):
    """A phone at 50 Hz and a watch at 20 Hz; windows of both span the same time."""
    for name, rate in (("phone", 50), ("watch", 20)):
        rows = [(i / rate, np.sin(i / rate), "xy"[i >= 5 * rate]) for i in range(10 * rate)]
        recording(rows, tmp_path / f"{name}.csv")
    found = loaded(tmp_path, time="t", rate=20, window=20, features=["ax"])
    assert found.input_shape == (20, 1)
    assert len(every(found)) == 20  # 10 s of each device, in windows of one
    slopes = np.abs(np.diff(every(found)[:, :, 0]))
    assert slopes.max() < 0.06


def test_resampling_stays_within_a_stretch(tmp_path):
    rows = [(t / 10, 100 * (t >= 20), "xy"[t >= 20]) for t in range(40)]
    found = loaded(recording(rows, tmp_path / "a.csv"), time="t", rate=40, features=["ax"])
    assert {*every(found)[:, 0].tolist()} == {0, 100}


# --- what a config says


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"gap": 1.0}, "gap needs time"),
        ({"rate": 50.0}, "rate needs time"),
        ({"time_unit": "ms"}, "time_unit needs time"),
        ({"group": "a", "split": "b"}, "split says what is for testing: leave out group"),
        ({"session": "a", "features": ("a",)}, "features names 'a', which is the session"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, line):
    with pytest.raises(ConfigError, match=line):
        Columns(**keys)


def test_a_missing_column_of_any_role_is_named(tmp_path):
    file = recording([(0, 0, "x")], tmp_path / "a.csv")
    for role in ("session", "time", "group"):
        with pytest.raises(DataError, match=r"has no column 'tt'\. Did you mean 't'"):
            loaded(file, **{role: "tt"})


def test_partitions_of_tables_made_before_keep_their_digest():
    assert set(Data(name="table", columns=Columns()).identity()["columns"]) == {
        "label", "features", "classes", "client", "split", "test_share", "window", "hop",
    }  # fmt: skip
    tables = {
        "data": {"name": "table", "columns": {"missing": "drop", "time": "t", "gap": 1}},
        "scenario": {"kind": "iid"}, "net": {"name": "mlp"}, "method": {"name": "fedavg"},
    }  # fmt: skip
    again = experiment_of(experiment_of(tables).to_dict())
    assert again.data is not None
    assert again.data.columns == Columns(missing="drop", time="t", gap=1.0)


def test_share_of_the_data_goes_before_that_of_the_columns(tmp_path):
    file = recording([(i, i, "x") for i in range(10)], tmp_path / "a.csv")
    data = Data(name="table", root=str(file), columns=Columns(), test_share=0.5)
    assert len(load(data).test.y) == 5
