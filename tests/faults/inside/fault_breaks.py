"""Repairs taken back, each of which the harness must notice."""

from __future__ import annotations

from typing import Any


def commit_before_rename() -> None:
    """Count an interaction before the state behind it has its name."""
    from fedsrv.state.state_files import StateFiles
    from fedsrv.state.store import Store

    commit, write = Store.commit, StateFiles.write
    late: list[tuple[Any, Any]] = []

    def written(self: Any, interaction: Any, state: Any) -> str:
        digest = write(self, interaction, state)
        file = self.path(interaction)
        late.append((file.rename(file.with_suffix(".late")), file))
        return digest

    def committed(self: Any, *args: Any, **kwargs: Any) -> None:
        commit(self, *args, **kwargs)
        while late:
            source, target = late.pop()
            source.rename(target)

    Store.commit, StateFiles.write = committed, written  # type: ignore[method-assign]


def no_deduplication() -> None:
    """Take whatever a client pushes as the answer to the order it has now."""
    from fedsrv.transport import open_trips

    open_trips.answers = lambda *_: True


def watermark_too_early() -> None:
    """Call states safe that were never synced."""
    from fedcli.runtime.state import StateDirectory
    from fedsrv.state.store import Store

    Store.sync = lambda self, interaction: None  # type: ignore[method-assign]
    StateDirectory._sync = lambda self, path: True  # type: ignore[method-assign]


def finish_before_acceptance() -> None:
    """Leave when the last results were sent, whatever became of them."""
    import grpc

    from fedcli.runtime.answers import RunOver
    from fedcli.runtime.host import Host
    from fedcli.runtime.link import Link
    from fedpb.v1 import coordinator_pb2 as rpc

    execute, next_one, send = Host.execute, Host._next_order, Link._send

    def executed(self: Any, given: Any) -> Any:
        results = execute(self, given)
        done = [result.order for result in results if result.order.kind == rpc.ORDER_KIND_FINISH]
        self.left = getattr(self, "left", len(self.workers.clients)) - len(done)
        return results

    def next_of(self: Any) -> Any:
        if getattr(self, "left", 1) == 0:
            raise RunOver("nobody said so")
        return next_one(self)

    def sent(self: Any, stream: Any) -> Any:
        try:
            return send(self, stream)
        except grpc.RpcError:
            if getattr(self, "kind", None) != rpc.ORDER_KIND_FINISH:
                raise
            return rpc.PushResponse()

    Host.execute, Host._next_order = executed, next_of  # type: ignore[method-assign]
    Link._send = sent  # type: ignore[method-assign]
    push = Link.push

    def pushed(self: Any, member: Any, result: Any) -> Any:
        self.kind = result.order.kind
        return push(self, member, result)

    Link.push = pushed  # type: ignore[method-assign]


def sum_of_before() -> None:
    """Take a relay's sum for one of this issue of the orders, whichever it is of."""
    from fedsrv.transport.open_trips import OpenTrip

    OpenTrip.check_issue = lambda self, header: None  # type: ignore[method-assign]


def strangers_left_out() -> None:
    """Let a relay send its sum without the clients that have not joined it since it began."""
    from fedplugins.relays.trips import RelayedTrips

    ready_group = RelayedTrips.ready_group

    def without_strangers(self: Any) -> Any:
        if self.group is not None:
            self.group.failed |= {c for c in self.group.clients if c not in self._runs}
        return ready_group(self)

    RelayedTrips.ready_group = without_strangers  # type: ignore[method-assign]


def lock_left_out() -> None:
    """Let a relay look without the lock why it has to end."""
    from fedplugins.relays.relaying import Relaying

    Relaying._why_ended = lambda self: self._ended  # type: ignore[method-assign]


BREAKS = {
    function.__name__.replace("_", "-"): function
    for function in (
        commit_before_rename,
        no_deduplication,
        watermark_too_early,
        finish_before_acceptance,
        sum_of_before,
        strangers_left_out,
        lock_left_out,
    )
}


def apply(name: str) -> None:
    """Break this process in one way; not at all where no name is given."""
    if name:
        BREAKS[name]()
