"""Write ``docs/configuration.md`` from the classes that check a config.

python docs/site/configuration.py > docs/configuration.md
"""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel

from fedmodels.config import (
    compression,
    deploy,
    evaluate,
    experiment,
    privacy,
    schedule,
    server,
    timeline,
    training,
)
from fedmodels.config import scenario as scenarios
from fedmodels.config.bounds import MAX_COUNT
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.part import parts_of_plugins
from fedmodels.config.sent import kinds_of, tables_in
from fedmodels.methods import names, variants_of
from fedmodels.nets import net_names
from fedplugins.reference.catalogue import meanings_of

HEAD = """# Configuration

Every key of an experiment, which is one TOML file. The page is generated from the classes that
check a config (`make docs` updates it). `--set table.key=value` of `fedsrv launch` and
`fedsrv serve` overrides a key. Keys without a default are optional.

```toml
seed = 0                 # integer from 0: determines everything random in a run
[method]
name = "fedrep"
```

If `--set` selects another method, net or kind of scenario than the file, the file's keys for the
former one are ignored, with a note: all hyper-parameters of the method, and the keys that the new
net or scenario does not have.

Editors with TOML schemas complete and check a config that starts with the line
`#:schema fedtide.schema.json`; `fedsrv schema > fedtide.schema.json` writes that file next to it.
"""
TABLES = {
    "data": Data,
    "data.columns": Columns,
    "net": experiment.NetTable,
    "method": experiment.MethodTable,
    "schedule": schedule.Schedule,
    "trigger": schedule.Trigger,
    "training": training.Training,
    "training.lr_schedule": training.LrSchedule,
    "evaluate": evaluate.Evaluate,
    "server": server.Server,
    "server_optimizer": training.ServerOptimizer,
    "compression": compression.Compression,
    "privacy": privacy.Privacy,
    "privacy.secure_sum": privacy.SecureSum,
    "deploy": deploy.Deploy,
    **{
        name: tables_in(experiment.Experiment.model_fields[name].annotation)[0]
        for part in parts_of_plugins()
        for name in sorted(part.tables)
    },
}
KINDS = tables_in(scenarios.Scenario)


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name, table in TABLES.items():
        parts += [f"## `[{name}]`\n", _table(table)]
        if name == "net":
            nets = ", ".join(f"`{net}`" for net in net_names())
            parts.append(
                f"Further keys are the net's own options: [nets](nets.md). Nets: {nets}.\n"
            )
            several = "[nets](nets.md#different-nets-per-client)"
            parts += ["## `[[net.by_client]]`\n", _table(experiment.ClientsNet)]
            parts.append(f"Further keys are the net's own options: {several} of clients.\n")
        if name == "method":
            parts.append(
                "Further keys are the method's hyper-parameters: [methods](methods/README.md), or "
                "`fedsrv methods NAME`.\n\n"
                "## `[method.reading]`\n\n"
                "Its keys settle how a paper is read where it leaves something open; each picks a "
                "variant of the method. "
                f"Methods with such a table: {', '.join(_with_readings())}.\n"
            )
    parts.append("## `[scenario]`\n\n`kind` chooses the scenario. Keys of every kind:\n")
    parts.append(_table(scenarios.ScenarioTable))
    for line in (timeline.Domains, timeline.Concepts):
        parts += [f"### `[scenario.{line.table}]`\n", f"{inspect.getdoc(line)}\n"]
        parts.append(_table(line))
    for kind in KINDS:
        name = (*kinds_of(kind), "file.py:function")[0]
        shown = _table(kind, without={"kind", *scenarios.ScenarioTable.model_fields})
        parts += [f"### `{name}`\n", f"{inspect.getdoc(kind)}\n", shown]
    return "\n".join(part for part in parts if part)


def _with_readings() -> list[str]:
    """Return the methods that have readings."""
    return [f"`{name}`" for name in names() if (found := variants_of(name)) and found.readings]


def _table(table: type[BaseModel], without: set[str] | frozenset[str] = frozenset()) -> str:
    """Return the keys of a table as rows."""
    properties = table.model_json_schema().get("properties", {})
    about = {key: text.replace("``", "`") for key, text in meanings_of(table).items()}
    rows = [
        f"| `{key}` | {_values(table, key, form)} | {_default(form)} | {about.get(key, '')} |"
        for key, form in properties.items()
        if key not in without
    ]
    if not rows:
        return ""
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _values(table: type[BaseModel], key: str, form: dict[str, Any]) -> str:
    """Say which values a key takes."""
    if "$ref" in form:
        return "a table"
    if "anyOf" in form:
        some = [_values(table, key, part) for part in form["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(some))
    if "enum" in form:
        return ", ".join(f"`{_toml(value)}`" for value in form["enum"])
    if "const" in form:
        return f"`{_toml(form['const'])}`"
    if form.get("type") == "array":
        return "list of " + _values(
            table, key, form.get("items") or form.get("prefixItems", [{}])[0]
        ).removeprefix("a ")
    name = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    kind = name.get(form.get("type", ""), "value")
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    told = {limit: sign for limit, sign in signs.items() if form.get(limit, MAX_COUNT) != MAX_COUNT}
    limits = [f"{sign} {form[limit]:,}" for limit, sign in told.items()]
    return f"{kind} {' and '.join(limits)}".rstrip()


def _default(form: dict[str, Any]) -> str:
    """Say what a key is unless given."""
    if "default" not in form:
        return "required"
    return "" if form["default"] is None else f"`{_toml(form['default'])}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(page(), end="")
