"""Write into pages what the parts that they describe do not go with, from the table of parts.

python docs/site/limits.py

A page asks for it by a pair of comments, ``limits: PART, PART`` and ``end of limits``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fedmodels.config.bounds import Refusal  # noqa: E402
from fedmodels.config.combinations import NEEDED, PARTS, refused_by  # noqa: E402

ASKED = re.compile(
    r"(?P<head><!-- limits: (?P<parts>[^>]+) -->\n).*?(?P<end><!-- end of limits -->)", re.DOTALL
)
ONLY = {"mean": "the method reads the mean", "each": "the method reads each upload", "": ""}
GLUE = "\0"
WIDTH = 120


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page that asks for limits, and its text with them."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text("utf-8")
        if ASKED.search(text):
            yield path, ASKED.sub(_with_limits, text)


def _with_limits(asked: re.Match[str]) -> str:
    names = asked["parts"].split(", ")
    lines = [_item(line) for name in names for line in _limits(name)]
    return f"{asked['head']}\n{chr(10).join(lines)}\n\n{asked['end']}"


def _limits(name: str) -> Iterator[str]:
    """Yield a line of what a part needs, and one of what it is refused with."""
    needed = [r.pair[1] for r in NEEDED if r.pair[0] == name]
    if needed:
        yield f"{_named(name)}: only with {' and '.join(map(_named, needed))}."
    others: dict[str, list[Refusal]] = {}
    for refusal in refused_by(PARTS):
        if name in refusal.pair:
            (other,) = {*refusal.pair} - {name}
            others.setdefault(other, []).append(refusal)
    if others:
        found = (_named(o, _condition(others[o])) for o in PARTS if o in others)
        yield f"{_named(name)} cannot be combined with {'; '.join(found)}."


def _named(name: str, condition: str = "") -> str:
    """Return a part's name with what switches it on, and a condition."""
    return f"{name} (`{PARTS[name].keys}`{condition})"


def _condition(refusals: list[Refusal]) -> str:
    """Return when a pair is refused, or nothing if it always is."""
    whens = [r.where or ONLY[r.only] for r in refusals]
    return f", if {' or '.join(whens)}" if all(whens) else ""


def _item(line: str) -> str:
    """Return an item of a list; no line ends within code."""
    words = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", GLUE), f"- {line}")
    filled = textwrap.fill(
        words, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return filled.replace(GLUE, " ")


if __name__ == "__main__":
    for page, text in pages():
        page.write_text(text, "utf-8")
