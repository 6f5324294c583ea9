"""What a server's answers mean to a client."""

from __future__ import annotations

from typing import Any

import grpc

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, LinkError, SetOut
from fedpb import AGAIN_AFTER, CROWDED, PROTOCOL
from fedpb.channels import set_out_by

_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class SessionGone(Exception):
    """The server does not know the session any more; joining again helps."""


class RunOver(Exception):
    """The run has ended, and its end is committed."""


class Dismissed(LinkError):
    """The server ends this client's part in the run, and says why."""


class UploadRefused(LinkError):
    """The server will not take this upload, now or later; the run may go on."""


class Superseded(Exception):
    """The server no longer wants this result."""


def said(error: Any) -> str:
    """Return the line of a server's error, with unprintable characters escaped."""
    return printable(error.details() or "")


def raise_if_final(what: str, error: grpc.RpcError) -> None:
    """Raise the error that a server's answer means, unless the call may be made again."""
    if (client := set_out_by(error)) is not None:
        raise SetOut(said(error), client) from None
    found = meaning_of(what, error.code(), said(error))
    if found is not None:
        raise found from None


def meaning_of(what: str, code: grpc.StatusCode, line: str) -> Exception | None:
    """Return the error that a code and its line mean; None if the call may be made again."""
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return SessionGone(line)
    if code == grpc.StatusCode.ABORTED:
        return Superseded(line)
    if code == grpc.StatusCode.OUT_OF_RANGE:
        return RunOver(line)
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return UploadRefused(f"{what}: {line} ({code.name})")
    if code == grpc.StatusCode.NOT_FOUND:  # the run has no such partition
        return ConfigError(f"{what}: {line}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return LinkError(f"{what}: the server does not speak protocol {PROTOCOL}: {line}")
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return Dismissed(f"{what}: {line} ({code.name})")
    return None if code in _RETRIED else LinkError(f"{what}: {line} ({code.name})")


def again_after_s(error: grpc.RpcError) -> float | None:
    """Return after how many seconds the server wants the same call again; None if it does not.

    No more than a minute, whatever the server says.
    """
    if error.details() == CROWDED:
        return 1.0
    for key, value in error.trailing_metadata() or ():
        if key == AGAIN_AFTER and str(value).isdecimal() and len(value) < 10:
            return min(int(value) / 1000, 60.0)
    return None
