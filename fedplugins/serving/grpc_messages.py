"""The messages of the Open Inference Protocol (KServe V2) that are answered here.

Names and numbers are those of KServe's ``grpc_predict_v2.proto``, and for the index of models of
Triton's ``grpc_service.proto``. They are made in a pool of their own: a process that also has a
client's stubs of this package would otherwise hold two definitions of it, which protobuf refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
CHOICE = "parameter_choice"
"""The one field that a parameter holds is of this ``oneof``."""
MESSAGES: Mapping[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": "string name = 1; string version = 2",
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name = 1; string version = 2; repeated string extensions = 3",
    "ModelMetadataRequest": "string name = 1; string version = 2",
    "TensorMetadata": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3;"
    "repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5",
    "InferParameter": "bool bool_param = 1; int64 int64_param = 2; string string_param = 3;"
    "double double_param = 4; uint64 uint64_param = 5",
    "InferTensorContents": "repeated bool bool_contents = 1; repeated int32 int_contents = 2;"
    "repeated int64 int64_contents = 3; repeated uint32 uint_contents = 4;"
    "repeated uint64 uint64_contents = 5; repeated float fp32_contents = 6;"
    "repeated double fp64_contents = 7; repeated bytes bytes_contents = 8",
    "InferInputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3;"
    "map InferParameter parameters = 4; InferTensorContents contents = 5",
    "InferRequestedOutputTensor": "string name = 1; map InferParameter parameters = 2",
    "ModelInferRequest": "string model_name = 1; string model_version = 2; string id = 3;"
    "map InferParameter parameters = 4; repeated InferInputTensor inputs = 5;"
    "repeated InferRequestedOutputTensor outputs = 6; repeated bytes raw_input_contents = 7",
    "InferOutputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3;"
    "map InferParameter parameters = 4; InferTensorContents contents = 5",
    "ModelInferResponse": "string model_name = 1; string model_version = 2; string id = 3;"
    "map InferParameter parameters = 4; repeated InferOutputTensor outputs = 5;"
    "repeated bytes raw_output_contents = 6",
    "RepositoryIndexRequest": "string repository_name = 1; bool ready = 2",
    "ModelIndex": "string name = 1; string version = 2; string state = 3; string reason = 4",
    "RepositoryIndexResponse": "repeated ModelIndex models = 1",
}
"""The fields of each message; a ``map`` is one from texts. Messages that the sources nest stand for
themselves here, which changes nothing of what is sent."""
_FIELD = re.compile(r"(?:(repeated|map) )?(\w+) (\w+) = (\d+)")


def _made() -> Mapping[str, Any]:
    """Return the class of each message."""
    file = FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for kind, of, field, number in _FIELD.findall(fields):
            made = _field(field, int(number), of, is_repeated=bool(kind))
            if kind == "map":
                entry = "".join(word.title() for word in field.split("_")) + "Entry"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                nested.field.extend([_field("key", 1, "string"), _field("value", 2, of)])
                made.type_name = f".{PACKAGE}.{name}.{entry}"
            message.field.append(made)
        if name == "InferParameter":
            message.oneof_decl.add(name=CHOICE)
            for one in message.field:
                one.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = (pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in MESSAGES)
    return {one.name: message_factory.GetMessageClass(one) for one in found}


def _field(name: str, number: int, of: str, *, is_repeated: bool = False) -> FieldDescriptorProto:
    label = "LABEL_REPEATED" if is_repeated else "LABEL_OPTIONAL"
    made = FieldDescriptorProto(
        name=name, number=number, label=FieldDescriptorProto.Label.Value(label)
    )
    if of in MESSAGES:
        made.type, made.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{of}"
    else:
        made.type = FieldDescriptorProto.Type.Value(f"TYPE_{of.upper()}")
    return made


CLASSES = _made()
