"""Traces of OpenTelemetry: what a coordinator and its clients tell belongs together."""

from __future__ import annotations

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fedcli.tracing
import fedmodels.host.spans
import fedsrv.progress.traces
from fedcli.joining import host_of
from fedcli.tracing import TracedHost, traced_host
from fedmodels.host.machine import tells_traces
from fedmodels.host.spans import Spans, exported
from fedsrv.coordinator import Listen, serve
from fedsrv.progress.events import Event
from tests.conftest import tiny_experiment
from tests.links.test_open_run_behind_a_relay import Listening

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def test_orders_and_what_clients_did_for_them_are_one_trace(digits, tmp_path, monkeypatch):
    """A coordinator and its clients, each with a teller of its own, as processes have."""
    told = kept(monkeypatch)
    experiment, listening = tiny_experiment(), Listening()
    everyone = range(experiment.schedule.clients)

    def joined(client: int, address: str) -> None:
        states = tmp_path / "states"
        host = host_of([client], address, digits, states, torch.device("cpu"), give_up_after=60)
        assert isinstance(host, TracedHost)
        host.run()

    with ThreadPoolExecutor(1 + len(everyone)) as pool:
        listen = Listen("127.0.0.1:0")
        run = pool.submit(serve, experiment, tmp_path / "run", listen, on_ready=listening.begin)
        address = listening.address.result(60)
        clients = [pool.submit(joined, client, address) for client in everyone]
        for one in (*clients, run):
            one.result(60)

    spans = {one.context.span_id: one for exporter in told for one in exporter.get_finished_spans()}
    assert len(told) == 1 + len(everyone)
    roots = [one for one in spans.values() if one.parent is None]
    assert [one.attributes["fedtide.interaction"] for one in roots] == [*range(len(roots))]
    assert len({one.context.trace_id for one in spans.values()}) == len(roots) > 1
    for root in roots:
        below = [one for one in spans.values() if above(one) == root.context.span_id]
        names = sorted(one.name for one in below)
        assert names.count("reduce") == names.count("commit") == 1
        trained = [one for one in below if one.attributes.get("fedtide.kind") == "train"]
        assert {one.attributes["fedtide.client"] for one in trained} == {*map(str, everyone)}
        for order in trained:
            work, upload = sorted(
                (one for one in spans.values() if above(one) == order.context.span_id),
                key=lambda one: one.start_time,
            )
            assert (work.name, upload.name) == ("train", "upload")
            assert root.start_time <= order.start_time <= work.start_time
            assert work.end_time <= upload.start_time < root.end_time
            assert upload.attributes["fedtide.bytes"] > 0


def above(span: Any) -> int:
    return span.parent.span_id if span.parent else 0


def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ask for traces; return the list of what keeps those of each teller."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    told = list[Any]()

    def in_memory(service: str) -> tuple[Spans, str]:
        told.append(InMemorySpanExporter())
        return Spans(service, SimpleSpanProcessor(told[-1])), ""

    for module in (fedcli.tracing, fedsrv.progress.traces):
        monkeypatch.setattr(module, "exported", in_memory)
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    return told


