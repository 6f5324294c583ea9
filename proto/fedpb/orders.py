"""Orders as they come over a Pull: a header each, and the parts of its payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.codec import Receiver, read_chunk
from fedpb.v1 import coordinator_pb2 as rpc

WITHOUT_PAYLOAD = (
    rpc.ORDER_KIND_ADVERTISE,
    rpc.ORDER_KIND_SHARE,
    rpc.ORDER_KIND_AGREE,
    rpc.ORDER_KIND_UNMASK,
)
"""Orders of a secure sum: all that they say stands in the order."""
OF_CLASSES = "new_classes", "class_changes"
Specs = Callable[[rpc.Order], Mapping[str, BundleSpec]]
"""Returns what the parts of an order's payload must hold, by role."""


def read_order(
    stream: Iterator[bytes],
    specs: Specs,
    held: dict[bytes, Bundle],
    begun: dict[bytes, Receiver] | None = None,
    arrives: Callable[[Receiver], None] = lambda receiver: None,
) -> tuple[rpc.PullHeader, dict[str, Bundle]] | None:
    """Read the next order and the parts of its payload, which ``more`` orders may share.

    Args:
        stream: the messages of a Pull.
        specs: what the parts must hold.
        held: the last common part by its digest; a new one takes its place.
        begun: a part of which only the beginning has come, by its digest, as a link broke; what is
            left of the stream goes there.
        arrives: told of a part of which more has come.

    Returns:
        The order's header and its parts by role; None if the stream has ended.

    Raises:
        PayloadError: the payload is not what ``specs`` says, or damaged.
    """
    first = next(stream, None)
    if first is None:
        return None  # the server ended the call: nobody waits for these clients any more
    header, frame = read_chunk(first, rpc.PullHeader)
    if header is None:
        raise PayloadError("an order must start with its header")
    found: dict[str, Bundle] = {}
    begun = {} if begun is None else begun
    expected = specs(header.order)
    for other in header.more:
        specs(other)
        if any(getattr(other, name) != getattr(header.order, name) for name in OF_CLASSES):
            raise PayloadError("a message brings orders that differ in their classes")
    if len({header.order.client_id, *(o.client_id for o in header.more)}) <= len(header.more):
        raise PayloadError("a message brings two orders for one client")
    if header.more and any(part.role != "common" for part in header.parts):
        raise PayloadError("orders of several clients share a personal part")
    for part in header.parts:
        if part.role not in expected or (part.held and part.digest not in held):
            raise PayloadError(f"an order's {part.role[:50]!r} part is none that can be expected")
        if part.held:
            found[part.role] = held[part.digest]
            continue
        receiver = _receiver_of(part, expected[part.role], begun)
        begun.clear()
        begun[part.digest] = receiver
        while not receiver.is_complete:
            if frame is None:
                _, frame = read_chunk(next(stream, b""), rpc.PullHeader)
            if frame is None:
                raise PayloadError(f"an order's {part.role} part ended early")
            receiver.feed(frame)
            arrives(receiver)
            frame = None
        begun.clear()
        found[part.role] = receiver.finish()
        if part.role == "common":
            held.clear()
            held[receiver.digest] = found[part.role]
    if frame is not None:
        raise PayloadError("an order continues after its last part")
    return header, found


def _receiver_of(
    part: rpc.PartHeader, spec: BundleSpec, begun: Mapping[bytes, Receiver]
) -> Receiver:
    """Return what takes a part: where its bytes go on, what took those before."""
    if not part.offset:
        return Receiver(part.bundle, spec)
    found = begun.get(part.digest)
    if found is None or found.received != part.offset or found.header != part.bundle:
        raise PayloadError(f"an order's {part.role} part continues where none of it ended")
    return found
