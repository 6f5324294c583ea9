"""What is fuzzed: each function takes any bytes, and must raise nothing of its own.

A target feeds the bytes to the code that meets them first. The one error that code may raise is
part of the target; what else comes out is a finding. Targets also check what must hold of bytes
that were accepted.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from google.protobuf.message import DecodeError
from uvicorn.server import ServerState

from fedcli.data.store.client_data import ClientData
from fedmodels.config.sent import without_places
from fedmodels.errors import ArchiveError, ConfigError, DataError, PayloadError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.facts.resolution import experiment_of, received_experiment
from fedmodels.host.http_server import BoundedProtocol, PageServer, Response, is_addressed
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec, prototype_spec
from fedpb.codec import Receiver, read_chunk
from fedpb.headers import checked_places, plan_of
from fedpb.tables import client_json_of, values_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import Profile
from fedsrv.transport.sessions import client_id_of

Target = Callable[[bytes], None]
SPLIT = b"\xff\xfe\xfd"
"""Between the messages of a stream, or the files of a directory."""
CLASSES, WIDTH = 3, 2
ROOM = 1 << 16
"""Bytes that a target may be made to allocate."""


def rich_bundle() -> Bundle:
    """Return a bundle with something in every field."""
    counts = torch.tensor([1, 0, 2], dtype=torch.int32)
    return Bundle(
        {"base/w": torch.ones(2, 3), "base/half": torch.ones(3, dtype=torch.bfloat16),
         "head/flag": torch.tensor([True, False]), "head/n": torch.tensor(4)},
        {"class": Prototypes.of({0: (torch.ones(WIDTH), 3), 2: (torch.zeros(WIDTH), 1)}, WIDTH)},
        {"1": GeneratorState(2, {"net/w": torch.zeros(2)})},
        Histogram(counts, counts.clone()),
        {"num_examples": 5.0},
    )  # fmt: skip


@cache
def specs() -> tuple[BundleSpec, ...]:
    """Return what receivers expect: exact, open in its rows, and with everything left out."""
    exact = BundleSpec.of(rich_bundle())
    rows = prototype_spec("class", WIDTH, max_rows=4)
    open_rows = replace(exact, required={**exact.required, **rows.required})
    any_net = {f"weights/{n}": TensorSpec(torch.float32, (None,), 9) for n in ("a", "b", "c")}
    return exact, open_rows, BundleSpec(optional={**open_rows.required, **any_net}), BundleSpec()


def codec(data: bytes) -> None:
    """Take the messages of a Push or a Pull: its header, then frames."""
    with suppress(PayloadError):
        _receive(
            data.split(SPLIT), rpc.PullHeader if len(data) % 2 else rpc.PushHeader, _spec(data)
        )


def _spec(data: bytes) -> BundleSpec:
    """Return one of the specs; each input meets the same one again."""
    return specs()[len(data) // 2 % len(specs())]


def _receive(
    messages: list[bytes], header_type: type[rpc.PushHeader | rpc.PullHeader], spec: BundleSpec
) -> None:
    chunks = [read_chunk(message, header_type) for message in messages]
    header = chunks[0][0]
    if isinstance(header, rpc.PushHeader):
        stated = [header.bundle]
    else:
        stated = [part.bundle for part in header.parts] if header is not None else []
    for one in stated[:2]:
        with suppress(PayloadError):
            receiver = Receiver(one, spec)
            assert len(receiver.buffer) <= ROOM
            for _, frame in chunks:
                if frame is not None:
                    receiver.feed(frame)
            bundle = receiver.finish()
            spec.check({k: (t.dtype, tuple(t.shape)) for k, t in bundle.by_key().items()})


def headers(data: bytes) -> None:
    """Take whatever a message says beside its frames."""
    with suppress(DecodeError):
        push = rpc.PushHeader.FromString(data)
        spec = _spec(data)
        with suppress(PayloadError):
            places = checked_places(push.bundle, spec)
            assert sum(place.num_bytes for place in places) <= spec.max_bytes <= ROOM
            assert plan_of(push.bundle, spec).places == places
        _identify(push.client_id)
    with suppress(DecodeError):
        join = rpc.JoinRequest.FromString(data)
        client = _identify(join.client_id)
        with suppress(PayloadError):
            text = client_json_of(join.description)
            profile = Profile.parse(0 if client is None else client, text)
            assert profile.train.shape == (profile.num_tasks, profile.problem.num_classes)


def _identify(text: str) -> int | str | None:
    with suppress(PayloadError):
        client = client_id_of(text, 10)
        assert str(client) == text
        return client
    return None


def archive(data: bytes) -> None:
    """Read a file of a run."""
    path = _file()
    path.write_bytes(data)
    with suppress(ArchiveError):
        bundles, header = load_named(path, verify=bool(len(data) % 2))
        json.dumps(header)
        for bundle in bundles.values():
            bundle.by_key()


@cache
def _file() -> Path:
    """Return a file in memory."""
    return Path(f"/proc/self/fd/{os.memfd_create('fuzz')}")


@cache
def _directory() -> Path:
    """Return a directory that lasts as long as this process."""
    place = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, place)
    return Path(place)


FILES = ("client.json", *(f"task-0/{p}_{k}.npy" for p in ("train", "test") for k in "xy"))


def directories(data: bytes) -> None:
    """Open a client's directory, made of files between SPLIT; those beyond FILES are images."""
    root = _directory() / "client"
    with suppress(DataError):
        for place in _laid_out(root, data.split(SPLIT)):
            ClientData(place).check()


