"""The methods as tables for the terminal."""

from __future__ import annotations

import ast
import dataclasses
import inspect

from rich.table import Table

from fedmodels.methods import method_class, names
from fedmodels.training.method import Method


def methods_table() -> Table:
    """Return one line for each registered method."""
    table = Table("method", "what it is", "paper")
    for name in names():
        cls = method_class(name)
        table.add_row(name, _first_line(cls), cls.citation)
    return table


def method_table(name: str) -> Table:
    """Return a method's hyper-parameters, their defaults and what they mean.

    Raises:
        ConfigError: no method has this name.
    """
    cls = method_class(name)
    table = Table("key", "default", "meaning", title=f"{name}: {_first_line(cls)} {cls.citation}")
    meanings = _meanings(cls)
    for field in dataclasses.fields(cls):
        table.add_row(field.name, repr(field.default), meanings.get(field.name, ""))
    return table


def _first_line(cls: type[Method]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _meanings(cls: type[Method]) -> dict[str, str]:
    """Return the text under each field of a class, or of the parent it was taken from."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if not issubclass(part, Method) or part is Method:
            continue
        body = ast.parse(inspect.getsource(part).lstrip()).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            text = getattr(getattr(after, "value", None), "value", None)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known = found.get(node.target.id, "")
                found[node.target.id] = " ".join(text.split()) if isinstance(text, str) else known
    return found
