"""The notebooks of examples/, cell by cell, as a kernel would run them."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
SHORTER = {'"schedule.rounds": 3': '"schedule.rounds": 1'}
"""What is run in place of what a notebook says: its runs are shown, not judged."""
SHOWN = {
    "quickstart": "2",
    "own-images": "disc",
    "own-recordings": "walk",
}
"""What the last cell shows or prints."""


def result_of(cell: str, names: dict[str, object]) -> str:
    """Run a cell; return what its last line evaluates to, as text."""
    statements = ast.parse(cell).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    if last is None:
        return ""
    return repr(eval(compile(ast.Expression(last.value), "cell", "eval"), names))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch, capsys):
    if path.stem == "own-recordings":
        pytest.importorskip("charset_normalizer", reason="reads tables")
        pytest.importorskip("pyarrow", reason="reads tables")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    names: dict[str, object] = {}
    shown = ""
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs"), "a notebook is kept without what it showed"
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for said, shorter in SHORTER.items():
                source = source.replace(said, shorter)
            shown = result_of(source, names) + capsys.readouterr().out
    assert SHOWN[path.stem] in shown


def test_every_notebook_is_known():
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys()
