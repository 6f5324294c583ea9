"""What the coordinator believes of the private states that clients hold."""

from collections.abc import Sequence

from fedsrv.state.history import LossTooLarge
from fedsrv.transport.sessions import ClientSession, StateInventory


def test_states_after_a_roll_back_are_not_safe_until_they_are_said_to_be():
    """Both clients synced state 10; the run goes back to 8 and does 9 again."""
    sessions = {c: ClientSession(b"t", "{}", (8, 9, 10), 0.0, durable=10) for c in (0, 1)}
    holdings = StateInventory(sessions)  # type: ignore[arg-type]
    holdings.require(lambda client, versions: True, {0: 10, 1: 10}, 10)
    assert holdings.durable(10) is None
    holdings.require(lambda client, versions: True, {0: 8, 1: 8}, 8)
    for client in (0, 1):
        holdings.has_trained(client, 9)
    assert holdings.durable(9) == 8
    for client in (0, 1):
        sessions[client].durable = 9
    assert holdings.durable(9) is None


def test_who_is_dismissed_for_a_loss_is_not_asked_what_it_holds():
    """Client 1 comes back without its state while the run goes back further than it may follow."""

    def refuse(client: int, versions: Sequence[int]) -> bool:
        raise LossTooLarge(f"client {client} must hold state 4")

    sessions = {1: ClientSession(b"t", "{}", (3,), 0.0)}
    holdings = StateInventory(sessions)  # type: ignore[arg-type]
    holdings.lose(1)
    holdings.require(refuse, {1: 4}, 4)
    assert 1 not in sessions
    holdings.check()
