"""Real training: what a round takes beside the same steps in plain torch loops on the same cores.

    python -m benchmarks.training [--jobs digits-10 digits-50 fashion-10] [--rounds 6]
    python -m benchmarks.training --steps       # memory formats, fused steps, stacked clients

A plain loop is what one would write without a framework: the clients' data as tensors, one process
per core, each training its share of the clients, nothing sent. Loops and framework alternate.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import tell
from fedmodels.config import experiment_of
from fedmodels.method import Run
from fedmodels.nets import SplitNet, load_weights, make_net, weights_of
from fedmodels.types import Problem

DIGITS = {"data": {"name": "digits"}, "net": {"name": "digits-cnn"}, "batch_size": 16}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "digits-10": {**DIGITS, "clients": 10},
    "digits-50": {**DIGITS, "clients": 50},
    "fashion-10": {
        "data": {"name": "fashion-mnist", "max_per_class": 600},
        "net": {"name": "resnet20"},
        "batch_size": 32,
        "clients": 10,
    },
}
"""One local epoch a round in each."""
NETS = {
    "digits-cnn": ((1, 28, 28), 16),
    "cnn5": ((1, 28, 28), 32),
    "resnet20": ((1, 28, 28), 64),
    "resnet18": ((3, 32, 32), 32),
}


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", nargs="+", default=["digits-10"], choices=list(JOBS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", action="store_true", help="single steps in place of rounds")
    parser.add_argument("--nets", nargs="+", default=list(NETS)[:3], choices=list(NETS))
    parser.add_argument("--loop", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.loop:
        config, data, share = options.loop
        print(json.dumps(_plain_loop(Path(config), Path(data), share)))
    elif options.steps:
        tell("training_step", [_step_row(net) for net in options.nets])
        tell("stacked_clients", [_stacked_row(clients) for clients in (2, 5, 10)])
    else:
        tell("training", [_round_row(job, options.rounds, options.hosts) for job in options.jobs])


# --- rounds ---------------------------------------------------------------------------------------


def _round_row(job: str, rounds: int, hosts: int) -> dict[str, Any]:
    facts = JOBS[job]
    with tempfile.TemporaryDirectory() as place:
        out, config = Path(place) / "run", Path(place) / "config.toml"
        config.write_text(tomli_w.dumps(_experiment(facts, rounds)))
        command = [sys.executable, "-m", "fedsrv", "launch", str(config), "--out", str(out)]
        launched = [*command, "--hosts", str(hosts)]
        subprocess.run(launched, check=True, stdout=subprocess.DEVNULL)
        loops = [_loops(config, out / "data")]
        walls = _walls(out)
        for _ in range(2):
            again = [*command, "--data", str(out / "data"), "--hosts", str(hosts)]
            again[again.index(str(out))] = str(other := Path(place) / f"again{len(loops)}")
            subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
            walls += _walls(other)
            loops.append(_loops(config, out / "data"))
    plain, ours = statistics.median(loops), statistics.median(walls)
    return {"job": job, "hosts": hosts, "round_s": ours, "plain_s": plain, "ratio": ours / plain}


def _experiment(facts: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    return {
        "data": facts["data"],
        "scenario": {"kind": "iid"},
        "net": facts["net"],
        "method": {"name": "fedavg"},
        "schedule": {"rounds": rounds, "clients": facts["clients"]},
        "training": {"local_epochs": 1, "batch_size": facts["batch_size"], "lr": 0.01},
        "evaluate": {"every": 0, "views": ["global"], "pictures": 0},
    }


def _walls(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [record["seconds"]["wall"] for record in records[2:]]


def _loops(config: Path, data: Path) -> float:
    """Return the seconds of one round's steps: one process per core, the slowest counts."""
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.training", "--loop", str(config), str(data)]
    processes = [
        subprocess.Popen([*command, f"{i}/{cores}"], stdout=subprocess.PIPE, text=True)
        for i in range(cores)
    ]
    return max(float(json.loads(process.communicate()[0])) for process in processes)


