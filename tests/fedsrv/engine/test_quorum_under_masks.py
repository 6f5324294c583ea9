"""How many answers a phase of a secure sum needs: no fewer than a round without masks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedmodels.config.privacy import SecureSum
from fedmodels.errors import TooFewClients
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Answers, Trip
from fedsrv.parts.secure_rounds import SecureRound, SecureRounds
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage, silent


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


@pytest.mark.parametrize(("fewest", "summed"), [(0, [3, 5]), (3, [3, 5]), (4, [5])])
def test_no_sum_of_fewer_than_whose_noise_is_counted_on_is_made(fewest, summed):
    """Two groups of five, opened by three each: of one of them three uploads come."""
    groups = [
        SimpleNamespace(
            threshold=3, shared=dict.fromkeys(clients, ""), keys=dict.fromkeys(clients, ""),
            to_train=lambda client: rpc.SecureSum(),
        )
        for clients in (range(5), range(5, 10))
    ]  # fmt: skip
    came = {c: Answer(Bundle(), rpc.Report()) for c in (0, 1, 2, *range(5, 10))}
    secure = SimpleNamespace(
        spec=BundleSpec(), declared=lambda upload: upload, integers=lambda _: np.ones(1, np.uint32)
    )
    cohort = SimpleNamespace(send_and_receive=lambda trip: Answers(came, {3: "gone", 4: "gone"}))
    wire = SimpleNamespace(part=lambda kind: secure)
    plan = SimpleNamespace(needed=lambda clients: 8, wire=wire)
    rounds: Any = SecureRounds.__new__(SecureRounds)
    rounds.parts, rounds._fewest = SimpleNamespace(plan=plan, cohort=cohort), fewest
    rounds.rules, rounds._fixed = SecureSum(threshold=0.51, groups=2), None
    found: Any = SecureRound("", groups)  # type: ignore[arg-type]
    rounds._trained(None, Trip({c: rpc.Order() for c in range(10)}, Bundle()), found)
    assert [len(group.counted) for group in found.groups] == summed
    assert [group.total.tolist() for group in found.groups] == [[n] for n in summed]
    assert (0 in found.failed) == (3 not in summed)
