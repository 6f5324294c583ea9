"""Runs with noise that hides clients: what they spend, where they end, and what they refuse."""

import json
import math
from itertools import pairwise

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedmodels.errors import ArchiveError, ConfigError, PayloadError, TooFewClients
from fedmodels.methods import make
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import (
    GaussianReleases,
    epsilon_of,
    releases_of_clients,
    renyi_epsilon_of,
)
from fedmodels.tensors.bundle import Problem
from fedmodels.training.private_uploads import noise_share
from fedmodels.training.run import RunFacts
from fedsrv.parts.exclusions import Exclusions
from fedsrv.progress.run_status import RunStatus
from fedsrv.report.frame import group_runs
from fedsrv.report.story import story
from fedsrv.state.run_record import read_run
from fedsrv.state.store import Store
from fedsrv.state.verification import verified
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.runs import Killed, ends_as, killed

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
BESIDE = ("announced", "examples", "loss", "scores")
NOISE = {
    "level": "client", "noise_multiplier": 5.0, "delta": 1e-2, "clip": 0.1, "prototype_clip": 1.0,
    "allow": BESIDE,
}  # fmt: skip


SMALL_GLDP = {"name": "gldp", "t": 1, "s": 1}
POISSON = {"sampling": "poisson", "per_round": 1}


def private(method="fedavg", schedule=None, server=None, **changes):
    table = {key: value for key, value in {**NOISE, **changes}.items() if value is not None}
    rounds = {"rounds": 3, **(schedule or {})}
    return tiny_experiment(method=method, privacy=table, schedule=rounds, server=server or {})


@pytest.fixture
def fixed_secrets(monkeypatch):
    """Let two runs draw the same noise, to be compared."""
    monkeypatch.setattr(Secret, "fresh", classmethod(lambda cls: cls(b"k" * 32)))


def dying_at(interaction, commit=Store.commit):
    """Return what takes the place of a store's commit, and dies at an interaction."""

    def dying(store, record, state, counts):
        if record["interaction"] == interaction:
            raise Killed
        commit(store, record, state, counts)

    return dying


def test_noise_of_clients_covers_what_all_models_have_in_common(digits, tmp_path):
    """IFCA's clients send heads of different names, which have no noise."""
    own = [f"weights/model{j}/head/{part}" for j in (0, 1) for part in ("bias", "weight")]
    method = {"name": "ifca", "common": ["base/"]}
    experiment = private(method, {"rounds": 1}, where="clients", allow=[*BESIDE, *own])
    run_in_process(experiment, digits, tmp_path)
    records = records_of(tmp_path)
    assert [record["privacy"]["releases"] for record in records] == [1, 2]
    assert all(record["metrics"]["models_trained"] > 0 for record in records)


