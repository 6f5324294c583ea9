"""Write ``docs/privacy.md``: what leaves a client, from messages of a real run of each method.

python docs/site/privacy.py > docs/privacy.md
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fedcli.runtime.worker import Result  # noqa: E402
from fedmodels.errors import ConfigError  # noqa: E402
from fedmodels.numerics.metric_tables import is_known, metric  # noqa: E402
from fedmodels.tensors.bundle import Problem  # noqa: E402
from fedmodels.training.asked import check_announcement  # noqa: E402
from fedmodels.training.run import RunFacts  # noqa: E402
from fedtide.inprocess import run_in_process  # noqa: E402
from fedtide.testing.trial import digits_in, method_of  # noqa: E402
from tests.fedmodels.methods.test_conformance import CASES, experiment_for  # noqa: E402

Case = tuple[str, Mapping[str, Any]]


@dataclass
class Seen:
    """What a field was in the messages of a run."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    largest: float = 0.0


Fields = dict[str, Seen]
TEXT, FIELDS = (ROOT / "docs" / "site" / name for name in ("privacy.txt", "privacy_fields.txt"))
"""What stands around the tables, and what each field of a message tells."""
OPERATORS = ("Watch", "Steer", "ListRuns", "SubmitRun", "WithdrawRun")
"""Calls that no client makes."""
CLASSES, WIDTH = 10, 16
"""K and D of the runs behind the page."""
MEANINGS = {
    r"weights/base/…": "the feature extractor after local training. Its change is close to a sum "
    "of gradients, from which inputs can partly be reconstructed if there are few examples",
    r"weights/head/…": "the classifier after local training. Rows of classes that the client lacks "
    "move alike, so it reveals which classes it has, and about how many of each",
    r"weights/eval/…": "the client's own classifier, with which the evaluator scores; as `weights/"
    "head/…`",
    r"weights/balanced/…": "a classifier trained on equally many examples of each class, at most "
    "five; as `weights/head/…`, but it tells no numbers of examples",
    r"weights/control/…": "the mean gradient of the client's steps (its control variate), as a "
    "difference",
    r"weights/learner\d+/…": "a whole net for each mixture component; as base and head",
    r"weights/model\d+/…": "a whole net, under the number of the model that fits the client "
    "best; as base and head. The number reveals which clients are similar",
    r"weights/new/…": "a whole net for data that no model fits; as base and head",
    r"weights/examples": "the number of its examples that belong to each model, exactly",
    r"weights/correct": "how many of these each model classifies correctly, exactly",
    r"scalars/model": "the number of the model that fits best",
    r"scalars/drifted": "whether no model fits any longer",
    r"weights/grads/…": "gradients of a public small net, one set for each class of a new task: "
    "a slightly changed example of each class can be reconstructed from them",
    r"weights/generator/…": "a net that generates inputs like the client's, of its classes",
    r"weights/source/…": "what distinguishes the client's inputs from generated ones",
    r"weights/flow/…": "a density of the client's features by class, which gives the likelihood "
    "that an example is one of the client's",
    r"prototypes/class/vectors": "the mean feature of the examples of a class. With one example, "
    "it is that example's feature",
    r"prototypes/statistics/vectors": "the same under the model as received, times the class's "
    "share of the examples",
    r"prototypes/gradient/vectors": "the mean gradient of the head over examples of a class",
    r"prototypes/alp/\d+(/twin)?/vectors": "the layer's learned prototypes: clusters of features "
    "over all classes",
    r"prototypes/[\w/]+/labels": "which classes the client has",
    r"prototypes/[\w/]+/counts": "the number of examples of each of these classes, exactly",
    r"generators/[\w]+/version": "how often that generator was trained",
    r"generators/[\w]+/tensors/…": "a net that generates inputs like the client's, of one class; "
    "sent when it has changed",
    r"histogram/round": "the number of examples of each class in the task, exactly",
    r"histogram/total": "the number of examples of each class in all its tasks so far, exactly",
    r"scalars/num_examples": "the number of examples that it trained on, exactly",
    r"scalars/variance": "the variance of its features around their class means, one number",
}
"""What a field of an upload tells, by a pattern of its name."""


# --- messages -------------------------------------------------------------------------------------


