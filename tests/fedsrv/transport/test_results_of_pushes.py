"""What a Push comes to: a result, a refusal, or nothing at all, after which it is made again."""

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb import AGAIN_AFTER, PROTOCOL
from fedpb.codec import encode
from fedpb.tables import client_json_of, values_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import Answer, Trip, UploadForm
from fedsrv.progress.events import EventLog
from fedsrv.transport.refusals import RunOver, Superseded, UnknownSession
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool

PROFILE = json.dumps(
    {
        "format": 1,
        "input_shape": [4],
        "num_classes": 2,
        "tasks": [{"train": [1, 1], "test": [1, 1]}],
    }
)
UPLOAD = Bundle(weights={"w": torch.ones(700_000)})
"""Three frames."""


class Refused(Exception):
    """How a call was aborted."""

    def __init__(self, code, line):
        super().__init__(line)
        self.code = code


class Context:
    """A call's context, of which nothing but the refusal is looked at."""

    metadata = ()

    def auth_context(self):
        return {}

    def peer(self):
        return "ipv4:127.0.0.1:5"

    def is_active(self):
        return True

    def add_callback(self, call):
        return True

    def cancel(self):
        pass

    def set_trailing_metadata(self, metadata):
        self.metadata = metadata

    def abort(self, code, line):
        raise Refused(code, line)


class World:
    """A service whose one client has an order to train."""

    def __init__(self, directory):
        self.events = EventLog()
        self.cohort = RemoteCohort(
            1, Spool(directory, 1 << 24), self.events, admission=Admission({})
        )
        self.service = Service("run", {}, self.cohort, self.events)
        self.token = self.cohort.join(0, PROFILE, b"", ())
        self.engine = ThreadPoolExecutor(1)

    def open(self, interaction=0, kind=rpc.ORDER_KIND_TRAIN):
        self.order = rpc.Order(kind=kind, client_id="0", interaction=interaction, trip=9)
        self.trip = Trip({0: self.order}, Bundle(), form=UploadForm(BundleSpec.of(UPLOAD)))
        self.done = self.engine.submit(self.cohort.send_and_receive, self.trip)
        while self.cohort._trips.current is None:
            pass

    def header(self, kind=rpc.ORDER_KIND_TRAIN, interaction=0):
        return rpc.PushHeader(
            client_id="0", token=self.token, kind=kind, interaction=interaction, trip=9
        )

    def chunks(self):
        encoded = encode(UPLOAD)
        header = self.header()
        header.bundle.CopyFrom(encoded.header)
        return [rpc.PushRequest(header=header).SerializeToString(), *encoded.chunks()]

    def push(self, chunks):
        context = Context()
        try:
            return self.service.push(iter(chunks), context)
        except Refused as refused:
            refused.metadata = dict(context.metadata)
            raise

    def told(self):
        return [e.kind for e in list(self.events._kept)]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.cohort.stop("the test is over")
    made.engine.shutdown()


@pytest.mark.parametrize("sent", [1, 2, 3])
def test_a_stream_that_ends_short_is_no_outcome(world, sent):
    """So ends the stream of a client that was killed, too: what it sent says nothing of it."""
    world.open()
    with pytest.raises(Refused) as refused:
        world.push(world.chunks()[:sent])
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE
    assert f"ended after {(sent - 1) << 20} of 2800000 bytes" in str(refused.value)
    assert int(refused.value.metadata[AGAIN_AFTER]) > 0, "it says when to come again"
    assert not world.done.done()
    assert "failed" not in world.told()
    assert not world.push(world.chunks()).repeated_upload
    assert list(world.done.result(30).by_client) == [0]


def test_what_comes_before_the_run_is_taken_up_is_wanted_later(world):
    with pytest.raises(Refused) as refused:
        world.push(world.chunks())
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE
    assert AGAIN_AFTER in refused.value.metadata
    world.open()
    assert not world.push(world.chunks()).repeated_upload
    assert len(world.done.result(30).by_client) == 1


def test_a_session_may_end_while_a_result_comes(world):
    """As a relay's do when it has its clients join again; the client then joins again, too."""
    world.open()
    trip = world.cohort.begin_result(0, world.header())
    world.cohort.sessions.clear()
    with pytest.raises(UnknownSession, match="client 0 has to join again"):
        world.cohort.begin_result(0, world.header(interaction=1))
    answer = Answer(UPLOAD, rpc.Report(), 0, 0, 0)
    assert world.cohort.end_result(0, trip, answer), "what came whole counts"
    assert list(world.done.result(30).by_client) == [0]


