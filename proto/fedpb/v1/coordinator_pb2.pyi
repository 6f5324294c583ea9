from fedpb.v1 import bundle_pb2 as _bundle_pb2
from fedpb.v1 import description_pb2 as _description_pb2
from fedpb.v1 import table_pb2 as _table_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OrderKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_KIND_UNSPECIFIED: _ClassVar[OrderKind]
    ORDER_KIND_TRAIN: _ClassVar[OrderKind]
    ORDER_KIND_EVALUATE: _ClassVar[OrderKind]
    ORDER_KIND_FINISH: _ClassVar[OrderKind]
    ORDER_KIND_ADVERTISE: _ClassVar[OrderKind]
    ORDER_KIND_SHARE: _ClassVar[OrderKind]
    ORDER_KIND_UNMASK: _ClassVar[OrderKind]
    ORDER_KIND_AGREE: _ClassVar[OrderKind]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_DECLINED: _ClassVar[FailureReason]
    FAILURE_REASON_REFUSED: _ClassVar[FailureReason]
    FAILURE_REASON_STORAGE: _ClassVar[FailureReason]
    FAILURE_REASON_CONFIG: _ClassVar[FailureReason]
    FAILURE_REASON_TRAINING: _ClassVar[FailureReason]
ORDER_KIND_UNSPECIFIED: OrderKind
ORDER_KIND_TRAIN: OrderKind
ORDER_KIND_EVALUATE: OrderKind
ORDER_KIND_FINISH: OrderKind
ORDER_KIND_ADVERTISE: OrderKind
ORDER_KIND_SHARE: OrderKind
ORDER_KIND_UNMASK: OrderKind
ORDER_KIND_AGREE: OrderKind
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_DECLINED: FailureReason
FAILURE_REASON_REFUSED: FailureReason
FAILURE_REASON_STORAGE: FailureReason
FAILURE_REASON_CONFIG: FailureReason
FAILURE_REASON_TRAINING: FailureReason

