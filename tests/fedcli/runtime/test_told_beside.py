"""With a floor, what no noise covers is refused before a site joins, and named with its option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.gate.gate import MASKED, Gate
from fedcli.gate.privacy_floor import PrivacyFloor
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedcli.parts.privacy.floor import FloorLedger
from fedcli.parts.privacy.scores import ScoreLedger
from fedcli.parts.privacy.told_beside import check_told
from fedcli.parts.secure_client import SecureClient
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedcli.runtime.worker import Result
from fedcli.runtime.workers import Workers
from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.secure_upload import MASKED as VECTOR
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
FLOOR = "level=client,epsilon=2000,delta=1e-3"
NOISY = {
    "level": "client", "where": "clients", "noise_multiplier": 4.0, "delta": 1e-3,
    "prototype_clip": 1.0, "histogram_clip": 1.0,
    "allow": ["announced", "examples", "loss"],
}  # fmt: skip
BARE = {
    "fedpac": "scalars/variance",
    "pfedgrp": "generators",
    "fedcil": "weights/generator",
    "ifca": "weights/model0",
    "feddrift": "weights/correct",
    "feddrift-eager": "weights/examples",
    "glfc": "weights/grads",
}
"""What no noise covers of the uploads of each method that has such keys."""
PROBLEM = Problem((1, 8, 8), 10)


def run_of(method: str, **more: Any) -> Any:
    return tiny_experiment(
        method=method, privacy=NOISY, **{"evaluate": {"views": []}, **more}
    )  # fmt: skip


@pytest.mark.parametrize("method", BARE)
def test_a_method_whose_uploads_no_noise_covers_is_refused_by_its_keys(method: str) -> None:
    rules, experiment = Rules.of(require_privacy=FLOOR), run_of(method)
    with pytest.raises(ConfigError, match="--require-privacy: no noise covers") as caught:
        check_told(rules, experiment, PROBLEM)
    line = str(caught.value)
    assert "\n" not in line
    words = line.split()
    named = [words[at + 1] for at, word in enumerate(words) if word == "--tell"]
    assert BARE[method] in named
    for tell in (named, ["bare"]):
        check_told(Rules.of(require_privacy=FLOOR, tell=tell), experiment, PROBLEM)


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedala", "gldp"])
def test_a_method_whose_uploads_noise_covers_is_taken(method: str) -> None:
    check_told(Rules.of(require_privacy=FLOOR), run_of(method), PROBLEM)


@pytest.mark.parametrize(("scores", "refused"), [(None, True), ("none", True), (5, False)])
def test_a_run_that_scores_is_refused_unless_scores_are_allowed(
    scores: str | int | None, refused: bool
) -> None:
    scoring = run_of("fedavg", evaluate={"views": ["global"]})
    rules = Rules.of(require_privacy=FLOOR, scores=scores)
    if refused:
        with pytest.raises(ConfigError, match="--scores N allows"):
            rules.joined(scoring, "run", [0])
    else:
        rules.joined(scoring, "run", [0])
        check_told(rules, scoring, PROBLEM)


def test_nothing_but_a_question_has_been_sent_when_a_run_is_refused(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, experiment = list[str](), run_of("pfedgrp").to_dict()
    answer = rpc.PrepareResponse(run_id="0" * 32, experiment=table_of(experiment))

    def unary(link: Link, name: str, reply: Any) -> Any:
        return lambda request: asked.append(name) or answer

    monkeypatch.setattr(Link, "_unary", unary)
    with pytest.raises(ConfigError, match="--tell generators would allow it"):
        host_of([0], "127.0.0.1:1", digits, tmp_path / "states", torch.device("cpu"),
                rules=Rules.of(require_privacy=FLOOR))  # fmt: skip
    assert {*asked} == {"Prepare"}


@pytest.mark.parametrize("method", ["fedbabu", "per-fedavg", "flash"])
def test_examples_are_not_hidden_by_a_method_that_looks_at_them_for_a_score(
    method: str, digits: Path, tmp_path: Path
) -> None:
    """A coordinator that orders nothing but scores has the method fit the model on examples."""
    table = {**NOISY, "level": "example", "where": "server"}
    experiment = tiny_experiment(method=method, privacy=table)
    floor = FLOOR.replace("client", "example")
    with pytest.raises(ConfigError, match=rf"method '{method}'"):
        check_told(Rules.of(require_privacy=floor, scores=5), experiment, PROBLEM)
    workers = Workers([0], digits, tmp_path / "states", torch.device("cpu"))
    with pytest.raises(ConfigError, match=rf"method '{method}'"):
        workers.begin(experiment)


def test_a_site_stays_out_of_a_run_that_is_another_one_once_it_has_joined(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it looked at is the first one: rules, columns and keys of uploads."""
    other = run_of("fedavg", training={"lr": 0.2})
    answers = {
        "Prepare": rpc.PrepareResponse(
            run_id="0" * 32, experiment=table_of(run_of("fedavg").to_dict())
        ),
        "Join": rpc.JoinResponse(
            run_id="0" * 32, beat_every_s=60, experiment=table_of(other.to_dict())
        ),
    }

    def unary(link: Link, name: str, reply: Any) -> Any:
        return lambda request, **rest: answers.get(name)

    monkeypatch.setattr(Link, "_unary", unary)
    host = host_of([0], "127.0.0.1:1", digits, tmp_path / "states", torch.device("cpu"),
                   rules=Rules.of(require_privacy=FLOOR))  # fmt: skip
    with pytest.raises(ConfigError, match="another config"):
        host.join()


