"""Makes points of what processes do: every call below reaches one before it and one after it.

Modules are changed right after they are imported. A function that is gone makes the import fail: a
hook that no longer holds anything must be noticed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import os
import queue
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import fault_breaks
import fault_disk
from fault_points import LOSE, begin, current, nap, note, reach, sync_slowly

SMALL_FRAME = 1024
"""Bytes of a frame here, so that the payload of a tiny net crosses in several messages."""


def around(owner: Any, name: str, point: str | Callable[..., str]) -> None:
    """Make a point before and after each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        what = point if isinstance(point, str) else point(*args)
        reach(f"{what}.before")
        found = original(*args, **kwargs)
        reach(f"{what}.after")
        return found

    setattr(owner, name, call)


def along(owner: Any, name: str, what: str | Callable[[], str]) -> None:
    """Make a point before each thing that the generator function ``owner.name`` yields."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        point = what if isinstance(what, str) else what()
        reach(f"{point}.before")
        for number, each in enumerate(original(*args, **kwargs)):
            if number:
                reach(f"{point}.middle")
            yield each
        reach(f"{point}.after")

    setattr(owner, name, call)


def before(owner: Any, name: str, point: str) -> None:
    """Make a point before each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        reach(point)
        return original(*args, **kwargs)

    setattr(owner, name, call)


# --- who this is ----------------------------------------------------------------------------------


def _coordinator(module: ModuleType) -> None:
    original = module.serve

    @functools.wraps(original)
    def serve(experiment: Any, out: Path, *args: Any, **kwargs: Any) -> Any:
        _begin("coordinator", out)
        return original(experiment, out, *args, **kwargs)

    module.serve = serve  # type: ignore[attr-defined]


def _host(module: ModuleType) -> None:
    original = module.Host.__init__

    @functools.wraps(original)
    def init(
        self: Any, clients: Any, link: Any, data: Path, states: Path, *more: Any, **by: Any
    ) -> None:
        _begin("client-" + ",".join(map(str, clients)), states.parent)
        original(self, clients, link, data, states, *more, **by)

    module.Host.__init__ = init


def _relaying(module: ModuleType) -> None:
    original = module.serve_relay

    @functools.wraps(original)
    def serve_relay(
        clients: Any, above: Any, listen: Any, telling: Any, code: Any, *more: Any
    ) -> None:
        _begin("relay", code[0])  # a file beside the plan: a relay has no directory of its own
        original(clients, above, listen, telling, (), *more)

    module.serve_relay = serve_relay  # type: ignore[attr-defined]
    around(module.Relaying, "_send", "send-sum")


def _uplink(module: ModuleType) -> None:
    push = module.Uplink.push

    @functools.wraps(push)
    def pushed(self: Any, header: Any, *args: Any) -> Any:
        what = "up-sum" if header.members else "up-push"
        reach(f"{what}.before")
        try:
            found = push(self, header, *args)
        except BaseException:
            reach(f"{what}.refused")
            raise
        reach(f"{what}.after")
        return found

    module.Uplink.push = pushed
    init = module.Uplink.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for name in ("join", "join_several", "leave"):
            around(self, name, f"up-{name}")

    module.Uplink.__init__ = made


def _relay_cohort(module: ModuleType) -> None:
    for name in ("begin", "told", "forget"):
        around(module.RelayedTrips, name, f"relay-{name}")


def _begin(role: str, out: Path) -> None:
    process = begin(role, out.resolve().parent / "faults")
    if process is not None:
        fault_breaks.apply(process.plan.get("broken", ""))
        if process.plan.get("records_disk"):
            fault_disk.record(out.resolve(), process.folder)


# --- what is done ---------------------------------------------------------------------------------


def _engine(module: ModuleType) -> None:
    around(module.Rounds, "interact", "interact")
    around(module.WholeCohort, "train", "train")
    for name in ("score", "finish"):
        around(module.RoundParts, name, name)
    around(module.Commits, "_write", "commit")
    make = module.make

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        method = make(*args, **kwargs)
        for name in ("broadcast", "aggregate", "finish"):
            around(type(method), name, f"method-{name}")
        return method

    module.make = made  # type: ignore[attr-defined]


def _buffer(module: ModuleType) -> None:
    around(module.BufferedRounds, "train", "train")