@pytest.mark.usefixtures("fixed_secrets")
@pytest.mark.parametrize(
    ("method", "where", "schedule"),
    [
        (SMALL_GLDP, "server", {}),
        (SMALL_GLDP, "server", POISSON),  # interaction 3 is without anybody
        ("fedavg", "clients", {}),
        ("fedproto", "clients", {}),
    ],
)
def test_a_kill_between_release_and_commit_repeats_the_bits_and_spends_once(
    digits, tmp_path, monkeypatch, method, where, schedule
):
    experiment, at = private(method, where=where, schedule=schedule), 3
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", dying_at(at))
        killed(experiment, digits, tmp_path / "run")
    lines = (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()
    assert len(lines) >= 1 + at + 1, "the release was written down before the commit"
    resumed = ends_as(whole, experiment, digits, tmp_path / "run")
    assert resumed["privacy"] == whole["privacy"]
    assert resumed["privacy"]["releases"] == len(records_of(tmp_path / "run")) == 6
    assert bool(records_of(tmp_path / "run")[at]["cohort"]) == (not schedule)


def test_what_has_no_noise_would_tell_who_was_drawn(digits, tmp_path):
    statistics = [f"weights/base/norm{n}.running_{what}" for n in "12" for what in ("mean", "var")]
    table = {**NOISE, "allow": [*BESIDE, *statistics]}
    net = {"name": "digits-cnn", "norm": "batch"}
    experiment = tiny_experiment(method="fedavg", privacy=table, net=net, schedule=POISSON)
    with pytest.raises(ConfigError, match=r"hides who takes part, and weights/.* leave out"):
        run_in_process(experiment, digits, tmp_path / "run")


@pytest.mark.parametrize("where", ["server", "clients"])
def test_nothing_of_single_uploads_is_recorded(where, digits, tmp_path):
    """All count alike, and neither size nor direction of an upload is told."""
    run_in_process(private(where=where, schedule={"rounds": 1}), digits, tmp_path / "run")
    for record in records_of(tmp_path / "run"):
        assert "warned" not in record
        for row in record["clients"].values():
            assert row["aggregation_weight"] == pytest.approx(1 / 3)
            assert row.keys() <= {
                "loss", "seconds", "num_examples", "peak_rss_bytes", "views", "aggregation_weight",
            }  # fmt: skip


def test_no_client_is_blamed_for_what_all_uploads_come_to(digits, tmp_path, monkeypatch):
    """One upload stands for all: its fault is not that of the first client."""
    monkeypatch.setattr(FedAvg, "finish", raising(RuntimeError("broken")))
    with pytest.raises(TooFewClients, match=r"no single client's fault: .*broken"):
        run_in_process(private(), digits, tmp_path / "run")


def test_noise_comes_from_no_seed(digits, tmp_path):
    first, second = (run_in_process(private(), digits, tmp_path / name) for name in "ab")
    assert first["state_sha256"] != second["state_sha256"]
    assert first["privacy"] == second["privacy"]


def test_a_run_ends_before_it_spends_more_and_says_what_it_spent(digits, tmp_path):
    out, limit = tmp_path / "run", 1.001 * epsilon_of((GaussianReleases(5.0, 4),), 1e-2)
    experiment = private(epsilon=limit)
    summary = run_in_process(experiment, digits, out, facts=True)
    spent = [record["privacy"]["epsilon"] for record in records_of(out)]
    assert len(spent) == 4, "of 6"
    assert spent == [epsilon_of((GaussianReleases(5.0, n),), 1e-2) for n in (1, 2, 3, 4)]
    assert summary["metrics"]["epsilon"] == summary["privacy"]["epsilon"] == spent[-1]
    assert "a_glo" in summary["metrics"], "the last state is scored"
    assert "the server is trusted" in summary["privacy"]["assumes"]
    (out / "summary.json").write_text(json.dumps(summary))
    said = " ".join(story(group_runs([read_run(out)])))
    coarser = renyi_epsilon_of((GaussianReleases(5.0, 4),), 1e-2)
    assert summary["privacy"]["epsilon_renyi"] == coarser > spent[-1]
    assert f"epsilon {spent[-1]:.3g} ({coarser:.3g} by Rényi accounting) at delta 0.01" in said
    again = run_in_process(experiment, digits, out, resume=True, facts=True)
    assert again["state_sha256"] == summary["state_sha256"], "nothing is left to spend"


@pytest.mark.parametrize("is_other", [False, True])
def test_a_replay_that_makes_another_sum_passes_no_limit(digits, tmp_path, monkeypatch, is_other):
    """Killed after the third release, of three that the limit allows. The same sum is released
    already. Another one, as after a roll-back, would be the fourth: the run ends before it."""
    limit, out = 1.001 * epsilon_of((GaussianReleases(5.0, 3),), 1e-2), tmp_path / "run"
    experiment, log = private(epsilon=limit), tmp_path / "run" / "privacy.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", dying_at(2))
        killed(experiment, digits, out)
    *lines, last = log.read_text().splitlines()
    if is_other:
        digest = json.loads(last)["digest"]
        log.write_text("\n".join([*lines, last.replace(digest, digest[::-1])]) + "\n")
    summary = run_in_process(experiment, digits, out, resume=True, facts=True)
    spent = [record["privacy"]["releases"] for record in records_of(out)]
    assert spent == ([1, 2] if is_other else [1, 2, 3])
    assert len(log.read_text().splitlines()) == 1 + 3, "nothing more was released"
    assert "a_glo" in summary["metrics"]


def test_status_tells_what_is_spent():
    told = {"epsilon": 1.5, "epsilon_renyi": 1.75, "delta": 0.01, "releases": 4}
    said = "privacy spent: epsilon 1.5 (1.75 by Renyi accounting) at delta 0.01, 4 releases"
    assert said in RunStatus(privacy=told).lines()


def test_without_noise_to_speak_of_a_run_learns_as_without_it(digits, tmp_path):
    """A bound beyond every change, and hardly any noise; all clients have equally many examples or
    count alike, so the mean is FedAvg's."""
    plain = tiny_experiment(method={"name": "fedavg", "weighting": "uniform"})
    whole = run_in_process(plain, digits, tmp_path / "plain")["metrics"]
    for where in ("server", "clients"):
        noise = {"clip": 50.0, "noise_multiplier": 1e-9, "where": where}
        found = run_in_process(
            tiny_experiment(method="fedavg", privacy={**NOISE, **noise}), digits, tmp_path / where
        )
        assert found["metrics"]["loss"] == pytest.approx(whole["loss"], rel=0.02)


