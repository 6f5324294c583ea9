from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT64: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_INT64: _ClassVar[Dtype]
    DTYPE_INT32: _ClassVar[Dtype]
    DTYPE_INT16: _ClassVar[Dtype]
    DTYPE_INT8: _ClassVar[Dtype]
    DTYPE_UINT8: _ClassVar[Dtype]
    DTYPE_BOOL: _ClassVar[Dtype]
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT64: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_INT64: Dtype
DTYPE_INT32: Dtype
DTYPE_INT16: Dtype
DTYPE_INT8: Dtype
DTYPE_UINT8: Dtype
DTYPE_BOOL: Dtype

class TensorHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ...) -> None: ...

class ModelShard(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ...) -> None: ...

class PrototypeSet(_message.Message):
    __slots__ = ("level", "vectors", "labels", "counts")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    level: str
    vectors: TensorHeader
    labels: TensorHeader
    counts: TensorHeader
    def __init__(self, level: _Optional[str] = ..., vectors: _Optional[_Union[TensorHeader, _Mapping]] = ..., labels: _Optional[_Union[TensorHeader, _Mapping]] = ..., counts: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class GeneratorUpdate(_message.Message):
    __slots__ = ("key", "version", "tensors")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ...) -> None: ...

class LabelHistogram(_message.Message):
    __slots__ = ("round", "total")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    round: TensorHeader
    total: TensorHeader
    def __init__(self, round: _Optional[_Union[TensorHeader, _Mapping]] = ..., total: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class BundleHeader(_message.Message):
    __slots__ = ("weights", "prototypes", "generators", "histogram", "scalars", "payload_bytes")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PROTOTYPES_FIELD_NUMBER: _ClassVar[int]
    GENERATORS_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    weights: ModelShard
    prototypes: _containers.RepeatedCompositeFieldContainer[PrototypeSet]
    generators: _containers.RepeatedCompositeFieldContainer[GeneratorUpdate]
    histogram: LabelHistogram
    scalars: _containers.ScalarMap[str, float]
    payload_bytes: int
    def __init__(self, weights: _Optional[_Union[ModelShard, _Mapping]] = ..., prototypes: _Optional[_Iterable[_Union[PrototypeSet, _Mapping]]] = ..., generators: _Optional[_Iterable[_Union[GeneratorUpdate, _Mapping]]] = ..., histogram: _Optional[_Union[LabelHistogram, _Mapping]] = ..., scalars: _Optional[_Mapping[str, float]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("offset", "crc32", "raw_bytes", "payload")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    offset: int
    crc32: int
    raw_bytes: int
    payload: bytes
    def __init__(self, offset: _Optional[int] = ..., crc32: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
