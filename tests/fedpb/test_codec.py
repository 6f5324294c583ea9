import importlib.util
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.tensors.bundle import (
    DTYPES,
    Bundle,
    GeneratorState,
    Histogram,
    Prototypes,
    tensor_bytes,
)
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec, scalar_spec
from fedmodels.tensors.packed_weights import ALIGNMENT
from fedpb.codec import (
    RawFrame,
    Receiver,
    encode,
    merged,
    messages,
    read_chunk,
)
from fedpb.frames import FRAME_BYTES, MESSAGE_BYTES, WHOLE_BYTES, Frame
from fedpb.headers import MAX_DIMS
from fedpb.v1 import bundle_pb2 as pb
from fedpb.v1 import coordinator_pb2 as rpc

NAME = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)
PATH = st.lists(NAME, min_size=1, max_size=3).map("/".join)


def tensor(dtype_name, shape, seed):
    dtype, rng = DTYPES[dtype_name], torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=rng).to(dtype)
    low, high = (0, 2) if dtype in (torch.bool, torch.uint8) else (-100, 100)
    return torch.randint(low, high, shape, generator=rng).to(dtype)


TENSOR = st.builds(
    tensor,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 1000),
)
ROWS = st.dictionaries(st.integers(0, 99), st.integers(1, 50), max_size=4)
PROTOTYPES = ROWS.map(
    lambda rows: Prototypes.of({k: (torch.full((3,), float(k)), n) for k, n in rows.items()}, 3)
)
INTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).map(
    lambda values: torch.tensor(values, dtype=torch.int32)
)
BUNDLE = st.builds(
    Bundle,
    weights=st.dictionaries(PATH, TENSOR, max_size=4),
    prototypes=st.dictionaries(PATH, PROTOTYPES, max_size=2),
    generators=st.dictionaries(
        NAME,
        st.builds(GeneratorState, st.integers(0, 99), st.dictionaries(PATH, TENSOR, max_size=2)),
        max_size=2,
    ),
    histogram=st.none() | st.builds(Histogram, INTS, INTS),
    scalars=st.dictionaries(NAME, st.floats(allow_nan=False, allow_infinity=False), max_size=2),
)


def frames_of(encoded):
    found = [read_chunk(chunk, rpc.PullHeader) for chunk in encoded.chunks()]
    assert all(header is None for header, _ in found)
    return [frame for _, frame in found]


def received(encoded, spec):
    receiver = Receiver(encoded.header, spec)
    for frame in frames_of(encoded):
        receiver.feed(frame)
    return receiver.finish(), receiver.digest


def assert_equal(one: Bundle, other: Bundle):
    a, b = one.by_key(), other.by_key()
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key].dtype, a[key].shape) == (b[key].dtype, b[key].shape), key
        assert bytes(tensor_bytes(a[key])) == bytes(tensor_bytes(b[key])), key


# --- round trips ----------------------------------------------------------------------------------


@given(BUNDLE)
def test_round_trip(bundle):
    encoded = encode(bundle)
    again, digest = received(encoded, BundleSpec.of(bundle))
    assert_equal(bundle, again)
    assert digest == encoded.digest
    assert encoded.num_bytes == bundle.num_bytes()
    assert_bytes_are_the_payload(bundle, encoded)


def assert_bytes_are_the_payload(bundle, encoded):
    """The frames hold the tensors' bytes in header order, each padded to the alignment."""
    sent = b"".join(rpc.PullResponse.FromString(c).frame.payload for c in encoded.chunks())
    assert len(sent) == encoded.header.payload_bytes
    for stated in encoded.header.weights.tensors:
        expected = bytes(tensor_bytes(bundle.weights[stated.name]))
        assert stated.offset % ALIGNMENT == 0
        assert sent[stated.offset : stated.offset + len(expected)] == expected


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_dtype_and_shape(name, shape):
    bundle = Bundle(weights={"base/w": tensor(name, shape, 1)})
    assert_equal(bundle, received(encode(bundle), BundleSpec.of(bundle))[0])


