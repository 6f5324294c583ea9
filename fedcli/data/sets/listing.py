"""What ``fedcli data`` prints: the known data sets, and where they lie or how to get them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcli.data.sets.registry import DATASETS, names, source_of
from fedmodels.config.data import Data


def list_datasets(console: Console | None = None) -> None:
    """Print which data sets are known, and where they lie or how to get them."""
    console = console or Console()
    table = Table("name", "what", "where, or how to get it")
    for name in names():
        known = DATASETS.get(name)
        if known is None:
            table.add_row(name, "from another package", "")
            continue
        found = source_of(Data(name=name)).find(*known.files) if known.files else None
        table.add_row(
            name, known.about, Text(str(found) if found else known.advice, overflow="fold")
        )
    console.print(table)
