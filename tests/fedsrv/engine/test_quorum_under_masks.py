"""How many answers a phase of a secure sum needs: no fewer than a round without masks."""

import pytest

from fedmodels.errors import TooFewClients
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage, silent

pytest.importorskip("Crypto.Protocol.SecretSharing", reason="needs the extra secure-sum")


@pytest.mark.parametrize("kind", [rpc.ORDER_KIND_SHARE, rpc.ORDER_KIND_TRAIN])
def test_masks_that_two_of_three_can_open_do_not_make_two_enough(kind, digits, tmp_path):
    """A threshold of two thirds is two clients, and ``min_clients`` is all three."""

    def lie(client, order, answer):
        return silent(client, order, answer) if order.kind == kind else answer

    experiment = tiny_experiment(
        privacy={"secure_sum": {"trust": "coordinator"}}, schedule={"rounds": 1}
    )
    stage = Stage(experiment, digits, tmp_path / "run", lie)
    with pytest.raises(TooFewClients, match="client 2 failed in round 1"):
        stage.run()
    assert not records_of(stage.out)
