"""A coordinator that orders one training again and again, each time a little otherwise.

What a site's ledger says is held against what left: against the noise that was really drawn, and
its cost by dp-accounting alone.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcli.gate.privacy_floor import PrivacyFloor
from fedcli.parts.privacy import clients
from fedcli.parts.privacy.floor import FloorLedger
from fedcli.runtime.released import ECHOED, OF_SCORES
from fedcli.runtime.worker import Worker
from fedcli.runtime.workers import Workers
from fedmodels.config.experiment import Experiment
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.ledger import PrivacyLedger
from fedmodels.tensors.bundle import Bundle, state_digest
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.coordinator_pb2 import ClassChange, SecureSum
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_private_rounds import BESIDE

accounting = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
DELTA, CLIP = 1e-3, 50.0
LEVELS = ("client", "example")
ORDER = {"interaction": 0, "base": -1, "committed": -1, "durable": -1}


def run_of(level: str, *, method: str = "fedavg", privacy: Any = None, **tables: Any) -> Experiment:
    where = {"where": "clients", "clip": CLIP} if level == "client" else {}
    hidden = {"level": level, "noise_multiplier": 4.0, "delta": DELTA, "allow": BESIDE, **where}
    tables = {"training": {"batch_size": 64}, **tables}
    return tiny_experiment(method=method, privacy={**hidden, **(privacy or {})}, **tables)


@dataclass
class Coordinator:
    """One that deviates: it restarts a site's process with a config of its own for each order."""

    digits: Path
    states: Path
    ledger: Path
    level: str
    sent: list[str] = field(default_factory=list)
    """Digests of the uploads that it got."""
    floor: str = "epsilon=1e6"

    def worker(self, experiment: Experiment | None = None, data: Path | None = None) -> Worker:
        floor = PrivacyFloor.of(f"level={self.level},{self.floor},delta={DELTA}")
        brought = {"floor": FloorLedger(floor, self.ledger)}
        workers = Workers([0], data or self.digits, self.states, torch.device("cpu"), brought)
        workers.begin(experiment or run_of(self.level))
        self.workers = workers
        return workers.of(0)

    def train(self, worker: Worker, moved: float = 0.0, **order: Any) -> str:
        """Order a training; return why the client refused."""
        asked = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id="0", **{**ORDER, **order})
        weights = {k: w + moved for k, w in worker.run.initial_weights.items()}
        names = [k.removeprefix("weights/") for k in worker.set_up.payload_spec["common"].required]
        found = worker.execute(asked, Bundle(weights={name: weights[name] for name in names}))
        assert found is not None
        if not found.failure:
            self.sent.append(state_digest([("", found.upload)]))
        return found.failure

    @property
    def told(self) -> float:
        """Epsilon by the site's ledger."""
        with closing(PrivacyLedger(self.ledger, self.level)) as ledger:
            return ledger.epsilon(DELTA)

    @property
    def charged(self) -> int:
        with closing(sqlite3.connect(self.ledger)) as db:
            return int(db.execute("SELECT count(*) FROM trainings").fetchone()[0])


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture
def deviating(digits, tmp_path, level):
    return Coordinator(digits, tmp_path / "states", tmp_path / "site.db", level)


@pytest.fixture
def drawn(monkeypatch):
    """All noise that is drawn: its bytes, and the purpose that it was drawn for."""
    found: dict[bytes, str] = {}
    plain = Secret.normal

    def normal(secret, content, purpose):
        noise = plain(secret, content, purpose)
        found[noise.numpy().tobytes()] = purpose
        return noise

    monkeypatch.setattr(Secret, "normal", normal)
    return found


def cost_of(releases: int) -> float:
    """Return what so many Gaussian releases cost: batches are all rows, so nothing is sampled."""
    account = accounting.pld.PLDAccountant()
    return float(account.compose(accounting.GaussianDpEvent(1.0), releases).get_epsilon(DELTA))


def exact(noise: float, releases: int) -> float:
    """Return the same in closed form (Balle and Wang, 2018), by bisection of its delta."""
    mu = math.sqrt(releases) / noise

    def delta(epsilon: float) -> float:
        def phi(x: float) -> float:
            return math.erfc(-x / math.sqrt(2)) / 2

        return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)

    low, high = 0.0, 700.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high


def other_rate(level, n):
    lr = 0.1 * (1 + 1e-7 * n)
    return run_of(level, training={"batch_size": 64, "lr": lr})


def test_a_training_under_other_settings_is_another_release(deviating, level, drawn):
    """The mean of uploads that differ in nothing but their noise has little noise left."""
    for n in range(6):
        assert deviating.train(deviating.worker(other_rate(level, n))) == ""
    assert len({*deviating.sent}) == 6
    noise = 4 / math.sqrt(3) if level == "client" else 4.0  # a third of the variance is its own
    steps = len(drawn) // 6
    assert len(drawn) == 6 * steps
    assert deviating.charged == 6
    assert deviating.told == pytest.approx(exact(noise, len(drawn)), rel=1e-4)


def test_settings_that_an_order_changes_are_another_release(deviating, level, drawn):
    worker = deviating.worker()
    for n in range(3):
        deviating.workers.follow(table_of({"training.lr": 0.2 + 1e-7 * n}))
        worker = deviating.workers.of(0)
        assert deviating.train(worker, settings=table_of({"training.lr": 0.2 + 1e-7 * n})) == ""
    assert len({*deviating.sent}) == 3 == deviating.charged


def test_what_was_spent_under_other_settings_is_a_limit(deviating, level):
    noise = 4 / math.sqrt(3) if level == "client" else 4.0
    deviating.floor = f"epsilon={1.001 * exact(noise, 2)}"
    found = [deviating.train(deviating.worker(other_rate(level, n))) for n in range(3)]
    assert found[:2] == ["", ""]
    assert "over all its runs" in found[2]


