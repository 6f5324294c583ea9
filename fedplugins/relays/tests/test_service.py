"""A relay's calls for the clients below it."""

from types import SimpleNamespace

import pytest

from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.service import RelayService
from fedsrv.transport.refusals import UnknownSession


class Above:
    """A coordinator that takes what is passed on."""

    def __init__(self):
        self.left = []

    def leave(self, request):
        self.left.append(request)
        return rpc.LeaveResponse()


def leaving(known, *clients):
    """Let clients leave by one call; return what went up, and whether somebody was refused."""
    relay, below = object.__new__(RelayService), SimpleNamespace()

    def session(client, token, context):
        if client not in known:
            raise UnknownSession("no session")

    def leave(request, context):
        for one in (request, *request.others):
            session(one.client_id, one.token, context)
        return rpc.LeaveResponse()

    below.session, below.leave = session, leave
    relay.below, relay.uplink = below, Above()
    first, *others = (rpc.Leaving(client_id=c, token=c.encode()) for c in clients)
    request = rpc.LeaveRequest(
        client_id=first.client_id, token=first.token, reason="finished", known=7, others=others
    )
    refused = []
    relay.refuse = lambda context, error: refused.append(str(error))
    relay.leave(request, None)
    return relay.uplink.left, refused


@pytest.mark.parametrize("clients", ["012", "910", "091"])
def test_those_with_a_session_leave_whoever_is_beside_them(clients):
    (passed,), refused = leaving("012", *clients)
    known = [c for c in clients if c != "9"]
    assert [passed.client_id, *(one.client_id for one in passed.others)] == known
    assert passed.token.decode() == known[0]
    assert (passed.reason, passed.known) == ("finished", 7)
    assert bool(refused) == ("9" in clients)


def test_nobody_above_hears_of_clients_without_a_session():
    assert leaving("012", "9") == ([], ["no session"])
