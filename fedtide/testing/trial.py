"""A tiny experiment on scikit-learn's digits, and the contexts of its clients and its server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedcli.data.store.stream import TaskStream
from fedmodels.config.experiment import Experiment
from fedmodels.facts.position import Interaction, Round
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import _CLASSES, make
from fedmodels.own.own_code import renew
from fedmodels.tensors.bundle import EVALUATOR, Bundle
from fedmodels.training.contexts import (
    START,
    ClientContext,
    Position,
    ServerContext,
    ServerData,
    ServerState,
)
from fedmodels.training.hooks import broadcast, evaluation, init_client, init_server
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedpb.codec import merged

TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "max_per_class": 20},
    "scenario": {"kind": "per_class_shards", "shards": 5, "tasks": 2},
    "net": {"name": "mlp", "hidden": [16]},
    "method": {"name": "fedavg"},
    "schedule": {"rounds": 2, "clients": 3},
    "training": {"batch_size": 16, "lr": 0.05},
}
"""Three clients, two tasks, about 33 training examples of at most five classes in each."""
FEW = [[3] * 20, [5], []]
"""Training labels of three clients: one class, one example, nothing."""


def tiny_experiment(**overrides: Any) -> Experiment:
    """Return the tiny experiment with whole tables or single keys of them replaced.

    A mapping is merged into its table, but ``net``, ``scenario`` and ``method`` are replaced when
    they name another; a string is a table's ``name``; anything else is a key of the top level.
    """
    tables: dict[str, Any] = {name: dict(table) for name, table in TABLES.items()}
    for name, given in overrides.items():
        given = {"name": given} if isinstance(given, str) else given
        if isinstance(given, Mapping) and not {"name", "kind"} & given.keys():
            tables[name] = {**tables.get(name, {}), **given}
        else:
            tables[name] = given
    return experiment_of(tables)


def digits_in(root: Path, *, gather: bool = False) -> Path:
    """Deal the digits out as :data:`TABLES` says, or pool them; return the partition's root."""
    made = tiny_experiment()
    clients, quiet = made.schedule.clients, Console(quiet=True)
    assert made.data is not None
    assert made.scenario is not None
    run_partition(made.data, made.scenario, clients, made.seed, root, quiet, gather=gather)
    write_server_data(root)
    return root


def write_server_data(root: Path) -> None:
    """Put noise beside a partition of digits, for methods that train on the server."""
    place, rng = root / "server", np.random.default_rng(0)
    place.mkdir()
    facts = json.loads((root / "0" / "client.json").read_text("utf-8"))
    facts.pop("tasks", None)
    facts.pop("partition", None)  # noise was not dealt out by any config
    (place / "problem.json").write_text(json.dumps(facts), "utf-8")
    for name, count in (("x", 20), ("unlabelled_x", 16)):
        x = rng.uniform(0, 16, (count, *facts["input_shape"])).astype(np.float32)
        np.save(place / f"{name}.npy", x)
    np.save(place / "y.npy", np.arange(20, dtype=np.int64) % facts["num_classes"])


def server_context(run: RunFacts, interaction: int, cohort: tuple[int, ...]) -> ServerContext:
    """Return the context of a server half, with noise as the data of its own."""
    draw = torch.Generator().manual_seed(0)
    shape, classes = run.problem.input_shape, run.problem.num_classes
    x, unlabelled = (torch.randn(n, *shape, generator=draw) for n in (2 * classes, 16))
    held = ServerData(x, torch.arange(2 * classes) % classes, unlabelled)
    labels = dict.fromkeys(cohort, tuple(range(classes)))
    at = Position(Interaction(interaction), Round(0), 0)
    return ServerContext(run, at, cohort, server_data=held, labels=labels, ends_task=True)


def context_of(
    experiment: Experiment, root: Path, client: int = 0, task: int = 0, interaction: int = 0
) -> ClientContext:
    """Return the context in which one client of a partition trains on a task."""
    data = ClientData(root / str(client))
    run = RunFacts(experiment, data.problem).of_client(client)
    keeps = method_of(experiment).trains_on == "history"
    stream = TaskStream(data, keep_history=keeps, accumulates=experiment.accumulates)
    stream.open(task)
    at = Position(Interaction(interaction), Round(0), task)
    return ClientContext(run, client, at, run.make_net(), stream, torch.device("cpu"))


def method_of(experiment: Experiment) -> Method:
    """Return an experiment's method."""
    return make(experiment.method.name, **experiment.method.hyper_parameters())


def payload_of(experiment: Experiment, ctx: ClientContext) -> tuple[Bundle, Bundle]:
    """Return the first payload and the initial private state of a context's client."""
    method = method_of(experiment)
    assert isinstance(ctx.client, int)
    run = RunFacts(experiment, ctx.run.problem)  # the client's may be of a net of its own
    server = ServerContext(run, START, (ctx.client,))
    common, personal = broadcast(method, server, init_server(method, run))
    parts = {"common": common, "personal": personal.get(ctx.client, Bundle())}
    return merged(parts), init_client(method, ctx.run, ctx.client)


def scored_by_the_evaluator(
    method: Method, ctx: ClientContext, server: ServerContext, state: ServerState
) -> tuple[ClientContext, Bundle]:
    """Return the context in which everyone's model is scored, and its payload."""
    common, own = evaluation(method, server, state)
    payload = merged({"common": common, "personal": own.get(EVALUATOR, Bundle())})
    return replace(ctx, client=EVALUATOR, view="global"), payload


def few_in(root: Path, data: Path) -> Path:
    """Write clients that hold a single class, a single example, and nothing to train on.

    Their problem is that of a partition of the digits.
    """
    rng = np.random.default_rng(0)
    for client, labels in enumerate(FEW):
        facts = json.loads((data / "0" / "client.json").read_text("utf-8"))
        tests = [3, 5, 7] if labels else []
        for part, ys in (("train", labels), ("test", tests)):
            place = root / str(client) / "task-0"
            place.mkdir(parents=True, exist_ok=True)
            x = rng.uniform(0, 16, (len(ys), *facts["input_shape"])).astype(np.float32)
            np.save(place / f"{part}_x.npy", x)
            np.save(place / f"{part}_y.npy", np.array(ys, dtype=np.int64))
        facts.pop("tasks")
        facts.pop("partition", None)  # these were not dealt out by any config
        (root / str(client) / "client.json").write_text(json.dumps(facts), "utf-8")
    write_server_data(root)
    return root


@contextmanager
def registered(method: str | type[Method]) -> Iterator[str]:
    """Register a class for a while, under a name that no other has; give that name."""
    if isinstance(method, str):
        renew(method)
        yield method
        return
    method.name = vars(method).get("name", method.__name__.lower())
    if _CLASSES.get(method.name) is method:
        yield method.name
        return
    name = f"{method.name}-{id(method):x}"
    _CLASSES[name] = method
    try:
        yield name
    finally:
        del _CLASSES[name]
