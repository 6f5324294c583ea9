"""Failed TLS handshakes: what gRPC says of a server's certificate, in words that say what to do."""

from __future__ import annotations

from ipaddress import ip_address

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
        ip_address(host)
    except ValueError:
        return "the host"
    return "the address"
