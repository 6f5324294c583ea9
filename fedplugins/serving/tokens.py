"""Tokens of the programs that may send labels to a served model, one per line of a file."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from fedmodels.errors import ConfigError, reason_of

TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""What a token looks like; those that fit are sent as ``Authorization: Bearer`` (RFC 6750)."""
SCHEME = "bearer"


def tokens_in(file: Path) -> tuple[str, ...]:
    """Return the tokens of a file; empty lines and those that begin with ``#`` are none.

    Raises:
        ConfigError: it cannot be read, or holds no token, or something else.
    """
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--feedback-tokens {file} cannot be read: {reason_of(error)}") from None
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#") and not TOKEN.fullmatch(line):
            raise ConfigError(
                f"--feedback-tokens {file}: line {number}: a token has 16 to 512 letters, digits "
                "and signs of ._~+/=-, as 'openssl rand -hex 32' prints one"
            )
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"--feedback-tokens {file} holds no token: write one on a line")
    return found


def bearer(header: str, tokens: Sequence[str]) -> str | None:
    """Return the one of some tokens that an ``Authorization`` header has; None if it has none.

    Every token is compared in constant time, so the answer's duration says nothing about one.
    """
    scheme, _, given = header.partition(" ")
    came = given.strip().encode("latin-1", "replace")
    same = [token for token in tokens if hmac.compare_digest(token.encode(), came)]
    return same[0] if same and scheme.lower() == SCHEME else None
