"""Whom an operator excludes, over the wire: ids are checked, and any run takes the call."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedmodels.errors import LinkError, PayloadError
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.cli import app
from fedsrv.progress.events import EventLog
from fedsrv.progress.watching import steer
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service

pytestmark = pytest.mark.loopback


@pytest.fixture
def place():
    """The address of a run that is not open, and whom it was asked to exclude."""
    excluded = []

    def exclude(clients):
        if 7 in clients:
            raise PayloadError("2 of 8 clients would be left, and the run needs 3")
        excluded.extend(clients)

    def check_known(clients):
        if 4 in clients:
            raise PayloadError("client 4 has never joined this run")

    with served({}, check_known, exclude=exclude) as address:
        yield address, excluded


@contextmanager
def served(config, check_known, steered=None, **asks):
    """Serve a run's calls; yield the address."""
    cohort = SimpleNamespace(
        num_clients=8, most_present=8, check_known=check_known, look_after=lambda: None
    )
    cohort.look_again, cohort.go_on_without = lambda: None, lambda clients: None
    asks |= {} if steered is None else {"retire": lambda clients, forget: steered.append(clients)}
    events = EventLog()
    service = Service("run", config, cohort, events, **asks)
    server, port = start_server(service, "127.0.0.1:0", None)
    yield f"127.0.0.1:{port}"
    events.close()
    stop_server(server)
    service.gate.close()
    service.complaints.close()


def test_whoever_is_excluded_is_kept_in_mind(place):
    address, excluded = place
    done = CliRunner().invoke(app, ["exclude", address, "3", "5"])
    assert done.output == f"{address}: excluded before the next round: 3, 5\n"
    assert excluded == [3, 5]
    for clients, line in {
        ("8",): "client id '8' is none of this run's: 0 to 7",
        ("evaluator",): "the evaluator is not excluded: stop its process",
        ("3 ",): "client id '3 ' is none of this run's: 0 to 7",
        ("1", "4"): "client 4 has never joined this run",
        ("1", "7"): "2 of 8 clients would be left, and the run needs 3",
    }.items():
        with pytest.raises(LinkError, match=line):
            steer(address, exclude=clients)
    with pytest.raises(LinkError, match="open = true takes new ones"):
        steer(address, exclude=["1"], close=True)
    assert excluded == [3, 5]


def test_tasks_of_clients_alone_are_set_aside():
    asked = []
    with served({}, lambda clients: None, set_aside=asked.extend) as address:
        steer(address, set_aside=[("3", 1), ("5", 0)])
        with pytest.raises(LinkError, match="the evaluator has no tasks: stop its process"):
            steer(address, set_aside=[("3", 2), ("evaluator", 0)])
        with pytest.raises(LinkError, match="client id '8' is none of this run's"):
            steer(address, set_aside=[("8", 0)])
    assert asked == [(3, 1), (5, 0)]


def test_what_ends_is_stored_before_the_call_is_answered():
    """A call whose decision cannot be kept is refused; the run looks at what is kept at once."""
    done: list[object] = []

    def retire(clients, forget):
        if 5 in clients:
            raise PayloadError("no client would be left: fedsrv close ends the run")
        done.append((clients, forget))

    asks = {"retire": retire, "close": done.append, "set_aside": done.append}
    with served({}, lambda clients: None, **asks) as address:
        steer(address, retire=["3"], forget=True)
        steer(address, close=True, now=True)
        with pytest.raises(LinkError, match="no client would be left"):
            steer(address, retire=["5"])
        with pytest.raises(LinkError, match="no client to retire or forget"):
            steer(address, forget=True, close=True)
    assert done == [([3], True), True]


def test_classes_are_shown_and_renamed_in_an_open_run_alone(place):
    asked = []

    def classes(changes, merge):
        asked.extend(changes)
        if ("a", "b") in changes:
            raise PayloadError("the run has a class 'b' already")
        return [rpc.ClassOf(name="b\n", earlier=["x", "y"], examples=5, clients=2)]

    def said(*words, code=0):
        done = CliRunner().invoke(app, ["classes", *words])
        assert done.exit_code == code or code
        return done.output if code == 0 else str(done.exception)

    facts = {"classes": classes, "steered": (steered := [])}
    with served({}, lambda clients: None, set_aside=asked.extend, **facts) as address:
        assert said(address) == "  0  'b\\\\n': 5 examples at 2 clients, earlier 'x', 'y'\n"
        assert '"earlier": ["x", "y"]' in said(address, "--json")
        line = f"{address}: the class 'x' is called 'z' from the next round on\n"
        assert said(address, "--rename", "x", "z") == line
        assert "the run has a class 'b' already" in said(address, "--rename", "a", "b", code=1)
        assert steer(address, retire=["3"], classes=()), "the classes, and somebody retires"
        assert steered == [[3]]
    assert asked == [("x", "z"), ("a", "b")]
    assert "open = true takes new ones" in said(place[0], code=1)
