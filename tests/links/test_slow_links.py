"""Links so slow that pings wait behind data live while bytes move, and go on where they broke.

Times are scaled: the link is as much faster than one of 100 kbit/s as pings are less patient.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedcli.runtime import link as link_module
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.worker import Result
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb import PROTOCOL, channels, pace
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import Trip, UploadForm
from fedsrv.progress.events import EventLog
from fedsrv.transport import listening as transport_server
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.links.proxy import Fate, Proxy
from tests.links.test_idle import PROFILE

pytestmark = pytest.mark.loopback

MODEL = Bundle(weights={"w": torch.arange(200_000, dtype=torch.float32)})
SIZE = 800_000
RATE = 2e5


def fate(number: int) -> Fate:
    """Break the first connection in the middle of the order, the second in that of the upload."""
    cuts = {0: ("down", 12), 1: ("up", 12)}
    return Fate(bytes_per_s=RATE, cut=cuts.get(number))  # type: ignore[arg-type]


def test_an_order_and_an_upload_cross_a_slow_link_that_breaks(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(channels, "KEEPALIVE_MS", 500)
    monkeypatch.setattr(channels, "KEEPALIVE_TIMEOUT_MS", 2_000)
    monkeypatch.setattr(channels, "PONG_MS", 60_000, raising=False)
    monkeypatch.setattr(transport_server, "PONG_MS", 300_000, raising=False)
    monkeypatch.setattr(transport_server, "BORNE_PING_MS", 100)
    monkeypatch.setattr(link_module, "PART_S", 0.3)
    for module in (pace, link_module):
        monkeypatch.setattr(module, "SLOW_S", 0.5)
    caplog.set_level(logging.WARNING)
    cohort = RemoteCohort(1, Spool(tmp_path, 1 << 26), EventLog(), admission=Admission({}))
    service = Service("run", {}, cohort, cohort.events)
    server, port = start_server(service, "127.0.0.1:0", None, keepalive_s=2.0)
    proxy, engine = Proxy(port, fate), ThreadPoolExecutor(1)
    link = Link(f"127.0.0.1:{proxy.port}")
    try:
        asked = rpc.JoinRequest(
            client_id="0", description=description_of(PROFILE), token=b"own", protocol=PROTOCOL
        )
        member = Membership(0, "run", link.join(asked).token)
        order = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id="0", trip=9)
        trip = Trip({0: order}, MODEL, form=UploadForm(BundleSpec.of(MODEL)))
        answers = engine.submit(cohort.send_and_receive, trip)
        waiting = rpc.Waiting(client_id="0", token=member.token, durable=-1)
        spec = {"common": BundleSpec.of(MODEL)}
        ((order, payload),) = link.pull(lambda: [waiting], lambda _: spec)
        assert torch.equal(payload.weights["w"], MODEL.weights["w"])
        link.push(member, Result(order, payload, rpc.Report()))
        (answer,) = answers.result(60).by_client.values()
        assert torch.equal(answer.upload.weights["w"], MODEL.weights["w"])
    finally:
        link.close()
        proxy.close()
        cohort.stop("the test is over")
        service.gate.close()
        stop_server(server, 0.0)
        service.complaints.close()
        engine.shutdown()
    assert (proxy.done["cut"], proxy.done["connections"]) == (2, 3), "nothing else ended a link"
    assert SIZE < proxy.done["bytes down"] < 1.35 * SIZE, "the beginning came once"
    assert SIZE < proxy.done["bytes up"] < 1.35 * SIZE
    assert "over a slow link: 0." in caplog.text