def test_the_same_training_again_is_one_release(deviating):
    for _ in range(3):
        assert deviating.train(deviating.worker(), trip=7) == ""
    assert len({*deviating.sent}) == 1 == deviating.charged


def test_noise_of_another_scale_on_one_upload_is_other_noise(digits, tmp_path, monkeypatch):
    """The same noise at two scales would be taken off exactly: 2 (u + z) - (u + 2 z) is u."""
    ways, plain = [], clients.with_own_noise

    def noted(method, run, upload, payload, *more):
        sent = plain(method, run, upload, payload, *more)
        ways.append((upload, sent))
        return sent

    monkeypatch.setattr(clients, "with_own_noise", noted)
    deviating = Coordinator(digits, tmp_path / "states", tmp_path / "site.db", "client")
    for clip in (CLIP, 2 * CLIP):
        assert deviating.train(deviating.worker(run_of("client", privacy={"clip": clip}))) == ""
    (first, one), (second, other) = ways
    assert state_digest([("", first)]) == state_digest([("", second)]), "the same is hidden"
    key = next(iter(one.weights))
    z = [(sent.weights[key] - first.weights[key]).flatten() for sent in (one, other)]
    corr = float(torch.corrcoef(torch.stack(z))[0, 1])
    assert abs(corr) < 6 / math.sqrt(len(z[0]))
    assert deviating.charged == 2


def test_other_bytes_of_one_training_are_another_release(deviating, level, monkeypatch):
    """As on a processor that adds in another order. Nobody is drawn anew for it: its rate is 1."""
    deviating.train(deviating.worker(run_of(level, training={"batch_size": 8})))
    plain, before = FedAvg.uplink, deviating.told

    def otherwise(method, ctx, state, refs):
        found = plain(method, ctx, state, refs)
        return Bundle({k: w + 1e-6 for k, w in found.weights.items()}, scalars=found.scalars)

    monkeypatch.setattr(FedAvg, "uplink", otherwise)
    assert deviating.train(deviating.worker(run_of(level, training={"batch_size": 8}))) == ""
    assert len({*deviating.sent}) == 2 == deviating.charged
    assert deviating.told > before
    with closing(sqlite3.connect(deviating.ledger)) as db:
        rates = [row[0] for row in db.execute("SELECT releases FROM trainings ORDER BY number")]
    assert rates[1].endswith("1.0]]")


def test_data_that_are_normalised_otherwise_are_another_release(deviating, level, digits, tmp_path):
    """A coordinator says how files are cut: with a mean that is moved, inputs move."""
    deviating.train(deviating.worker())
    moved = shutil.copytree(digits, tmp_path / "moved")
    file = moved / "0" / "client.json"
    facts = json.loads(file.read_text())
    facts["mean"] = [m + 1e-3 for m in facts["mean"]]
    file.write_text(json.dumps(facts))
    assert deviating.train(deviating.worker(data=moved)) == ""
    assert len({*deviating.sent}) == 2 == deviating.charged


# --- every field of an order ----------------------------------------------------------------------

OTHERWISE: dict[str, Any] = {
    "kind": None,  # another kind of order
    "client_id": None,  # another client's, whom another worker serves
    "secure_sum": SecureSum(clients=9, most=3.0),
    "settings": table_of({"training.lr": 0.3}),
    "class_changes": [ClassChange(old="0", now="zero")],
    "new_classes": ["eleven"],
    "views": ["global"],
    "set_aside": [1],
    "task_began": 1,
    "base": 0,
    "round": 1,
    "task": 1,
    "interaction": 1,
}
"""Another value of each field, where it is not one more."""


def other(name: str) -> Any:
    if name in OTHERWISE:
        return OTHERWISE[name]
    kind = rpc.Order.DESCRIPTOR.fields_by_name[name]
    assert not kind.message_type, f"{name}: say here what another value is"
    return {kind.CPPTYPE_BOOL: True, kind.CPPTYPE_STRING: "x"}.get(kind.cpp_type, 1)


@pytest.mark.parametrize("name", [f.name for f in rpc.Order.DESCRIPTOR.fields])
@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_a_field_of_an_order_changes_the_release_or_no_byte(deviating, level, name, drawn):
    """A field that is new is part of a release by itself: ``ECHOED`` alone leaves one out."""
    if (value := other(name)) is None:
        return
    experiment = run_of(level, method="fedrep")
    worker = deviating.worker(experiment)
    before = {"round": 1} if name == "task_began" else {}
    assert deviating.train(worker, **before) == ""
    base = deviating.charged
    if name == "settings":
        deviating.workers.follow(value)
        worker = deviating.workers.of(0)
    refused = deviating.train(worker, **{**before, name: value})
    if refused:
        assert deviating.charged == base
    elif len({*deviating.sent}) == 2:
        assert deviating.charged == base + 1
    else:
        assert name in ECHOED.keys() | OF_SCORES.keys()
        assert deviating.charged == base


def test_all_fields_that_are_left_out_are_fields_of_orders():
    known = {one.name for one in rpc.Order.DESCRIPTOR.fields}
    assert ECHOED.keys() | OF_SCORES.keys() <= known
    assert not ECHOED.keys() & OF_SCORES.keys()


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_a_payload_that_moved_is_another_release(deviating, level):
    worker = deviating.worker()
    assert [deviating.train(worker, moved) for moved in (0.0, 1e-6)] == ["", ""]
    assert deviating.charged == 2


def test_the_closed_form_of_this_file_is_dp_accounting_s():
    assert exact(1.0, 5) == pytest.approx(cost_of(5), rel=1e-3)
    assert np.isfinite(exact(0.1, 1))
