"""Writes docs/times.md: all times of the programs, and what each of them decides."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from fedmodels import times

TOP = f"""# Times

The programs wait for others, and look at things now and then. These are all the times that they
have. One more is in the config: `[server] deadline_s`, after which `min_clients` answers will do.

## Where links or machines are slow

`{times.VARIABLE}=4` in the environment of a process makes all times of the first table four times
as long there, and lets a link be four times as slow. It takes a number from {times.LEAST} to
{times.MOST}. Set it for the coordinator, its relays and clients of the slow place alike. Whoever
waits longer also notices later that somebody is gone.

The time of what is sent, where a row adds it, is that of a link with 16 KiB/s. The tables are made
from the code (`make docs`).

"""
MORE = """
## How often something is looked at, and other limits

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
