"""Prints what each plugin of fedtide brings, for ``models/fedmodels/plugins.json``.

python docs/site/plugins.py > build/plugins.json && mv build/plugins.json models/fedmodels/
"""

from __future__ import annotations

import json
from typing import Any

import typer
from pydantic import BaseModel

from fedmodels.config.experiment import Experiment
from fedmodels.config.part import Part
from fedmodels.config.sent import tables_in
from fedmodels.plugins import folder_of, offered, part_of


def content() -> dict[str, Any]:
    """Return the commands of all plugins that come with fedtide, and their tables of a config."""
    brought: dict[str, dict[str, Any]] = {}
    for group in ("fedsrv.commands", "fedcli.commands"):
        for point in offered(group):
            if folder := folder_of(point):
                brings = brought.setdefault(folder, {})
                brings.setdefault("commands", []).extend(commands_of(point.load()))
    for point in offered("fedtide.parts"):
        part: Part = point.load()
        if (folder := folder_of(point)) and part.tables:
            brings = brought.setdefault(folder, {})
            held = {name: part_of(f"{part.home}.{place}")() for name, place in part.tables.items()}
            brings["tables"] = {name: table.model_dump(mode="json") for name, table in held.items()}
            brings["owns"] = [name for name, kind in held.items() if is_whole(name, kind)]
            brings["beside"] = brings["owns"] if part.is_beside else []
    for point in offered("fedtide.methods"):
        if folder := folder_of(point):
            brought.setdefault(folder, {}).setdefault("methods", []).append(point.name)
    return brought


def is_whole(name: str, added: BaseModel) -> bool:
    """Tell whether a table is a plugin's own, and not keys that it adds to one of the core."""
    return tables_in(Experiment.model_fields[name].annotation) == [type(added)]


def commands_of(app: typer.Typer) -> list[str]:
    """Return the names of an app's commands."""
    made = (command.name or command.callback.__name__ for command in app.registered_commands)
    return sorted(name.replace("_", "-") for name in made)


if __name__ == "__main__":
    print(json.dumps(content(), indent=1, sort_keys=True))