def test_the_bound_follows_the_quantile(digits, tmp_path):
    """Nearly without noise and with a bound that nobody reaches, all lie within: it shrinks by
    exp(-0.2 (1 - 0.5)) in each interaction."""
    table = {"clip": 1e3, "noise_multiplier": 1e-9, "clip_quantile": 0.5}
    run_in_process(private(**table), digits, tmp_path / "run")
    clips = [record["privacy"]["clip"] for record in records_of(tmp_path / "run")]
    assert clips[0] == 1e3
    assert clips[1] / clips[0] == pytest.approx(0.904837, rel=0.05)
    assert clips[2] / clips[1] == pytest.approx(0.904837, rel=0.05)


def test_an_epsilon_alone_finds_the_noise_that_all_rounds_need():
    """Three rounds of two tasks are six releases."""
    found = private(noise_multiplier=None, epsilon=3.0).privacy.noise
    assert epsilon_of((GaussianReleases(found, 6),), 1e-2) <= 3.0
    assert epsilon_of((GaussianReleases(found, 7),), 1e-2) > 3.0


def test_more_rounds_than_the_noise_was_found_for_are_not_run(digits, tmp_path):
    """The run keeps the noise that it began with, finishes again, and says why it does."""
    found = private(noise_multiplier=None, epsilon=3.0, schedule={"rounds": 1})
    first = run_in_process(found, digits, tmp_path / "run")
    longer = private(
        noise_multiplier=found.privacy.noise, epsilon=3.0, schedule={"rounds": 2}, clip=0.1
    )
    again = run_in_process(longer, digits, tmp_path / "run", resume=True)
    assert len(records_of(tmp_path / "run")) == 2
    assert again["state_sha256"] == first["state_sha256"]


