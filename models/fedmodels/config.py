"""One experiment as one strict table: what a TOML file may say, and what it means.

The server owns the file; a client gets the resolved experiment when it joins. Reading the file is
the commands' business, this module only checks what it says.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedmodels.errors import ConfigError, suggestion
from fedmodels.scenario import Data, Scenario

View = Literal["global", "after_local", "after_downlink"]


class Table(BaseModel):
    """A TOML table that knows all its keys; values are of their type, never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NetTable(BaseModel):
    """``[net]``: a registered net and its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    weights: str | None = None
    """A file of weights that all start from, such as ``fedcli pretrain`` writes; every process
    of the run reads it. What it lacks is initialised as ever."""
    weights_sha256: str | None = None
    """Of that file; the coordinator fills it in, and every process checks what it reads."""

    def options(self) -> dict[str, Any]:
        """Return what is passed to ``make_net`` beside the name."""
        return dict(self.model_extra or {})


class MethodTable(BaseModel):
    """``[method]``: a registered method and its hyper-parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def pools_data(self) -> bool:
        """Whether the clients' training data belong into one place: Centralized, unless its own."""
        return self.name == "centralized" and self.hyper_parameters().get("data") != "own"

    def hyper_parameters(self) -> dict[str, Any]:
        """Return what is passed to ``make`` beside the name."""
        return dict(self.model_extra or {})


class Schedule(Table):
    """``[schedule]``: how many rounds, over whom, in which order."""

    rounds: Annotated[int, Field(ge=1)] = 10
    """Rounds in all; with ``tasks_outer``, rounds on each task."""
    clients: Annotated[int, Field(ge=1)] = 3
    per_round: Annotated[int, Field(ge=1)] | None = None
    """Clients in a cohort; all of them unless given."""
    order: Literal["rounds_outer", "tasks_outer"] = "rounds_outer"

    @model_validator(mode="after")
    def _cohort_fits(self) -> Schedule:
        if self.per_round is not None and self.per_round > self.clients:
            raise ValueError(f"per_round = {self.per_round} exceeds clients = {self.clients}")
        return self


class Training(Table):
    """``[training]``: the local work every method's stock loop does."""

    local_epochs: Annotated[int, Field(ge=0)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 32
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    threads: Annotated[int, Field(ge=1)] = 1
    """Torch threads of a client process; the count changes floats, so it belongs to the run."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What nets compute in on the way to their embeddings, in training and in scoring; weights,
    losses and what travels are float32 all the same. It changes floats, and pays on CPUs with
    AMX, not on others: docs/results.md."""
    augment: Literal["none", "crop-flip"] = "none"
    together: Annotated[int, Field(ge=1)] = 1
    """Clients of one process that train as one stacked step at most; 1: in turn. It changes
    floats, and pays for small nets alone: docs/results.md."""

    @property
    def mixed_precision(self) -> bool:
        """Whether nets compute in bfloat16 where they may."""
        return self.precision == "bfloat16"


class Evaluate(Table):
    """``[evaluate]``: when, and which models, are scored."""

    every: Annotated[int, Field(ge=0)] = 1
    """Score after every so many rounds, and after the last; 0 is after the last only."""
    views: Annotated[tuple[View, ...], Field(strict=False)] = (  # TOML has lists only
        "global",
        "after_local",
        "after_downlink",
    )
    last_rounds: Annotated[int, Field(ge=1)] = 1
    """Summary metrics are means over this many last scored rounds."""
    reference: str | None = None
    """Run directory against which the average forgetting measure is taken."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    generalization: bool = False
    """Score clients' models on the global test set too, where there is one: costly. It gives
    FedAli's Generalization and FedMLP's A_loc (``a_loc_balanced``)."""
    pictures: Annotated[int, Field(ge=0)] = 2
    """Clients, from the first on, that draw what they learnt into their own directory in the end:
    prototypes among the embeddings of their test data, images they replay."""
    select_by: Literal["f1", "accuracy"] = "f1"
    """What makes a round the best: mean macro-F1, or mean accuracy as FedAli's published code."""


class Server(Table):
    """``[server]``: how the coordinator waits, keeps and computes."""

    min_clients: Annotated[int, Field(ge=1)] | None = None
    """Clients an interaction needs when its deadline passes or clients fail; all unless given."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which an interaction closes with those that answered; none waits for all."""
    durability: Literal["watermark", "strict"] = "watermark"
    """``strict`` syncs every commit to the disk before it counts."""
    max_rollback: Annotated[int, Field(ge=0)] = 2
    """Interactions that are done again at most for private states a client lost, beyond what a
    power failure explains; states of so many are kept in any case. ``--resume`` may change it."""
    threads: Annotated[int, Field(ge=1)] = 1
    upload_memory_mb: Annotated[int, Field(ge=0)] = 256
    """Uploads of a round beyond this many MiB are added up as they come, where the method allows
    it, and those that have to wait go to a memory-mapped spool."""


class Tracking(Table):
    """``[tracking]``: where else the numbers go."""

    tensorboard: bool = False
    """Write metrics to OUT/tensorboard as they come; needs the extra ``tensorboard``."""


class Experiment(Table):
    """A whole config file, resolved: every key has its value."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: Data
    scenario: Scenario
    net: NetTable
    method: MethodTable
    schedule: Schedule = Schedule()
    training: Training = Training()
    evaluate: Evaluate = Evaluate()
    server: Server = Server()
    tracking: Tracking = Tracking()

    @property
    def cohort_size(self) -> int:
        """Return how many clients take part in a round."""
        return self.schedule.per_round or self.schedule.clients

    @property
    def min_clients(self) -> int:
        """Return how many uploads an interaction needs at least."""
        return min(self.server.min_clients or self.cohort_size, self.cohort_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved experiment as plain values; parsing it again is the same run."""
        return self.model_dump(mode="json", exclude_none=True)


def parse_experiment(
    text: str, source: str = "config", overrides: Sequence[str] = ()
) -> Experiment:
    """Parse and check a TOML experiment.

    Args:
        text: the TOML.
        source: its name in error lines.
        overrides: ``key.path=value`` items that replace or add keys; a value is read as TOML and
            taken as a string where it is none.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    for item in overrides:
        _override(tables, item)
    return experiment_of(tables, source)


def experiment_of(tables: Mapping[str, Any], source: str = "config") -> Experiment:
    """Check plain tables, resolve the method's hyper-parameters, and return the experiment.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    try:
        experiment = Experiment.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_one_line(error, tables)}") from None
    from fedmodels.methods import make  # methods import torch: only when a config is used
    from fedmodels.nets import net_names

    try:
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        if experiment.net.name not in net_names():
            raise ConfigError(
                f"unknown net {experiment.net.name!r} in [net]; known: {', '.join(net_names())}."
                + suggestion(experiment.net.name, net_names())
            )
        if experiment.training.together > 1 and not method.trains_together:
            raise ConfigError(
                f"[training] together = {experiment.training.together}: clients of method "
                f"{method.name!r}, or with these switches, train in turn only; leave it out"
            )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    resolved = MethodTable(name=experiment.method.name, **method.hyper_parameters())
    return experiment.model_copy(update={"method": resolved})


