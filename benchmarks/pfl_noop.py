"""Rounds of pfl's simulator whose clients change one number.

    python -m venv PFL && PFL/bin/pip install 'pfl[pytorch]'
    PFL/bin/python benchmarks/pfl_noop.py POPULATION COHORT ROUNDS PARAMETERS

It knows nothing of fedtide, and fedtide nothing of pfl: benchmarks/peer.py starts this file with
the interpreter that it is told. pfl simulates all clients in one process. The file prints one
line, a JSON list of the time at the start and after each round, in s.
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

LEAVES = 20
"""Arrays that the weights are cut into, as those of a small net are."""


class Net(torch.nn.Module):
    """Weights that nothing is computed with; a step changes one of them."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        sizes = [len(part) for part in np.array_split(range(parameters), LEAVES)]
        self.leaves = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def loss(self, x: torch.Tensor, eval: bool = False) -> torch.Tensor:
        return self.bias.sum()

    def metrics(self, x: torch.Tensor) -> dict[str, float]:
        return {}


class Clock(TrainingProcessCallback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ended: list[float] = [time.monotonic()]

    def after_central_iteration(
        self, aggregate_metrics: object, model: object, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ended.append(time.monotonic())
        return False, Metrics()


def main() -> None:
    """Run the simulation, and print when its rounds ended."""
    population, cohort, rounds, parameters = map(int, sys.argv[1:])
    clock, net = Clock(), Net(parameters)
    users, one = [str(number) for number in range(population)], np.zeros((1, 1), np.float32)

    def dataset(user: str) -> Dataset:
        return Dataset(raw_data=(one,), user_id=user)

    def sampled() -> str:
        return random.choice(users)

    data = FederatedDataset(dataset, sampled)
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, rounds + 1, cohort, 0),
        backend=SimulatedBackend(data, data),
        model=model,
        model_train_params=NNTrainHyperParams(1, 1, 1e-3),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    print(json.dumps(clock.ended))


if __name__ == "__main__":
    main()