@pytest.mark.parametrize(
    ("asked", "is_told"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://here"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here"}, True),
        ({ENDPOINT: "http://here", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({ENDPOINT: "http://here", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://here", "OTEL_TRACES_EXPORTER": ""}, True),
        ({ENDPOINT: "http://here", "OTEL_TRACES_EXPORTER": "console, otlp"}, True),
    ],
)
def test_the_environment_asks_for_traces(asked, is_told, monkeypatch):
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert tells_traces() is is_told


def test_a_client_without_the_package_says_what_is_missing_and_joins(monkeypatch, caplog):
    place = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, place, None)
    with caplog.at_level(logging.WARNING):
        assert not issubclass(traced_host(), TracedHost)
    assert "traces are off" in caplog.text
    assert "pip install 'opentelemetry-exporter-otlp-proto-http" in caplog.text


def test_a_protocol_that_has_no_package_is_named(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke/signals")
    assert "opentelemetry-exporter-otlp-proto-smoke" in exported("it")[1]


def test_a_variable_without_a_value_is_not_set(monkeypatch):
    place = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, place, None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert exported("it")[1].endswith("-proto-grpc")
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.setenv(name, "")
    assert not exported("it")[1].endswith("-proto-")


def test_the_end_waits_for_no_collector_that_stalls(monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr(fedmodels.host.spans, "LAST_SPANS_S", 0.01)
    stalled, went_on = InMemorySpanExporter(), threading.Event()
    monkeypatch.setattr(stalled, "shutdown", lambda: went_on.wait(20))
    Spans("it", SimpleSpanProcessor(stalled)).end()
    assert not went_on.is_set()
    went_on.set()


def times_of(monkeypatch: pytest.MonkeyPatch, *events: Event) -> dict[str, tuple[float, float]]:
    """Return the times of the last span of each name that events make."""
    told = kept(monkeypatch)
    spans = fedcli.tracing.exported("fedsrv")[0]
    assert spans is not None
    record: Any = {"seconds": {"server": 2.0}}
    traces = fedsrv.progress.traces.Traces(spans, "run", lambda at: record)
    for event in events:
        traces.take(event)
    found = {one.name: one for one in told[0].get_finished_spans()}
    return {name: (one.start_time / 1e9, one.end_time / 1e9) for name, one in found.items()}


def commit(at: int, now: float) -> Event:
    return Event("commit", "", at, at, {"seconds": 80.0, "task": 0, "failed": {}}, now)


def test_what_is_ordered_earlier_is_reduced_when_it_came(monkeypatch):
    """In asynchronous rounds, the commit had the time of the wait for uploads."""
    times = times_of(
        monkeypatch,
        Event("order", "0", 3, 3, {"order": 1}, 10.0),
        Event("order", "1", 4, 4, {"order": 1}, 20.0),
        Event("upload", "0", 3, 3, {}, 90.0),
        commit(4, 95.0),
    )
    assert times == {
        "order": (10, 90), "reduce": (90, 92), "commit": (92, 95), "interaction": (20, 95),
    }  # fmt: skip


def test_a_score_is_below_the_interaction_whose_commit_it_follows(monkeypatch):
    """Where nobody is asked for scores, they are told before the commit."""
    early = Event("scores", "", 4, 4, {"metrics": {}}, 94.0)
    late = Event("scores", "", 3, 3, {"metrics": {}}, 99.0)
    assert "score" not in times_of(monkeypatch, commit(3, 80.0), early, commit(4, 95.0))
    times = times_of(monkeypatch, commit(3, 80.0), commit(4, 95.0), late)
    assert times["score"] == (80, 99)


def test_what_is_ordered_again_after_a_roll_back_begins_then(monkeypatch):
    order = {"order": 1}
    times = times_of(
        monkeypatch,
        Event("order", "0", 4, 4, order, 10.0),
        Event("rollback", "", 2, detail={"reason": "it started over"}, unix_time=11.0),
        Event("order", "0", 4, 4, order, 50.0),
        Event("upload", "0", 4, 4, {}, 60.0),
        commit(4, 70.0),
    )
    assert (times["order"], times["interaction"]) == ((50, 60), (50, 70))


def test_all_processes_leave_out_the_same_interactions(monkeypatch):
    told = kept(monkeypatch)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    for service, way in (("fedsrv", ()), ("fedcli", (("order", "0 1"), ("train", "")))):
        spans = fedcli.tracing.exported(service)[0]
        assert spans is not None
        for interaction in range(40):
            spans.tell(way, "run", interaction, 1.0, 2.0)
    first, second = (
        [one.attributes["fedtide.interaction"] for one in exporter.get_finished_spans()]
        for exporter in told
    )
    assert first == second
    assert 5 < len(first) < 35


def test_a_failed_order_has_its_reason(monkeypatch):
    told = kept(monkeypatch)
    spans = fedcli.tracing.exported("fedsrv")[0]
    assert spans is not None
    traces = fedsrv.progress.traces.Traces(spans, "run", lambda at: None)
    traces.take(Event("order", "3", 7, 2, {"order": 1}, 10.0))
    traces.take(Event("order", "3", 7, 2, {"order": 1}, 11.0))  # it is asked for again
    traces.take(Event("failed", "3", 7, 2, {"reason": "its disk is full"}, 12.5))
    (one,) = told[0].get_finished_spans()
    assert (one.start_time, one.end_time) == (10_000_000_000, 12_500_000_000)
    assert (one.status.status_code.name, one.status.description) == ("ERROR", "its disk is full")
