"""The methods and the metrics, as tables for the terminal and for a page."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from rich.markup import escape
from rich.table import Column, Table

from fedmodels.errors import ConfigError, suggestion
from fedmodels.methods import file_of, method_class, names, variants_of
from fedmodels.numerics.metric_tables import (
    ENDINGS,
    EVERYONE,
    FIGURES,
    METRICS,
    OF_PLUGINS,
    REPORTED,
    SCORES,
    VIEWS,
    Metric,
    is_known,
    metric,
)
from fedplugins.reference.rows import MethodLine, MetricLine, Setting

if TYPE_CHECKING:
    from fedmodels.methods.variants import Choices
    from fedmodels.training.method import Method

NO_DEFAULT = "(none: give one)"
STORED = Path(__file__).with_suffix(".json")
"""Tables of what comes with fedtide, which ``docs/site/catalogue.py`` writes."""


def methods_told() -> list[MethodLine]:
    """Return one line for each registered method."""
    told = []
    for name in names():
        try:
            about, paper = _about(name)
        except ConfigError as error:  # of another package: no reason to hide the others
            about, paper = f"cannot be used: {error}", ""
        told.append(MethodLine(name=name, about=about, paper=paper))
    return told


def methods_table() -> Table:
    """Return the methods as a table."""
    table = Table("method", "what it is", "paper")
    for one in methods_told():
        table.add_row(one.name, escape(one.about), escape(one.paper))
    return table


def _about(name: str) -> tuple[str, str]:
    """Return the first line on a method, and its paper.

    A file that comes with fedtide is read and not imported, since importing torch takes seconds.
    """
    file = file_of(name)
    if file is None:
        cls = method_class(name)
        return _first_line(cls), getattr(cls, "citation", "")
    decorated = rf'^@register\("{name}"\)\n(?:@.*\n)*class .*\n    """(.+?)(?:"""|\n)'
    text = file.read_text(encoding="utf-8")
    about = re.search(decorated, text, re.M)
    of_class = text[about.end() :] if about else ""  # a file may have several methods
    paper = re.search(r'^    citation: ClassVar\[str\] = "(.+)"$', of_class, re.M)
    return (about[1] if about else "", paper[1] if paper else "")


def method_table(name: str) -> Table:
    """Return a method's settings, their defaults and what they mean; readings come last.

    Raises:
        ConfigError: no method has this name.
    """
    title, *sections = _stored_or_read(name)
    table = Table("key", "default", "meaning", title=title)
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def method_told(name: str) -> list[Setting]:
    """Return a method's settings, as :func:`method_table` has them."""
    _, keys, *variants = _stored_or_read(name)
    kinds: tuple[Literal["switch", "reading"], ...] = ("switch", "reading")
    told = [setting_of(row, "setting") for row in keys]
    for kind, rows in zip(kinds, variants, strict=True):
        told += [setting_of(row, kind) for row in rows]
    return told


def setting_of(row: Sequence[str], kind: Literal["setting", "switch", "reading"]) -> Setting:
    """Return a row of key, default and meaning with the default as a value."""
    key, default, meaning = row
    is_required = default == NO_DEFAULT
    try:
        value = None if is_required else ast.literal_eval(default)
    except (ValueError, SyntaxError):  # of another package: an object of its own
        value = default
    return Setting(key=key, required=is_required, default=value, meaning=meaning, kind=kind)


def _stored_or_read(name: str) -> list[Any]:
    kept = stored("methods").get(name) if file_of(name) else None
    return kept or method_rows(name)


def stored(kind: str) -> Mapping[str, Any]:
    """Return what ``catalogue.json`` has of the methods, or of the nets, that come with fedtide.

    To look into their classes takes importing torch, which takes seconds. Where the file is missing
    or damaged, nothing is stored, and the classes are asked.
    """
    try:
        found = json.loads(STORED.read_text("utf-8"))
        tables: Mapping[str, Any] = found[kind]
    except (OSError, ValueError, KeyError):
        return {}
    return tables


def method_rows(name: str) -> list[Any]:
    """Return the title and the rows of a method's table, from its class; ConfigError if unknown."""
    from fedmodels.methods.variants import Variants
    from fedmodels.training.settings import keys_of

    cls, variants = method_class(name), variants_of(name) or Variants()
    keys = keys_of(cls)
    found: list[Any] = [_title(name, cls), []]
    for key, (owner, kept) in keys.items():
        found[-1].append([key, _default(kept), meanings_of(owner).get(key, "")])
    for prefix, choices in (("", variants.switches), ("reading.", variants.readings)):
        found.append([])
        for key, classes in choices.items():
            if key not in keys:
                found[-1].append([prefix + key, repr(next(iter(classes))), _told(classes)])
    return found


def _told(classes: Choices) -> str:
    """Say what each value but the default means."""
    others = ((value, kind) for value, kind in classes.items() if kind is not None)
    return " ".join(f"{value!r}: {_first_line(kind)}" for value, kind in others)


def _default(field: dataclasses.Field[Any]) -> str:
    """Return what a field holds unless it is given."""
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return NO_DEFAULT if field.default is dataclasses.MISSING else repr(field.default)


def _title(name: str, cls: type[Method]) -> str:
    return f"{name}: {_first_line(cls)} {getattr(cls, 'citation', '')}"


_METRIC_HEADS = ("metric", "what it is", "formula", "over whom", "range", "better", "source")
_WAYS = {1: "more", -1: "less", 0: "–"}


def metrics_told(names: Collection[str]) -> list[MetricLine]:
    """Return a line for each of these metrics, or of all; ConfigError if one is unknown."""
    for name in names:
        if not is_known(name):
            raise ConfigError(
                f"{name!r} is no metric of fedtide.{suggestion(name, METRICS)} fedsrv metrics "
                "lists them"
            )
    ways: dict[int, Literal["more", "less"]] = {1: "more", -1: "less"}
    return [
        MetricLine(
            name=one.name, title=one.title, meaning=one.meaning.replace("`", ""),
            population=one.population.replace("`", ""), range=one.range,
            better=ways.get(one.better), source=one.source,
        )
        for one in map(metric, names or METRICS)
    ]  # fmt: skip


def metrics_table(names: Collection[str]) -> Table:
    """Return these metrics, or all, as a table; ConfigError if one is unknown."""
    table = Table(Column("metric", no_wrap=True), "meaning", "range", "better", "source")
    for one in metrics_told(names):
        meaning = f"{one.title}: {one.meaning}"
        if one.population != EVERYONE.replace("`", ""):
            meaning += f"; over {one.population}"
        table.add_row(one.name, meaning, one.range, one.better or _WAYS[0], one.source)
    return table


def metrics_markdown() -> str:
    """Return every metric, ending and view as the tables of ``docs/metrics.md``."""
    parts = [
        ("What the coordinator computes", _METRIC_HEADS, map(_cells, SCORES)),
        (
            "Endings of `a_glo` and of `a_loc…`",
            ("ending", "meaning"),
            ((f"`_{ending}`", meaning) for ending, (_, meaning) in ENDINGS.items()),
        ),
        (
            "Figures of targets",
            ("figure", "what it is", "formula", "range", "better"),
            (
                (f"`{f.name}`", f.title, f.meaning, f.range, _WAYS[f.better])
                for f in FIGURES.values()
            ),
        ),
        ("What methods and clients report", _METRIC_HEADS, map(_cells, REPORTED)),
        ("Figures of plugins", _METRIC_HEADS, map(_cells, OF_PLUGINS)),
        (
            "Views",
            ("view", "what is scored"),
            ((f"`{name}`", view.meaning) for name, view in VIEWS.items()),
        ),
    ]
    blocks = [f"## {title}\n\n{markdown_of(heads, rows)}" for title, heads, rows in parts]
    return "\n\n".join(blocks) + "\n"


def markdown_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines)


def _cells(found: Metric) -> tuple[str, ...]:
    way = _WAYS[found.better]
    facts = (found.population, found.range, way, found.source)
    return (f"`{found.name}`", found.title, found.meaning, *facts)


def _first_line(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def meanings_of(cls: type[Any]) -> dict[str, str]:
    """Return, to be read only, the text under each field of a class, or of the parent it came from.

    Args:
        cls: a dataclass, or a table of a config.
    """
    hashes: Any = cls  # which mypy does not know of a class
    return _read(hashes)


@functools.cache
def _read(cls: Any) -> dict[str, str]:
    from fedmodels.training.method import Method

    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        is_table = issubclass(part, BaseModel) and part is not BaseModel
        if not (is_table or dataclasses.is_dataclass(part)) or part is Method:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            text = getattr(after.value, "value", None) if isinstance(after, ast.Expr) else None
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known = found.get(node.target.id, "")
                found[node.target.id] = " ".join(text.split()) if isinstance(text, str) else known
    return found