def test_what_comes_between_trips_is_not_wanted(world):
    world.open()
    world.push(world.chunks())
    world.done.result(30)
    world.cohort.commit(0, -1)
    with pytest.raises(Superseded):
        world.cohort.begin_result(0, world.header(interaction=1))
    with pytest.raises(Superseded):
        world.cohort.begin_result(0, world.header(rpc.ORDER_KIND_EVALUATE))


def test_the_end_is_told_to_everybody_and_waits_until_they_left(world):
    world.open()
    ended = ThreadPoolExecutor(1).submit(world.cohort.end)
    caller = world.cohort.caller({0: world.cohort.session(0, world.token)}, {0: 0})
    with world.cohort.changed:
        assert world.cohort.changed.wait_for(lambda: world.cohort._over, 120)
    with pytest.raises(RunOver):
        world.cohort.next_orders(caller, lambda: True)
    assert world.cohort.begin_result(0, world.header(rpc.ORDER_KIND_FINISH)) is None, (
        "it is not needed"
    )
    assert not ended.done()
    world.cohort.leave(0, "finished")
    ended.result(30)


@pytest.mark.parametrize("joined", [True, False])
def test_the_end_waits_for_no_longer_than_a_lease(tmp_path, monkeypatch, joined):
    monkeypatch.setattr(RemoteCohort, "lease_s", 0.05)
    cohort = RemoteCohort(1, Spool(tmp_path, 0), EventLog(), admission=Admission({}))
    if joined:
        cohort.join(0, PROFILE, b"", ())
    cohort.end(returning=True)


def test_a_pull_that_waits_again_keeps_no_payload(world):
    """It is as large as the model, and the next one comes beside it."""
    world.open()
    kept = weakref.ref(world.cohort._trips.current)
    waiting = [rpc.Waiting(client_id="0", token=world.token, durable=-1)]
    pull = world.service.pull(rpc.PullRequest(waiting=waiting), Context())
    assert next(pull)
    with ThreadPoolExecutor(1) as pool:
        next_order = pool.submit(next, pull, None)
        world.push(world.chunks())
        world.done.result(30)
        del world.trip, world.done
        while not world.cohort.sessions[0].is_waiting:
            pass
        gc.collect()
        assert kept() is None
        world.cohort.leave(0, "finished")
        assert next_order.result(30) is None


def test_files_of_ones_own_are_not_changed_as_a_scenario_says(world):
    """A site would cut its files as they are, and the run believe that they change."""
    tables = {"data": {"name": "table"}, "scenario": {"kind": "natural"}}
    asked = rpc.PrepareRequest(client_id="0", protocol=PROTOCOL)
    plain = Service("run", tables, world.cohort, world.events)
    assert plain.prepare(asked, Context()).data
    tables["scenario"]["blur"] = 0.2
    with pytest.raises(Refused, match=r"\[scenario\] blur changes the examples"):
        Service("run", tables, world.cohort, world.events).prepare(asked, Context())


def test_a_site_hears_what_the_run_is_before_it_joins(world):
    """A site that allows runs by rules looks first; whose files are cut needs no [data]."""
    service = Service("run", {"method": {"name": "gldp"}}, world.cohort, world.events)
    asked = rpc.PrepareRequest(client_id="0", protocol=PROTOCOL, has_cut=True)
    told = service.prepare(asked, Context())
    assert (told.run_id, values_of(told.experiment)) == ("run", {"method": {"name": "gldp"}})
    assert not values_of(told.data)
    asked.has_cut = False
    with pytest.raises(Refused, match=r"has no \[data\]"):
        service.prepare(asked, Context())


def test_a_site_that_lost_data_hears_what_an_open_run_knows_of_them(world, monkeypatch):
    service = Service("run", {"schedule": {"open": True}}, world.cohort, world.events)
    monkeypatch.setattr(service, "_set_aside", lambda client, task, why: None)
    asked = rpc.PrepareRequest(client_id="0", protocol=PROTOCOL, has_cut=True)
    assert not service.prepare(asked, Context()).HasField("known"), "nobody asked"
    asked.wants_known = True
    monkeypatch.setattr(world.cohort, "admission", Admission({}))
    with pytest.raises(Refused, match="client 0 never described its data to this run"):
        service.prepare(asked, Context())
    known = {0: PROFILE}
    monkeypatch.setattr(world.cohort, "admission", Admission(known))
    told = service.prepare(asked, Context()).known
    assert json.loads(client_json_of(told))["tasks"] == json.loads(known[0])["tasks"]
    with pytest.raises(Refused, match="open"):
        Service("run", {}, world.cohort, world.events).prepare(asked, Context())
