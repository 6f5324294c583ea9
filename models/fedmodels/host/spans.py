"""What processes of a run did and how long, as spans of OpenTelemetry: a trace an interaction.

Nothing about a trace travels: its id, and that of each span, follow from the run's id and from what
the span is of. So a coordinator and its clients tell parts of one trace, each to the place that its
own environment names (``OTEL_EXPORTER_OTLP_ENDPOINT``), or tell nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from typing import Any

from fedmodels.errors import pip_line
from fedmodels.times import LAST_SPANS_S

Way = tuple[tuple[str, object], ...]
"""From an interaction to one of its spans: the name of each one, and what tells it from others of
that name. Empty: the interaction itself."""


def exported(service: str) -> tuple[Spans | None, str]:
    """Return what tells spans to the place that the environment names, or why there is none."""
    over = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    over = (over or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http").partition("/")[0]
    try:
        place = f"opentelemetry.exporter.otlp.proto.{over}.trace_exporter"
        exporter = importlib.import_module(place).OTLPSpanExporter()
        batches = importlib.import_module("opentelemetry.sdk.trace.export")
        return Spans(service, batches.BatchSpanProcessor(exporter)), ""
    except ImportError:
        more = "" if over == "http" else f" opentelemetry-exporter-otlp-proto-{over}"
        line = f"traces need a package more: {pip_line('opentelemetry')}{more}"
    except Exception as error:  # of a variable's value
        line = str(error)
    return None, f"traces are off, although OpenTelemetry's variables ask for them: {line}"


class Spans:
    """Tells spans that are over to a processor of OpenTelemetry; safe between threads."""

    def __init__(self, service: str, processor: Any) -> None:
        """Tell nothing yet; the service is called as here unless ``OTEL_SERVICE_NAME`` is set."""
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        self._api: Any = importlib.import_module("opentelemetry.trace")
        self._lock = threading.Lock()
        self._ids = _Ids()
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create(named),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("fedtide")

    def tell(
        self,
        way: Way,
        run: str,
        interaction: int,
        begun_s: float,
        ended_s: float,
        error: str = "",
        **facts: object,
    ) -> None:
        """Tell a span from one moment to another, in seconds of the clock (``time.time``)."""
        trace = _number(16, run, interaction)
        if self._provider.sampler.should_sample(None, trace, "interaction").decision.value == 0:
            return  # every process decides so, by the trace's id
        above = None
        if way:
            flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
            parent = _number(8, run, interaction, *way[:-1])
            found = self._api.SpanContext(trace, parent, is_remote=True, trace_flags=flags)
            above = self._api.set_span_in_context(self._api.NonRecordingSpan(found))
        named = {f"fedtide.{key}": value for key, value in facts.items() if value is not None}
        named |= {"fedtide.run": run, "fedtide.interaction": interaction}
        with self._lock:
            self._ids.trace, self._ids.span = trace, _number(8, run, interaction, *way)
            span = self._tracer.start_span(
                way[-1][0] if way else "interaction",
                above,
                attributes=named,
                start_time=int(begun_s * 1e9),
            )
        if error:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, error))
        span.end(int(max(begun_s, ended_s) * 1e9))

    def end(self) -> None:
        """Send what is not sent yet, within ``LAST_SPANS_S``: OpenTelemetry has no such bound."""
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(LAST_SPANS_S)


class _Ids:
    """Gives the ids that were put here."""

    trace = span = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span

    def is_trace_id_random(self) -> bool:
        return True  # its bytes are those of a digest


def _number(size: int, *words: object) -> int:
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1
