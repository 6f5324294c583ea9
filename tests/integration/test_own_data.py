"""A stranger's own files, from an empty folder to predictions, with commands as users type them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import ForkServer

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(120)]
END = """
[scenario]
kind = "natural"
[net]
name = "mlp"
hidden = [8]
[method]
name = "fedrep"
[schedule]
clients = 2
rounds = 4
[training]
local_epochs = 4
lr = 0.05
[evaluate]
pictures = 0
"""


Typed = Callable[..., str]


@pytest.fixture
def typed(fork_server: ForkServer, tmp_path: Path) -> Typed:
    """Return a function that types a command; it returns what the command printed."""

    def type_one(*words: object, status: int = 0) -> str:
        program, *rest = map(str, words)
        found, said = fork_server.typed(tmp_path, program, *rest)
        assert found == status, said
        return said

    return type_one


def recording(path: Path, people: str, seed: int = 0) -> None:
    """Write a recording as an office program does, unsorted and with holes; 50 rows a second."""
    draw, rows = random.Random(seed), list[str]()
    for person in people.split():
        for activity, level in (("gehen", 5.0), ("stehen", -5.0)):
            for i in range(300):
                value = "" if draw.random() < 0.02 else f"{level + draw.gauss(0, 1):.3f}"
                rows.append(f"{i / 50:.2f};{person};{activity};{value};Notiz")
    draw.shuffle(rows)
    lines = ["t;Person;Tätigkeit;ax;Bemerkung", *(row.replace(".", ",") for row in rows)]
    path.write_text("\r\n".join(lines) + "\r\n", "cp1252")


def test_recordings_of_an_office_program(tmp_path, typed):
    pytest.importorskip("pandas")
    recording(tmp_path / "rec.csv", "Jörg Ann")
    (tmp_path / "e.toml").write_text(
        '[data]\nname = "table"\nroot = "rec.csv"\n[data.columns]\nlabel = "Tätigkeit"\n'
        'client = "Person"\nsession = "Tätigkeit"\ntime = "t"\nwindow = 32\n'
        'missing = "interpolate"\n' + END
    )
    said = typed("fedsrv", "launch", "e.toml", "--out", "run")
    for note in (
        "note: rec.csv: an example has the columns ax; left out: Bemerkung (texts)",
        "note: rec.csv: it is read with semicolons between columns, a decimal comma, the encoding",
        "empty cells are filled by interpolation",
    ):
        assert note in said
    assert re.search(r"\(a_loc\) %\W+100\.00", said)
    recording(tmp_path / "new.csv", "Ann", seed=1)
    said = typed("fedcli", "predict", "--run", "run", "--client", 0, "new.csv")
    assert re.search(r"new\.csv: (gehen|stehen) 9, (gehen|stehen) 9\nwritten to pred", said)


def test_what_may_not_be_meant_is_said_at_the_start(tmp_path, typed):
    """By launch, of data that it deals out or is given, and by join; --strict refuses them."""
    pytest.importorskip("pandas")
    rows = "".join(f"{i},1,{('sit', 'walk', 'Walk')[i % 3]},{'ab'[i % 2]}\n" for i in range(90))
    (tmp_path / "rec.csv").write_text("ax,one,label,who\n" + rows)
    data = '[data]\nname = "table"\nroot = "rec.csv"\n[data.columns]\nclient = "who"\n'
    (tmp_path / "e.toml").write_text(data + END)
    notes = (
        "note: classes 'Walk' and 'walk' differ only in case or punctuation",
        "note: column one has one value in all examples: leave it out of features",
    )
    launch = ("fedsrv", "launch", "e.toml", "--set", "schedule.rounds=1")
    dealt = typed(*launch, "--out", "run")
    given = typed(*launch, "--out", "again", "--data", "run/data")
    for said in (dealt, given):
        assert all(note in said for note in notes)
    for more in (("--out", "a"), ("--out", "b", "--data", "run/data")):
        said = typed(*launch, *more, "--strict", status=1)
        assert "error: --strict: classes 'Walk' and 'walk' differ" in said
    join = ("join", "--client-id", 0, "--server", "127.0.0.1:1", "--data", "run/data", "--strict")
    said = typed("fedcli", *join, status=2)
    assert "error: --strict: column one has one value in all examples" in said