def sent_by_clients() -> list[Descriptor]:
    """Return every message that a client or its relay sends, and what such a message holds."""
    found: dict[str, Descriptor] = {}

    def visit(message: Descriptor) -> None:
        if message.full_name in found or message.GetOptions().map_entry:
            return
        found[message.full_name] = message
        for each in message.fields:
            if each.message_type is not None:
                visit(each.message_type)

    for name in sorted(path.stem for path in (ROOT / "proto" / "fedpb" / "v1").glob("*.proto")):
        schema = importlib.import_module(f"fedpb.v1.{name}_pb2")
        for service in schema.DESCRIPTOR.services_by_name.values():
            for call in service.methods:
                if call.name not in OPERATORS:
                    visit(call.input_type)
    return [*found.values()]


def told() -> dict[str, tuple[str, str]]:
    """Return what each field tells and who needs it, by ``Message.field``, as written by hand."""
    rows = re.findall(r"^(\w+\.\w+): (.+?) \| (.+)$", FIELDS.read_text("utf-8"), flags=re.MULTILINE)
    return {name: (tells, needed) for name, tells, needed in rows}


def messages() -> str:
    """Return the tables of messages.

    Raises:
        SystemExit: a field has no entry, or an entry no field.
    """
    known, parts, used = told(), [], set[str]()
    for message in sent_by_clients():
        if message.file.name.endswith(("bundle.proto", "table.proto")):
            continue  # tensors: the tables of methods; tables: as the fields that hold them
        rows = []
        for each in message.fields:
            name = f"{message.name}.{each.name}"
            if name not in known:
                raise SystemExit(f"docs/site/privacy_fields.txt says nothing of {name}")
            used.add(name)
            rows.append(f"| `{each.name}` | {kind_of(each)} | {' | '.join(known[name])} |")
        head = ["| field | type | contents | needed for |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {message.name}\n", *head, *rows, ""]))
    if stale := sorted(known.keys() - used):
        raise SystemExit(f"docs/site/privacy_fields.txt: no message has {stale[0]}")
    return "\n".join(parts)


def kind_of(field: FieldDescriptor) -> str:
    """Return what a field holds, for a table."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "numbers by name"
    kinds = {value: name for name, value in vars(FieldDescriptor).items() if name[:5] == "TYPE_"}
    kind = kinds[field.type].removeprefix("TYPE_").lower()
    other = field.message_type or field.enum_type
    kind = other.name if other is not None else f"`{kind}`"
    return f"list of {kind}" if field.is_repeated else kind


# --- methods --------------------------------------------------------------------------------------


def fields_in(results: Iterable[Result]) -> Fields:
    """Return the fields of uploads, and the methods' own numbers in reports."""
    found: Fields = {}
    for result in results:
        for key, tensor in result.upload.by_key().items():
            seen = found.setdefault(pattern_of(key), Seen())
            seen.shapes.append(tuple(tensor.shape))
            if tensor.numel():
                seen.largest = max(seen.largest, tensor.max().item())
        for name in result.report.extra:
            found.setdefault(f"report.extra[{re.sub(r'_[0-9]+$', '_K', name)}]", Seen())
    return found


def pattern_of(key: str) -> str:
    """Return a key without what a net or a class makes of it: ``weights/base/…``."""
    part, _, rest = key.partition("/")
    if part == "weights":
        role, is_of_a_net, _ = rest.partition("/")
        return f"weights/{role}/…" if is_of_a_net else key
    if part == "generators":
        name, _, inner = rest.partition("/")
        return f"generators/{'K' if name.isdecimal() else name}/{inner.partition('/')[0]}" + (
            "/…" if "/" in inner else ""
        )
    return key


def label_of(case: Case) -> str:
    """Return what a case is called on the page."""
    name, switches = case
    keys = ", ".join(f"`{key} = {_toml(value)}`" for key, value in switches.items())
    return f"`{name}`" + (f" with {keys}" if keys else "")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def rows_of(fields: Fields) -> list[str]:
    """Return the table of a method's fields, in an order that no run changes."""
    ordered = sorted(fields.items(), key=lambda item: (item[0].startswith("report"), item[0]))
    return [
        f"| `{name}` | {_shape(name, seen.shapes)} | {meaning_of(name, seen)} |"
        for name, seen in ordered
    ]


