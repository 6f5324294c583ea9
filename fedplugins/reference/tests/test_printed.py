"""What commands print with ``--json`` is of the shape that ``fedsrv schema`` tells."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import TypeAdapter

from fedmodels.config.presets import preset_files
from fedplugins.reference.config_schema import config_schema
from fedplugins.reference.rows import SHAPES


@pytest.mark.parametrize(
    ("words", "key", "first"),
    [
        (["methods"], "name", "fedavg"),
        (["methods", "fedprox"], "key", "mu"),
        (["nets"], "name", "acgan"),
        (["nets", "mlp"], "key", "hidden"),
        (["metrics", "a_loc"], "name", "a_loc"),
        (["plugins"], "name", "drift"),
    ],
)
def test_tables_are_printed_as_json_too(words, key, first, capsys):
    from fedsrv.cli import main

    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    out = capsys.readouterr().out
    assert first in [row[key] for row in json.loads(out)]
    shape = words[0] if len(words) == 1 or words[0] == "metrics" else words[0].removesuffix("s")
    TypeAdapter(SHAPES[shape]).validate_json(out, strict=True)


@pytest.mark.parametrize("what", SHAPES)
def test_what_commands_print_for_programs_has_keys_types_and_a_schema(what, capsys):
    """Keys were the heads of tables, such as "as the net sees them", and numbers were texts."""
    from fedsrv.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["schema", what])
    schema = json.loads(capsys.readouterr().out)
    rows = [*schema.get("$defs", {}).values(), schema]
    keys = [key for row in rows for key in row.get("properties", ())]
    assert keys
    assert all(re.fullmatch("[a-z_]+", key) for key in keys)


def test_the_default_of_a_setting_is_a_value_and_no_text(capsys):
    from fedsrv.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["methods", "fedprox", "--json"])
    (mu,) = (row for row in json.loads(capsys.readouterr().out) if row["key"] == "mu")
    assert (type(mu["default"]), mu["required"], mu["kind"]) == (float, False, "setting")
    with pytest.raises(SystemExit, match="2"):
        main(["schema", "method!"])
    assert "has no schema. Did you mean 'method'? There are config, methods" in (
        capsys.readouterr().err
    )


NOT_LIMITS = {"$defs", "$schema", "default", "description", "discriminator", "title"}
TYPES: Mapping[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "integer": int, "number": (int, float),
}  # fmt: skip


def refused(value: Any, form: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    """Return why a value is not of a form of JSON Schema; None: it is."""
    kinds_first = sorted(form.items(), key=lambda item: item[0] != "type")
    for key, limit in kinds_first:  # limits of a kind look at values of it alone
        if key == "$ref":
            why = refused(value, whole["$defs"][limit.rpartition("/")[2]], whole)
        elif key in ("anyOf", "oneOf"):
            all_of = [refused(value, one, whole) for one in limit]
            why = None if None in all_of else "; ".join(map(str, all_of))
        elif key == "items":
            why = next(filter(None, (refused(v, limit, whole) for v in value)), None)
        elif key == "prefixItems":
            pairs = zip(value, limit, strict=False)
            why = next(filter(None, (refused(v, f, whole) for v, f in pairs)), None)
        elif key == "properties":
            both = ((k, refused(value[k], f, whole)) for k, f in limit.items() if k in value)
            why = next((f"{k}: {reason}" for k, reason in both if reason), None)
        elif key == "additionalProperties":
            rest = value.keys() - form.get("properties", {}).keys()
            whys = dict.fromkeys(rest, "unknown" if limit is False else None)
            if isinstance(limit, Mapping):
                whys = {k: refused(value[k], limit, whole) for k in rest}
            why = next((f"{k}: {reason}" for k, reason in whys.items() if reason), None)
        elif key not in NOT_LIMITS:
            why = None if holds(key, value, limit) else f"{value!r} against {key} {limit!r}"
        else:
            why = None
        if why:
            return why
    return None


def holds(key: str, value: Any, limit: Any) -> bool:
    """Tell whether a value keeps a limit that looks at nothing below it."""
    if key == "type":
        is_truth = isinstance(value, bool)
        return isinstance(value, TYPES[limit]) and (limit == "boolean" or not is_truth)
    if key in ("enum", "const"):
        return value in (limit if key == "enum" else [limit])
    if key == "required":
        return set(limit) <= value.keys()
    if key == "pattern":
        return re.search(limit, value) is not None
    comparisons = {
        "minimum": lambda: value >= limit, "maximum": lambda: value <= limit,
        "exclusiveMinimum": lambda: value > limit, "exclusiveMaximum": lambda: value < limit,
        "minLength": lambda: len(value) >= limit, "maxLength": lambda: len(value) <= limit,
        "minItems": lambda: len(value) >= limit, "maxItems": lambda: len(value) <= limit,
        "minProperties": lambda: len(value) >= limit,
    }  # fmt: skip
    return bool(comparisons[key]())  # a keyword that is new here has to be added


@pytest.mark.needs
def test_the_schema_holds_every_preset():
    """It refused numbers-diabetes, whose target is given in short."""
    schema = json.loads(json.dumps(config_schema()))
    read = {name: tomllib.loads(path.read_text()) for name, path in preset_files().items()}
    configs = {name: one for name, one in read.items() if "preset" not in one}  # no sweeps
    assert len(configs) > 50
    wrong = {name: refused(one, schema, schema) for name, one in configs.items()}
    assert {name: why for name, why in wrong.items() if why} == {}


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("schedule", "clients", "four"),
        ("schedule", "clients", 0),
        ("schedule", "client", 4),
        ("method", "name", "fedprx"),
        ("method", "mu", -1),
    ],
)
def test_the_schema_refuses_what_a_config_must_not_say(table, key, value):
    schema = json.loads(json.dumps(config_schema()))
    config = tomllib.loads(preset_files()["quickstart"].read_text())
    config["method"] = {"name": "fedprox", "mu": 0.1}
    assert refused(config, schema, schema) is None
    config[table] = {**config[table], key: value}
    assert refused(config, schema, schema) is not None
