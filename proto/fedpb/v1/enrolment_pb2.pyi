from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("secret", "request")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    request: bytes
    def __init__(self, secret: _Optional[bytes] = ..., request: _Optional[bytes] = ...) -> None: ...

class EnrolResponse(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...
