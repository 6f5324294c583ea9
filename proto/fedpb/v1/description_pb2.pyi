from fedpb.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientDescription(_message.Message):
    __slots__ = ("format", "dataset", "input_shape", "num_classes", "scale", "mean", "std", "class_names", "partition", "tasks", "name", "counted", "recipe")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    INPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    NUM_CLASSES_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    format: int
    dataset: str
    input_shape: _containers.RepeatedScalarFieldContainer[int]
    num_classes: int
    scale: float
    mean: _containers.RepeatedScalarFieldContainer[float]
    std: _containers.RepeatedScalarFieldContainer[float]
    class_names: _containers.RepeatedScalarFieldContainer[str]
    partition: _table_pb2.Table
    tasks: _containers.RepeatedCompositeFieldContainer[TaskCounts]
    name: str
    counted: str
    recipe: str
    def __init__(self, format: _Optional[int] = ..., dataset: _Optional[str] = ..., input_shape: _Optional[_Iterable[int]] = ..., num_classes: _Optional[int] = ..., scale: _Optional[float] = ..., mean: _Optional[_Iterable[float]] = ..., std: _Optional[_Iterable[float]] = ..., class_names: _Optional[_Iterable[str]] = ..., partition: _Optional[_Union[_table_pb2.Table, _Mapping]] = ..., tasks: _Optional[_Iterable[_Union[TaskCounts, _Mapping]]] = ..., name: _Optional[str] = ..., counted: _Optional[str] = ..., recipe: _Optional[str] = ...) -> None: ...

class TaskCounts(_message.Message):
    __slots__ = ("train", "test", "set_aside", "why", "again", "unusual", "drifted", "digest")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    TEST_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    UNUSUAL_FIELD_NUMBER: _ClassVar[int]
    DRIFTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    train: _containers.RepeatedScalarFieldContainer[int]
    test: _containers.RepeatedScalarFieldContainer[int]
    set_aside: bool
    why: str
    again: int
    unusual: str
    drifted: str
    digest: str
    def __init__(self, train: _Optional[_Iterable[int]] = ..., test: _Optional[_Iterable[int]] = ..., set_aside: bool = ..., why: _Optional[str] = ..., again: _Optional[int] = ..., unusual: _Optional[str] = ..., drifted: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...
