"""Real training: what a round takes beside the same steps in plain torch loops on the same cores.

    python -m benchmarks.training [--jobs digits-10 digits-50 fashion-10] [--rounds 6]
    python -m benchmarks.training --steps       # formats, fused steps, bfloat16
    python -m benchmarks.training --alignment   # FedAli's local training beside FedAvg's
    python -m benchmarks.training --replay      # rounds of methods with generators beside FedAvg's
    python -m benchmarks.training --terms       # methods with terms of the weights beside FedAvg's

The job on Fashion-MNIST also runs in bfloat16.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import config_in, in_turn, launching, parser_of, records_of, tell
from fedmodels.facts.resolution import experiment_of
from fedmodels.host.devices import repeat_bits
from fedmodels.host.machine import keep_large_blocks
from fedmodels.methods import make
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ClientContext, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server, reduce
from fedmodels.training.loop import ClientHalf, train_locally
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedpb.codec import merged

DIGITS = {"data": {"name": "digits"}, "net": {"name": "digits-cnn"}, "batch_size": 16}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "digits-10": {**DIGITS, "clients": 10},
    "digits-50": {**DIGITS, "clients": 50},
    "fashion-10": {
        "data": {"name": "fashion-mnist", "max_per_class": 600},
        "net": {"name": "resnet20"},
        "batch_size": 32,
        "clients": 10,
        "bfloat16": True,
    },
}
"""One local epoch a round in each; ``bfloat16``: also so."""
NETS = {
    "digits-cnn": ((1, 28, 28), 16),
    "cnn5": ((1, 28, 28), 32),
    "resnet20": ((1, 28, 28), 64),
    "resnet18": ((3, 32, 32), 32),
    "vit-tiny": ((3, 32, 32), 32),
    "hart": ((128, 6), 32),
}

REPLAYS: Mapping[str, Sequence[str]] = {
    "pfedgrp": ["global"],
    "fedavg-replay": ["global"],
    "pfedgraph-replay": ["after_local"],
    "fedcil": ["global"],
}
"""Methods that train a generator for each class, or one of all (FedCIL), and what is scored."""
TERMS = ("fedprox", "feddyn", "scaffold")
"""Methods whose loss has terms of the weights alone."""
ALIGNED = (
    ("hart", (128, 6), [2048, 1024, 512, 256, 128, 64], 320),
    ("vit-tiny", (3, 32, 32), [128, 64], 160),
)
"""Net, inputs, prototypes of its blocks, examples of the client."""


def main() -> None:
    """Measure what the command line asks for."""
    parser = parser_of("training", __doc__)
    parser.add_argument("--jobs", nargs="+", default=["digits-10"], choices=list(JOBS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", action="store_true", help="single steps in place of rounds")
    parser.add_argument("--alignment", action="store_true", help="FedAli beside FedAvg")
    parser.add_argument("--replay", action="store_true", help="rounds of methods with generators")
    parser.add_argument("--terms", action="store_true", help="FedProx and its kin beside FedAvg")
    parser.add_argument("--methods", nargs="+", default=list(REPLAYS), choices=list(REPLAYS))
    parser.add_argument("--nets", nargs="+", default=list(NETS)[:3], choices=list(NETS))
    parser.add_argument("--loop", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()  # as the commands do
    if options.loop:
        config, data, share = options.loop
        print(json.dumps(_plain_loop(Path(config), Path(data), share)))
    elif options.steps:
        tell("training_step", [_step_row(net) for net in options.nets])
    elif options.replay:
        tell("replay", _replay_rows(options.methods))
    elif options.terms:
        tell("terms", [_terms_row(net) for net in options.nets])
    elif options.alignment:
        tell("alignment", [_aligned_row(*case) for case in ALIGNED])
    else:
        tell("training", [_round_row(job, options.rounds, options.hosts) for job in options.jobs])


def _terms_row(net: str) -> dict[str, Any]:
    """Compare a client's eight steps of FedAvg with those of methods that hold it near weights."""
    shape, batch = NETS[net]
    stream = Examples(8 * batch, shape, torch.Generator().manual_seed(0))

    def epoch(name: str) -> Any:
        facts = {**DIGITS, "net": {"name": net}, "clients": 1, "batch_size": batch}
        tables = experiment_tables(facts, 1) | {"method": {"name": name}}
        method, run = make(name), RunFacts(experiment_of(tables), Problem(shape, 10))
        ctx = ClientContext(run, 0, START, run.make_net().pack(), stream, torch.device("cpu"))
        common, own = broadcast(method, ServerContext(run, START, (0,)), init_server(method, run))
        payload, state = (
            merged({"common": common, "personal": own.get(0, Bundle())}),
            init_client(method, run, 0),
        )
        return lambda: train_locally(method, ctx, payload, state)

    work = {name: epoch(name) for name in ("fedavg", *TERMS)}
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(8):
        for name, train in work.items():
            begun = time.process_time()
            train()
            took[name].append(time.process_time() - begun)
    least = {name: min(seconds[1:]) for name, seconds in took.items()}
    return {"net": net, **{name: least[name] / least["fedavg"] for name in TERMS}}


