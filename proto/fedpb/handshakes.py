"""Failed TLS handshakes: what gRPC says of a server's certificate, in words that say what to do."""

from __future__ import annotations

from ipaddress import ip_address


def distrust(details: str, address: str) -> str:
    """Return why the certificate of a server was not accepted; empty if that is not the reason.

    Args:
        details: what gRPC says of the failed call.
        address: HOST:PORT of the server, as the user gave it.
    """
    if "Hostname Verification Check failed" in details:
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


def _kind(host: str) -> str:
    try:
        ip_address(host)
    except ValueError:
        return "the host"
    return "the address"