def _store(module: ModuleType) -> None:
    store = module.Store
    for name in ("add_scores", "prune", "sync", "end", "_append"):
        around(store, name, f"store-{name.strip('_')}")
    init, commit, roll_back, advance = (
        store.__init__, store.commit, store.roll_back, store.advance
    )  # fmt: skip

    def opened(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        note(position=self.committed)

    def committed(self: Any, record: Any, *args: Any, **kwargs: Any) -> None:
        commit(self, record, *args, **kwargs)
        note(committed=record["interaction"])

    def rolled_back(self: Any, interaction: int, *args: Any, **kwargs: Any) -> None:
        if interaction < self.committed:
            note(committed=self.committed)
            note(position=interaction)
        roll_back(self, interaction, *args, **kwargs)

    def advanced(self: Any, watermark: int) -> int:
        note(watermark=watermark)
        return int(advance(self, watermark))

    store.__init__, store.commit = opened, committed
    store.roll_back, store.advance = rolled_back, advanced


def _remote(module: ModuleType) -> None:
    around(module.RemoteCohort, "end_result", "result")


def _service(module: ModuleType) -> None:
    along(module, "messages", "broadcast")
    for name in ("join", "push", "leave"):
        around(module.Service, name, f"service-{name.replace('_', '-')}")


def _link(module: ModuleType) -> None:
    import grpc

    class Lost(grpc.RpcError):
        """A call whose answer never came."""

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "the acknowledgement was lost"

        def trailing_metadata(self) -> tuple[()]:
            return ()

    for name in ("join", "leave"):
        around(module.Link, name, name)
    send = module.Link._send

    def sent(self: Any, *args: Any) -> Any:
        reach("push.before")
        reply = send(self, *args)
        if reach("push.after") == LOSE:
            raise Lost
        return reply

    module.Link._send = sent


def _worker(module: ModuleType) -> None:
    kinds = {1: "train", 2: "evaluate", 3: "client-finish"}
    around(module.Worker, "execute", lambda self, order, *_: kinds.get(order.kind, "order"))
    before(module.Worker, "_tick", "train.middle")


def _client_state(module: ModuleType) -> None:
    for name in ("save", "save_personal"):
        around(module.StateDirectory, name, name.replace("_", "-"))


def _sessions(module: ModuleType) -> None:
    around(module.SessionFile, "begin", "begin-session")
    around(module.SessionFile, "write", "set-session")


def _told(module: ModuleType) -> None:
    def point() -> str:
        process = current()
        return "up" if process is not None and process.role == "relay" else "upload"

    along(module.Pushed, "messages", point)


def _codec(module: ModuleType) -> None:
    module.WHOLE_BYTES = module.FRAME_BYTES = SMALL_FRAME  # type: ignore[attr-defined]
    before(module.Receiver, "feed", "receive.middle")


def _frames(module: ModuleType) -> None:
    module.MESSAGE_BYTES = SMALL_FRAME  # type: ignore[attr-defined]


def _archive(module: ModuleType) -> None:
    original = module.serialize_file

    def serialize_file(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        reach("write.before")
        original(tensors, path, *args, **kwargs)
        size = os.path.getsize(path)
        reach("write.middle", lambda: os.truncate(path, size // 2))
        reach("write.after")

    module.serialize_file = serialize_file  # type: ignore[attr-defined]


MODULES = {
    "fedsrv.coordinator": _coordinator,
    "fedsrv.engine.rounds": _engine,
    "fedsrv.parts.buffered_rounds": _buffer,
    "fedsrv.state.store": _store,
    "fedsrv.transport.remote_cohort": _remote,
    "fedsrv.transport.service": _service,
    "fedplugins.relays.relaying": _relaying,
    "fedplugins.relays.uplink": _uplink,
    "fedplugins.relays.trips": _relay_cohort,
    "fedcli.runtime.host": _host,
    "fedcli.runtime.link": _link,
    "fedcli.runtime.worker": _worker,
    "fedcli.runtime.sessions": _sessions,
    "fedcli.runtime.state": _client_state,
    "fedpb.codec": _codec,
    "fedpb.told": _told,
    "fedpb.frames": _frames,
    "fedmodels.tensors.archive": _archive,
}


# --- what the system is asked for -----------------------------------------------------------------

_WRITES = ("insert", "update", "delete", "commit", "create")


class Connection(sqlite3.Connection):
    """A connection whose writing statements are points, each named after its verb."""

    def _written(self, call: Any, sql: str, *args: Any) -> Any:
        verb = sql.split(maxsplit=1)[0].lower()
        if verb not in _WRITES:
            return call(sql, *args)
        reach(f"sql-{verb}.before")
        if verb == "commit":  # SQLite syncs without asking Python
            sync_slowly()
        found = call(sql, *args)
        reach(f"sql-{verb}.after")
        return found

    def execute(self, sql: str, *args: Any) -> Any:
        return self._written(super().execute, sql, *args)

    def executemany(self, sql: str, *args: Any) -> Any:
        return self._written(super().executemany, sql, *args)

    def close(self) -> None:
        fault_disk.database_closes(self)
        super().close()


def _system() -> None:
    """Make points of what the operating system and SQLite are asked for."""
    connect, fsync = sqlite3.connect, os.fsync

    def connected(database: Any, *args: Any, **kwargs: Any) -> Any:
        return connect(database, *args, **{"factory": Connection, **kwargs})

    def synced(descriptor: Any) -> None:
        safe = fault_disk.about_to_sync(descriptor)
        sync_slowly()
        fsync(descriptor)
        safe()

    sqlite3.connect, os.fsync = connected, synced  # type: ignore[assignment]
    around(os, "fsync", "fsync")
    around(os, "replace", "rename")
    around(os, "rename", "rename")
    around(os, "unlink", "unlink")
    around(Path, "write_text", "write-text")


# --- borders between threads ----------------------------------------------------------------------

OURS = {"fedsrv", "fedcli", "fedpb", "fedmodels"}
"""Whose threads nap; those of gRPC and of Python's library have borders of their own."""


def _place(what: str) -> str:
    """Return the name of a border: the function two frames up and what it does; empty of others."""
    code = sys._getframe(2).f_code
    parts = code.co_filename.split("/")
    return f"{parts[-1]}:{code.co_name}:{what}" if not OURS.isdisjoint(parts) else ""


def _at_borders(kind: Any, before: str, after: str) -> None:
    """Let threads nap before one method of a kind of object, and after another one."""
    for name, is_first in ((before, True), (after, False)):
        setattr(kind, name, _napping(getattr(kind, name), kind.__name__, is_first))


def _napping(original: Callable[..., Any], what: str, is_first: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **by: Any) -> Any:
        place = _place(what)
        if place and is_first:
            nap(f"{place} before")
        found = original(*args, **by)
        if place and not is_first:
            nap(f"{place} after")
        return found

    return call


class _Lock:
    """A lock of Python's library before whose taking, and after whose release, threads may nap."""

    def __init__(self) -> None:
        self._lock = _LOCK()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *why: Any) -> None:
        self._lock.__exit__(*why)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class _RLock(threading._PyRLock):  # type: ignore[name-defined, misc]
    """The same that its owner may take again."""

    def __enter__(self) -> bool:
        return bool(self.acquire())


_LOCK, _RLOCK = threading.Lock, threading.RLock


def _borders() -> None:
    """Let threads nap before they take a lock, after they gave it back, and where work is queued.

    What one thread hands to another it leaves under a lock, or in the queue of a pool of threads.
    """
    for kind in (threading.Condition, _Lock, _RLock):
        _at_borders(kind, "__enter__", "__exit__")
    _at_borders(queue.Queue, "get", "put")
    threading.Lock = lambda: _Lock() if _place("") else _LOCK()  # type: ignore[assignment, misc]
    threading.RLock = lambda: _RLock() if _place("") else _RLOCK()  # type: ignore[assignment, misc]
    submit = ThreadPoolExecutor.submit

    def submitted(self: Any, call: Callable[..., Any], /, *args: Any, **by: Any) -> Any:
        place = _place("submit")
        if not place:
            return submit(self, call, *args, **by)

        def late() -> Any:
            nap(f"{place} before")
            return call(*args, **by)

        found = submit(self, late)
        nap(f"{place} after")
        return found

    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign, assignment]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have points, and changes them once they are loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            MODULES[name](module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Change the modules of this process as they come in."""
    _system()
    _borders()
    sys.meta_path.insert(0, _Finder())
