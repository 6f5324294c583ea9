"""Events as they cross to a watcher: each kind is a message of its own in the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.progress.events import Event


def field_of(kind: str) -> str:
    """Return the field of ``Event.what`` that holds a kind of event."""
    return kind.replace("-", "_")


def message_of(event: Event) -> rpc.Event:
    """Return an event as a message; facts without a value are left out."""
    facts = {key: _sendable(value) for key, value in event.detail.items() if value is not None}
    return rpc.Event(
        client_id=event.client,
        interaction=event.interaction,
        round=event.round,
        unix_time=event.unix_time,
        **{field_of(event.kind): facts},
    )


def _sendable(fact: Any) -> Any:
    """Return a fact without the entries of mappings that hold nothing."""
    if isinstance(fact, Mapping):
        return {str(key): value for key, value in fact.items() if value is not None}
    return fact


def event_of(message: rpc.Event) -> Event:
    """Return a message as an event; ``unknown`` where the schema here does not know its kind."""
    field = message.WhichOneof("what")
    return Event(
        field.replace("_", "-") if field else "unknown",
        message.client_id,
        message.interaction,
        message.round,
        _facts(getattr(message, field)) if field else {},
        message.unix_time,
    )


def _facts(message: Message) -> dict[str, Any]:
    """Return every field of a message by name; None for a number that was left out."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            if field.message_type is not None:  # a map
                inner = {
                    key: _facts(v) if isinstance(v, Message) else v for key, v in value.items()
                }
            found[field.name] = list(value) if field.message_type is None else inner
        else:
            left_out = field.has_presence and not message.HasField(field.name)
            found[field.name] = None if left_out else value
    return found