@pytest.mark.parametrize(
    ("experiment", "line"),
    [
        ({"method": "pfedgraph"}, "reads uploads one by one"),
        ({"method": "local"}, "nothing to hide"),
        ({"method": "fedproto", "prototype_clip": None}, "prototype_clip is needed"),
        ({"allow": ()}, "adds no noise to all that leaves.*announced .*allow = "),
        ({"allow": (*BESIDE, "score")}, "which does not leave a client here"),
        ({"method": "apfl"}, r"metrics \(numbers of the method's own"),
        ({"method": "fedproto", "clip_quantile": 0.5}, "the method sends none"),
        ({"epsilon": 0.1}, "one interaction alone costs"),
        (
            {"where": "clients", "schedule": {"sampling": "poisson", "per_round": 2}},
            "cohorts of a known size",
        ),
        ({"server": {"reduce": "median"}}, "does not go with .privacy. level"),
        ({"secure_sum": {"trust": "coordinator"}}, r'with it, where = "clients"'),
        ({"schedule": {"per_round": 2, "over_select": 1}}, "time does not choose"),
        ({"method": "pfedgraph", "where": "clients", "colluders": 2}, "each has all of the noise"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_line(digits, tmp_path, experiment, line):
    with pytest.raises(ConfigError, match=line) as caught:
        run_in_process(private(**experiment), digits, tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"delta": None}, "give delta"),
        ({"noise_multiplier": None}, "give noise_multiplier, or the epsilon"),
        ({"level": None}, 'does nothing without level = "client"'),
        ({"where": "clients", "clip_quantile": 0.5}, "clip_quantile needs"),
        ({"server": {"exclude_after": 2}}, "exclude_after looks at single uploads"),
        ({"level": "example", "where": "clients"}, "clients hide their own examples"),
        ({"colluders": 2}, 'colluders needs where = "clients"'),
        ({"noise_multiplier": None, "epsilon": 1e-9, "delta": 1e-12}, "out of reach"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(changes, line):
    with pytest.raises(ConfigError, match=line):
        private(**changes)


@pytest.mark.usefixtures("fixed_secrets")
def test_a_round_without_anybody_is_noise_alone(digits, tmp_path, monkeypatch):
    """With this secret nobody is drawn in interaction 3 of 6. Noise of 5 x 0.1 on a sum that one
    client is expected for moves each of 650 weights by about 0.5: what says that nobody came is
    neither the state nor what the run has spent."""
    commit, states = Store.commit, []

    def seen(store, record, state, counts):
        states.append(torch.cat([w.flatten() for w in state.common.weights.values()]))
        commit(store, record, state, counts)

    monkeypatch.setattr(Store, "commit", seen)
    run_in_process(private(schedule=POISSON), digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert [len(record["cohort"]) for record in records] == [2, 1, 1, 0, 1, 1]
    assert "loss" not in records[3]["metrics"]
    assert "a_glo" in records[3]["metrics"], "the state is scored as any other"
    assert [record["privacy"]["releases"] for record in records] == [1, 2, 3, 4, 5, 6]
    moved = [float((after - before).std()) for before, after in pairwise(states)]
    assert moved == pytest.approx([0.5] * 5, rel=0.1)


def test_chances_count_where_the_server_adds_the_noise():
    """The server knows whom it drew. So a client that hides from it gains nothing by its chance."""
    spent = []
    for where, method in (("server", "fedavg"), ("clients", "pfedgraph")):
        schedule = {"rounds": 1, **POISSON}
        experiment = private(method, where=where, schedule=schedule, delta=1e-3)
        spent.append(releases_of_clients(experiment, 5.0, 2, reads_each=method != "fedavg"))
    assert spent == [(GaussianReleases(5.0, 2, 1 / 3),), (GaussianReleases(5.0, 2),)]


def test_a_secure_sum_of_uploads_with_noise_is_one_release_of_prototypes_too(
    digits, tmp_path, monkeypatch
):
    """Clients' noise and masks go together: the coordinator learns the sum with noise alone, also
    of prototypes, which a secure sum without noise refuses. Of a class that no client has, noise
    alone may make a prototype, another one in each run."""
    table = {"where": "clients", "secure_sum": True, "noise_multiplier": 1e-6, "clip": 5.0}
    commit, committed = Store.commit, []

    def seen(store, record, state, counts):
        committed.append(state.common)
        commit(store, record, state, counts)

    monkeypatch.setattr(Store, "commit", seen)
    for on in ({"trust": "coordinator"}, False):
        experiment = private(
            SMALL_GLDP, {"rounds": 1}, **{**table, "secure_sum": on}, prototype_clip=20.0
        )
        summary = run_in_process(experiment, digits, tmp_path / str(bool(on)))
        assert summary["privacy"]["releases"] == 2
    masked, plain = committed[0], committed[2]
    for name, weight in plain.weights.items():
        torch.testing.assert_close(masked.weights[name], weight, atol=1e-3, rtol=0)
    clients = [ClientData(digits / str(client)) for client in range(3)]
    held = {k for c in clients for k, n in enumerate(c.counts(0, "train")) if n}
    rows, expected = (
        dict(zip(found.labels.tolist(), found.vectors, strict=True))
        for found in (masked.prototypes["class"], plain.prototypes["class"])
    )
    assert held <= rows.keys() & expected.keys()
    for label in held:
        torch.testing.assert_close(rows[label], expected[label], atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("tables", "part"),
    [
        ({}, 4 / 8),  # two groups of four
        ({"server": {"min_clients": 7}}, 3 / 7),  # four and three, or three and four
        ({"groups": 1}, 1.0),
        ({"groups": 1, "colluders": 1}, 7 / 8),  # a member takes its own noise off
        ({"colluders": 2}, 2 / 8),
        ({"colluders": 9}, 1 / 8),  # all others: the client's own is left
    ],
)
def test_a_group_of_a_secure_sum_has_its_part_of_the_noise(tables, part):
    """The server opens each group's sum: epsilon is that of z times the root of this part."""
    keys = {"groups": 2, "colluders": 0, "server": None, **tables}
    experiment = private(
        where="clients", schedule={"clients": 8}, server=keys["server"],
        secure_sum={"groups": keys["groups"]}, colluders=keys["colluders"],
    )  # fmt: skip
    assert releases_of_clients(experiment, 5.0, 3) == (GaussianReleases(5.0 * part**0.5, 3),)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"secure_sum": {"groups": 2}, "server": {"min_clients": 1}}, "1 of 2 groups"),
        ({"secure_sum": {"clip": 1.0}}, "would scale an upload down with the noise"),
    ],
)
def test_a_secure_sum_whose_noise_would_not_add_up_is_refused(table, line):
    with pytest.raises(ConfigError, match=line):
        private(where="clients", schedule={"clients": 8}, **table)


def test_one_training_is_no_sum_over_two_sets_of_clients(digits, tmp_path, monkeypatch):
    """The clients train from the same, with the same noise: the two sums would differ by the
    upload of client 2 and its share of the noise alone."""
    experiment = private(where="clients", server={"min_clients": 2})
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", raising(Killed))
        killed(experiment, digits, tmp_path / "run")
    line = r"a sum over clients 0, 1, 2, and .* clients 0, 1 came"
    with pytest.raises(TooFewClients, match=line):
        run_in_process(experiment, digits, tmp_path / "run", resume=True, without=[2])