class PrepareRequest(_message.Message):
    __slots__ = ("client_id", "protocol", "has_cut", "wants_known")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HAS_CUT_FIELD_NUMBER: _ClassVar[int]
    WANTS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    protocol: int
    has_cut: bool
    wants_known: bool
    def __init__(self, client_id: _Optional[str] = ..., protocol: _Optional[int] = ..., has_cut: bool = ..., wants_known: bool = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("data", "seed", "announce", "run_id", "experiment", "known", "places")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    data: _table_pb2.Table
    seed: int
    announce: str
    run_id: str
    experiment: _table_pb2.Table
    known: _description_pb2.ClientDescription
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[_Union[_table_pb2.Table, _Mapping]] = ..., seed: _Optional[int] = ..., announce: _Optional[str] = ..., run_id: _Optional[str] = ..., experiment: _Optional[_Union[_table_pb2.Table, _Mapping]] = ..., known: _Optional[_Union[_description_pb2.ClientDescription, _Mapping]] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("number", "link")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    number: int
    link: bytes
    def __init__(self, number: _Optional[int] = ..., link: _Optional[bytes] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("head", "digests")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    head: Head
    digests: bytes
    def __init__(self, head: _Optional[_Union[Head, _Mapping]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("client_id", "run_id", "token", "versions", "protocol", "start_over", "description", "relay", "known", "relay_process")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    START_OVER_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RELAY_PROCESS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    run_id: str
    token: bytes
    versions: _containers.RepeatedScalarFieldContainer[int]
    protocol: int
    start_over: bool
    description: _description_pb2.ClientDescription
    relay: str
    known: int
    relay_process: bytes
    def __init__(self, client_id: _Optional[str] = ..., run_id: _Optional[str] = ..., token: _Optional[bytes] = ..., versions: _Optional[_Iterable[int]] = ..., protocol: _Optional[int] = ..., start_over: bool = ..., description: _Optional[_Union[_description_pb2.ClientDescription, _Mapping]] = ..., relay: _Optional[str] = ..., known: _Optional[int] = ..., relay_process: _Optional[bytes] = ...) -> None: ...

class JoinSeveralRequest(_message.Message):
    __slots__ = ("run_id", "protocol", "start_over", "descriptions", "clients", "relay", "known", "relay_process")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    START_OVER_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RELAY_PROCESS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    start_over: bool
    descriptions: _containers.RepeatedCompositeFieldContainer[_description_pb2.ClientDescription]
    clients: _containers.RepeatedCompositeFieldContainer[Joining]
    relay: str
    known: int
    relay_process: bytes
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., start_over: bool = ..., descriptions: _Optional[_Iterable[_Union[_description_pb2.ClientDescription, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[Joining, _Mapping]]] = ..., relay: _Optional[str] = ..., known: _Optional[int] = ..., relay_process: _Optional[bytes] = ...) -> None: ...

class Joining(_message.Message):
    __slots__ = ("client_id", "token", "versions", "description", "tasks", "name")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    versions: _containers.RepeatedScalarFieldContainer[int]
    description: int
    tasks: _containers.RepeatedCompositeFieldContainer[_description_pb2.TaskCounts]
    name: str
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., versions: _Optional[_Iterable[int]] = ..., description: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[_description_pb2.TaskCounts, _Mapping]]] = ..., name: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("run_id", "token", "committed", "beat_every_s", "experiment", "class_names", "history", "refused")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BEAT_EVERY_S_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAMES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    token: bytes
    committed: int
    beat_every_s: float
    experiment: _table_pb2.Table
    class_names: _containers.RepeatedScalarFieldContainer[str]
    history: History
    refused: _containers.RepeatedCompositeFieldContainer[TaskOf]
    def __init__(self, run_id: _Optional[str] = ..., token: _Optional[bytes] = ..., committed: _Optional[int] = ..., beat_every_s: _Optional[float] = ..., experiment: _Optional[_Union[_table_pb2.Table, _Mapping]] = ..., class_names: _Optional[_Iterable[str]] = ..., history: _Optional[_Union[History, _Mapping]] = ..., refused: _Optional[_Iterable[_Union[TaskOf, _Mapping]]] = ...) -> None: ...

class JoinSeveralResponse(_message.Message):
    __slots__ = ("joined",)
    JOINED_FIELD_NUMBER: _ClassVar[int]
    joined: JoinResponse
    def __init__(self, joined: _Optional[_Union[JoinResponse, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("client_id", "token", "durable", "issue")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    durable: int
    issue: int
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., durable: _Optional[int] = ..., issue: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("waiting", "held", "begun")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    waiting: _containers.RepeatedCompositeFieldContainer[Waiting]
    held: _containers.RepeatedScalarFieldContainer[bytes]
    begun: _containers.RepeatedCompositeFieldContainer[Begun]
    def __init__(self, waiting: _Optional[_Iterable[_Union[Waiting, _Mapping]]] = ..., held: _Optional[_Iterable[bytes]] = ..., begun: _Optional[_Iterable[_Union[Begun, _Mapping]]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("digest", "bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    bytes: int
    def __init__(self, digest: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class SecureSum(_message.Message):
    __slots__ = ("attempt", "threshold", "clients", "most", "peers", "counted", "payload")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    attempt: bytes
    threshold: int
    clients: int
    most: float
    peers: _containers.RepeatedCompositeFieldContainer[SecurePeer]
    counted: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    def __init__(self, attempt: _Optional[bytes] = ..., threshold: _Optional[int] = ..., clients: _Optional[int] = ..., most: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[SecurePeer, _Mapping]]] = ..., counted: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SecurePeer(_message.Message):
    __slots__ = ("client", "channel_key", "mask_key", "share", "signature", "certificates", "agreed")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_KEY_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    client: int
    channel_key: bytes
    mask_key: bytes
    share: bytes
    signature: bytes
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    agreed: bytes
    def __init__(self, client: _Optional[int] = ..., channel_key: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., share: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificates: _Optional[_Iterable[bytes]] = ..., agreed: _Optional[bytes] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("kind", "client_id", "interaction", "round", "task", "committed", "durable", "views", "tasks_seen", "trip", "global_test", "issue", "following", "base", "confusion", "new_classes", "first_task", "task_began", "secure_sum", "set_aside", "settings", "class_changes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INTERACTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    TASKS_SEEN_FIELD_NUMBER: _ClassVar[int]
    TRIP_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_TEST_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CONFUSION_FIELD_NUMBER: _ClassVar[int]
    NEW_CLASSES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TASK_FIELD_NUMBER: _ClassVar[int]
    TASK_BEGAN_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUM_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CLASS_CHANGES_FIELD_NUMBER: _ClassVar[int]
    kind: OrderKind
    client_id: str
    interaction: int
    round: int
    task: int
    committed: int
    durable: int
    views: _containers.RepeatedScalarFieldContainer[str]
    tasks_seen: int
    trip: int
    global_test: bool
    issue: int
    following: int
    base: int
    confusion: bool
    new_classes: _containers.RepeatedScalarFieldContainer[str]
    first_task: int
    task_began: int
    secure_sum: SecureSum
    set_aside: _containers.RepeatedScalarFieldContainer[int]
    settings: _table_pb2.Table
    class_changes: _containers.RepeatedCompositeFieldContainer[ClassChange]
    def __init__(self, kind: _Optional[_Union[OrderKind, str]] = ..., client_id: _Optional[str] = ..., interaction: _Optional[int] = ..., round: _Optional[int] = ..., task: _Optional[int] = ..., committed: _Optional[int] = ..., durable: _Optional[int] = ..., views: _Optional[_Iterable[str]] = ..., tasks_seen: _Optional[int] = ..., trip: _Optional[int] = ..., global_test: bool = ..., issue: _Optional[int] = ..., following: _Optional[int] = ..., base: _Optional[int] = ..., confusion: bool = ..., new_classes: _Optional[_Iterable[str]] = ..., first_task: _Optional[int] = ..., task_began: _Optional[int] = ..., secure_sum: _Optional[_Union[SecureSum, _Mapping]] = ..., set_aside: _Optional[_Iterable[int]] = ..., settings: _Optional[_Union[_table_pb2.Table, _Mapping]] = ..., class_changes: _Optional[_Iterable[_Union[ClassChange, _Mapping]]] = ...) -> None: ...

class ClassChange(_message.Message):
    __slots__ = ("old", "now", "after")
    OLD_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    old: str
    now: str
    after: int
    def __init__(self, old: _Optional[str] = ..., now: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class PartHeader(_message.Message):
    __slots__ = ("role", "digest", "bundle", "held", "offset")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    role: str
    digest: bytes
    bundle: _bundle_pb2.BundleHeader
    held: bool
    offset: int
    def __init__(self, role: _Optional[str] = ..., digest: _Optional[bytes] = ..., bundle: _Optional[_Union[_bundle_pb2.BundleHeader, _Mapping]] = ..., held: bool = ..., offset: _Optional[int] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("order", "parts", "group", "more")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    order: Order
    parts: _containers.RepeatedCompositeFieldContainer[PartHeader]
    group: _containers.RepeatedScalarFieldContainer[int]
    more: _containers.RepeatedCompositeFieldContainer[Order]
    def __init__(self, order: _Optional[_Union[Order, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[PartHeader, _Mapping]]] = ..., group: _Optional[_Iterable[int]] = ..., more: _Optional[_Iterable[_Union[Order, _Mapping]]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    frame: _bundle_pb2.Frame
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., frame: _Optional[_Union[_bundle_pb2.Frame, _Mapping]] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("view", "rule", "test_set", "support", "predicted", "correct", "loss_sum")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TEST_SET_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    view: str
    rule: str
    test_set: str
    support: _containers.RepeatedScalarFieldContainer[int]
    predicted: _containers.RepeatedScalarFieldContainer[int]
    correct: _containers.RepeatedScalarFieldContainer[int]
    loss_sum: float
    def __init__(self, view: _Optional[str] = ..., rule: _Optional[str] = ..., test_set: _Optional[str] = ..., support: _Optional[_Iterable[int]] = ..., predicted: _Optional[_Iterable[int]] = ..., correct: _Optional[_Iterable[int]] = ..., loss_sum: _Optional[float] = ...) -> None: ...

class Confusion(_message.Message):
    __slots__ = ("view", "counts")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    view: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, view: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Probabilities(_message.Message):
    __slots__ = ("view", "auroc", "ece")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    AUROC_FIELD_NUMBER: _ClassVar[int]
    ECE_FIELD_NUMBER: _ClassVar[int]
    view: str
    auroc: float
    ece: float
    def __init__(self, view: _Optional[str] = ..., auroc: _Optional[float] = ..., ece: _Optional[float] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("view", "test_set", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VIEW_FIELD_NUMBER: _ClassVar[int]
    TEST_SET_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    view: str
    test_set: str
    values: _containers.ScalarMap[str, float]
    def __init__(self, view: _Optional[str] = ..., test_set: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("loss", "seconds", "num_examples", "counts", "state_sha256", "extra", "durable", "peak_rss_bytes", "confusions", "skipped_examples", "probabilities", "secure_sum", "refused_model", "figures", "withheld", "trained")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    STATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    PEAK_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONFUSIONS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_MODEL_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    loss: float
    seconds: float
    num_examples: int
    counts: _containers.RepeatedCompositeFieldContainer[Counts]
    state_sha256: str
    extra: _containers.ScalarMap[str, float]
    durable: int
    peak_rss_bytes: int
    confusions: _containers.RepeatedCompositeFieldContainer[Confusion]
    skipped_examples: int
    probabilities: _containers.RepeatedCompositeFieldContainer[Probabilities]
    secure_sum: SecureAnswer
    refused_model: RefusedModel
    figures: _containers.RepeatedCompositeFieldContainer[Figures]
    withheld: _containers.RepeatedScalarFieldContainer[str]
    trained: _containers.RepeatedCompositeFieldContainer[TrainedOn]
    def __init__(self, loss: _Optional[float] = ..., seconds: _Optional[float] = ..., num_examples: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[Counts, _Mapping]]] = ..., state_sha256: _Optional[str] = ..., extra: _Optional[_Mapping[str, float]] = ..., durable: _Optional[int] = ..., peak_rss_bytes: _Optional[int] = ..., confusions: _Optional[_Iterable[_Union[Confusion, _Mapping]]] = ..., skipped_examples: _Optional[int] = ..., probabilities: _Optional[_Iterable[_Union[Probabilities, _Mapping]]] = ..., secure_sum: _Optional[_Union[SecureAnswer, _Mapping]] = ..., refused_model: _Optional[_Union[RefusedModel, _Mapping]] = ..., figures: _Optional[_Iterable[_Union[Figures, _Mapping]]] = ..., withheld: _Optional[_Iterable[str]] = ..., trained: _Optional[_Iterable[_Union[TrainedOn, _Mapping]]] = ...) -> None: ...

class TrainedOn(_message.Message):
    __slots__ = ("task", "rows")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    task: int
    rows: int
    def __init__(self, task: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class RefusedModel(_message.Message):
    __slots__ = ("round", "accuracy", "live")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    round: int
    accuracy: float
    live: float
    def __init__(self, round: _Optional[int] = ..., accuracy: _Optional[float] = ..., live: _Optional[float] = ...) -> None: ...

class SecureAnswer(_message.Message):
    __slots__ = ("channel_key", "mask_key", "own_digest", "shares", "opened", "signature", "certificates")
    CHANNEL_KEY_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    OWN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    channel_key: bytes
    mask_key: bytes
    own_digest: bytes
    shares: _containers.RepeatedCompositeFieldContainer[SealedShare]
    opened: _containers.RepeatedCompositeFieldContainer[OpenedShare]
    signature: bytes
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, channel_key: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., own_digest: _Optional[bytes] = ..., shares: _Optional[_Iterable[_Union[SealedShare, _Mapping]]] = ..., opened: _Optional[_Iterable[_Union[OpenedShare, _Mapping]]] = ..., signature: _Optional[bytes] = ..., certificates: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SealedShare(_message.Message):
    __slots__ = ("sealed", "pair_digest", "own_digest")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    PAIR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OWN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    sealed: bytes
    pair_digest: bytes
    own_digest: bytes
    def __init__(self, sealed: _Optional[bytes] = ..., pair_digest: _Optional[bytes] = ..., own_digest: _Optional[bytes] = ...) -> None: ...

class OpenedShare(_message.Message):
    __slots__ = ("client", "pair", "own")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    client: int
    pair: bytes
    own: bytes
    def __init__(self, client: _Optional[int] = ..., pair: _Optional[bytes] = ..., own: _Optional[bytes] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("client_id", "token", "kind", "interaction", "trip", "report", "bundle", "failure", "summed", "members", "distance", "issue", "reason", "part_of")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INTERACTION_FIELD_NUMBER: _ClassVar[int]
    TRIP_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PART_OF_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    kind: OrderKind
    interaction: int
    trip: int
    report: Report
    bundle: _bundle_pb2.BundleHeader
    failure: str
    summed: bool
    members: _containers.RepeatedCompositeFieldContainer[Member]
    distance: Distance
    issue: int
    reason: FailureReason
    part_of: bytes
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., kind: _Optional[_Union[OrderKind, str]] = ..., interaction: _Optional[int] = ..., trip: _Optional[int] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., bundle: _Optional[_Union[_bundle_pb2.BundleHeader, _Mapping]] = ..., failure: _Optional[str] = ..., summed: bool = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., distance: _Optional[_Union[Distance, _Mapping]] = ..., issue: _Optional[int] = ..., reason: _Optional[_Union[FailureReason, str]] = ..., part_of: _Optional[bytes] = ...) -> None: ...

class Distance(_message.Message):
    __slots__ = ("weights", "statistics")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    weights: float
    statistics: float
    def __init__(self, weights: _Optional[float] = ..., statistics: _Optional[float] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("client_id", "token", "cosine")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    cosine: float
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., cosine: _Optional[float] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    frame: _bundle_pb2.Frame
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., frame: _Optional[_Union[_bundle_pb2.Frame, _Mapping]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("repeated_upload", "received")
    REPEATED_UPLOAD_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    repeated_upload: bool
    received: int
    def __init__(self, repeated_upload: bool = ..., received: _Optional[int] = ...) -> None: ...

class PushSeveralRequest(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PushRequest]
    def __init__(self, results: _Optional[_Iterable[_Union[PushRequest, _Mapping]]] = ...) -> None: ...

class PushSeveralResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("code", "line", "repeated_upload")
    CODE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    REPEATED_UPLOAD_FIELD_NUMBER: _ClassVar[int]
    code: int
    line: str
    repeated_upload: bool
    def __init__(self, code: _Optional[int] = ..., line: _Optional[str] = ..., repeated_upload: bool = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("client_id", "token", "epoch", "batch", "durable", "interaction", "known")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    INTERACTION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    epoch: int
    batch: int
    durable: int
    interaction: int
    known: int
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., batch: _Optional[int] = ..., durable: _Optional[int] = ..., interaction: _Optional[int] = ..., known: _Optional[int] = ...) -> None: ...

class BeatResponse(_message.Message):
    __slots__ = ("superseded", "history")
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    superseded: bool
    history: History
    def __init__(self, superseded: bool = ..., history: _Optional[_Union[History, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("client_id", "token", "reason", "known", "others")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    reason: str
    known: int
    others: _containers.RepeatedCompositeFieldContainer[Leaving]
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., reason: _Optional[str] = ..., known: _Optional[int] = ..., others: _Optional[_Iterable[_Union[Leaving, _Mapping]]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("client_id", "token")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ("history",)
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    history: History
    def __init__(self, history: _Optional[_Union[History, _Mapping]] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("client_id", "token", "description")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    token: bytes
    description: _description_pb2.ClientDescription
    def __init__(self, client_id: _Optional[str] = ..., token: _Optional[bytes] = ..., description: _Optional[_Union[_description_pb2.ClientDescription, _Mapping]] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ("refused",)
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    refused: _containers.RepeatedCompositeFieldContainer[TaskOf]
    def __init__(self, refused: _Optional[_Iterable[_Union[TaskOf, _Mapping]]] = ...) -> None: ...

class SteerRequest(_message.Message):
    __slots__ = ("retire", "forget", "close", "now", "exclude", "set_aside", "class_changes", "list_classes", "merge")
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    CLASS_CHANGES_FIELD_NUMBER: _ClassVar[int]
    LIST_CLASSES_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    retire: _containers.RepeatedScalarFieldContainer[str]
    forget: bool
    close: bool
    now: bool
    exclude: _containers.RepeatedScalarFieldContainer[str]
    set_aside: _containers.RepeatedCompositeFieldContainer[TaskOf]
    class_changes: _containers.RepeatedCompositeFieldContainer[ClassChange]
    list_classes: bool
    merge: bool
    def __init__(self, retire: _Optional[_Iterable[str]] = ..., forget: bool = ..., close: bool = ..., now: bool = ..., exclude: _Optional[_Iterable[str]] = ..., set_aside: _Optional[_Iterable[_Union[TaskOf, _Mapping]]] = ..., class_changes: _Optional[_Iterable[_Union[ClassChange, _Mapping]]] = ..., list_classes: bool = ..., merge: bool = ...) -> None: ...

class TaskOf(_message.Message):
    __slots__ = ("client_id", "task", "why")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    task: int
    why: str
    def __init__(self, client_id: _Optional[str] = ..., task: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class SteerResponse(_message.Message):
    __slots__ = ("classes",)
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[ClassOf]
    def __init__(self, classes: _Optional[_Iterable[_Union[ClassOf, _Mapping]]] = ...) -> None: ...

class ClassOf(_message.Message):
    __slots__ = ("name", "earlier", "examples", "clients", "part_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    PART_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    earlier: _containers.RepeatedScalarFieldContainer[str]
    examples: int
    clients: int
    part_of: str
    def __init__(self, name: _Optional[str] = ..., earlier: _Optional[_Iterable[str]] = ..., examples: _Optional[int] = ..., clients: _Optional[int] = ..., part_of: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("from_start",)
    FROM_START_FIELD_NUMBER: _ClassVar[int]
    from_start: bool
    def __init__(self, from_start: bool = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("event", "head")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    event: Event
    head: Head
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ..., head: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("client_id", "interaction", "round", "unix_time", "joined", "left", "order", "beat", "upload", "failed", "commit", "scores", "finished", "waiting", "server", "rollback", "started_over", "missed", "listening", "draining", "dashboard", "metrics", "ended", "note", "gone", "back", "present", "resting", "growth", "resumed", "refused", "forecast")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INTERACTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    STARTED_OVER_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DASHBOARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    BACK_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    interaction: int
    round: int
    unix_time: float
    joined: Joined
    left: Left
    order: OrderSent
    beat: Progress
    upload: Uploaded
    failed: Failed
    commit: Committed
    scores: Scored
    finished: Finished
    waiting: WaitingFor
    server: ServerWork
    rollback: RolledBack
    started_over: StartedOver
    missed: Missed
    listening: Listening
    draining: Draining
    dashboard: Dashboard
    metrics: MetricsPage
    ended: Ended
    note: Noted
    gone: Gone
    back: Back
    present: Present
    resting: Resting
    growth: Grown
    resumed: Resumed
    refused: Refused
    forecast: Forecast
    def __init__(self, client_id: _Optional[str] = ..., interaction: _Optional[int] = ..., round: _Optional[int] = ..., unix_time: _Optional[float] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., order: _Optional[_Union[OrderSent, _Mapping]] = ..., beat: _Optional[_Union[Progress, _Mapping]] = ..., upload: _Optional[_Union[Uploaded, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., commit: _Optional[_Union[Committed, _Mapping]] = ..., scores: _Optional[_Union[Scored, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., waiting: _Optional[_Union[WaitingFor, _Mapping]] = ..., server: _Optional[_Union[ServerWork, _Mapping]] = ..., rollback: _Optional[_Union[RolledBack, _Mapping]] = ..., started_over: _Optional[_Union[StartedOver, _Mapping]] = ..., missed: _Optional[_Union[Missed, _Mapping]] = ..., listening: _Optional[_Union[Listening, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., dashboard: _Optional[_Union[Dashboard, _Mapping]] = ..., metrics: _Optional[_Union[MetricsPage, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., note: _Optional[_Union[Noted, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ..., back: _Optional[_Union[Back, _Mapping]] = ..., present: _Optional[_Union[Present, _Mapping]] = ..., resting: _Optional[_Union[Resting, _Mapping]] = ..., growth: _Optional[_Union[Grown, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Left(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class OrderSent(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: OrderKind
    def __init__(self, order: _Optional[_Union[OrderKind, str]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("epoch", "batch")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batch: int
    def __init__(self, epoch: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class Uploaded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("task", "loss", "of", "failed", "seconds", "bytes", "privacy", "open")
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PrivacyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TASK_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    task: int
    loss: float
    of: int
    failed: _containers.ScalarMap[str, str]
    seconds: float
    bytes: _containers.ScalarMap[str, int]
    privacy: _containers.ScalarMap[str, float]
    open: bool
    def __init__(self, task: _Optional[int] = ..., loss: _Optional[float] = ..., of: _Optional[int] = ..., failed: _Optional[_Mapping[str, str]] = ..., seconds: _Optional[float] = ..., bytes: _Optional[_Mapping[str, int]] = ..., privacy: _Optional[_Mapping[str, float]] = ..., open: bool = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("metrics", "scored", "unscored", "means", "changed")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MeansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    scored: int
    unscored: _containers.RepeatedScalarFieldContainer[str]
    means: _containers.ScalarMap[str, int]
    changed: str
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., scored: _Optional[int] = ..., unscored: _Optional[_Iterable[str]] = ..., means: _Optional[_Mapping[str, int]] = ..., changed: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("metrics", "state_sha256")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    state_sha256: str
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., state_sha256: _Optional[str] = ...) -> None: ...

class WaitingFor(_message.Message):
    __slots__ = ("line", "clients", "seconds")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    line: str
    clients: _containers.RepeatedScalarFieldContainer[str]
    seconds: int
    def __init__(self, line: _Optional[str] = ..., clients: _Optional[_Iterable[str]] = ..., seconds: _Optional[int] = ...) -> None: ...

class ServerWork(_message.Message):
    __slots__ = ("work", "step", "of", "loss")
    WORK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    work: str
    step: int
    of: int
    loss: float
    def __init__(self, work: _Optional[str] = ..., step: _Optional[int] = ..., of: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class RolledBack(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StartedOver(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Missed(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: int
    def __init__(self, events: _Optional[int] = ...) -> None: ...

class Listening(_message.Message):
    __slots__ = ("address", "clients", "needed")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    address: str
    clients: int
    needed: int
    def __init__(self, address: _Optional[str] = ..., clients: _Optional[int] = ..., needed: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: str
    def __init__(self, line: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Noted(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: str
    def __init__(self, line: _Optional[str] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("line", "clients")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    line: str
    clients: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, line: _Optional[str] = ..., clients: _Optional[_Iterable[str]] = ...) -> None: ...

class Back(_message.Message):
    __slots__ = ("line", "clients")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    line: str
    clients: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, line: _Optional[str] = ..., clients: _Optional[_Iterable[str]] = ...) -> None: ...

class Present(_message.Message):
    __slots__ = ("clients", "roster")
    class RosterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Standing
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedScalarFieldContainer[str]
    roster: _containers.MessageMap[str, Standing]
    def __init__(self, clients: _Optional[_Iterable[str]] = ..., roster: _Optional[_Mapping[str, Standing]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("state", "since", "why", "refused")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    state: str
    since: float
    why: str
    refused: str
    def __init__(self, state: _Optional[str] = ..., since: _Optional[float] = ..., why: _Optional[str] = ..., refused: _Optional[str] = ...) -> None: ...

class Resting(_message.Message):
    __slots__ = ("line", "clients")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    line: str
    clients: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, line: _Optional[str] = ..., clients: _Optional[_Iterable[str]] = ...) -> None: ...

class Grown(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: str
    def __init__(self, line: _Optional[str] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("line", "clients", "interactions", "down", "up", "all", "server_disk", "client_disk")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    INTERACTIONS_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    SERVER_DISK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_DISK_FIELD_NUMBER: _ClassVar[int]
    line: str
    clients: int
    interactions: int
    down: _containers.RepeatedScalarFieldContainer[int]
    up: _containers.RepeatedScalarFieldContainer[int]
    all: _containers.RepeatedScalarFieldContainer[int]
    server_disk: _containers.RepeatedScalarFieldContainer[int]
    client_disk: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, line: _Optional[str] = ..., clients: _Optional[int] = ..., interactions: _Optional[int] = ..., down: _Optional[_Iterable[int]] = ..., up: _Optional[_Iterable[int]] = ..., all: _Optional[_Iterable[int]] = ..., server_disk: _Optional[_Iterable[int]] = ..., client_disk: _Optional[_Iterable[int]] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("task", "loss", "metrics", "scored", "unscored", "means", "changed")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MeansEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TASK_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    task: int
    loss: float
    metrics: _containers.ScalarMap[str, float]
    scored: int
    unscored: _containers.RepeatedScalarFieldContainer[str]
    means: _containers.ScalarMap[str, int]
    changed: str
    def __init__(self, task: _Optional[int] = ..., loss: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., scored: _Optional[int] = ..., unscored: _Optional[_Iterable[str]] = ..., means: _Optional[_Mapping[str, int]] = ..., changed: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: str
    def __init__(self, line: _Optional[str] = ...) -> None: ...

class Dashboard(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class MetricsPage(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...
