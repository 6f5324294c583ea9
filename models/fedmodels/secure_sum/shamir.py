"""Shamir's secret sharing over GF(2^128), for many points or secrets at a time.

Adi Shamir, How to Share a Secret, Communications of the ACM 22(11), 1979.

    paper                here
    D, D_i               secret, share: 16 bytes
    q(x)                 a random polynomial of degree threshold - 1 with q(0) = D
    x_i = i              place + 1
    k, n                 threshold, count

The field is GF(2)[x] / (1 + x + x^2 + x^7 + x^128), and a number is 16 bytes, the highest power
first: shares are those of ``pycryptodome``. A Python integer holds many numbers, each in a lane of
32 bytes, so that one operation of the integer is one of all lanes. No branch depends on a secret.

The secret is sum_i l_i D_i, where l_i = prod_{m != i} x_m / (x_i + x_m) depends on who holds the
shares alone. So the l_i are computed once for all secrets that the same clients hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache

SECRET_BYTES = 16
LANE_BYTES = 2 * SECRET_BYTES
BITS, LANE = 8 * SECRET_BYTES, 8 * LANE_BYTES
FIELD = 1 << 128 | 0b10000111
"""The polynomial that the field is taken modulo."""


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return ``count`` shares of a secret, any ``threshold`` of which give it."""
    everywhere, low, with_bit = _lanes([_ONE] * count), _lanes([_FULL] * count), _with_bit(count)
    drawn, found = os.urandom(SECRET_BYTES * (threshold - 1)), 0
    for end in range(SECRET_BYTES, len(drawn) + 1, SECRET_BYTES):
        found ^= _number(drawn[end - SECRET_BYTES : end]) * everywhere
        found = _multiplied(found, with_bit, low)
    return _numbers(found ^ _number(secret) * everywhere, count)


def combined(places: Sequence[int], shares: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return the secrets behind shares.

    Args:
        places: of the clients that hold the shares, from 0, each once: as many as the threshold.
        shares: of each secret, one for each place.
    """
    total, low = 0, _lanes([_FULL] * len(shares))
    factors = _lagrange(tuple(places))
    for factor, held in zip(factors, zip(*shares, strict=True), strict=True):
        lanes = _lanes(held)
        for bit in _bits(factor):
            total ^= lanes << bit
    return _numbers(_reduced(_reduced(total, low), low), len(shares))


@lru_cache(maxsize=16)
def _lagrange(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return l_i of each place."""
    points, product = [place + 1 for place in places], 1
    for point in points:
        product = _product(product, point)
    found = []
    for point in points:
        below = point
        for other in points:
            if other != point:
                below = _product(below, point ^ other)
        found.append(_product(product, _inverse(below)))
    return tuple(found)


# --- numbers in lanes -----------------------------------------------------------------------------


def _lanes(numbers: Sequence[bytes]) -> int:
    return _number(b"".join(_EMPTY + number for number in numbers))


def _numbers(lanes: int, count: int) -> list[bytes]:
    data = lanes.to_bytes(count * LANE_BYTES, "big")
    return [data[end - SECRET_BYTES : end] for end in range(LANE_BYTES, len(data) + 1, LANE_BYTES)]


@lru_cache(maxsize=16)
def _with_bit(count: int) -> tuple[int, ...]:
    """Return, for each bit, the lanes whose point of 1 to ``count`` has that bit."""
    return tuple(
        _lanes([_FULL if point >> bit & 1 else _EMPTY for point in range(1, count + 1)])
        for bit in range(count.bit_length())
    )


def _multiplied(lanes: int, with_bit: Sequence[int], low: int) -> int:
    """Return lanes times a small number of each, by the lanes whose small number has each bit."""
    found = 0
    for bit, mask in enumerate(with_bit):
        found ^= (lanes & mask) << bit
    return _reduced(found, low)


def _reduced(lanes: int, low: int) -> int:
    """Return lanes without what is beyond 128 bits; of 255 bits, 7 are left for a second call."""
    high = lanes >> BITS & low
    return lanes & low ^ high ^ high << 1 ^ high << 2 ^ high << 7


# --- single numbers, none of them secret ----------------------------------------------------------


def _product(number: int, other: int) -> int:
    found = 0
    for bit in _bits(other):
        found ^= number << bit
    low = (1 << BITS) - 1
    return _reduced(_reduced(found, low), low)


def _inverse(number: int) -> int:
    """Return the number whose product with this one is 1, by Euclid's algorithm."""
    a, b, x, y = number, FIELD, 1, 0
    while a != 1:
        shift = a.bit_length() - b.bit_length()
        if shift < 0:
            a, b, x, y, shift = b, a, y, x, -shift
        a, x = a ^ b << shift, x ^ y << shift
    return x


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


_EMPTY, _FULL = bytes(SECRET_BYTES), b"\xff" * SECRET_BYTES
_ONE = (1).to_bytes(SECRET_BYTES, "big")
