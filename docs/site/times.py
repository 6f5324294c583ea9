"""Writes docs/times.md: all times of the programs, and what each of them decides."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from fedmodels import times

TOP = f"""# Times

For operators of slow links or machines: all timeouts and intervals of the programs. One more is in
the config: after `[server] deadline_s`, `min_clients` answers are enough.

## Where links or machines are slow

The environment variable `{times.VARIABLE}=4` makes all times of the first table four times as long
for a process, and lets a link be four times as slow ({times.LEAST} to {times.MOST}). Set it for the
coordinator, its relays and the clients of the slow place alike. A process that waits longer also
notices disconnected peers later.

Where a row adds the time for sending, it assumes 16 KiB/s. The tables are generated from the code
(`make docs`).

"""
MORE = """
## Intervals and other limits

"""


def rows(scaled: bool) -> Iterator[str]:
    """Yield the rows of the times that grow with the variable, or of all others."""
    body = ast.parse(Path(times.__file__).read_text()).body
    for one, meaning in itertools.pairwise(body):
        if not isinstance(one, ast.Assign) or not isinstance(one.targets[0], ast.Name):
            continue
        name = one.targets[0].id
        if not name.endswith(("_S", "_MS")) or name.endswith("_PER_S"):
            continue
        assert isinstance(meaning, ast.Expr), f"{name} does not say what it decides"
        assert isinstance(meaning.value, ast.Constant), f"{name} does not say what it decides"
        grows = any(isinstance(n, ast.Name) and n.id == "PATIENCE" for n in ast.walk(one.value))
        if grows == scaled:
            values = getattr(times, name)
            values = values if isinstance(values, tuple) else (values,)
            scale = (times.PATIENCE if grows else 1) * (1000 if name.endswith("_MS") else 1)
            said = " to ".join(f"{value / scale:g}" for value in values)
            text = " ".join(str(meaning.value.value).split()).removesuffix(".")
            yield f"| `{name}` | {said} | {text[0].lower()}{text[1:]} |"


def page() -> str:
    """Return the page."""
    head = "| name | seconds | what happens then |\n|---|---|---|\n"
    return TOP + head + "\n".join(rows(True)) + "\n" + MORE + head + "\n".join(rows(False)) + "\n"


if __name__ == "__main__":
    print(page(), end="")
