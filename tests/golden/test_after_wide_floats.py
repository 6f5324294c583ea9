"""A run after one in float64, in the same process, is the run that it always was."""

from __future__ import annotations

from fedsrv.engine import client_profile
from fedtide.inprocess import run_in_process
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.wide_floats import wide_floats


def test_nothing_of_float64_is_left(digits, tmp_path):
    """FedCIL reads the limits of inputs, which the coordinator keeps by client's description."""
    experiment = experiment_for(("fedcil", {}), schedule={"rounds": 1})
    client_profile._shared.cache_clear()
    with wide_floats():
        wide = run_in_process(experiment, digits, tmp_path / "wide")
    after = run_in_process(experiment, digits, tmp_path / "after")
    client_profile._shared.cache_clear()
    fresh = run_in_process(experiment, digits, tmp_path / "fresh")
    assert after["state_sha256"] == fresh["state_sha256"] != wide["state_sha256"]
