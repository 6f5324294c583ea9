"""Why nobody answers: what gRPC says of a failed call in words, a proxy on the way, distrust."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fedpb.channels import host_of, is_here, is_socket

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that name gRPC's proxy; the first one that is set counts."""
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""The variables that name hosts without proxy; the first one that is set counts."""


def targets_of(address: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each address that a host's name stands for, as gRPC names it, and options of its own.

    The options keep the host's name, by which a certificate is checked. A host of one address, and
    one behind a proxy, has none.
    """
    host, _, port = re.sub(r"^dns:(///)?", "", address).rpartition(":")
    if not port.isdecimal() or is_socket(address) or proxy_to(address):
        return []
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        kinds = {socket.AF_INET: "ipv4:{}:{}", socket.AF_INET6: "ipv6:[{}]:{}"}
        targets = dict.fromkeys(kinds[of].format(*at[:2]) for of, *_, at in found if of in kinds)
        named = [("grpc.ssl_target_name_override", host), ("grpc.default_authority", address)]
        return [(target, named) for target in targets] if len(targets) > 1 else []
    return []


def clearest(details: str, address: str, ask: Callable[[str, Any], str]) -> str:
    """Return what gRPC says of a failed call, of the address that has most to say.

    Of a host with several addresses, such as ``localhost``, gRPC tells the last failure: that one
    of them refuses. Another one may have asked for a certificate.

    Args:
        details: what gRPC says of the host.
        address: of the server, as the user gave it.
        ask: returns what gRPC says of one address, given options of its channel.
    """
    if "refused" in details.lower() or "unreachable" in details.lower():
        for target, options in targets_of(address):
            if (found := ask(target, options)) and "refused" not in found.lower():
                return found
    return details


def why_unreachable(details: str, address: str, *, over_tls: bool, option: str = "--tls") -> str:
    """Return why a server cannot be reached: in words, what that may mean, a proxy on the way.

    Args:
        details: what gRPC says of the failed call, in printable characters.
        address: of the server, as the user gave it.
        over_tls: whether the caller has credentials.
        option: how the options of TLS begin, ``--tls`` or ``--up``.
    """
    said = in_words(details)
    if meaning := meaning_of_failure(details, over_tls, option):
        said = f"{said} ({meaning})"
    if proxy := proxy_to(address):
        said += f"; {proxy} is on the way: name {host_of(address)} in no_proxy to do without it"
    return said


_WORDS = {
    "nothing listens there (connection refused)": ("connection refused",),
    "its name is not known here": ("dns resolution failed", "domain name not found"),
    "no way leads there": ("no route to host", "unreachable"),
    "it does not answer": ("timed out", "timeout", "deadline exceeded", "fd shutdown"),
    "the connection was ended": (
        "socket closed", "connection reset", "broken pipe", "goaway", "stream removed", "recvmsg",
        "connection closed", "rst_stream",
    ),
}  # fmt: skip
"""What is said of a failed call, and which of gRPC's words mean it."""


def in_words(details: str) -> str:
    """Return what gRPC says of a failed call as a user would say it; else without its marks."""
    last = details.rpartition("last error: ")[2]
    for meaning, signs in _WORDS.items():
        if any(sign in last.lower() for sign in signs):
            return meaning
    return re.sub(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?", "", last)


def proxy_to(address: str) -> str:
    """Return the proxy between here and a server, and the variable that names it; empty for none.

    These are gRPC's rules. A password in the variable is left out.
    """
    if is_here(address) or is_socket(address):
        return ""
    variable = next((name for name in PROXIES if os.environ.get(name)), "")
    with suppress(ValueError):  # a port that is none: gRPC passes over such a value
        proxy = urlsplit(os.environ.get(variable, ""))
        if proxy.scheme == "http" and proxy.hostname and not _is_exempt(host_of(address)):
            port = f":{proxy.port}" if proxy.port else ""
            return f"the proxy {proxy.hostname}{port} of {variable}"
    return ""


def _is_exempt(host: str) -> bool:
    """Tell whether a variable says that a host is reached without proxy."""
    listed = next((os.environ[name] for name in EXCEPTIONS if os.environ.get(name)), "")
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        if host.lower().endswith(entry.lower()):
            return True
        with suppress(ValueError):  # one of the two is a name
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


OTHER_NAME = ("Hostname Verification Check failed", "is not in peer certificate")
"""What gRPC says of a certificate that does not name the server: 1.85, and 1.80."""


def distrust(details: str, address: str) -> str:
    """Return why the certificate of a server was not accepted; empty if that is not the reason.

    Args:
        details: what gRPC says of the failed call.
        address: HOST:PORT of the server, as the user gave it.
    """
    if any(words in details for words in OTHER_NAME):
        host = address.rpartition(":")[0].strip("[]")
        return (
            f"TLS: the certificate of the server at {address} does not name {_kind(host)} {host}; "
            f"give one that it names, or issue it anew with --host {host}"
        )
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return (
            f"TLS: the certificate of the server at {address} is not signed by the authority that "
            "--tls-ca names, or has expired"
        )
    return ""


def meaning_of_failure(details: str, over_tls: bool, option: str) -> str:
    """Return what a failed connection looks like, where the two sides may differ in TLS.

    Args:
        details: what gRPC says of the failed call.
        over_tls: whether the caller has credentials.
        option: how the caller's options of TLS begin, ``--tls`` or ``--up``.
    """
    ended = "Socket closed" in details
    if not over_tls:
        return f"a server that wants TLS ends calls like this: give {option}-ca" if ended else ""
    if "WRONG_VERSION_NUMBER" in details:
        return f"a server without TLS answers like this: leave out {option}-ca"
    was_open = "Stream removed" in details  # so the server had accepted the connection
    if not was_open and (ended or "handshake" in details.lower()):
        return (
            "over TLS a server ends calls like this where it wants a certificate, or does not "
            f"accept the one it got: give {option}-cert and {option}-key beside {option}-ca, "
            "from an authority that the server knows"
        )
    return ""


def _kind(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "the host"
    return "the address"