def test_a_site_goes_on_with_a_run_that_was_resumed_with_other_settings(
    digits: Path, tmp_path: Path
) -> None:
    """Its coordinator may come back with what a resume may change, and the site joins again."""
    schedule = {"open": True, "order": "tasks_outer", "rounds": 2}
    before = tiny_experiment(schedule=schedule)
    link, cpu = Link("127.0.0.1:1"), torch.device("cpu")
    host = Host([0], link, digits, tmp_path / "states", cpu, shown=before)
    host._check_shown(tiny_experiment(schedule={**schedule, "rounds": 5}, training={"lr": 0.2}))
    with pytest.raises(ConfigError, match=r"differs in training\.batch_size, so the site"):
        host._check_shown(tiny_experiment(schedule=schedule, training={"batch_size": 3}))


def ordered(
    experiment: Any, digits: Path, states: Path, brought: Any = None, **more: Any
) -> Result:
    workers = Workers([0], digits, states, torch.device("cpu"), brought or {})
    workers.begin(experiment)
    worker = workers.of(0)
    facts = {"kind": rpc.ORDER_KIND_TRAIN, "base": -1, "committed": -1, "durable": -1, **more}
    order = rpc.Order(client_id="0", **facts)
    sent = worker.run.initial_weights
    names = [key.removeprefix("weights/") for key in worker.set_up.payload_spec["common"].required]
    found = worker.execute(order, Bundle(weights={name: sent[name] for name in names}))
    assert found is not None
    return found


def trained(experiment: Any, digits: Path, states: Path) -> Result:
    found = ordered(experiment, digits, states)
    assert found.failure == ""
    return found


SCORED = [("fedavg", "after_local", False), ("fedavg", "global", True),
          ("fedper", "after_downlink", False), ("fedbabu", "global", False)]  # fmt: skip


@pytest.mark.parametrize("kind", [rpc.ORDER_KIND_TRAIN, rpc.ORDER_KIND_EVALUATE])
@pytest.mark.parametrize(("method", "view", "is_scored"), SCORED)
def test_a_model_that_was_trained_without_noise_is_not_scored(
    method: str, view: str, is_scored: bool, kind: Any, digits: Path, tmp_path: Path
) -> None:
    """Scores of it tell of training rows, and no ledger would be charged for them."""
    ledger = tmp_path / "site.db"
    floor = PrivacyFloor.of(FLOOR)
    brought = {"floor": FloorLedger(floor, ledger), "scores": ScoreLedger(9, ledger)}
    run = run_of(method)
    done = ordered(
        run, digits, tmp_path / "a", brought, kind=kind, views=[view], tasks_seen=1
    )  # fmt: skip
    assert bool(done.report.counts) == (is_scored and kind == rpc.ORDER_KIND_EVALUATE)
    assert (done.reason == rpc.FAILURE_REASON_REFUSED) != is_scored
    assert done.report.num_examples == 0 or is_scored, "nothing was trained"


