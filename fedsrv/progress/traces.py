"""A run's interactions as traces of OpenTelemetry, from the coordinator's events."""

from __future__ import annotations

from collections.abc import Callable

from fedmodels.facts.position import Interaction
from fedmodels.host.spans import Spans, Way, exported
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.progress.events import Ending, Event, EventLog
from fedsrv.state.record import Record
from fedsrv.state.store import Store


class Traces:
    """Makes spans of events: each order, then ``reduce``, ``commit`` and ``score``."""

    def __init__(
        self, spans: Spans, run: str, record: Callable[[Interaction], Record | None]
    ) -> None:
        """Know no event yet; ``record`` gives that of an interaction of the run."""
        self._spans, self._run, self._record = spans, run, record
        self._orders: dict[tuple[str, int], tuple[int, float]] = {}
        """The interaction of each client's last order of a kind, and when it was given."""
        self._begun: dict[int, float] = {}
        """When the first order of each open interaction was given."""
        self._trained = 0.0
        """When something trained came last, of any interaction."""
        self._committed: dict[int, float] = {}
        """When each of the last interactions was committed."""

    def take(self, event: Event) -> None:
        """Take in one event."""
        at, now, facts = event.interaction, event.unix_time, event.detail
        if event.kind == "order":
            key = event.client, facts["order"]
            if self._orders.get(key, (-1, 0.0))[0] != at:  # else it is asked for again
                self._orders[key] = at, now
            self._begun.setdefault(at, now)
        elif event.kind in ("upload", "failed"):
            given = self._orders.items()
            for key in [k for k, (of, _) in given if (k[0], of) == (event.client, at)]:
                if key[1] == rpc.ORDER_KIND_TRAIN:
                    self._trained = now
                kind = rpc.OrderKind.Name(key[1]).removeprefix("ORDER_KIND_").lower()
                more = {"client": event.client, "kind": kind, "round": event.round}
                way = (("order", f"{event.client} {key[1]}"),)
                begun = self._orders.pop(key)[1]
                self._tell(way, event, begun, now, facts.get("reason", ""), **more)
        elif event.kind == "commit":
            begun = self._begun.pop(at, now - facts["seconds"])
            came = max(begun, self._trained)  # asynchronous rounds take what earlier ones ordered
            record = self._record(Interaction(at))
            reduced = min(came + (record["seconds"].get("server", 0.0) if record else 0.0), now)
            self._tell((("reduce", ""),), event, came, reduced)
            self._tell((("commit", ""),), event, reduced, now)
            more = {"round": event.round, "task": facts["task"], "failed": len(facts["failed"])}
            self._tell((), event, begun, now, **more)
            for one in [one for one in self._begun if one < at]:  # scored after its commit
                del self._begun[one]
            self._committed = {one: self._committed[one] for one in [*self._committed][-1:]}
            self._committed[at] = now
        elif event.kind == "scores" and at in self._committed:  # else no client was asked
            self._tell((("score", ""),), event, self._committed[at], now)
        elif event.kind == "rollback":  # what is ordered again begins then
            for moments in (self._orders, self._begun, self._committed):
                moments.clear()

    def _tell(
        self,
        way: Way,
        event: Event,
        begun: float,
        ended: float,
        error: str = "",
        **facts: object,
    ) -> None:
        self._spans.tell(way, self._run, event.interaction, begun, ended, error, **facts)


def trace(events: EventLog, store: Store) -> Ending:
    """Tell a run's traces to the place that the environment names; return what ends that."""
    spans, why = exported("fedsrv")
    if spans is None:
        events.tell("note", line=why)
        return lambda: None
    end_telling = events.follow(Traces(spans, store.run_id, store.ledger.record).take, "traces")

    def end() -> None:
        end_telling()
        spans.end()

    return end
