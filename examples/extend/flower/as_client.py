"""Run Flower clients in a fedtide run: a ``NumPyClient``, or a ``ClientApp``.

    pip install fedtide flwr
    fedsrv serve quickstart --listen 127.0.0.1:5055 --out run \
        --set method.name=fedavg --set net.name=examples/extend/own-loop/net.py:Net

A script with clients of yours::

    tasks = fedtide.client("127.0.0.1:5055", 0, DATA, code=["examples/extend/own-loop/net.py"])
    with_numpy_client(lambda task: MyClient(task.data), Net(), tasks)

``fit`` trains, and fedtide scores what it sends on the client's own test data. A Flower client that
trains on other data than the task's counts for the task's number of examples all the same.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import torch
from flwr.app import (
    DEFAULT_TTL,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    Metadata,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from fedtide import LoopTask


def with_numpy_client(
    client_for: Callable[[LoopTask], NumPyClient],
    net: nn.Module,
    tasks: Iterable[LoopTask],
    loss: str = "loss",
) -> None:
    """Answer each interaction by the ``fit`` of a client; ``loss`` names it in its metrics."""
    for task in tasks:
        task.load(net)
        state = net.state_dict()
        before = [tensor.numpy(force=True).copy() for tensor in state.values()]
        after, _, metrics = client_for(task).fit(before, {"server_round": task.round + 1})
        trained = map(torch.as_tensor, after)
        net.load_state_dict(dict(zip(state, trained, strict=True)))
        task.send(net, loss=float(metrics[loss]))


def with_client_app(
    app: ClientApp,
    net: nn.Module,
    tasks: Iterable[LoopTask],
    node_config: Mapping[str, bool | float | int | str],
    loss: str = "train_loss",
) -> None:
    """Answer each interaction by the app's ``train``; the node's config gets ``task`` as well."""
    state = RecordDict()
    for task in tasks:
        task.load(net)
        config = ConfigRecord({"server-round": task.round + 1})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "config": config})
        facts = Metadata(0, "", 0, task.client, "", "", time.time(), DEFAULT_TTL, MessageType.TRAIN)
        node = {**node_config, "task": task.task}
        order = Message(content=content, metadata=facts)
        found = app(order, Context(0, task.client, node, state, {})).content
        (arrays,), (metrics,) = found.array_records.values(), found.metric_records.values()
        net.load_state_dict(arrays.to_torch_state_dict())
        task.send(net, loss=float(metrics[loss]))