def _laid_out(root: Path, files: list[bytes]) -> Iterator[Path]:
    (root / "task-0").mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, [*files, *[b""] * len(FILES)], strict=False):
        if content:
            (root / name).write_bytes(content)
        else:
            (root / name).unlink(missing_ok=True)
    images = [root / f"task-0/{part}/0/a.png" for part in ("train", "test")]
    for path, content in zip(images, files[len(FILES) :], strict=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    yield root
    for path in images:
        if path.exists():
            path.unlink()
            path.parent.rmdir()
            path.parent.parent.rmdir()


def config(data: bytes) -> None:
    """Read a config file and one override behind it."""
    text, _, override = data.decode(errors="replace").partition("\0")
    with suppress(ConfigError):
        experiment = parse_experiment(text, "config", [override] if override else [])
        assert experiment_of(experiment.to_dict()) == experiment


def experiment(data: bytes) -> None:
    """Take the experiment that a server sends: it names no place on this machine."""
    with suppress(DecodeError, PayloadError, ConfigError):
        tables = values_of(rpc.JoinResponse.FromString(data).experiment)
        found = received_experiment(tables, "the server's experiment", ())
        assert found.to_dict() == without_places(found.to_dict())


def request(data: bytes) -> None:
    """Take what a caller of a page sends."""
    server, loop = _page_server()
    head = loop.run_until_complete(_answered(data, server)).partition(b"\r\n")[0]
    if b" 200 " in head:
        lines = [line.partition(b":") for line in data.replace(b"\r", b"\n").split(b"\n")]
        hosts = [value.strip() for name, _, value in lines if name.lower() == b"host"]
        assert any(is_addressed(host.decode("latin-1"), "127.0.0.1", ()) for host in hosts)


async def _answered(data: bytes, server: PageServer) -> bytes:
    """Return what a server of pages sends to a caller that has said everything."""
    config, sent = server._server.config, bytearray()
    caller = SimpleNamespace(
        write=sent.extend, close=lambda: None, is_closing=lambda: False,
        get_extra_info=lambda name: None, pause_reading=lambda: None, resume_reading=lambda: None,
    )  # fmt: skip
    state = ServerState()
    protocol: Any = BoundedProtocol(config, state, {}, asyncio.get_running_loop())
    protocol.connection_made(caller)
    if data:  # no bytes are the end of a connection
        protocol.data_received(data)
    await asyncio.gather(*state.tasks)
    protocol.connection_lost(None)
    return bytes(sent)


@cache
def _page_server() -> tuple[PageServer, asyncio.AbstractEventLoop]:
    pages = {"/": lambda accept: Response(accept.encode("latin-1"))}
    found, loop = PageServer("127.0.0.1", 0, pages), asyncio.new_event_loop()
    found._server.config.load()
    atexit.register(loop.close)
    return found, loop


TARGETS: dict[str, Target] = {
    "codec": codec,
    "headers": headers,
    "archive": archive,
    "directories": directories,
    "config": config,
    "experiment": experiment,
    "request": request,
}