@pytest.mark.parametrize("extra", [-64, -1, 0, 1, 3])
def test_tensor_larger_than_a_frame(extra):
    """Tensors that end before, at and after a frame, and one that begins within a frame."""
    big = tensor("uint8", (2 * FRAME_BYTES + extra,), 2)
    bundle = Bundle(weights={"a": big, "b": tensor("float32", (FRAME_BYTES // 4 + 7,), 3)})
    encoded = encode(bundle)
    assert all(len(c) <= FRAME_BYTES + 64 for c in encoded.chunks())
    assert len(encoded.frames) == -(-encoded.header.payload_bytes // FRAME_BYTES)
    assert_equal(bundle, received(encoded, BundleSpec.of(bundle))[0])


def test_non_contiguous_and_shared_tensors_travel():
    base = torch.arange(12.0).reshape(3, 4)
    bundle = Bundle(weights={"a": base.T, "b": base[:, 1], "c": base})
    again, _ = received(encode(bundle), BundleSpec.of(bundle))
    assert torch.equal(again.weights["a"], base.T)
    assert torch.equal(again.weights["b"], base[:, 1])


@pytest.mark.parametrize("kind", [rpc.PullResponse, rpc.PushRequest])
@pytest.mark.parametrize("size", [1, 127, 128, FRAME_BYTES, FRAME_BYTES + 200])
def test_generated_class_reads_what_is_laid_out_by_hand(kind, size):
    data = tensor("uint8", (size,), 4)
    encoded = encode(Bundle(weights={"w": data}))
    payload, place = b"", 0
    for chunk in encoded.chunks():
        message = kind.FromString(chunk)
        assert message.HasField("frame")
        assert not message.HasField("header")
        frame = message.frame
        assert frame.offset == place
        assert frame.crc32 == zlib.crc32(frame.payload)
        assert message.SerializeToString() == chunk, "the layout is not the canonical one"
        payload, place = payload + frame.payload, place + len(frame.payload)
    assert payload[:size] == bytes(tensor_bytes(data))
    assert not payload[size:].strip(b"\0")


def test_frame_of_checksum_zero_is_laid_out_canonically():
    """proto3 leaves out a field that is zero: bytes with CRC-32 0 have no checksum field."""
    zero = bytes.fromhex("9d0ad96d")
    assert zlib.crc32(zero) == 0
    frame = Frame(0, [memoryview(zero)])
    chunk, checksum = frame.laid_out(), frame.crc32
    assert checksum == 0
    assert rpc.PullResponse.FromString(chunk).SerializeToString() == chunk
    assert read_chunk(chunk, rpc.PullHeader) == (None, RawFrame(0, 0, memoryview(zero)))


def field(number, wire_type, body):
    return bytes([number << 3 | wire_type]) + body


def message(number, body):
    return field(number, 2, bytes([len(body)]) + body)


KINDS = [(rpc.PullResponse, rpc.PullHeader), (rpc.PushRequest, rpc.PushHeader)]


@pytest.mark.parametrize(("kind", "header_type"), KINDS)
@pytest.mark.parametrize("header", [b"", b"\x0a\x00", b"\x0a\x05\x0a\x03\x12\x013"])
def test_frames_laid_out_otherwise_are_read(kind, header_type, header):
    frame = pb.Frame(offset=7, crc32=zlib.crc32(b"abc"), payload=b"abc")
    payload = message(15, b"abc")
    offset, crc = field(1, 0, b"\x07"), field(2, 5, frame.crc32.to_bytes(4, "little"))
    unknown = field(9, 0, b"\x01")
    layouts = [
        header + kind(frame=frame).SerializeToString(),
        header + message(15, payload + crc + offset),
        header + message(15, crc + offset + payload),
        header + message(15, offset + unknown + crc + payload),
        header + message(15, offset + crc + payload) + unknown,
        unknown + header + message(15, offset + crc + payload),
        message(15, offset + crc + payload) + header,
    ]
    for data in layouts:
        head, found = read_chunk(data, header_type)
        assert (head is not None) == bool(header), data
        assert (found.offset, found.crc32, bytes(found.payload)) == (7, frame.crc32, b"abc")


ORDER = rpc.PullHeader(order=rpc.Order(client_id="3", interaction=5))


def test_a_header_alone_and_with_the_first_frame():
    head = rpc.PullResponse(header=ORDER).SerializeToString()
    assert read_chunk(head, rpc.PullHeader) == (ORDER, None)
    frame = Frame(0, [memoryview(b"abc")]).laid_out()
    header, found = read_chunk(head + frame, rpc.PullHeader)
    assert header == ORDER
    assert bytes(found.payload) == b"abc"
    both = rpc.PullResponse.FromString(head + frame)
    assert (both.header, both.frame.payload) == (ORDER, b"abc")
    assert both.SerializeToString() == head + frame, "the layout is not the canonical one"
    assert read_chunk(b"", rpc.PullHeader) == (None, None)


def test_small_things_travel_in_one_message():
    assert list(messages(b"head", [])) == [b"head"]
    assert list(messages(b"head", [b"one"])) == [b"headone"]
    assert list(messages(b"head", [b"one", b"two"])) == [b"headone", b"two"]
    large = bytes(MESSAGE_BYTES)
    assert list(messages(b"head", [large])) == [b"head", large]
    assert list(messages(large + b"head", [])) == [large + b"head"]


@pytest.mark.parametrize(("size", "frames"), [(WHOLE_BYTES, 1), (WHOLE_BYTES + 64, 3)])
def test_a_small_payload_is_one_frame(size, frames):
    assert len(encode(Bundle(weights={"w": tensor("uint8", (size,), 5)})).frames) == frames


def test_empty_bundle_travels():
    encoded = encode(Bundle())
    assert encoded.frames == []
    assert encoded.num_bytes == 0
    assert received(encoded, BundleSpec())[0] == Bundle()


# --- refusals -------------------------------------------------------------------------------------

BASE = Bundle(
    weights={"base/w": torch.ones(2, 3), "base/n": torch.tensor(4)}, scalars={"num_examples": 2.0}
)
SPEC = BundleSpec.of(BASE)
COUNTS = Histogram(*[torch.ones(3, dtype=torch.int32)] * 2)


def never(size):
    pytest.fail(f"{size} bytes were allocated for a header that must be refused")


def refused(header, spec, kind=PayloadError, match="."):
    with pytest.raises(kind, match=match) as caught:
        Receiver(header, spec, never)
    assert "\n" not in str(caught.value)


def header_with(**weights):
    return encode(replace(BASE, weights={**BASE.weights, **weights})).header


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (header_with(**{"base/m": torch.ones(2)}), "unexpected tensor 'weights/base/m'. Did you"),
        (encode(Bundle(weights={"base/w": torch.ones(2, 3)})).header, "is missing"),
        (header_with(**{"base/w": torch.ones(2, 3).half()}), "is float16 .* expected float32"),
        (header_with(**{"base/w": torch.ones(3, 2)}), r"\[3, 2\]; expected float32 \[2, 3\]"),
        (header_with(**{"base/w": torch.ones(2, 3, 1)}), "expected float32"),
        (encode(replace(BASE, scalars={"n": 1.0})).header, "unexpected tensor 'scalars/n'"),
        (encode(replace(BASE, scalars={})).header, "'scalars/num_examples' is missing"),
        (
            encode(replace(BASE, generators={"3": GeneratorState(1, {})})).header,
            "unexpected tensor 'generators/3/version'",
        ),
        (
            encode(
                replace(BASE, histogram=Histogram(*[torch.ones(3, dtype=torch.int32)] * 2))
            ).header,
            "unexpected tensor 'histogram/round'",
        ),
    ],
    ids=[
        "unknown",
        "missing",
        "dtype",
        "shape",
        "axes",
        "scalar",
        "no scalar",
        "generator",
        "hist",
    ],
)
def test_refused_before_anything_is_allocated(header, match):
    room = BundleSpec.of(Bundle(weights={"room": torch.ones(100)})).required
    refused(header, replace(SPEC, optional=room), match=match)


def changed(change):
    header = encode(BASE).header
    change(header)
    return header


def test_key_stated_twice():
    def change(header):
        again = header.weights.tensors.add()
        again.CopyFrom(header.weights.tensors[1])
        again.offset = header.payload_bytes
        header.payload_bytes += ALIGNMENT

    limits = replace(SPEC, optional={"weights/room": SPEC.required["weights/base/w"]})
    refused(changed(change), limits, match="stated twice")


def test_generator_stated_twice():
    bundle = Bundle(generators={"3": GeneratorState(1, {"w": torch.ones(2)})})
    header = encode(bundle).header
    header.generators.add(key="3", version=2)
    refused(header, BundleSpec.of(bundle), match="stated twice")


def test_ten_gigabytes_claimed():
    def payload(header):
        header.payload_bytes = 10 << 30

    def shape(header):
        del header.weights.tensors[1].shape[:]
        header.weights.tensors[1].shape.extend([10 << 30, 1 << 63, 1 << 63])

    def rows(header):
        header.weights.tensors[1].shape[0] = 10 << 30
        header.payload_bytes = (10 << 30) * 12 + ALIGNMENT

    refused(changed(payload), SPEC, PayloadTooLarge)
    refused(changed(shape), SPEC)
    refused(changed(rows), SPEC, PayloadTooLarge)


def test_too_many_rows():
    spec = prototype_spec("class", 3, max_rows=10)
    bundle = Bundle(
        prototypes={"class": Prototypes.of({k: (torch.ones(3), 1) for k in range(11)}, 3)}
    )
    refused(encode(bundle).header, spec, PayloadError)


@pytest.mark.parametrize("offset", [0, 8, 63, 128, 1 << 62])
def test_places_that_overlap_or_leave_gaps(offset):
    def change(header):
        header.weights.tensors[1].offset = offset

    refused(changed(change), SPEC, match=f"lies at {offset}, expected 64")


def test_claim_that_differs_from_the_tensors():
    def change(header):
        header.payload_bytes += 1

    refused(changed(change), SPEC, match="its tensors need 128")


def test_too_many_axes():
    def change(header):
        header.weights.tensors[0].shape.extend([1] * (MAX_DIMS + 1))

    refused(changed(change), SPEC, match="17 axes")


@pytest.mark.parametrize("dtype", [0, 11, 1000])
def test_unknown_dtype(dtype):
    def change(header):
        header.weights.tensors[0].dtype = dtype

    refused(changed(change), SPEC, match="unknown dtype")


def test_version_beyond_int64():
    """The schema's uint64 holds versions that no tensor does."""
    bundle = Bundle(generators={"3": GeneratorState(1, {})})
    header = encode(bundle).header
    header.generators[0].version = 2**63 - 1
    assert Receiver(header, BundleSpec.of(bundle)).finish().generators["3"].version == 2**63 - 1
    header.generators[0].version = 2**63
    refused(header, BundleSpec.of(bundle), match="version")


@pytest.mark.parametrize("rows", [(3, 2, 3), (3, 3, 2), (0, 1, 1)])
def test_prototypes_of_unequal_rows(rows):
    """Each array fits its spec, but they are no set of prototypes together."""
    vectors, labels, counts = rows
    odd = Prototypes(
        torch.ones(vectors, 3),
        torch.ones(labels, dtype=torch.int32),
        torch.ones(counts, dtype=torch.int32),
    )
    encoded = encode(Bundle(prototypes={"class": odd}))
    with pytest.raises(PayloadError, match="'class'"):
        received(encoded, prototype_spec("class", 3, max_rows=5))


LARGE = Bundle(weights={"w": tensor("uint8", (3 * FRAME_BYTES,), 5)})


def fed(frames, bundle=LARGE):
    receiver = Receiver(encode(bundle).header, BundleSpec.of(bundle))
    for frame in frames:
        receiver.feed(frame)
    return receiver.finish()


def test_frames_out_of_order():
    a, b, c = frames_of(encode(LARGE))
    for frames in ([b], [a, c, b], [a, a, b, c]):
        with pytest.raises(PayloadError, match="a frame begins at"):
            fed(frames)


def test_damaged_frame():
    a, b, c = frames_of(encode(LARGE))
    damaged = bytearray(b.payload)
    damaged[5] ^= 1
    with pytest.raises(PayloadError, match="damaged"):
        fed([a, replace(b, payload=memoryview(damaged)), c])


def test_frames_beyond_the_claim():
    frames = frames_of(encode(LARGE))
    more = RawFrame(3 * FRAME_BYTES, zlib.crc32(b"x"), memoryview(b"x"))
    with pytest.raises(PayloadTooLarge, match="beyond the 3145728 bytes claimed"):
        fed([*frames, more])


def test_truncated_stream():
    a, b, _ = frames_of(encode(LARGE))
    with pytest.raises(PayloadError, match="ended after 2097152 of 3145728"):
        fed([a, b])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_values_that_are_not_finite(value, dtype):
    bundle = Bundle(weights={"w": torch.tensor([1.0, value, 2.0], dtype=DTYPES[dtype])})
    with pytest.raises(PayloadError, match="'weights/w' holds NaN or infinite"):
        received(encode(bundle), BundleSpec.of(bundle))


def test_infinite_halves_beside_other_tensors():
    """Two infinite float16 are a finite number when they are read as one float32."""
    half = torch.tensor([torch.inf, torch.inf], dtype=torch.float16)
    bundle = Bundle(weights={"h": half, "w": torch.ones(3)})
    with pytest.raises(PayloadError, match="'weights/h' holds NaN or infinite"):
        received(encode(bundle), BundleSpec.of(bundle))


def test_integers_that_look_like_nan_as_floats_are_fine():
    odd = torch.tensor([0x7FC00000, -1], dtype=torch.int32)
    bundle = Bundle(weights={"a": odd, "w": torch.ones(3)})
    assert_equal(bundle, received(encode(bundle), BundleSpec.of(bundle))[0])
    poisoned = Bundle(weights={"a": odd, "w": torch.tensor([1.0, torch.nan, 1.0])})
    with pytest.raises(PayloadError, match="'weights/w' holds NaN"):
        received(encode(poisoned), BundleSpec.of(poisoned))


@pytest.mark.parametrize("place", [0, 2])
def test_a_boolean_that_is_none(place):
    bundle = Bundle(weights={"on": torch.tensor([True, False, True])})
    encoded = encode(bundle)
    payload = bytearray(encoded.header.payload_bytes)
    payload[place] = 2
    receiver = Receiver(encoded.header, BundleSpec.of(bundle))
    receiver.feed(RawFrame(0, zlib.crc32(payload), memoryview(payload)))
    with pytest.raises(PayloadError, match="'weights/on' holds booleans that are neither 0 nor 1"):
        receiver.finish()


def test_a_nan_in_a_later_frame():
    values = torch.zeros(3 * FRAME_BYTES // 4)
    values[-1] = torch.nan
    bundle = Bundle(weights={"w": values})
    with pytest.raises(PayloadError, match="'weights/w' holds NaN"):
        received(encode(bundle), BundleSpec.of(bundle))


def test_a_header_checked_before_is_checked_again_for_another_spec():
    bundle = Bundle(weights={"w": torch.ones(3)})
    spec = BundleSpec.of(bundle)
    for _ in range(2):
        received(encode(bundle), spec)
    other = BundleSpec.of(Bundle(weights={"w": torch.ones(4)}))
    with pytest.raises(PayloadError, match=r"\[3\]; expected float32 \[4\]"):
        Receiver(encode(bundle).header, other)


def test_receivers_of_one_encoding_get_the_same_messages():
    """Also where they take them by turns: each is laid out once."""
    encoded = encode(Bundle(weights={"w": torch.ones(FRAME_BYTES)}))
    first, second = encoded.chunks(), encoded.chunks()
    pairs = [(next(first), next(second)) for _ in encoded.frames]
    assert len(pairs) == 4
    assert all(a is b for a, b in pairs)
    assert next(first, None) is None


def test_a_frame_is_laid_out_once_for_all_receivers(monkeypatch):
    calls, plain = [], Frame.laid_out
    monkeypatch.setattr(Frame, "laid_out", lambda frame: calls.append(frame) or plain(frame))
    encoded = encode(Bundle(weights={"w": torch.ones(WHOLE_BYTES // 4 + 1)}))
    assert [*encoded.chunks()] == [*encoded.chunks()]
    assert calls == encoded.frames


def test_a_frame_is_read_without_a_copy():
    message = Frame(64, [memoryview(bytes(300))]).laid_out()
    assert read_chunk(message, rpc.PullHeader)[1].payload.obj is message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scalars_that_are_not_finite(value):
    with pytest.raises(PayloadError, match="'scalars/n'"):
        received(encode(Bundle(scalars={"n": value})), scalar_spec("n"))
    with pytest.raises(PayloadError, match="'scalars/n'"):
        received(encode(Bundle(scalars={"a": 1.0, "n": value})), scalar_spec("a", "n"))


@pytest.mark.parametrize("value", [-1.0, -1e9])
def test_examples_below_zero(value):
    """A client that claims fewer than no examples would turn a mean against the others."""
    with pytest.raises(PayloadError, match="'scalars/num_examples' counts below zero"):
        received(encode(Bundle(scalars={"num_examples": value})), scalar_spec("num_examples"))


@pytest.mark.parametrize("part", ["labels", "counts"])
def test_prototypes_below_zero(part):
    rows = Prototypes.of({0: (torch.ones(3), 1), 4: (torch.ones(3), 0)}, 3)
    fine = Bundle(prototypes={"class": rows})
    received(encode(fine), prototype_spec("class", 3, max_rows=5))
    odd = replace(rows, **{part: torch.tensor([0, -1], dtype=torch.int32)})
    with pytest.raises(PayloadError, match=f"'prototypes/class/{part}' counts below zero: -1"):
        received(encode(Bundle(prototypes={"class": odd})), prototype_spec("class", 3, max_rows=5))


def test_histogram_below_zero():
    odd = Bundle(histogram=replace(COUNTS, total=torch.tensor([1, -2, 3], dtype=torch.int32)))
    with pytest.raises(PayloadError, match="'histogram/total' counts below zero: -2"):
        received(encode(odd), BundleSpec.of(odd))


# --- digests --------------------------------------------------------------------------------------


@given(BUNDLE, st.randoms())
def test_digest_is_of_the_content(bundle, random):
    """Whoever sends equal content, its parts in whatever order, sends the same digest."""
    flat = list(bundle.by_key().items())
    random.shuffle(flat)
    again = Bundle.from_keys({key: t.clone() for key, t in flat})
    assert encode(again).digest == encode(bundle).digest


def test_digest_differs_with_the_content():
    others = [
        BASE,
        replace(BASE, scalars={"num_examples": 3.0}),
        replace(BASE, scalars={}),
        replace(BASE, weights={**BASE.weights, "base/w": torch.zeros(2, 3)}),
        replace(BASE, weights={**BASE.weights, "base/w": torch.ones(3, 2)}),
        replace(BASE, weights={**BASE.weights, "base/w": torch.ones(2, 3).view(torch.int32)}),
        replace(BASE, weights={"base/v": torch.ones(2, 3), "base/n": torch.tensor(4)}),
        replace(BASE, generators={"1": GeneratorState(1, {})}),
        replace(BASE, generators={"1": GeneratorState(2, {})}),
    ]
    assert len({encode(bundle).digest for bundle in others}) == len(others)


def test_merged_personal_wins():
    common = Bundle(weights={"a": torch.zeros(1), "b": torch.zeros(1)}, scalars={"s": 1.0})
    personal = Bundle(weights={"b": torch.ones(1), "c": torch.ones(1)}, scalars={"s": 2.0})
    for parts in (
        {"common": common, "personal": personal},
        {"personal": personal, "common": common},
    ):
        found = merged(parts)
        assert {k: t.item() for k, t in found.weights.items()} == {"a": 0.0, "b": 1.0, "c": 1.0}
        assert found.scalars == {"s": 2.0}
    assert merged({"common": common}).weights.keys() == {"a", "b"}
    assert merged({}) == Bundle()


# --- whatever may arrive --------------------------------------------------------------------------


def taken(data, header_type):
    try:
        return read_chunk(data, header_type)
    except PayloadError:
        return None, None


FIELDS = st.lists(
    st.tuples(st.sampled_from([b"\x7a", b"\x0a"]), st.binary(max_size=20)), max_size=3
).map(lambda pairs: b"".join(tag + bytes([len(body)]) + body for tag, body in pairs))


@given(st.binary(max_size=60) | FIELDS)
@settings(max_examples=300)
def test_no_bytes_break_read_chunk(data):
    """What is read by hand is what the generated parser reads."""
    for kind, header_type in KINDS:
        header, frame = taken(data, header_type)
        try:
            parsed = kind.FromString(data)
        except Exception:
            continue
        if header is not None:
            assert header == parsed.header
        if frame is not None and parsed.HasField("frame"):
            assert bytes(frame.payload) == parsed.frame.payload
            assert frame.crc32 == parsed.frame.crc32


@pytest.mark.timeout(10)
@pytest.mark.parametrize("prefix", [b"", b"\x0a", b"\x7a", b"\x7a\x80\x80\x80\x01\x08"])
def test_a_number_without_an_end_costs_nothing(prefix):
    assert taken(prefix + b"\xff" * (4 << 20), rpc.PushHeader) == (None, None)


HEADER = st.builds(
    pb.BundleHeader,
    weights=st.none()
    | st.builds(
        pb.ModelShard,
        tensors=st.lists(
            st.builds(
                pb.TensorHeader,
                name=st.sampled_from(["base/w", "base/n", "x", ""]),
                dtype=st.integers(0, 12),
                shape=st.lists(st.sampled_from([0, 1, 2, 3, 2**63, 2**64 - 1]), max_size=4),
                offset=st.sampled_from([0, 64, 128, 2**64 - 1]),
            ),
            max_size=3,
        ),
    ),
    generators=st.lists(
        st.builds(
            pb.GeneratorUpdate,
            key=st.sampled_from(["", "1", "a/b"]),
            version=st.sampled_from([0, 1, 2**64 - 1]),
        ),
        max_size=2,
    ),
    scalars=st.dictionaries(st.sampled_from(["num_examples", "x", ""]), st.floats(), max_size=2),
    payload_bytes=st.sampled_from([0, 64, 128, 192, 2**64 - 1]),
)
FRAME = st.builds(
    RawFrame,
    st.sampled_from([0, 64, 128, 2**63]),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=130).map(memoryview),
).map(lambda f: replace(f, crc32=zlib.crc32(f.payload)) if f.crc32 % 4 else f)
LOOSE = replace(SPEC, optional={"generators/1/version": BundleSpec.of(
    Bundle(generators={"1": GeneratorState(1, {})})).required["generators/1/version"]})  # fmt: skip


@given(st.just(encode(BASE).header) | HEADER, st.lists(FRAME, max_size=4))
@settings(max_examples=300)
def test_nothing_but_payload_errors_comes_out_of_a_receiver(header, frames):
    for spec in (SPEC, BundleSpec(optional=LOOSE.required | LOOSE.optional)):
        with suppress(PayloadError):
            receiver = Receiver(header, spec)
            for frame in frames:
                receiver.feed(frame)
            receiver.finish()


def test_compressed_bytes_that_nobody_asked_for(monkeypatch):
    """A process without zstd refuses them like any damaged frame."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bundle = Bundle(weights={"w": torch.zeros(9)})
    receiver = Receiver(encode(bundle).header, BundleSpec.of(bundle))
    with pytest.raises(PayloadError, match="compressed with zstd, which was not requested"):
        receiver.feed(RawFrame(0, 0, memoryview(b"few bytes"), 36))