def raising(error):
    def fails(*_):
        raise error

    return fails


def test_clients_whose_noise_is_needed_stay(digits, tmp_path, monkeypatch):
    """The noise of three adds up, and no operator takes one of them away; where one is gone
    nevertheless, the run ends before a sum of two."""
    made = []
    init = Exclusions.__init__
    monkeypatch.setattr(
        Exclusions, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1]
    )

    def before(order):
        if order.interaction == 1:
            made[-1].ask([2])

    experiment = private(where="clients")
    with pytest.raises(PayloadError, match="2 of 3 clients would be left, and the run needs 3"):
        run_in_process(experiment, digits, tmp_path / "asked", before=before)
    monkeypatch.setattr(Exclusions, "_check_left", lambda *_: None)
    with pytest.raises(TooFewClients, match="has 2 clients, and their noise adds up from 3 on"):
        run_in_process(experiment, digits, tmp_path / "gone", before=before)


def test_who_takes_part_comes_from_the_secret(digits, tmp_path, monkeypatch):
    """With a chance of 2 in 3 each, these two secrets draw other cohorts."""
    cohorts = []
    for number in (1, 2):
        key = bytes([number]) * 32
        monkeypatch.setattr(Secret, "fresh", classmethod(lambda cls, key=key: cls(key)))
        schedule = {"sampling": "poisson", "per_round": 2, "rounds": 1}
        run_in_process(private(schedule=schedule), digits, tmp_path / str(number))
        cohorts.append([record["cohort"] for record in records_of(tmp_path / str(number))])
    assert cohorts[0] != cohorts[1]


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_a_member_that_takes_its_noise_off_a_sum_is_charged_for(method):
    """Three clients add their noise. A member subtracts its own: what the other two sent has a
    deviation of sqrt(2/3) of that of the whole sum, and epsilon counts on no more."""
    experiment = private(method, where="clients")
    run = RunFacts(experiment, Problem((1, 8, 8), 10))
    share = noise_share(make(method), run)
    (charged,) = releases_of_clients(experiment, 5.0, 20)
    assert charged.noise == pytest.approx(5.0 * share * math.sqrt(2))
    assert charged.noise == pytest.approx(5.0 * math.sqrt(2 / 3))
    (each,) = releases_of_clients(private("pfedgraph", where="clients"), 5.0, 20, reads_each=True)
    assert each.noise == 5.0, "each upload has all of it"


def test_an_epsilon_alone_finds_the_noise_that_hides_from_a_member():
    """Of three clients' noise a member sees two thirds: the whole is larger by sqrt(3/2)."""
    found = [
        private(where="clients", noise_multiplier=None, epsilon=3.0, colluders=t).privacy.noise
        for t in (0, 1)
    ]
    assert found[1] / found[0] == pytest.approx(math.sqrt(3 / 2), rel=1e-3)


# --- the log of releases is stated ----------------------------------------------------------------


@pytest.mark.parametrize("where", ["server", "clients"])
def test_an_edited_log_of_releases_is_told_and_refused(digits, tmp_path, where):
    """Whoever removes a line would spend less, and whoever edits one gets other noise."""
    run, experiment = tmp_path / "run", private("fedavg", where=where)
    run_in_process(experiment, digits, run)
    assert verified(run).wrong == []
    log = run / "privacy.jsonl"
    secret, *lines = log.read_text().splitlines(keepends=True)
    other = json.dumps({**json.loads(lines[2]), "digest": "0" * 32}) + "\n"
    secrets = json.dumps({"secret": "00" * 32}) + "\n"
    for changed, line in (
        ([secret, *lines[:2], other, *lines[3:]], "one of its lines 4 to 4"),
        ([secret, *lines[:-1]], f"lacks line {len(lines) + 1}"),
        ([secrets, *lines], "one of its lines 1 to 2"),
        ([secret, lines[1], lines[0], *lines[2:]], "one of its lines 1 to 2"),
    ):
        log.write_text("".join(changed))
        (wrong,) = verified(run).wrong
        assert wrong.startswith("privacy.jsonl ")
        assert line in wrong
        with pytest.raises(ArchiveError, match=r"privacy\.jsonl"):
            Store(run, experiment, resume=True)
    log.unlink()
    assert verified(run).wrong == ["privacy.jsonl is gone; put a copy of it back"]
    log.write_text("".join([secret, *lines, lines[-1]]))  # spent, and never committed: as a kill
    assert verified(run).wrong == []