def meaning_of(name: str, seen: Seen) -> str:
    """Return what a field tells.

    Raises:
        SystemExit: nobody wrote it down.
    """
    if seen.shapes and not any(math.prod(shape) for shape in seen.shapes):
        return "nothing: the method leaves it empty"
    if name.startswith("histogram/") and seen.largest <= 1:
        when = "has in the task" if name.endswith("round") else "had in earlier tasks"
        return f"which classes it {when}: 0 or 1 for each"
    if name.startswith("report.extra["):
        own = name.removeprefix("report.extra[").removesuffix("]")
        one = own.replace("_K", "_0")
        if is_known(one):
            found, is_by_class = metric(one), own.endswith("_K")
            about = "" if is_by_class else f"{found.title}: "
            more = "; for each class K that the client has" if is_by_class else ""
            return f"{about}{found.meaning.rstrip('.')}{more}".replace("|", "\\|")
    for pattern, meaning in MEANINGS.items():
        if re.fullmatch(pattern, name):
            return meaning
    raise SystemExit(f"docs/site/privacy.py says nothing of what {name} tells")


def _shape(name: str, found: list[tuple[int, ...]]) -> str:
    """Return a shape in letters; that of a group of tensors is the net's own."""
    if not found:
        return "a number"
    if name.endswith("…"):
        return "as in the net"
    if len({len(shape) for shape in found}) > 1 or not found[0]:
        return "a number"
    sizes = [
        {CLASSES: "K"}.get(axis[0], str(axis[0])) if len({*axis}) == 1 else "P"
        for axis in zip(*found, strict=True)
    ]
    if len(sizes) == 2 and sizes[1] == str(WIDTH):
        sizes[1] = "D"
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def methods() -> str:
    """Run every method and return the tables of what it sends; like ones are one table."""
    tables: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        data = digits_in(Path(place) / "data")
        for number, case in enumerate(CASES):
            sent: list[Result] = []
            experiment = experiment_for(case, schedule={"rounds": 3})
            run_in_process(experiment, data, Path(place) / f"run-{number}", after=sent.append)
            tables.setdefault(tuple(rows_of(fields_in(sent))), []).append(label_of(case))
    parts = []
    for rows, labels in tables.items():
        head = ["| field | shape | what it reveals |", "|---|---|---|"] if rows else ["Nothing."]
        parts.append("\n".join([f"**{'; '.join(labels)}**\n", *head, *rows, ""]))
    return "\n".join(parts)


def hiding(how: str) -> list[str]:
    """Return the methods that go with ``[privacy] announce``."""
    found = []
    for name, switches in CASES:
        if switches:
            continue
        experiment = experiment_for((name, {}), privacy={"announce": how})
        run = RunFacts(experiment, Problem((1, 8, 8), CLASSES))
        try:
            check_announcement(method_of(experiment), run)
            found.append(name)
        except ConfigError:
            pass
    return sorted(found)


def fields_on(page: str) -> dict[str, set[str]]:
    """Return the fields that a page lists for each case, by its label."""
    found: dict[str, set[str]] = {}
    for block in re.split(r"^(?=\*\*`)", page, flags=re.MULTILINE)[1:]:
        head, _, rest = block.partition("\n\n")
        rows = set(re.findall(r"^\| `(.+?)` \|", rest.partition("\n\n")[0], flags=re.MULTILINE))
        found |= dict.fromkeys(head.strip("*\n").split("; "), rows)
    return found


# --- the page -------------------------------------------------------------------------------------


def page(uploads: str | None = None) -> str:
    """Return the whole page; ``uploads`` are the tables of methods, made anew unless given."""
    found = TEXT.read_text("utf-8").replace("{{messages}}\n", messages() + "\n")
    for how in ("rounded", "none"):
        found = found.replace(f"{{{{{how}}}}}", ", ".join(f"`{name}`" for name in hiding(how)))
    return found.replace("{{methods}}\n", f"{methods() if uploads is None else uploads}\n")


def uploads_on(page: str) -> str:
    """Return the tables of methods of a page."""
    return page[page.index("**`") :].partition("\n\n## ")[0] + "\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(page(), end="")
