"""Four repairs taken back, each of which the harness must notice."""

from __future__ import annotations

from typing import Any


def commit_before_rename() -> None:
    """Count an interaction before the state behind it has its name."""
    import os

    from fedsrv.store import Store

    original = Store.commit

    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        late: list[tuple[Any, Any]] = []
        rename = os.replace
        os.replace = lambda source, target: late.append((source, target))  # type: ignore[assignment]
        try:
            original(self, *args, **kwargs)
        finally:
            os.replace = rename
        for source, target in late:
            os.replace(source, target)

    Store.commit = commit  # type: ignore[method-assign]


def no_deduplication() -> None:
    """Take whatever a client pushes as the answer to the order it has now."""
    from fedsrv import remote

    remote.answers = lambda header, order: True


def watermark_too_early() -> None:
    """Call states safe that were never synced."""
    from fedcli.state import StateDirectory
    from fedsrv.store import Store

    Store.sync = lambda self, interaction: None  # type: ignore[method-assign]
    StateDirectory._sync = lambda self, path: True  # type: ignore[method-assign]


def finish_before_acceptance() -> None:
    """Take the last result as delivered when it was sent, whatever became of it."""
    import grpc

    from fedcli.link import Link
    from fedpb import coordinator_pb2 as rpc

    original = Link._send

    def send(self: Any, header: Any, upload: Any) -> Any:
        try:
            return original(self, header, upload)
        except grpc.RpcError:
            if header.kind != rpc.ORDER_FINISH:
                raise
            return rpc.PushReply()

    Link._send = send  # type: ignore[method-assign]


BREAKS = {
    function.__name__.replace("_", "-"): function
    for function in (
        commit_before_rename,
        no_deduplication,
        watermark_too_early,
        finish_before_acceptance,
    )
}


def apply(name: str) -> None:
    """Break this process in one way; not at all where no name is given."""
    if name:
        BREAKS[name]()
