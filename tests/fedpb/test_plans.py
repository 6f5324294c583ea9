"""The cache of checked headers: keyed on what a header means, bounded by bytes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
import torch

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec, scalar_spec
from fedpb.codec import Receiver, encode
from fedpb.headers import Plans, plan_of
from fedpb.v1 import bundle_pb2 as pb

BASE = Bundle(weights={"base/w": torch.ones(2, 3)}, scalars={"num_examples": 2.0})
SPEC = BundleSpec.of(BASE)


def with_unknown_bytes(header: pb.BundleHeader, size: int, fill: int) -> pb.BundleHeader:
    """Return the header with a field that the schema does not know."""
    unknown = bytes([0xFA, 0x3E]) + varint(size) + bytes([fill]) * size
    return pb.BundleHeader.FromString(header.SerializeToString() + unknown)


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def test_bytes_without_a_meaning_are_not_remembered():
    header = encode(BASE).header
    tracemalloc.start()
    try:
        for fill in range(40):
            Receiver(with_unknown_bytes(header, 1 << 20, fill), SPEC)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 << 20  # 40 MiB came


def test_headers_that_mean_the_same_are_checked_once():
    """What differs is a number of examples, and bytes that the schema does not know."""
    header = encode(BASE).header
    other = with_unknown_bytes(encode(replace(BASE, scalars={"num_examples": 3.0})).header, 9, 1)
    assert plan_of(other, SPEC) is plan_of(header, SPEC)


def test_a_scalar_more_is_another_header():
    plan_of(encode(BASE).header, SPEC)
    with pytest.raises(PayloadError, match="scalars/loss"):
        plan_of(encode(replace(BASE, scalars={"num_examples": 2.0, "loss": 1.0})).header, SPEC)


def test_another_spec_is_another_check():
    header = encode(BASE).header
    first = plan_of(header, SPEC)
    loose = SPEC | scalar_spec("num_examples")
    again = plan_of(header, loose)
    assert again is not first
    assert again.spec is loose


def test_a_plan_that_takes_the_place_of_another_is_counted_once():
    """A tensor takes more than 600 bytes."""
    plans, header = Plans(), encode(BASE).header
    plans.of(header, SPEC)
    size = plans.num_bytes
    for _ in range(3):
        plans.of(header, BundleSpec.of(BASE))
    assert (len(plans), plans.num_bytes) == (1, size)
    many = Bundle(weights={f"base/{n}": torch.ones(1) for n in range(100)})
    plans.of(encode(many).header, BundleSpec.of(many))
    assert plans.num_bytes - size > 100 * 600


def test_plans_are_bounded_by_bytes():
    """Rows may be any number up to a bound, so that one spec admits many headers."""
    rows = TensorSpec(torch.float32, (None, 2), 10_000)
    spec = BundleSpec(optional={f"weights/{n}": rows for n in range(50)})
    plans = Plans(most_bytes=100_000)
    for count in range(1, 200):
        weights = {str(n): torch.zeros(count, 2) for n in range(50)}
        plans.of(encode(Bundle(weights=weights)).header, spec)
    assert 0 < plans.num_bytes <= 100_000
    assert len(plans) < 199