# --- rounds ---------------------------------------------------------------------------------------


def _round_row(job: str, rounds: int, hosts: int) -> dict[str, Any]:
    facts, ways = JOBS[job], {"round": ""}
    if "bfloat16" in facts:
        ways["bfloat16"] = "training.precision=bfloat16"
    loops, walls = list[float](), {way: list[float]() for way in ways}
    with tempfile.TemporaryDirectory() as place:
        config, data = (
            config_in(Path(place), experiment_tables(facts, rounds)),
            Path(place) / "round0/data",
        )
        for number in range(3):
            for way, setting in ways.items():
                out = Path(place) / f"{way}{number}"
                dealt = ["--data", data] if data.exists() else []
                sets = ["--set", setting] if setting else []
                command = launching(config, out, "--hosts", hosts, *dealt, *sets)
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                walls[way] += walls_of(out)
            loops.append(_loops(config, data))
    plain = statistics.median(loops)
    row: dict[str, Any] = {"job": job, "hosts": hosts, "plain_s": plain}
    for way, seconds in walls.items():
        ours = statistics.median(seconds)
        row |= {f"{way}_s": ours, f"{way}_ratio": ours / plain}
    return row


def _replay_rows(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Compare first rounds of two of ten clients on digits, each of which has ten classes."""
    from fedtide.inprocess import launch_in_process  # a run needs more than a step does

    runs = ("fedavg", 11), ("fedavg", 1), *((method, 1) for method in methods)
    spent: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as place:
        for number in range(4):
            for (method, rounds), seconds in spent.items():
                tables = experiment_tables({**DIGITS, "clients": 10}, rounds)
                tables["method"]["name"], tables["schedule"]["per_round"] = method, 2
                if method != "fedavg":
                    tables["evaluate"]["views"] = REPLAYS[method]
                begun = time.process_time()
                launch_in_process(experiment_of(tables), Path(place) / f"{method}{rounds}-{number}")
                seconds.append(time.process_time() - begun)
    many, one, *others = (statistics.median(seconds[1:]) for seconds in spent.values())
    fedavg = (many - one) / 10
    rows = []
    for method, seconds in zip(methods, others, strict=True):
        took = seconds - one + fedavg
        row = {"method": method, "fedavg_cpu_s": fedavg, "cpu_s": took, "ratio": took / fedavg}
        rows.append(row)
    return rows


def experiment_tables(facts: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    return {
        "data": facts["data"],
        "scenario": {"kind": "iid"},
        "net": facts["net"],
        "method": {"name": "fedavg"},
        "schedule": {"rounds": rounds, "clients": facts["clients"]},
        "training": {"local_epochs": 1, "batch_size": facts["batch_size"], "lr": 0.01},
        "evaluate": {"every": 0, "views": ["global"], "pictures": 0},
    }


def walls_of(out: Path) -> list[float]:
    records = records_of(out)
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

    from fedcli.data.store.client_data import ClientData
    from fedcli.data.store.stream import TaskStream

    experiment = experiment_of(tomllib.loads(config.read_text()))
    first, of = map(int, share.split("/"))
    sets = []
    for client in range(first, experiment.schedule.clients or 1, of):
        stream = TaskStream(ClientData(data / str(client)))
        stream.open(0)
        sets.append(stream.train(0))
    problem = Problem(tuple(sets[0][0].shape[1:]), 10)
    net = RunFacts(experiment, problem).make_net()
    before = weights_of(net)
    return statistics.median(plain_epoch(net, before, sets, experiment.training) for _ in range(5))


def plain_epoch(
    net: SplitNet, before: Mapping[str, Tensor], sets: Sequence[tuple[Tensor, Tensor]], how: Any
) -> float:
    """Train one client after the other for an epoch, as one would by hand; return the seconds."""
    begun = time.perf_counter()
    for x, y in sets:
        load_weights(net, before)
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=how.lr, fused=True)
        for index in torch.randperm(len(y), device=y.device).split(how.batch_size):
            loss = cross_entropy(net(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return time.perf_counter() - begun


# --- steps ----------------------------------------------------------------------------------------


def _step_row(name: str) -> dict[str, Any]:
    """Compare the plain layout, channels last, with fused optimiser steps, and in bfloat16."""
    shape, batch = NETS[name]
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    fast = make_net(name, num_classes=10, input_shape=shape)
    net = copy.deepcopy(fast)
    plain = nn.Sequential(net.base, net.head)  # without the features' memory format
    half = copy.deepcopy(fast)
    half.mixed_precision = True
    steps = {
        "plain": one_step(plain, x, y, fused=False),
        "last": one_step(fast, x, y, fused=False),
        "fused": one_step(copy.deepcopy(fast), x, y, fused=True),
        "bfloat16": one_step(half, x, y, fused=True),
        "forward": torch.no_grad()(lambda: plain(x)),
        "forward_last": torch.no_grad()(lambda: fast(x)),
        "forward_bfloat16": torch.no_grad()(lambda: half(x)),
    }
    took = in_turn(steps, 25, 2)
    return {
        "net": name,
        "batch": batch,
        "plain_ms": 1e3 * took["plain"],
        "channels_last": took["last"] / took["plain"],
        "and_fused": took["fused"] / took["plain"],
        "and_bfloat16": took["bfloat16"] / took["plain"],
        "forward": took["forward_last"] / took["forward"],
        "forward_bfloat16": took["forward_bfloat16"] / took["forward"],
    }


def one_step(net: nn.Module, x: Tensor, y: Tensor, *, fused: bool) -> Callable[[], object]:
    """Return what takes one step of SGD with momentum on a batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=fused)

    def step() -> None:
        loss = cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _run(facts: Mapping[str, Any], shape: tuple[int, ...], how: str = "off", **tables: Any) -> Any:
    """Return the facts of a run of one round, with steps eager (off) or captured (auto)."""
    base = experiment_tables(facts, 1) | tables
    base["training"] |= {"capture": how}
    return RunFacts(experiment_of(base), Problem(shape, 10))


