"""Write ``docs/schema.md`` from the files of the schema and the comments in them.

python docs/site/schema.py > docs/schema.md
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
    SourceCodeInfo,
)

PROTO = Path(__file__).parents[2] / "proto"
PROTOC = Path(sys.prefix) / "protoc"
"""Where ``make setup`` puts the compiler."""
FILES = ("coordinator", "enrolment", "front", "bundle", "description", "table")
HEAD = """# The schema

Every call, message and field of the package `fedpb.v1`. This page is generated from
`proto/fedpb/v1/*.proto` and the comments in them (`make docs` updates it).
[The protocol](protocol.md) says how the calls play together.
"""
SYNTAX, MESSAGE, ENUM, SERVICE = 12, 4, 5, 6
"""Numbers of a file's parts in the paths of comments; descriptor.proto defines them."""
FIELD, VALUE, METHOD, ONEOF = 2, 2, 2, 8

Place = tuple[int, ...]
Comments = Mapping[Place, str]


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for file in _described():
        places = file.source_code_info.location
        comments = {tuple(place.path): _line(place) for place in places}
        name = file.name.rpartition("/")[2]
        parts.append(f"## {name}\n\n{comments.get((SYNTAX,), '')}\n")
        for at, service in enumerate(file.service):
            parts.append(_service(service, (SERVICE, at), comments))
        for at, message in enumerate(file.message_type):
            parts.append(_message(message, (MESSAGE, at), comments))
        for at, enum in enumerate(file.enum_type):
            parts.append(_enum(enum, (ENUM, at), comments))
    return "\n".join(parts)


def _described() -> list[FileDescriptorProto]:
    """Return the files of the schema, parsed by protoc, with their comments."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "schema"
        wanted = [f"fedpb/v1/{name}.proto" for name in FILES]
        options = [f"-I{PROTO}", "--include_source_info", f"--descriptor_set_out={out}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *options, *wanted]
        there = {**os.environ, "PYTHONPATH": str(PROTOC)}
        if subprocess.run(command, check=False, env=there).returncode:
            raise SystemExit("protoc cannot parse the schema: make setup installs it")
        found = FileDescriptorSet.FromString(out.read_bytes())
    by_name = {file.name: file for file in found.file}
    return [by_name[name] for name in wanted]


def _line(place: SourceCodeInfo.Location) -> str:
    """Return the comments of a place in one line."""
    above = place.leading_detached_comments
    text = " ".join([*above, place.leading_comments, place.trailing_comments])
    return " ".join(text.split()).replace("|", "\\|")


def _service(service: ServiceDescriptorProto, path: Place, comments: Comments) -> str:
    """Return the part of the page on a service, with a row for each call."""
    rows = [
        f"| `{call.name}` | {_stream(call.client_streaming)}{_link(call.input_type)} "
        f"| {_stream(call.server_streaming)}{_link(call.output_type)} "
        f"| {comments.get((*path, METHOD, at), '')} |"
        for at, call in enumerate(service.method)
    ]
    heads = ["| call | takes | returns | meaning |", "|---|---|---|---|"]
    return _part(service.name, comments.get(path, ""), [*heads, *rows])


def _message(message: DescriptorProto, path: Place, comments: Comments) -> str:
    """Return the part of the page on a message, with a row for each field."""
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    rows = [
        f"| {field.number} | `{field.name}` | {_type(field, entries)} "
        f"| {comments.get((*path, FIELD, at), '')} |"
        for at, field in enumerate(message.field)
    ]
    heads = ["| number | field | type | meaning |", "|---|---|---|---|"]
    choices = [
        f"{comments.get((*path, ONEOF, at), '').rstrip('.')}: one of "
        f"{', '.join(f'`{name}`' for name in _members(message, at))}."
        for at, choice in enumerate(message.oneof_decl)
        if not choice.name.startswith("_")  # how protoc says that a field is optional
    ]
    gone = [str(n) for each in message.reserved_range for n in range(each.start, each.end)]
    reserved = [f"Never used again: {', '.join(gone)}."] if gone else []
    about = " ".join([comments.get(path, ""), *choices, *reserved])
    return _part(message.name, about, [*heads, *rows] if rows else [])


def _members(message: DescriptorProto, choice: int) -> Iterator[str]:
    """Yield the fields of a oneof, which has the number ``choice`` in its message."""
    for field in message.field:
        if field.HasField("oneof_index") and field.oneof_index == choice:
            yield field.name


def _enum(enum: EnumDescriptorProto, path: Place, comments: Comments) -> str:
    """Return the part of the page on an enum, with a row for each value."""
    rows = [
        f"| {value.number} | `{value.name}` | {comments.get((*path, VALUE, at), '')} |"
        for at, value in enumerate(enum.value)
    ]
    heads = ["| number | value | meaning |", "|---|---|---|"]
    return _part(enum.name, comments.get(path, ""), [*heads, *rows])


def _part(name: str, about: str, table: list[str]) -> str:
    return "\n".join([f"### {name}\n", f"{about}\n", *table, *([""] if table else [])])


def _type(field: FieldDescriptorProto, entries: Mapping[str, DescriptorProto]) -> str:
    """Return what to call a field's type, with a link if the page has a part on it."""
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_type(each, {}) for each in entry.field)
        return f"map of {key} to {value}"
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = _link(field.type_name) if field.type_name else f"`{kind}`"
    if field.proto3_optional:
        return f"optional {name}"
    is_list = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"list of {name}" if is_list else name


def _link(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[{short}](#{short.lower()})"


def _stream(is_stream: bool) -> str:
    return "stream of " if is_stream else ""


if __name__ == "__main__":
    print(page(), end="")