def _plain_loop(config: Path, data: Path, share: str) -> float:
    """Train this process's share of the clients, round by round; return the median seconds."""
    import tomllib

    from fedcli.data.client_data import ClientData
    from fedcli.data.stream import TaskStream

    experiment = experiment_of(tomllib.loads(config.read_text()))
    first, of = map(int, share.split("/"))
    sets = []
    for client in range(first, experiment.schedule.clients or 1, of):
        stream = TaskStream(ClientData(data / str(client)))
        stream.open(0)
        sets.append(stream.train(0))
    problem = Problem(tuple(sets[0][0].shape[1:]), 10)
    net = Run(experiment, problem).make_net()
    before = weights_of(net)
    return statistics.median(_epoch(net, before, sets, experiment.training) for _ in range(5))


def _epoch(
    net: SplitNet, before: Mapping[str, Tensor], sets: Sequence[tuple[Tensor, Tensor]], how: Any
) -> float:
    begun = time.perf_counter()
    for x, y in sets:
        load_weights(net, before)
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=how.lr, fused=True)
        for index in torch.randperm(len(y)).split(how.batch_size):
            loss = cross_entropy(net(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return time.perf_counter() - begun


# --- steps ----------------------------------------------------------------------------------------


def _step_row(name: str) -> dict[str, Any]:
    """Compare the plain layout, channels last, and channels last with fused optimiser steps."""
    shape, batch = NETS[name]
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    fast = make_net(name, num_classes=10, input_shape=shape)
    net = copy.deepcopy(fast)
    plain = nn.Sequential(net.base, net.head)  # without the features' memory format
    steps = {
        "plain": _step(plain, x, y, fused=False),
        "last": _step(fast, x, y, fused=False),
        "fused": _step(copy.deepcopy(fast), x, y, fused=True),
        "forward": torch.no_grad()(lambda: plain(x)),
        "forward_last": torch.no_grad()(lambda: fast(x)),
    }
    took = _alternating(steps, 25)
    return {
        "net": name,
        "batch": batch,
        "plain_ms": 1e3 * took["plain"],
        "channels_last": took["last"] / took["plain"],
        "and_fused": took["fused"] / took["plain"],
        "forward": took["forward_last"] / took["forward"],
    }


def _step(net: nn.Module, x: Tensor, y: Tensor, *, fused: bool) -> Callable[[], object]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=fused)

    def step() -> None:
        loss = cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _stacked_row(clients: int) -> dict[str, Any]:
    """Compare clients that train in turn with ``torch.func`` over their stacked parameters."""
    nets = [make_net("digits-cnn", num_classes=10, input_shape=(1, 8, 8)) for _ in range(clients)]
    x, y = torch.randn(clients, 16, 1, 8, 8), torch.randint(10, (clients, 16))
    in_turn = [_step(net, x[i], y[i], fused=True) for i, net in enumerate(nets)]
    plain = [nn.Sequential(net.base, net.head) for net in nets]  # vmap sets the memory format
    parameters, buffers = torch.func.stack_module_state(plain)  # type: ignore[arg-type]
    base = copy.deepcopy(plain[0]).to("meta")

    def loss_of(p: Any, b: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(base, (p, b), (x,)), y)

    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.01, momentum=0.9, fused=True)

    def together() -> None:
        losses = torch.vmap(loss_of, randomness="error")(parameters, buffers, x, y)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()

    took = _alternating({"turn": lambda: [step() for step in in_turn], "together": together}, 15)
    return {
        "clients": clients,
        "in_turn_ms": 1e3 * took["turn"],
        "stacked": took["together"] / took["turn"],
    }


def _alternating(work: Mapping[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Return the median seconds of each, taken in turn."""
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(times + 2):
        for name, function in work.items():
            begun = time.perf_counter()
            function()
            took[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds[2:]) for name, seconds in took.items()}


if __name__ == "__main__":
    main()
