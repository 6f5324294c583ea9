"""The way of a caller to its server: options of the channel, and which address is near."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any

from fedmodels.times import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, PONG_MS
from fedpb import SET_OUT


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return gRPC's options of a channel: a silent server is noticed, and loopback has no proxy."""
    return [
        ("grpc.max_receive_message_length", 4 << 20),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # as TCP_USER_TIMEOUT
        ("grpc.http2.ping_timeout_ms", PONG_MS),  # an answer waits behind data
        ("grpc.http2.settings_timeout", PONG_MS),
        ("grpc.http2.max_pings_without_data", 0),  # else once a minute, after two without data
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", int(not is_here(address))),
    ]


def set_out_by(error: Any) -> int | None:
    """Return the client that a refusal says takes no part any more; None of another error.

    The other side wrote the number: longer ones than ids have are none.
    """
    for key, value in error.trailing_metadata() or ():
        if key == SET_OUT and str(value).isdecimal() and len(value) < 10:
            return int(value)
    return None


def place_after(address: str, place: int) -> str:
    """Return the address so many ports after another one; of a socket, its path and the number."""
    if is_socket(address):
        return f"{address}.{place}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + place}"


def is_here(address: str) -> bool:
    """Tell whether a gRPC address is on this machine: loopback, or by the machine's own name."""
    return is_loopback(address) or host_of(address).lower() == socket.gethostname().lower()


def is_loopback(address: str) -> bool:
    """Tell whether only this machine can reach a gRPC address; in doubt it is not loopback."""
    if is_socket(address):
        return True
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def is_socket(address: str) -> bool:
    """Tell whether a gRPC address is a socket of Unix."""
    return re.match(r"unix(-abstract)?:", address) is not None


def host_of(address: str) -> str:
    """Return the host of a gRPC address, without brackets."""
    target = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", address)
    match = re.fullmatch(r"\[(?P<six>[^\]]+)\](:\d+)?|(?P<host>[^:]*)(:\d+)?", target)
    return (match["six"] or match["host"]) if match else target
