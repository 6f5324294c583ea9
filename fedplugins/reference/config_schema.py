"""The JSON Schema of a config: by it editors complete a TOML file, and mark what is wrong in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import tables_in
from fedmodels.methods import method_class, variants_of
from fedmodels.methods import names as method_names
from fedmodels.methods.variants import Choices, Variants
from fedmodels.nets import net_names
from fedmodels.training.settings import hints_of, keys_of
from fedplugins.reference.catalogue import meanings_of
from fedplugins.reference.net_catalogue import options_of

Form = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"


def config_schema() -> Form:
    """Return the schema of a whole config, with the keys of every method and net."""
    whole = Experiment.model_json_schema()
    definitions = whole["$defs"]
    for table in {*_tables_below(Experiment)}:
        if table.__name__ in definitions:
            _explain(definitions[table.__name__], table)
    by_name = {
        "MethodTable": {name: _of_method(name) for name in method_names()},
        "NetTable": {name: _of_net(name) for name in net_names()},
    }
    for name, forms in by_name.items():
        definitions[name]["anyOf"] = _of_each(definitions[name]["properties"], forms)
    return {"$schema": DRAFT, **whole}


def _tables_below(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in table.model_fields.values():
        for inner in tables_in(field.annotation):
            yield inner
            yield from _tables_below(inner)


def _explain(form: Form, table: type[BaseModel]) -> None:
    """Put the text under each field into a table's form."""
    for key, text in meanings_of(table).items():
        if text and key in form["properties"]:
            form["properties"][key]["description"] = text


def _of_each(shared: Form, forms: Mapping[str, Form]) -> list[Form]:
    """Return the forms of a table by its key ``name``; a custom name has any other keys.

    Args:
        shared: the keys of every name.
        forms: the further keys by name.
    """
    own: Form = {"properties": {"name": {"type": "string", "pattern": r"\.py:\w+$"}}}
    named = [
        {"properties": {**shared, **form, "name": {"const": name}}, "additionalProperties": False}
        for name, form in sorted(forms.items())
    ]
    return [*named, own]


def _of_method(name: str) -> Form:
    """Return the forms of a method's keys."""
    cls, variants = method_class(name), variants_of(name) or Variants()
    form: Form = {}
    for key, (owner, field) in keys_of(cls).items():
        form[key] = TypeAdapter(hints_of(owner, name)[field.name]).json_schema()
        if text := meanings_of(owner).get(key, ""):
            form[key]["description"] = text
        if field.default not in (dataclasses.MISSING, None):
            form[key]["default"] = field.default
    form |= {key: _choice(each) for key, each in variants.switches.items() if key not in form}
    if variants.readings:
        readings = {key: _choice(each) for key, each in variants.readings.items()}
        form["reading"] = {"type": "object", "properties": readings}
    return form


def _choice(choices: Choices) -> Form:
    return {"enum": [*choices], "default": next(iter(choices))}


def _of_net(name: str) -> Form:
    """Return the forms of a net's options."""
    return {
        key: {"description": meaning, "default": list(value) if isinstance(value, tuple) else value}
        for key, (value, meaning) in options_of(name).items()
    }
