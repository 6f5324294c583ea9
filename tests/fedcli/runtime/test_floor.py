"""What a site requires of privacy by itself: how it is written, what it refuses, what it counts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.gate.privacy_floor import PrivacyFloor
from fedcli.parts.privacy.floor import FloorLedger
from fedcli.parts.privacy.ledger_marks import MARKS, LedgerMark
from fedcli.runtime.worker import Result, Worker
from fedcli.runtime.workers import Workers
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.methods.fedavg import FedAvg
from fedmodels.privacy.accounting import GaussianReleases, epsilon_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.private_uploads import noise_of_client
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_private_rounds import BESIDE

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
EXAMPLE = "level=example,epsilon=2,delta=1e-3"
CLIENT = "level=client,epsilon=2,delta=1e-3"
HIDING = {"level": "example", "noise_multiplier": 4.0, "delta": 1e-3, "allow": BESIDE}
NOISY = {**HIDING, "level": "client", "where": "clients"}


def run_of(**privacy: Any) -> Any:
    return tiny_experiment(privacy=privacy or None, training={"batch_size": 64})


def test_a_floor_is_read_as_it_is_written():
    found = PrivacyFloor.of("level=client, epsilon=2,delta=1e-5,clip=1,min-cohort=5,where=server")
    assert found == PrivacyFloor("client", 2.0, 1e-5, 1.0, 5, "server")
    assert PrivacyFloor.of(EXAMPLE) == PrivacyFloor("example", 2.0, 1e-3)
    assert PrivacyFloor.of(f"{CLIENT},colluders=0").colluders == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "'' is none of level, epsilon"),
        ("level=example", "epsilon is missing, as in"),
        (f"{EXAMPLE},epsilon=3", "epsilon is given twice"),
        (f"{EXAMPLE},clipp=3", r"'clipp=3' is none of .* Did you mean 'clip'\?"),
        ("level=row,epsilon=2,delta=1e-3", "level=row is none of example, client"),
        ("level=client,epsilon=-2,delta=1e-3", "epsilon=-2 is not a number above 0"),
        ("level=client,epsilon=nan,delta=1e-3", "epsilon=nan is not a number above 0"),
        ("level=client,epsilon=2,delta=1", "delta=1 is not a number above 0 and below 1"),
        (f"{EXAMPLE},min-cohort=0", "min-cohort=0 is no number of clients"),
        (f"{EXAMPLE},where=server", "where belongs to level=client"),
        (f"{EXAMPLE},colluders=1", "colluders belongs to level=client"),
        (f"{CLIENT},colluders=-1", "colluders=-1 is no number of clients"),
    ],
)
def test_a_mistake_is_one_line(text, line):
    with pytest.raises(ConfigError, match=f"^--require-privacy: {line}"):
        PrivacyFloor.of(text)


@pytest.mark.parametrize(
    ("text", "privacy", "line"),
    [
        (EXAMPLE, {}, r"level=example, and the run has no \[privacy\] level"),
        (EXAMPLE, NOISY, r'level=example, and the run has \[privacy\] level = "client"'),
        (f"{EXAMPLE},clip=0.5", HIDING, r"clip=0.5, and the run has \[privacy\] clip = 1"),
        (f"{EXAMPLE},min-cohort=3", HIDING, "min-cohort=3, and somebody sees each upload alone"),
        (CLIENT, {**NOISY, "where": "server"}, "noise at the server, which sees each upload"),
        (f"{CLIENT},min-cohort=4", {**NOISY, "secure_sum": True}, "sees sums of 3 clients"),
        (
            f"{CLIENT},min-cohort=3",
            {**NOISY, "secure_sum": {"trust": "coordinator"}},
            "min-cohort=3, and somebody sees each upload alone",
        ),
        (
            f"{CLIENT},where=server,clip=2",
            {**NOISY, "where": "server", "clip_quantile": 0.5},
            "the run's bound adapts",
        ),
    ],
)
def test_a_run_that_offers_less_is_refused(text, privacy, line):
    with pytest.raises(ConfigError, match=f"^--require-privacy: .*{line}"):
        PrivacyFloor.of(text).check(run_of(**privacy))


def test_runs_that_offer_as_much_are_taken():
    PrivacyFloor.of(f"{EXAMPLE},clip=1").check(run_of(**HIDING))
    PrivacyFloor.of(f"{CLIENT},min-cohort=3").check(run_of(**NOISY, secure_sum=True))
    PrivacyFloor.of(f"{CLIENT},where=server,min-cohort=3").check(
        run_of(**NOISY | {"where": "server"})
    )


def worker_of(digits: Path, states: Path, experiment: Any, text: str, ledger: Path) -> Worker:
    floor = FloorLedger(PrivacyFloor.of(text), ledger, states)
    workers = Workers([0], digits, states, torch.device("cpu"), {"floor": floor})
    workers.begin(experiment)
    return workers.of(0)


def trained(worker: Worker, interaction: int) -> Result:
    order = rpc.Order(
        kind=rpc.ORDER_KIND_TRAIN, client_id="0", interaction=interaction, base=-1, committed=-1,
        durable=-1,
    )  # fmt: skip
    sent = worker.run.initial_weights
    names = [key.removeprefix("weights/") for key in worker.set_up.payload_spec["common"].required]
    found = worker.execute(order, Bundle(weights={name: sent[name] for name in names}))
    assert found is not None
    return found


def charged(ledger: Path) -> int:
    with closing(sqlite3.connect(ledger)) as db:
        return int(db.execute("SELECT count(*) FROM trainings").fetchone()[0])


def test_rows_that_a_site_gave_to_another_run_count_and_a_training_done_again_does_not(
    digits, tmp_path
):
    """Batches of 64 are all rows, so a training is one step with a rate of 1."""
    ledger, one = tmp_path / "site.db", epsilon_of((GaussianReleases(4.0, 2),), 1e-3)
    text = f"level=example,epsilon={1.001 * one},delta=1e-3"
    first = worker_of(digits, tmp_path / "a", run_of(**HIDING), text, ledger)
    assert trained(first, 0).failure == ""
    assert charged(ledger) == 1
    again = worker_of(digits, tmp_path / "a", run_of(**HIDING), text, ledger)  # it was killed
    assert trained(again, 0).failure == ""
    assert charged(ledger) == 1
    other = worker_of(digits, tmp_path / "b", run_of(**HIDING), text, ledger)
    assert trained(other, 0).failure == ""
    assert charged(ledger) == 2
    refused = trained(other, 1)
    assert refused.reason == rpc.FAILURE_REASON_DECLINED
    assert refused.failure.endswith("over all its runs")
    assert charged(ledger) == 2


def test_a_client_counts_its_own_part_of_the_noise_where_nobody_sums_under_masks(digits, tmp_path):
    """Each of three adds 4 / sqrt(3) of the noise, and the coordinator sees each upload."""
    ledger, alone = tmp_path / "site.db", GaussianReleases(4.0 / 3**0.5)
    text = f"level=client,epsilon={1.001 * epsilon_of((alone,), 1e-3)},delta=1e-3"
    worker = worker_of(digits, tmp_path / "a", run_of(**NOISY), text, ledger)
    assert trained(worker, 0).failure == ""
    again = worker_of(digits, tmp_path / "a", run_of(**NOISY), text, ledger)
    assert trained(again, 0).failure == ""
    assert trained(again, 1).reason == rpc.FAILURE_REASON_DECLINED
    assert charged(ledger) == 1


SIGNED = {"secure_sum": True}
TRUSTING = {"secure_sum": {"trust": "coordinator"}}


@pytest.mark.parametrize(
    ("masks", "of_site", "counted"),
    [
        (SIGNED, None, 1),  # all others may collude
        (SIGNED, 1, 2),
        (SIGNED, 0, 3),
        (SIGNED, 9, 1),
        (TRUSTING, 0, 1),  # the coordinator can read each upload
        ({}, 0, 1),
    ],
)
@pytest.mark.parametrize("of_coordinator", [0, 1, 2])
def test_whose_noise_counts_is_the_word_of_the_site(masks, of_site, counted, of_coordinator):
    """Three clients add 4 / sqrt(3) each; a sum under masks has that of all who do not collude."""
    experiment = run_of(**NOISY, **masks, colluders=of_coordinator)
    run = RunFacts(experiment, Problem((1, 8, 8), 10))
    found = noise_of_client(FedAvg(), run, of_site)
    assert found == pytest.approx(4 * (counted / 3) ** 0.5)


@pytest.mark.parametrize(("level", "privacy"), [(EXAMPLE, HIDING), (CLIENT, NOISY)])
def test_a_training_that_fails_is_charged_as_its_failure_tells_of_examples(
    level, privacy, digits, tmp_path
):
    """A coordinator asks by weights of its own whether numbers overflow: an answer each time."""
    ledger = tmp_path / "site.db"
    text = level.replace("epsilon=2", "epsilon=4")
    worker = worker_of(digits, tmp_path / "a", run_of(**privacy), text, ledger)
    names = [k.removeprefix("weights/") for k in worker.set_up.payload_spec["common"].required]

    def asked(scale: float) -> Result:
        sent = {name: worker.run.initial_weights[name] * scale for name in names}
        order = rpc.Order(
            kind=rpc.ORDER_KIND_TRAIN, client_id="0", base=-1, committed=-1, durable=-1
        )
        found = worker.execute(order, Bundle(sent))
        assert found is not None
        return found

    assert asked(1e36).reason == rpc.FAILURE_REASON_TRAINING
    assert charged(ledger) == 1
    assert asked(1e36).reason == rpc.FAILURE_REASON_TRAINING
    assert charged(ledger) == 1, "the same question has the same answer"
    reasons = [asked(1e36 + n * 1e34).reason for n in range(1, 60)]
    assert reasons[-1] == rpc.FAILURE_REASON_DECLINED
    assert charged(ledger) < 40


@pytest.mark.parametrize(("level", "privacy"), [(EXAMPLE, HIDING), (CLIENT, NOISY)])
def test_nobody_trains_for_a_score_where_a_site_counts(level, privacy, digits, tmp_path):
    """It would not be charged, and whether it fails tells of examples."""
    worker = worker_of(digits, tmp_path / "a", run_of(**privacy), level, tmp_path / "site.db")
    order = rpc.Order(
        kind=rpc.ORDER_KIND_EVALUATE, client_id="0", base=-1, committed=-1, durable=-1,
        views=["after_local"], tasks_seen=1,
    )  # fmt: skip
    sent = worker.run.initial_weights
    names = [k.removeprefix("weights/") for k in worker.set_up.payload_spec["common"].required]
    found = worker.execute(order, Bundle({name: sent[name] for name in names}))
    assert found is not None
    assert found.reason == rpc.FAILURE_REASON_REFUSED
    assert not found.report.counts


# --- a ledger that was deleted or copied back -----------------------------------------------------


@pytest.mark.parametrize("change", ["deleted", "copied back"])
@pytest.mark.parametrize("level", ["client", "example"])
def test_a_ledger_that_lacks_rows_is_refused(digits, tmp_path, level, change):
    """At the join, in one line that says what to do; and so by one that trains all the same."""
    ledger, privacy = tmp_path / "site.db", {"client": NOISY, "example": HIDING}[level]
    text = f"level={level},epsilon=99,delta=1e-3"
    first = worker_of(digits, tmp_path / "a", run_of(**privacy), text, ledger)
    assert trained(first, 0).failure == ""
    older = ledger.read_bytes()
    assert trained(first, 1).failure == ""
    assert charged(ledger) == 2
    ledger.unlink() if change == "deleted" else ledger.write_bytes(older)
    held = 0 if change == "deleted" else 1
    again = worker_of(digits, tmp_path / "a", run_of(**privacy), text, ledger)
    line = (
        rf"site\.db holds {held} rows, and held 2 by .*ledgers\.json: .* put the newest copy back"
    )
    with pytest.raises(ArchiveError, match=line) as refused:
        again.brought["floor"].joined(run_of(**privacy), "run", [0])
    assert "\n" not in str(refused.value)
    assert trained(again, 2).reason == rpc.FAILURE_REASON_STORAGE
    assert charged(ledger) == held
    (tmp_path / "a" / "0" / MARKS).unlink()  # its owner takes that
    assert trained(again, 2).failure == ""


def test_a_ledger_with_other_rows_is_refused(digits, tmp_path):
    ledger, text = tmp_path / "site.db", "level=client,epsilon=99,delta=1e-3"
    assert (
        trained(worker_of(digits, tmp_path / "a", run_of(**NOISY), text, ledger), 0).failure == ""
    )
    with closing(sqlite3.connect(ledger)) as db:
        db.execute("UPDATE trainings SET releases = '[[40.0, 1, 1.0]]'")
        db.commit()
    again = worker_of(digits, tmp_path / "a", run_of(**NOISY), text, ledger)
    with pytest.raises(ArchiveError, match="holds other rows"):
        again.brought["floor"].joined(run_of(**NOISY), "run", [0])


def test_a_kill_between_the_ledger_and_its_mark_goes_on(digits, tmp_path, monkeypatch):
    """And another run of the site may have added rows."""
    ledger, text = tmp_path / "site.db", "level=client,epsilon=99,delta=1e-3"

    class Killed(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Killed

    for interaction in range(2):  # the first mark, and a later one
        worker = worker_of(digits, tmp_path / "a", run_of(**NOISY), text, ledger)
        with monkeypatch.context() as patched:
            patched.setattr(LedgerMark, "set", dies)
            with pytest.raises(Killed):
                trained(worker, interaction)
        assert charged(ledger) == 2 * interaction + 1
        worker = worker_of(digits, tmp_path / "a", run_of(**NOISY), text, ledger)
        worker.brought["floor"].joined(run_of(**NOISY), "run", [0])
        assert trained(worker, interaction).failure == ""
        assert charged(ledger) == 2 * interaction + 1
        other = worker_of(digits, tmp_path / "b", run_of(**NOISY), text, ledger)
        assert trained(other, interaction).failure == ""
    assert charged(ledger) == 4


def test_a_run_s_own_ledger_that_was_copied_back_is_refused(digits, tmp_path):
    """Without a floor: what the client counts for the run lies beside its state."""

    def worker() -> Worker:
        workers = Workers([0], digits, tmp_path, torch.device("cpu"))
        workers.begin(run_of(**HIDING))
        return workers.of(0)

    first, ledger = worker(), tmp_path / "0" / "privacy.db"
    assert trained(first, 0).failure == ""
    older = ledger.read_bytes()
    assert trained(first, 1).failure == ""
    first.close()
    ledger.write_bytes(older)
    refused = trained(worker(), 2)
    assert refused.reason == rpc.FAILURE_REASON_STORAGE
    assert "holds 1 rows, and held 2 by" in refused.failure
