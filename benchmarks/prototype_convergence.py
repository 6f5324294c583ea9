"""How far FedAli's local prototypes move in each epoch of one client's training: its figure 5.

    python -m benchmarks.prototype_convergence CONFIG [--epochs 200] [--set K=V] [--out F.svg]

With ``--keep`` the distances become the record of a page.

Client 0 of the config trains alone, from the initial weights. A line for each block has the mean
distance of its prototypes to themselves one epoch earlier, each after the first step of its epoch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedcli.data.store.commands import run_partition
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import data_and_scenario
from fedmodels.console.charts import Chart, Spread, document
from fedmodels.facts.config_file import read_experiment
from fedmodels.nets.split import SplitNet
from fedmodels.training.loop import train_locally
from fedtide.testing.trial import context_of, method_of, payload_of

SHOWN = 10
"""Epochs that are printed; the picture has all."""


def main() -> None:
    """Print and draw the distances."""
    parser = parser_of("prototype_convergence", __doc__, "prototype_convergence")
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a picture of the distances")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = [*options.set, f"training.local_epochs={options.epochs}"]
    moved = distances(read_experiment(options.config, sets))
    every = max(1, options.epochs // SHOWN)
    rows = [
        {"epoch": epoch + 1, **{f"block {b + 1}": line[epoch] for b, line in moved.items()}}
        for epoch in range(options.epochs)
        if epoch == 0 or (epoch + 1) % every == 0
    ]
    tell("prototype_convergence", rows)
    caption = "Distance of local prototypes to those of the epoch before"
    if options.keep:
        keep(options.keep, given_as("prototype_convergence"), {caption: rows})
    if options.out:
        lines = {
            f"block {block + 1}": {epoch: Spread(d) for epoch, d in enumerate(line, 1)}
            for block, line in moved.items()
        }
        options.out.write_text(document([Chart(caption, "lines", lines, "epoch", "distance")]))
        print(options.out)


def distances(experiment: Experiment) -> Mapping[int, list[float]]:
    """Return by block how far prototypes moved in each local epoch, on average.

    One epoch more is trained: distances are from an epoch's first step to the next one's.
    """
    more = {"local_epochs": experiment.training.local_epochs + 1}
    training = experiment.training.model_copy(update=more)
    experiment = experiment.model_copy(update={"training": training})
    method = method_of(experiment)
    with tempfile.TemporaryDirectory() as place:
        data, scenario = data_and_scenario(experiment)
        root = Path(place) / "data"
        clients = experiment.schedule.clients
        run_partition(data, scenario, clients, experiment.seed, root, Console(quiet=True))
        ctx = context_of(experiment, root)
        payload, state = payload_of(experiment, ctx)
        found: dict[int, list[float]] = {}
        before: dict[int, Tensor] = {}

        def tick(epoch: int, batch: int, loss: Tensor) -> None:
            """Look at the prototypes after the first step of an epoch."""
            for block, now in enumerate(local_prototypes(ctx.net)) if batch == 0 else ():
                if block in before:
                    away = (now - before[block]).norm(dim=1).mean()
                    found.setdefault(block, []).append(float(away))
                before[block] = now

        ctx.tick = tick
        train_locally(method, ctx, payload, state)
    return found


def local_prototypes(net: SplitNet) -> list[Tensor]:
    """Return a copy of the local prototypes (G, d) of each block, in order."""
    named = dict(net.base.named_buffers()) | dict(net.base.named_parameters())
    return [
        tensor.detach().clone() for name, tensor in named.items()
        if name.endswith("local_prototypes")
    ]  # fmt: skip


if __name__ == "__main__":
    main()
