"""Fixed-point numbers, masks and shares, by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.secure_sum.fixed_point import CountedNumbers, FixedPoint, added, signed
from fedmodels.secure_sum.keys import (
    Attempt,
    Channel,
    Secrets,
    own_key,
    pair_key,
    private_key,
    secrets_of,
)
from fedmodels.secure_sum.masks import CHUNK, Vector, add_mask

ATTEMPT = Attempt(bytes(range(16)), 7)
RFC_8439 = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
"""Appendix A.1, test vector 1: the first bytes of the stream of a key and a nonce of zeros."""
SMALL_ORDER = [bytes(32), b"\1" + bytes(31), bytes.fromhex(
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
)]  # fmt: skip
"""Points 0 and 1, and one of order 8 (RFC 7748, section 7, and https://cr.yp.to/ecdh.html)."""


def numbers(**facts: Any) -> FixedPoint:
    return FixedPoint(**{"bits": 32, "largest": 1.0, "clients": 2, "most": 4.0, **facts})


def encoded(how: FixedPoint, values: Any, count: float) -> Vector:
    return how.encode([CountedNumbers("w", torch.as_tensor(values), count)])


def test_numbers_by_hand():
    """2 (2^s + 1) <= 2^31 gives s = 29. An upload that counts 1 of 4 has the factor 2^27.

    The sum of 0.5 with count 1 and -0.25 with count 3 is -0.25, and the mean -0.25 / 4.
    """
    how = numbers()
    assert how.scale == 29
    one, other = encoded(how, [0.5], 1.0), encoded(how, [-0.25], 3.0)
    assert one.tolist() == [2**26]
    assert other.tolist() == [2**32 - 3 * 2**25]
    total = signed(added([one, other]))
    assert total.tolist() == [-(2.0**25)]
    assert how.mean(total, [1.0, 3.0], "w").tolist() == [-0.0625]
    assert encoded(how, [0.5], 0.0).tolist() == [0]


@given(st.sampled_from([32, 64]), st.integers(3, 200), st.floats(1, 1000), st.integers(0, 2**32))
def test_no_sum_overflows(bits, clients, largest, seed):
    how = numbers(bits=bits, clients=clients, largest=largest)
    try:
        scale = how.scale
    except ConfigError:
        return
    assert clients * (largest * 2**scale + 1) <= 2 ** (bits - 1)
    assert scale == 52 or clients * (largest * 2 ** (scale + 1) + 1) > 2 ** (bits - 1)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], 5)
    total = signed(added([encoded(how, signs * largest, how.most)] * clients))
    mean = how.mean(total, [how.most] * clients, "w")
    assert np.allclose(mean, signs * largest, rtol=1e-6, atol=2.0**-scale)


@given(st.integers(3, 40), st.integers(0, 2**32))
def test_no_honest_sum_is_refused_and_the_next_integer_is(clients, seed):
    """Each number is the largest, and each count is any: rounding adds half a step for each."""
    rng = np.random.default_rng(seed)
    how = numbers(clients=clients, most=1000.0, largest=64.0)
    counts = rng.integers(0, 1001, clients).astype(float)
    counts[0] = 1.0
    total = signed(added([encoded(how, [64.0], c) for c in counts]))
    assert how.mean(total, counts, "w")[0] == pytest.approx(64.0, rel=1e-3)
    most = 64.0 * counts.sum() / 1000.0 * 2.0**how.scale + (counts > 0).sum() / 2
    with pytest.raises(PayloadError, match=r"'w' is 64.*, beyond .* largest = 64, so one of its"):
        how.mean(np.array([most * (1 + 1e-8) + 1]), counts, "w")


@pytest.mark.parametrize("bad", [1.001, -1.001, float("nan"), float("inf")])
def test_a_number_beyond_the_range_is_refused_and_not_told(bad):
    with pytest.raises(PayloadError, match=r"tensor 'b' holds a number beyond .* largest = 1") as e:
        numbers().encode(
            [
                CountedNumbers("a", torch.zeros(3), 1.0),
                CountedNumbers("b", torch.tensor([0.0, bad]), 1.0),
            ]
        )
    assert "001" not in str(e.value)
    with pytest.raises(PayloadError, match="counts more than the most"):
        encoded(numbers(), [0.0], 4.5)
    with pytest.raises(ConfigError, match="bits leave 3 behind the point"):
        _ = numbers(largest=1e6, clients=200).scale