def difference(one: Experiment, other: Experiment) -> list[str]:
    """Return the dotted keys in which two experiments differ."""
    a, b = _leaves(one.to_dict()), _leaves(other.to_dict())
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out.update(_leaves(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = json.dumps(value)
    return out


def _override(tables: dict[str, Any], item: str) -> None:
    path, equals, value = item.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {item!r} is not key=value, such as --set method.lam=0.3")
    *parents, leaf = path.strip().split(".")
    table = tables
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {item!r}: {name!r} is a value, not a table")
    try:
        table[leaf] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table[leaf] = value


def _one_line(error: ValidationError, tables: Mapping[str, Any]) -> str:
    """Turn the first finding of pydantic into a line a user can act on."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    scenario = tables.get("scenario")
    if path[:1] == ["scenario"] and isinstance(scenario, Mapping):
        kind = scenario.get("kind")
    else:
        kind = None
    if kind in path[1:2]:  # the tag of the scenario's union is no key of the file
        path.pop(1)
    where = f"[{'.'.join(path[:-1])}]" if path[:-1] else "the top level"
    if first["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], kind)
        line = f"unknown key {path[-1]!r} in {where}; known: {', '.join(known)}."
        return line + suggestion(path[-1], known)
    if first["type"] == "missing":
        return f"key {path[-1]!r} is missing in {where}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = first.get("ctx", {})
        tag, tags = str(context.get("tag", "")), str(context.get("expected_tags", ""))
        known = [name.strip("' ") for name in tags.split(",")] if tags else []
        given = f"unknown kind {tag!r}" if tag else "key 'kind' is missing"
        return f"{given} in [scenario]; known: {', '.join(known)}.{suggestion(tag, known)}"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f" (given: {first['input']!r})"
    return f"{'.'.join(path) or 'config'}: {message}{given}"


def _known_keys(path: list[str], kind: str | None) -> list[str]:
    schema = TypeAdapter(Experiment).json_schema()
    node: dict[str, Any] = schema
    for name in path:
        node = node.get("properties", {}).get(name, {})
        if kind and "discriminator" in node:
            node = {"$ref": node["discriminator"]["mapping"].get(kind, "")}
        for branch in node.get("allOf", []) + node.get("anyOf", []):
            node = branch if "$ref" in branch else node
        if "$ref" in node:
            node = schema["$defs"].get(node["$ref"].rpartition("/")[2], {})
    return sorted(node.get("properties", {}))
