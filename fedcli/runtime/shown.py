"""What leaves a client, in words: each message before it is sent, a line for each field.

``fedcli join --show-uploads`` writes them for whoever answers for a site's data. A message that
cannot be written down is not sent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from torch import Tensor

from fedmodels.errors import ArchiveError, ConfigError, LinkError, reason_of
from fedmodels.host.line_file import append_lines
from fedmodels.tensors.archive import save
from fedmodels.tensors.bundle import DTYPE_NAMES, Bundle, ClientId, state_digest
from fedpb.tables import values_of
from fedpb.v1.table_pb2 import Table

MAX_FILE_BYTES = 32 << 20
"""Size at which a file is set aside for a new one; the one before it stays."""
KEPT_TENSORS = 20
"""How many uploads have their tensors on the disk: the newest ones."""
MANY = 64
"""How many numbers of a field are written out at most: its first ones."""
ASKED = ("Join", "JoinSeveral", "Announce", "Push")
"""Calls for which a person may be asked; the others carry neither data nor what was learnt."""
SECRETS = ("token",)


def fields_of(message: Message, upload: Bundle | None = None) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each field that a message fills.

    Of tensors that follow it, the headers in the message say nothing more.
    """
    for known, value in message.ListFields():
        if upload is None or known.name != "bundle":
            yield from _told(known.name, value, known)
    for key, tensor in (upload or Bundle()).by_key().items():
        yield f"upload.{key}", tensor_text(tensor)


def _told(name: str, value: Any, known: FieldDescriptor) -> Iterator[tuple[str, str]]:
    """Yield the fields that one field of a message is or holds."""
    if known.name in SECRETS:
        yield name, f"{len(value)} bytes, the secret of the session"
    elif known.message_type is not None and known.message_type.GetOptions().map_entry:
        for key in sorted(value):
            yield f"{name}[{key}]", str(value[key])
    elif known.is_repeated and known.message_type is not None:
        for at, one in enumerate(value):
            for inner, text in fields_of(one):
                yield f"{name}[{at}].{inner}", text
    elif known.is_repeated:
        yield name, _listed([*value])
    elif isinstance(value, Table):
        yield from _keys(name, values_of(value))
    elif known.message_type is not None:
        for inner, text in fields_of(value):
            yield f"{name}.{inner}", text
    elif known.enum_type is not None:
        yield name, known.enum_type.values_by_number[value].name
    else:
        yield name, value.hex() if isinstance(value, bytes) else repr(value)


def _keys(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(f"{name}.{key}", inner)
    else:
        yield name, repr(value)


def _listed(values: Sequence[Any]) -> str:
    more = f" … ({len(values)} in all)" if len(values) > MANY else ""
    shown = (v.hex() if isinstance(v, bytes) else str(v) for v in values[:MANY])
    return ", ".join(shown) + more


def tensor_text(tensor: Tensor) -> str:
    """Return a tensor's type and shape; its numbers, or how far they reach if they are many."""
    kind = f"{DTYPE_NAMES[tensor.dtype]} {tuple(tensor.shape)}"
    if tensor.numel() <= MANY:
        return f"{kind}: {_listed(tensor.flatten().tolist())}"
    numbers = tensor.double()
    low, high, mean = numbers.min().item(), numbers.max().item(), numbers.mean().item()
    return f"{kind}: from {low:.4g} to {high:.4g}, mean {mean:.4g}"


@dataclass
class Shown:
    """Writes each message of a process before it is sent, and may ask a person."""

    place: Path | None
    """A directory; None for the standard output."""
    clients: Sequence[ClientId]
    tensors: bool = False
    """Write the tensors of uploads, too."""
    asks: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        """Make the directory; ConfigError if that fails, or nobody can be asked."""
        if self.asks and not sys.stdin.isatty():
            raise ConfigError("--ask needs a terminal, where somebody answers")
        if self.place is None and self.tensors:
            raise ConfigError("--show-tensors needs a directory: --show-uploads DIR")
        if self.place is not None:
            try:
                self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                why = reason_of(error)
                raise ConfigError(f"--show-uploads {self.place} cannot be used: {why}") from None

    @property
    def name(self) -> str:
        """What files are called: several processes may share a directory."""
        first, last = self.clients[0], self.clients[-1]
        return f"client-{first}" if first == last else f"clients-{first}-to-{last}"

    def __call__(self, call: str, message: Message, upload: Bundle | None = None) -> None:
        """Write down a message that is about to be sent; ask whether to send it, if that is due.

        Raises:
            ArchiveError: it cannot be written.
            LinkError: the answer was no.
        """
        with self._lock:
            try:
                self._write(self._text(call, message, upload))
                if self.tensors and upload is not None and upload.by_key():
                    self._keep(message, upload)
            except OSError as error:
                where = self.place or "the standard output"
                raise ArchiveError(
                    f"{call} is not sent, since {where} does not take what it would tell: "
                    f"{reason_of(error)}"
                ) from None
            if self.asks and call in ASKED:
                self._ask(call)

    def _text(self, call: str, message: Message, upload: Bundle | None) -> str:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        found = [*fields_of(message, upload)]
        if call in ("Beat", "Pull", "Leave"):
            return f"{now} {call}: {'; '.join(f'{name} {text}' for name, text in found)}\n"
        head = f"{now} {call}"
        if upload is not None:
            digest = state_digest([("upload", upload)])
            head += f": an upload of {upload.num_bytes()} bytes, sha256 {digest}"
        width = max((len(name) for name, _ in found), default=0)
        return "\n".join([head, *(f"    {name:<{width}}  {text}" for name, text in found), ""])

    def _write(self, text: str) -> None:
        if self.place is None:
            print(text, end="", flush=True)
            return
        path = self.place / f"{self.name}.txt"
        if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
            path.replace(path.with_suffix(".before.txt"))
        append_lines(path, text.encode(), sync=True)

    def _keep(self, header: Any, upload: Bundle) -> None:
        """Write the tensors of an upload; the oldest ones go."""
        assert self.place is not None
        own = f"client-{header.client_id}-interaction-{header.interaction + 1}.safetensors"
        save(self.place / own, upload, {"client": header.client_id})
        mine = {f"client-{client}" for client in self.clients}
        files = self.place.glob("client-*-interaction-*.safetensors")
        kept = [path for path in files if path.name.rpartition("-interaction-")[0] in mine]
        for path in sorted(kept, key=lambda path: path.stat().st_mtime_ns)[:-KEPT_TENSORS]:
            path.unlink()

    def _ask(self, call: str) -> None:
        where = "above" if self.place is None else f"at the end of {self.place / self.name}.txt"
        answer = input(f"{call}: what would leave stands {where}. Send it? [yes/no] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise LinkError(f"{call} is not sent: the answer was {answer!r}")
