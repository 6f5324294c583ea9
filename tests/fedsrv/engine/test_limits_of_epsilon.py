"""A run whose limit lies a hundredth below what its next interaction costs ends before it."""

import pytest

from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.training.test_private_steps import NOISE as OF_EXAMPLES
from tests.fedsrv.engine.test_private_rounds import NOISE as OF_CLIENTS

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


@pytest.mark.parametrize("noise", [OF_CLIENTS, OF_EXAMPLES], ids=["client", "example"])
def test_a_limit_holds_to_the_hundredth(noise, digits, tmp_path):
    def spent(name, **limit):
        experiment = tiny_experiment(method="fedavg", privacy={**noise, **limit})
        run_in_process(experiment, digits, tmp_path / name)
        return [record["privacy"]["epsilon"] for record in records_of(tmp_path / name)]

    free = spent("free")
    limit = 0.99 * free[2]
    assert free[1] < limit, "the third interaction costs more than a hundredth"
    assert spent("limited", epsilon=limit) == free[:2]
