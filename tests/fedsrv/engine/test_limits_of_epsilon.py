"""A run whose limit lies a hundredth below what its next interaction costs ends before it."""

import pytest

from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.training.test_private_steps import NOISE as OF_EXAMPLES
from tests.fedsrv.engine.test_private_rounds import NOISE as OF_CLIENTS

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


def spent(noise, digits, out, **limit):
    """Return epsilon after each interaction of a run, and after what it says that it ends."""
    experiment, events = tiny_experiment(method="fedavg", privacy={**noise, **limit}), []
    run_in_process(experiment, digits, out, hear=events.append)
    lines = [str(event.detail["line"]) for event in events if event.kind == "note"]
    ends = [line.partition(": ")[0] for line in lines if line.startswith("the run ends after")]
    return [record["privacy"]["epsilon"] for record in records_of(out)], ends


@pytest.mark.parametrize("noise", [OF_CLIENTS, OF_EXAMPLES], ids=["client", "example"])
def test_a_limit_holds_to_the_hundredth(noise, digits, tmp_path):
    free, no_end = spent(noise, digits, tmp_path / "free")
    assert no_end == []
    limit = 0.99 * free[2]
    assert free[1] < limit, "the third interaction costs more than a hundredth"
    limited = spent(noise, digits, tmp_path / "limited", epsilon=limit)
    assert limited == (free[:2], ["the run ends after round 1"])
    if noise is OF_CLIENTS:  # both tasks of a round spend of the same
        within = spent(noise, digits, tmp_path / "within a round", epsilon=0.99 * free[1])
        assert within == (free[:1], ["the run ends after interaction 1, within round 1"])