def captures(device: str) -> list[str]:
    """Return what ``[training] capture`` is measured at: steps are captured on a GPU alone."""
    return ["off", "auto"] if device.startswith("cuda") else ["off"]


def loop_row(name: str, device: str, batches: int, times: int = 7) -> dict[str, Any]:
    """Compare a client's epoch by the training loop with one by hand, data on the device."""
    (shape, batch), there = NETS[name], torch.device(device)
    facts = {**DIGITS, "net": {"name": name}, "clients": 1, "batch_size": batch}
    stream = Examples(batches * batch, shape, torch.Generator().manual_seed(0), there)
    run = _run(facts, shape)
    plain = run.make_net().to(there)
    before = {key: tensor.to(there) for key, tensor in run.initial_weights.items()}

    def by_hand() -> None:
        plain_epoch(plain, before, [stream.train(0)], run.experiment.training)

    def by_hand_freely() -> None:
        with as_torch_is(there):
            by_hand()
            wait_for(there)

    ways = {"by_hand": by_hand_freely, "repeatable": by_hand}
    for how, way in zip(captures(device), ("here", "captured"), strict=False):
        made = _run(facts, shape, how)
        half = half_of(made, 0, made.make_net().to(there).pack(), stream)
        ways[way] = partial(train_locally, half.method, half.ctx, half.payload, half.state)
    took = in_turn(ways, times, 2, lambda: wait_for(there))
    row = {"net": name, "batch": batch, "step_ms": 1e3 * took["by_hand"] / batches}
    return row | {f"{way}_ratio": took[way] / took["by_hand"] for way in ways if way != "by_hand"}


