"""Rounds of Flower's simulator whose clients send back what they got.

    python -m venv FLOWER && FLOWER/bin/pip install 'flwr[simulation]'
    FLOWER/bin/python benchmarks/flower_noop.py POPULATION COHORT ROUNDS PARAMETERS

It knows nothing of fedtide, and fedtide nothing of Flower: benchmarks/peer.py starts this file with
the interpreter that it is told. It prints one line, a JSON list of the time at the start and after
each round, in s.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

LEAVES = 20
"""Arrays that the weights are cut into, as those of a small net are."""


def main() -> None:
    """Run the simulation, and print when its rounds ended."""
    population, cohort, rounds, parameters = map(int, sys.argv[1:])
    ended: list[float] = [time.monotonic()]
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        counted = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": counted})
        return Message(content=content, reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        def look(round: int, arrays: ArrayRecord) -> MetricRecord:
            if round:
                ended.append(time.monotonic())
            return MetricRecord()

        each = [
            np.zeros(part.size, np.float32) for part in np.array_split(range(parameters), LEAVES)
        ]
        strategy = FedAvg(
            fraction_train=cohort / population,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_evaluate_nodes=0,
            min_available_nodes=population,
        )
        strategy.start(grid, ArrayRecord(each), num_rounds=rounds, evaluate_fn=look)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=population, backend_config=resources)
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
