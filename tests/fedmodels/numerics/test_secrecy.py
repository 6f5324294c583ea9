"""Noise of privacy: nobody but the client can draw it again, and a crash draws it again."""

import os
import stat

import pytest
import torch

from fedcli.runtime.state import StateDirectory
from fedmodels.errors import ArchiveError
from fedmodels.numerics.secrecy import Secret
from fedmodels.training.loop import train_locally
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.runs import dies, ends_as, killed

NOISY = ["gldp", "fedmlp", "fedproto"]
ONE_ROUND = {"schedule": {"rounds": 1}}
"""One interaction for each of two tasks."""
KEY, OTHER = Secret(b"k" * 32), Secret(b"o" * 32)


def noisy(name, **more):
    return experiment_for((name, {"noise_std": 0.5}), **more)


def upload_of(experiment, root, secret=None):
    """Return what a client of this experiment sends, with a secret or one of its own."""
    ctx = context_of(experiment, root)
    if secret is not None:
        ctx.secret = lambda: secret
    found = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
    return found.upload


def sent(bundle):
    return bundle.prototypes["class"].vectors


# --- what an observer can do ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
def test_the_seed_of_the_run_does_not_give_the_noise_away(name, digits):
    """Two clients that agree in everything an observer knows send different noise."""
    one, other = (sent(upload_of(noisy(name), digits)) for _ in range(2))
    assert one.shape == other.shape
    assert not torch.isclose(one, other).any()


@pytest.mark.parametrize("name", NOISY)
def test_a_secret_gives_the_same_bits_again(name, digits):
    one, again, other = (sent(upload_of(noisy(name), digits, s)) for s in (KEY, KEY, OTHER))
    assert torch.equal(one, again)
    assert not torch.isclose(one, other).any()


@pytest.mark.parametrize("name", NOISY)
def test_without_noise_no_secret_is_asked_for(name, digits):
    ctx = context_of(tiny_experiment(method=name), digits)
    ctx.secret = lambda: pytest.fail("it was asked for")
    experiment = ctx.run.experiment
    train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))


def test_noise_of_other_content_or_purpose_is_other_noise():
    """Else the difference of two uploads would be free of noise."""
    content = torch.tensor([1.0, 2.0])
    one = KEY.normal(content, "3/class/1")
    assert torch.equal(one, KEY.normal(content.clone(), "3/class/1"))
    assert not torch.isclose(one, KEY.normal(content + 1e-6, "3/class/1")).any()
    assert not torch.isclose(one, KEY.normal(content, "4/class/1")).any()


def test_noise_is_normal():
    found = KEY.normal(torch.zeros(200_001), "any")
    assert found.dtype == torch.float32
    assert found.mean().item() == pytest.approx(0, abs=0.01)
    assert found.std().item() == pytest.approx(1, abs=0.01)
    assert (found.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.005)
    pairs = torch.stack([found[:-1], found[1:]])
    assert torch.corrcoef(pairs)[0, 1].item() == pytest.approx(0, abs=0.01)


def test_a_secret_does_not_print_itself():
    assert "kkk" not in repr(KEY)


# --- where it is kept -----------------------------------------------------------------------------


def test_a_secret_is_stored_before_it_is_used(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), sync(handle)))
    first = StateDirectory(tmp_path / "0").secret()
    assert synced
    path = tmp_path / "0" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Secret(path.read_bytes()) == first == StateDirectory(tmp_path / "0").secret()
    assert StateDirectory(tmp_path / "1").secret() != first


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_secret(tmp_path, content):
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ArchiveError, match=r"secret is damaged; delete it to draw another"):
        StateDirectory(tmp_path).secret()


def test_a_secret_that_cannot_be_stored_is_not_used(tmp_path, monkeypatch):
    states = StateDirectory(tmp_path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArchiveError, match=r"cannot write .*secret: No space left on device"):
        states.secret()
    assert not (tmp_path / "secret").exists()


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISY)
def test_a_resumed_run_repeats_its_noise_and_another_run_does_not(name, digits, tmp_path):
    """Interaction 1 is broken off after client 1 sent its upload, which has to be drawn again."""
    experiment = noisy(name, **ONE_ROUND)
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    for client in "012":
        place = tmp_path / "broken" / "clients" / client
        place.mkdir(parents=True)
        kept = tmp_path / "whole" / "clients" / client / "secret"
        (place / "secret").write_bytes(kept.read_bytes())
    at = dies(kind=rpc.ORDER_KIND_TRAIN, interaction=1, client_id="2")
    killed(experiment, digits, tmp_path / "broken", resume=True, before=at)
    ends_as(whole, experiment, digits, tmp_path / "broken")
    if name == NOISY[0]:
        another = run_in_process(experiment, digits, tmp_path / "another")
        assert another["state_sha256"] != whole["state_sha256"]


def test_workers_take_the_secret_of_their_directory(digits, tmp_path):
    cohort = InProcessCohort(noisy("gldp"), digits, tmp_path)
    for client in cohort.workers.clients:
        order = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=str(client))
        ctx = cohort.workers.of(client)._context(order)
        assert ctx.secret() == Secret((tmp_path / str(client) / "secret").read_bytes())


@pytest.mark.parametrize("name", NOISY)
def test_a_run_without_noise_keeps_no_secret(name, digits, whole_run):
    """That its digest is its seed's, the conformance suite checks."""
    out = whole_run(experiment_for((name, {}), **ONE_ROUND), digits).out
    assert (out / "clients" / "0").is_dir()
    assert not list(out.rglob("secret"))