def method_row(name: str, net: str, device: str, batches: int, times: int = 7) -> dict[str, Any]:
    """Compare a client's epoch of a method's second round, captured and eager."""
    (shape, batch), there = NETS[net], torch.device(device)
    facts = {**DIGITS, "net": {"name": net}, "clients": 1, "batch_size": batch}
    stream = Examples(batches * batch, shape, torch.Generator().manual_seed(0), there)
    ways = {}
    for how in captures(device):
        run = _run(facts, shape, how, method={"name": name})
        own = run.make_net().to(there).pack()
        ctx = ClientContext(run, 0, START, own, stream, there)
        ways[how] = partial(train_locally, make(name), ctx, *_second(make(name), ctx))
    took = in_turn(ways, times, 2, lambda: wait_for(there))
    row = {"method": name, "net": net, "batch": batch}
    row |= {"eager_ms": 1e3 * took["off"] / batches}
    return row | ({"captured_of_eager": took["auto"] / took["off"]} if "auto" in took else {})


def _second(method: Method, ctx: ClientContext) -> tuple[Bundle, Bundle]:
    """Return what a method's only client trains with in its second round: payload and state."""
    from fedtide.testing.trial import server_context  # more than a step needs

    server = server_context(ctx.run, 0, (0,))
    state, own = init_server(method, ctx.run), init_client(method, ctx.run, 0)
    done = train_locally(method, ctx, _payload(method, server, state), own)
    state, _ = reduce(method, server, state, as_uploads(method, {0: done.upload}))
    return _payload(method, server, state), done.state


def _payload(method: Method, server: ServerContext, state: ServerState) -> Bundle:
    common, personal = broadcast(method, server, state)
    return merged({"common": common, "personal": personal.get(0, Bundle())})


@contextmanager
def as_torch_is(device: torch.device) -> Iterator[None]:
    """Let a GPU compute as torch does unless told: with TF32 in convolutions, bits that vary."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = False, True
    try:
        yield
    finally:
        if device.type == "cuda":
            repeat_bits()


def half_of(run: RunFacts, client: int, net: SplitNet, stream: Examples) -> ClientHalf:
    """Return a client's half of FedAvg, on the device of its data."""
    ctx = ClientContext(run, client, START, net, stream, stream.x.device)
    return ClientHalf(make("fedavg"), ctx, Bundle(weights=run.initial_weights), Bundle())


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was told; a processor has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _aligned_row(
    net: str, shape: tuple[int, ...], prototypes: list[int], examples: int
) -> dict[str, Any]:
    """Compare a client's epoch of FedAvg, of FedAli, and of FedAli that measures its influence."""
    aligned = {"name": net, "alp": True, "prototypes": prototypes, "blocks": len(prototypes)}
    plain = {"name": net, "blocks": len(prototypes)}
    stream = Examples(examples, shape, torch.Generator().manual_seed(0))

    def epoch(name: str, table: Mapping[str, Any], *, influence: bool = False) -> Any:
        facts = {**DIGITS, "net": table, "clients": 1, "batch_size": 32}
        tables = experiment_tables(facts, 1) | {"method": {"name": name}}
        tables["evaluate"] |= {"influence": influence}
        method, run = make(name), RunFacts(experiment_of(tables), Problem(shape, 10))
        ctx = ClientContext(run, 0, START, run.make_net().pack(), stream, torch.device("cpu"))
        payload = method.init_server(run).common
        return lambda: train_locally(method, ctx, payload, Bundle())

    took = in_turn(
        {
            "fedavg": epoch("fedavg", plain),
            "fedali": epoch("fedali", aligned),
            "influence": epoch("fedali", aligned, influence=True),
        },
        5,
        2,
    )
    return {
        "net": net,
        "fedavg_ms": 1e3 * took["fedavg"],
        "fedali": took["fedali"] / took["fedavg"],
        "with_influence": took["influence"] / took["fedavg"],
    }


class Examples:
    """A stream of noise."""

    def __init__(
        self,
        count: int,
        shape: tuple[int, ...],
        draw: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self.x = torch.randn(count, *shape, generator=draw).to(device)
        self.y = torch.randint(10, (count,), generator=draw).to(device)

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    train_up_to = train

    def train_each(self, task: int) -> dict[int, tuple[Tensor, Tensor]]:
        return {task: self.train(task)}

    def limits(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.ones(1)


if __name__ == "__main__":
    main()