@pytest.mark.parametrize(("method", "view", "is_scored"), SCORED)
def test_a_run_that_scores_what_was_trained_without_noise_is_refused_before_the_join(
    method: str, view: str, is_scored: bool
) -> None:
    run = run_of(method, evaluate={"views": [view]})
    rules = Rules.of(require_privacy=FLOOR, scores=9, tell=["bare"])
    if is_scored:
        check_told(rules, run, PROBLEM)
    else:
        with pytest.raises(ConfigError, match=rf"the run scores {view} of method '{method}'"):
            check_told(rules, run, PROBLEM)


@pytest.mark.parametrize("level", ["client", "example"])
def test_all_that_leaves_of_a_private_training_is_covered_and_its_loss_does_not(
    level: str, digits: Path, tmp_path: Path
) -> None:
    table = {**NOISY, "level": level, "where": "clients" if level == "client" else "server"}
    run = tiny_experiment(method="fedavg", privacy=table, evaluate={"views": []})
    done = trained(run, digits, tmp_path / "states")
    assert done.report.loss > 0
    assert {*done.upload.by_key()} - {"scalars/num_examples"} <= {*done.covers}
    header = rpc.PushHeader(report=done.report)
    floor = FLOOR.replace("client", level)
    Gate(Rules.of(require_privacy=floor)).pushed(header, done.upload, done.covers)
    assert "loss" in header.report.withheld
    assert header.report.loss == 0.0
    bare = {key: how for key, how in done.covers.items() if "head" not in key}
    with pytest.raises(ConfigError, match=r"no noise covers.*--tell weights/head"):
        Gate(Rules.of(require_privacy=floor)).pushed(header, done.upload, bare)


@pytest.mark.parametrize("noise", [True, False])
def test_what_is_under_masks_needs_noise_of_its_own(
    noise: bool, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate refuses it, whatever was looked at when the client joined."""
    table = {**NOISY, "where": "clients"} if noise else {}
    run = tiny_experiment(
        method="fedavg",
        privacy={**table, "secure_sum": {"trust": "coordinator"}},
        evaluate={"views": []},
    )

    def masked(self: Any, order: Any, upload: Bundle, payload: Any, form: Any) -> Bundle:
        return Bundle({VECTOR: torch.zeros(3)}, scalars=upload.scalars)

    monkeypatch.setattr(SecureClient, "masked", masked)
    done = trained(run, digits, tmp_path / "states")
    assert done.covers[f"weights/{VECTOR}"] == MASKED
    assert "weights/head/bias" in done.inside
    held = Gate(Rules.of(require_privacy=FLOOR, min_cohort=3))
    if noise:
        held.pushed(rpc.PushHeader(), done.upload, done.covers, done.inside)
    else:
        with pytest.raises(ConfigError, match=r"has weights/base/.*, which no noise covers"):
            held.pushed(rpc.PushHeader(), done.upload, done.covers, done.inside)


@pytest.mark.parametrize("form", ["float16", "int8", "top-k"])
def test_what_is_packed_is_covered_as_it_was_before(
    form: str, digits: Path, tmp_path: Path
) -> None:
    table = {**NOISY, "level": "example", "where": "server"}
    run = tiny_experiment(
        method="fedavg", privacy=table, evaluate={"views": []}, compression={"up": form}
    )
    done = trained(run, digits, tmp_path / "states")
    floor = Rules.of(require_privacy=FLOOR.replace("client", "example"))
    Gate(floor).pushed(rpc.PushHeader(), done.upload, done.covers)