def test_a_mask_is_the_stream_of_its_key():
    vector = np.zeros(CHUNK // 2, "<u4")  # two chunks
    add_mask(vector, bytes(32), 1)
    assert vector.tobytes()[:32].hex() == RFC_8439
    again = vector.copy()
    add_mask(again, bytes(32), 1)
    assert np.array_equal(again, 2 * vector)
    add_mask(again, bytes(32), -1)
    add_mask(again, bytes(32), -1)
    assert not again.any()
    wide = np.zeros(CHUNK // 4, "<u8")
    add_mask(wide, bytes(32), 1)
    assert wide.tobytes() == vector.tobytes()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.37])
def test_a_masked_upload_tells_no_more_than_its_length(bits, value):
    """Whatever it holds, its bytes are uniform, and a mask exists that gives it to any other."""
    how = numbers(bits=bits)
    plain = encoded(how, np.full(50_000, value), 4.0)
    masked = plain.copy()
    add_mask(masked, own_key(ATTEMPT, 0, b"s" * 16), 1)
    counts = np.bincount(np.frombuffer(masked.tobytes(), np.uint8), minlength=256)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    assert np.bincount(np.frombuffer(plain.tobytes(), np.uint8), minlength=256).max() > 40_000
    other = encoded(how, np.linspace(-1, 1, 50_000), 1.0)
    mask = masked - other  # of the same length, modulo 2^bits
    assert np.array_equal(other + mask, masked)
    assert masked.nbytes == other.nbytes


def test_two_clients_come_to_one_key_and_other_attempts_to_others():
    secrets = {c: Secrets.fresh() for c in (3, 8)}

    def key(attempt: Attempt, own: int, other: int) -> bytes:
        private = private_key(attempt, own, secrets[own].pair)
        return pair_key(attempt, own, private, other, secrets[other].public(attempt, other))

    others = (ATTEMPT, Attempt(ATTEMPT.number, 8), Attempt(bytes(16), 7))
    assert key(ATTEMPT, 3, 8) == key(ATTEMPT, 8, 3)
    assert len({key(attempt, 3, 8) for attempt in others}) == 3


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_points_of_small_order_are_refused(point):
    with pytest.raises(PayloadError, match=r"client 5: its public key is no usable point"):
        pair_key(ATTEMPT, 0, private_key(ATTEMPT, 0, b"k" * 16), 5, point)
    with pytest.raises(PayloadError, match=r"client 5: its public key is no usable point"):
        Channel.of(b"k" * 32).agree({5: point})


def test_shares_below_the_threshold_do_not_tell_the_secret():
    secrets = Secrets.fresh()
    shares = secrets.shares(3, 5)
    held = {place: share.own for place, share in enumerate(shares)}
    found = secrets_of(
        {
            7: {p: held[p] for p in (4, 0, 2)},
            8: {p: shares[p].pair for p in (1, 2, 3, 4)},
            9: {p: held[p] for p in (0, 1)},
        },
        3,
    )
    assert found == {7: secrets.own, 8: secrets.pair}
    assert secrets_of({9: {p: held[p] for p in (0, 1)}}, 2)[9] != secrets.own


def test_a_sealed_share_opens_for_its_receiver_from_its_sender_in_its_attempt_alone():
    one, other, third = (Channel.of(bytes([n]) * 32) for n in range(3))
    share = Secrets.fresh().shares(2, 3)[1]
    sealed = one.seal(ATTEMPT, 0, 1, other.public, share)
    assert other.open(ATTEMPT, 0, 1, one.public, sealed) == share
    assert one.seal(ATTEMPT, 0, 1, other.public, share) != sealed
    for who, attempt, sender, own, key, text in (
        (third, ATTEMPT, 0, 1, one.public, sealed),
        (other, Attempt(ATTEMPT.number, 8), 0, 1, one.public, sealed),
        (other, ATTEMPT, 2, 1, one.public, sealed),
        (other, ATTEMPT, 0, 2, one.public, sealed),
        (other, ATTEMPT, 0, 1, third.public, sealed),
        (other, ATTEMPT, 0, 1, one.public, sealed[:-1]),
        (other, ATTEMPT, 0, 1, one.public, b""),
    ):
        with pytest.raises(PayloadError, match="cannot be decrypted"):
            who.open(attempt, sender, own, key, text)
