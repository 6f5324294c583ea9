"""What pydantic finds wrong with a value, in the words of a config file: tables and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fedmodels.config.scenario import Scenario
from fedmodels.config.sent import kinds_of, known_keys, tables_in
from fedmodels.console.printable import shown
from fedmodels.errors import suggestion
from fedmodels.own.code_names import of_a_file

SHOULD_BE = "Input should be "
_TABLES = ("model_type", "model_attributes_type", "dict_type", "mapping_type", "dataclass_type")
_WORDS = {
    **dict.fromkeys(_TABLES, "a table"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
}
"""Kind of a pydantic error -> what the value should be."""


@dataclass(frozen=True)
class Fault:
    """The first thing that is wrong with a value."""

    path: list[str]
    """The keys from the value down to what is wrong."""
    message: str
    given: Any


def fault_of(error: ValidationError, value: Any) -> Fault:
    """Return the first fault of a value.

    Where a key may be of several kinds, the line names all that may stand there. Pydantic has an
    error for each, under a path with names of its own.
    """
    found = [(_path_in(value, each["loc"]), each) for each in error.errors()]
    first = found[0][0]
    path = max((p for p, _ in found if p[: len(first)] == first), key=len)
    here = [each for p, each in found if p == path]
    fitting = [each for each in here if not each["type"].endswith("_type")]  # of the right kind
    messages = dict.fromkeys(_message(each) for each in fitting or here)
    start, *others = messages
    message = " or ".join([start, *(m.removeprefix(SHOULD_BE) for m in others)])
    return Fault(path, message, here[0]["input"])


def _message(error: Mapping[str, Any]) -> str:
    word = _WORDS.get(error["type"])
    return f"{SHOULD_BE}{word}" if word else str(error["msg"]).removeprefix("Value error, ")


def _path_in(value: Any, loc: Sequence[int | str]) -> list[str]:
    """Return a path without the names that pydantic gives to the kinds of a value."""
    path = []
    for part in loc:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(part))
    return path


def first_line(error: ValidationError, tables: Mapping[str, Any]) -> str:
    """Turn the first finding of pydantic into a line a user can act on."""
    first = error.errors()[0]
    path = [*_path_in(tables, first["loc"][:-1]), *map(str, first["loc"][-1:])]
    where = f"[{'.'.join(path[:-1])}]" if path[:-1] else "the top level"
    if first["type"] == "extra_forbidden":
        known = known_keys(path[:-1], tables)
        line = f"unknown key {path[-1]!r} in {where}; known: {', '.join(known)}."
        return line + suggestion(path[-1], known)
    if first["type"] == "missing":
        return f"key {path[-1]!r} is missing in {where}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag, known = str(first.get("ctx", {}).get("tag", "")), _kinds()
        given = f"unknown kind {tag!r}" if tag else "key 'kind' is missing"
        hint = of_a_file(tag) or suggestion(tag, known)
        return f"{given} in [scenario]; known: {', '.join(known)}.{hint}"
    fault = fault_of(error, tables)
    given = "" if isinstance(fault.given, dict) else f" (given: {shown(fault.given)})"
    return f"{'.'.join(fault.path) or 'config'}: {fault.message}{given}"


def _kinds() -> list[str]:
    """Return the kinds of scenarios."""
    return [kind for table in tables_in(Scenario) for kind in kinds_of(table)]
