"""``fedsrv plugins``: what is installed beside the core."""

from __future__ import annotations

from fedmodels.console.options import AsRows, show


def plugins(as_json: AsRows = False) -> None:
    """List the installed plugins and what they add."""
    from rich.table import Table

    from fedmodels import plugins as found
    from fedmodels.console.rows import PluginLine

    rows = [
        PluginLine(name=p.name, package=p.package, is_installed=p.is_here, adds=[*p.groups])
        for p in found.plugins()
    ]
    table = Table("plugin", "from", "adds")
    for row in rows:
        adds = ", ".join(row.adds) if row.is_installed else "not installed"
        table.add_row(row.name, row.package, adds)
    show(rows, lambda: table, as_json)
