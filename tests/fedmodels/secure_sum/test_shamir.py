"""Shamir's sharing over GF(2^128): by hand, and beside that of pycryptodome."""

from __future__ import annotations

import os

import pytest

from fedmodels.secure_sum import shamir
from fedmodels.secure_sum.shamir import combined, split


def test_a_polynomial_of_degree_one_by_hand(monkeypatch):
    """q(x) = 1 + x * x^127 at 1 and 2: 1 ^ x^127, and 1 ^ x^128 with x^128 = 1 + x + x^2 + x^7.

    x is the number 2, so the random coefficient is 2^127, and 2^128 = 0b10000111.
    """
    monkeypatch.setattr(shamir.os, "urandom", lambda n: (1 << 127).to_bytes(n, "big"))
    shares = split((1).to_bytes(16, "big"), 2, 2)
    assert [int.from_bytes(share, "big") for share in shares] == [1 << 127 | 1, 0b10000110]
    assert combined((0, 1), [shares]) == [(1).to_bytes(16, "big")]


@pytest.mark.parametrize(("threshold", "count"), [(1, 3), (2, 3), (34, 50), (200, 300)])
def test_shares_are_those_of_pycryptodome_both_ways(threshold, count):
    """Also of several secrets at a time, and of 300 holders, whose places take nine bits."""
    other = pytest.importorskip("Crypto.Protocol.SecretSharing").Shamir
    secrets = [os.urandom(16), bytes(16), b"\xff" * 16]
    ours = [split(secret, threshold, count) for secret in secrets]
    theirs = [[s for _, s in other.split(threshold, count, one)] for one in secrets[: count // 50]]
    places = [*range(0, count, 2), *range(1, count, 2)][:threshold]
    if threshold < 100:  # its own combination takes seconds beyond
        assert other.combine([(p + 1, ours[0][p]) for p in places]) == secrets[0]
    held = [[shares[place] for place in places] for shares in ours + theirs]
    assert combined(places, held) == secrets + secrets[: len(theirs)]


def test_fewer_shares_tell_another_secret():
    secret = os.urandom(16)
    shares = split(secret, 3, 5)
    assert combined((0, 4), [[shares[0], shares[4]]]) != [secret]
