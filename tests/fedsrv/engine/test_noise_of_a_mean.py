"""The deviation that a mean of noisy uploads is said to have: what stands out of it is kept."""

import pytest

from fedmodels.privacy.contributions import Contributions
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_private_rounds import NOISE

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


@pytest.mark.parametrize("where", ["clients", "server"])
def test_three_clients_have_a_third_of_the_noise_on_their_sum(where, digits, tmp_path, monkeypatch):
    """One part with a bound of 1 at z = 5: the sum's noise has a deviation of 5, wherever it is
    added, and the mean's has 5 / 3."""
    told, upload = [], Contributions.upload
    monkeypatch.setattr(
        Contributions, "upload", lambda self, *at: (told.append(at[2]), upload(self, *at))[1]
    )
    table = {**NOISE, "where": where}
    experiment = tiny_experiment(method="fedproto", privacy=table, schedule={"rounds": 1})
    run_in_process(experiment, digits, tmp_path / "run")
    assert [[*stds.values()] for stds in told] == [[pytest.approx(5 / 3)]] * 2
