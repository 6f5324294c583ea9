"""Sums of relays beside the uploads that came whole: the same bounds, and the relay is named."""

from types import SimpleNamespace

import pytest
import torch

from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.differences import SKETCH, Measured
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.relayed_sums import RelayedSum, RelayedSums
from fedsrv.engine.cohort import AllOf, Answer, Answers, Trip
from fedsrv.engine.server_part import WholeCohort


def measured(norm, row=(1.0, 0.0)):
    sketch = torch.zeros(SKETCH)
    sketch[: len(row)] = norm * torch.tensor(row)
    return Measured({"weights": norm}, {"weights": 0.1}, norm, sketch)


def answers(whole, told, moved):
    """Return answers of clients with these norms, of which a relay told some, and moved the sum."""
    held = {**whole, **{c: Measured({"weights": n}, {"weights": 0.1}, n) for c, n in told.items()}}
    found = {c: Answer(Bundle(), rpc.Report(), measured=one) for c, one in held.items()}
    return Answers(found, {}, added=RelayedSums([RelayedSum("0-1", tuple(told), moved)]))


def far_out(results):
    return results.added.far_out(results)


def warnings(results):
    """Return whose uploads stand out, on whom all agree, and which sums stand out."""
    record = {}
    return *results.added.stand_out(results, None, record), record.get("warned_relays", {})


WHOLE = {c: measured(1.0) for c in range(2, 7)}


@pytest.mark.parametrize(("norm", "out"), [(10.0, []), (10.1, [0, 1])])
def test_a_sum_beyond_the_bound_of_an_upload_is_left_out_and_the_relay_is_named(norm, out):
    """Its relay says of its uploads what fits, and the others have moved by 1."""
    found = far_out(answers(WHOLE, {0: 9.0, 1: 9.0}, measured(norm)))
    assert [*found] == out
    for line in found.values():
        assert line == (
            "the sum of its relay 0-1 is far out of its cohort: its weights moved 10.1 times as "
            "far as the median of 6 uploads"
        )


def test_an_upload_that_makes_a_sum_odd_costs_the_others_of_its_relay_nothing():
    """One month that is a thousand times too large had all sites behind a relay left out with it.

    Their rounds failed until the months of all of them were set aside.
    """
    found = far_out(answers(WHOLE, {0: 1000.0, 1: 1.0}, measured(500.0)))
    assert [*found] == [0]
    assert found[0].endswith("as the median of 7 uploads (as its relay 0-1 says)")


class Resending:
    """A cohort behind one relay, as an exchange sees it: what each trip brings, and who is out."""

    experiment = SimpleNamespace(server=SimpleNamespace(min_clients=None))

    def __init__(self, *outs, added=None):
        self.added = added
        self.cohort, self.outs, self.asked, self.gone = self, [*outs], [], []

    def training(self, *given):
        return Trip({c: rpc.Order() for c in range(4)}, Bundle(), {}, None, AllOf(4))

    def send_and_receive(self, trip):
        self.asked.append([*trip.orders])
        found = {c: Answer(Bundle(), rpc.Report()) for c in trip.orders}
        return Answers(found, {}, mean={}, added=self.added)

    def judged(self, at, results):
        return self.outs.pop(0)

    def leave_out(self, ctx, results, out):
        self.gone += out
        for client, why in out.items():
            results.set_aside(client, why)


def trained(parts):
    ctx, plan = SimpleNamespace(cohort=range(4), round=0), SimpleNamespace()
    plan.is_scored, plan.needed_uploads = bool, len
    at = SimpleNamespace(ctx=ctx, plan=plan, step=None)
    return WholeCohort.train(SimpleNamespace(parts=parts), at, None)


def test_what_comes_again_is_judged_again():
    """A relay called one upload odd, and its second sum was taken unseen."""
    parts = Resending({3: "odd"}, {2: "odd now"}, {}, added=RelayedSums(()))
    results = trained(parts)
    assert parts.asked == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
    assert (parts.gone, [*results.by_client]) == ([3, 2], [0, 1])


def test_uploads_are_judged_once_with_and_without_a_relay():
    """Without memory for all uploads their mean comes alone, and the run is the same as with it."""
    parts = Resending({3: "odd"}, {2: "odd now"})
    trained(parts)
    assert parts.asked == [[0, 1, 2, 3], [0, 1, 2]]
    found = answers(WHOLE, {0: 1000.0, 1: 1.0}, measured(1.0))
    assert [*far_out(found)] == [0]
    assert found.added.again().far_out(found) == {}


def test_what_a_relay_says_of_an_upload_is_told_as_its_word():
    (line,) = far_out(answers(WHOLE, {0: 20.0, 1: 1.0}, measured(1.0))).values()
    assert line.endswith("as the median of 7 uploads (as its relay 0-1 says)")


@pytest.mark.parametrize(
    ("moved", "why"),
    [
        (measured(1.0), ""),
        (measured(1.0, (-1.0, 0.0)), "it points against 5 of 5 others"),
        (measured(6.0), "its weights moved 6 times as far as the median of 6 uploads"),
    ],
)
def test_a_sum_that_is_turned_or_large_is_a_warning_of_its_relay(moved, why):
    found = warnings(answers(WHOLE, {0: 60.0, 1: 6.0}, moved))
    assert found == ({}, [], {"0-1": why} if why else {}), "its word warns of no client"


def test_a_relay_that_brings_everything_stands_alone():
    assert far_out(answers({}, {0: 1.0, 1: 1.0}, measured(50.0))) == {}
    assert warnings(answers({}, {0: 1.0, 1: 1.0}, measured(50.0))) == ({}, [], {})
