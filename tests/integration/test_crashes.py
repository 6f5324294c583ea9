"""kill -9 of anybody at any moment, and power loss: the run ends in the bits it would have."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from fedmodels.facts.resolution import experiment_of
from fedsrv.engine.schedule import steps
from tests.integration.conftest import tables
from tests.integration.harness import reached

pytestmark = pytest.mark.loopback

EXPERIMENT = tables("held", schedule={"rounds": 3, "clients": 3, "per_round": 2})
"""Six interactions; cohorts of two, so that somebody always stays behind."""


@pytest.fixture(scope="module")
def trained() -> int:
    """Return a client that trains in interaction 2: the cohorts are the seed's."""
    step = steps(experiment_of(EXPERIMENT), range(3), dict.fromkeys(range(3), 2))[2]
    return step.cohort[0]


def test_a_client_is_killed_during_training(loopback, trained, steer):
    (steer / f"train-{trained}-2").touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    reached(steer / f"train-{trained}-2.reached")
    clients[trained].kill()
    clients[trained] = run.join(str(trained))
    run.finish_as_alone(server, *clients.values())


def test_a_client_is_killed_between_saving_and_pushing(loopback, trained, steer):
    (steer / f"saved-{trained}-2").touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    reached(steer / f"saved-{trained}-2.reached")
    assert (run.out / "clients" / str(trained) / "state-00000002.safetensors").exists()
    clients[trained].kill()
    clients[trained] = run.join(str(trained))
    run.finish_as_alone(server, *clients.values())


def test_a_kill_loses_nothing_that_a_client_owes(loopback, trained, steer):
    """Everybody dies when a client has saved what it did not send, before it sends the rest."""
    has_zstd = find_spec("zstandard") is not None
    table = {"up": "top-k", "share": 0.1, "down": "bfloat16", "zstd": has_zstd}
    experiment = {**EXPERIMENT, "compression": table}
    (steer / f"saved-{trained}-2").touch()
    run = loopback(experiment)
    server = run.serve()
    clients = run.join("0-2")
    reached(steer / f"saved-{trained}-2.reached")
    clients.kill()
    server.kill()
    server, clients = run.serve(), run.join("0-2")
    found = run.finish_as_alone(server, clients)
    assert found["bytes"]["up"] == run.alone["bytes"]["up"]


def test_a_kill_where_clients_have_nets_of_their_own(loopback):
    """Two are behind a relay. Prototypes of one width are all that travels."""
    net = {"name": "digits-cnn", "by_client": [{"name": "mlp", "hidden": [16, 64]}]}
    run = loopback(tables("fedproto", net=net))
    server = run.serve()
    relay = run.relay("0-1")
    behind, alone = run.join("0-1", port=relay.port), run.join("2")
    server.wait_kind("commit", interaction=1)
    server.kill()
    behind.kill()
    server, behind = run.serve(), run.join("0-1", port=relay.port)
    run.finish_as_alone(server, behind, alone)


@pytest.mark.parametrize("point", ["train", "aggregate"])
def test_the_coordinator_is_killed(point, loopback, trained, steer):
    place = f"train-{trained}-2" if point == "train" else "aggregate-2"
    (steer / place).touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    reached(steer / f"{place}.reached")
    server.kill()
    if point == "train":  # the client holds on to what nobody waits for any more
        clients[trained].kill()
        clients[trained] = run.join(str(trained))
    server = run.serve()
    run.finish_as_alone(server, *clients.values())
    assert "lost the server" in clients[(trained + 1) % 3].output()


def test_everything_is_killed_at_once(loopback, steer):
    (steer / "aggregate-3").touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = [run.join("0"), run.join("1-2")]
    reached(steer / "aggregate-3.reached")
    server.kill()
    for client in clients:
        client.kill()
    server = run.serve()
    clients = [run.join("0-1"), run.join("2")]  # another layout does not matter either
    run.finish_as_alone(server, *clients)


def test_a_kill_between_commit_and_scores_loses_no_score(loopback, steer):
    for client in range(3):  # whoever is in the last cohort waits there for the kill
        (steer / f"train-{client}-5").touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = [run.join("0-2")]
    server.wait_kind("commit", interaction=3)
    server.kill()
    for client in range(3):
        (steer / f"train-{client}-5").unlink()
    server = run.serve()
    run.finish_as_alone(server, *clients)
    rounds = (run.out / "rounds.jsonl").read_text().splitlines()
    assert len(rounds) == 6


@pytest.mark.parametrize("lost", ["client", "everybody"])
def test_power_loss_rolls_back_to_the_watermark(lost, loopback, steer):
    (steer / "sync-limit").write_text("1")  # the disk has kept up to interaction 1 only
    (steer / "aggregate-4").touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = [run.join(str(c)) for c in range(3)]
    reached(steer / "aggregate-4.reached")
    server.kill()
    for client in clients:
        client.kill()
    places = (
        [run.out / "clients"] if lost == "client" else [run.out / "clients", run.out / "server"]
    )
    newer = [f for p in places for f in p.rglob("state-*") if int(f.stem[-8:]) > 1]
    assert any(f.parent.name != "server" for f in newer)
    for file in newer:
        file.unlink()
    (steer / "sync-limit").unlink()
    server = run.serve()
    clients = [run.join(str(c)) for c in range(3)]
    server.wait_kind("commit", interaction=2)
    run.finish_as_alone(server, *clients)


def test_a_client_that_lost_its_state_rolls_the_living_run_back(loopback, trained, steer):
    (steer / "sync-limit").write_text("1")
    (steer / f"train-{trained}-4").touch()
    (steer / f"train-{trained}-5").touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    server.wait_kind("commit", interaction=3)
    clients[trained].kill()
    for file in (run.out / "clients" / str(trained)).glob("state-*"):
        if int(file.stem[-8:]) > 1:
            file.unlink()
    for file in steer.iterdir():
        file.unlink()
    clients[trained] = run.join(str(trained))
    server.wait_kind("rollback")
    assert server.wait_kind("commit")["interaction"] == 2  # no further back than needed
    run.finish_as_alone(server, *clients.values())
