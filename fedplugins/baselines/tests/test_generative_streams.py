"""AF-FCL and FedCIL on the streams of pFedGRP's paper: classes differ by client, and come back."""

import json
import math

import pytest
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.tensors.archive import load
from fedmodels.tensors.roles import part_of
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import SMALL

STREAMS = {
    "replay_gradual": {"parts": 2, "images_per_part": 8},
    "replay_circulating": {"parts": 2, "images_per_part": 8},
    "replay_heterogeneous": {"images_per_part": 8},
}


PAIRS = [("af-fcl", "gradual"), ("af-fcl", "circulating"), ("fedcil", "heterogeneous")]
REST = [("af-fcl", "heterogeneous"), ("fedcil", "gradual"), ("fedcil", "circulating")]


@pytest.mark.parametrize(
    ("name", "kind"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.whole) for pair in REST)]
)
def test_it_runs_on_the_streams(name, kind, tmp_path):
    """Every round is another task: from the second on, each client has a predecessor."""
    stream = f"replay_{kind}"
    made = tiny_experiment(
        data={"name": "digits", "max_test_per_class": 4},
        scenario={"kind": stream, **STREAMS[stream]},
        method={"name": name, **SMALL[name]},
        schedule={"rounds": 1, "clients": 2, "order": "tasks_outer"},
    )
    data, out = tmp_path / "data", tmp_path / "out"
    run_partition(made.data, made.scenario, 2, made.seed, data, Console(quiet=True))
    run_in_process(made, data, out)
    records = records_of(out)
    assert len(records) == len(json.loads((data / "0" / "client.json").read_text())["tasks"])
    for record in records:
        assert all(math.isfinite(value) for value in record["metrics"].values())
        assert "a_glo" in record["metrics"]
        told = {"af-fcl": "credibility", "fedcil": "generator_loss"}[name]
        assert all(told in row for row in record["clients"].values())
        assert ("consolidation_agreement" in record["metrics"]) == (name == "fedcil")
    assert len({record["bytes"]["down"] for record in records}) == 1
    for client in range(2):
        file = max((out / "clients" / str(client)).glob("state-*.safetensors"))
        state = load(file)[0]
        assert part_of(state.weights, "last")
        assert state.scalars["task"] == len(records) - 1
