"""Write the tables of figures for Prometheus into ``docs/monitoring.md``; what stands above stays.

python docs/site/monitoring.py > build/monitoring.md && mv build/monitoring.md docs/monitoring.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import prometheus_client

from fedplugins.serving.figures import Figures
from fedplugins.trackers.prometheus import Exporter

PAGE = Path(__file__).parents[1] / "monitoring.md"
TITLE = "## Every figure"
ABOUT = """These tables are made from the code (`make docs`).
Of a histogram there are `…_bucket`, `…_sum` and `…_count`.
"""


def page() -> str:
    """Return the whole page."""
    above = PAGE.read_text("utf-8").partition(TITLE)[0]
    head = f"{above}{TITLE}\n\n{ABOUT}"
    run = _table("A run: `--metrics-port`", Exporter(prometheus_client))
    return "\n".join([head, *run, "", *_table("A model: `fedcli serve-model`", Figures()), ""])


def figures(exporter: Exporter | Figures) -> Mapping[str, str]:
    """Return the name that Prometheus shows of each figure, with labels, and what it is."""
    found = {}
    for one in vars(exporter).values():
        if not hasattr(one, "_labelnames"):
            continue
        names = ", ".join(f"{name}=…" for name in one._labelnames)
        total = "_total" if one._type == "counter" else ""
        key = one._name + total + (f"{{{names}}}" if names else "")
        found[key] = f"{one._type} | {one._documentation}"
    return found


def _table(title: str, exporter: Exporter | Figures) -> Iterator[str]:
    yield from (f"### {title}", "", "| name | kind | what it is |", "|---|---|---|")
    yield from (f"| `{name}` | {what} |" for name, what in figures(exporter).items())


if __name__ == "__main__":
    print(page(), end="")
