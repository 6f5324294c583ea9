"""The record of an interaction: a JSON object, the same in ``run.db`` and ``rounds.jsonl``.

The engine makes it (:mod:`fedsrv.engine.commits`) and adds scores, the ledger stores it, the
summary and the reports read it. It stays a JSON object in memory. So a record goes back to the disk
as it came, with what another version of fedtide put into it.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

ClientRow = dict[str, Any]
"""What a client reported: ``loss``, ``seconds``, ``num_examples``, ``peak_rss_bytes``, the method's
own numbers, ``skipped_examples`` where the last epoch left out some, and ``views`` once the client
is scored: by view ``accuracy``, ``loss``, ``auroc`` where it was asked for, the accuracy on each
class, and on each of ``tasks`` from ``first_task`` on, which is left out where it is 0. Also what
the coordinator measured of its upload, whether it counts or not: ``difference_norm``,
``difference_cosine`` and the norms of other parts. An upload that counts has its
``aggregation_weight`` (:mod:`fedsrv.engine.comparison`)."""


class Traffic(TypedDict):
    """The bytes of an interaction; keys with ``wire`` include scoring."""

    down: int
    """Payloads of all clients, each counted in full."""
    up: int
    """Uploads of all clients."""
    wire_down: int
    """Bytes that the coordinator really sent."""
    wire_up: int
    """Bytes that the coordinator really received."""
    per_client: dict[str, dict[str, int]]
    """``down`` and ``up`` of each client, and ``eval_up`` where it sent tensors for scoring."""


class Durations(TypedDict):
    """Where the time of an interaction went, in seconds."""

    train: float
    """Local training of the slowest client."""
    server: NotRequired[float]
    """``aggregate`` and ``finish``."""
    wall: NotRequired[float]
    """From broadcast to commit, without scoring."""


class Record(TypedDict):
    """What is committed of an interaction; clients' keys are their ids as text."""

    round: int
    interaction: int
    task: int
    cohort: list[int]
    """The clients whose uploads count, ascending."""
    definitions: NotRequired[int]
    """What its metrics mean: :data:`fedmodels.numerics.metric_tables.DEFINITIONS`."""
    metrics: dict[str, float]
    """Finite numbers alone: JSON has no others."""
    bytes: Traffic
    seconds: Durations
    clients: dict[str, ClientRow]
    warned: NotRequired[dict[str, str]]
    """The clients whose uploads count and stand out of their cohort, and in what."""
    agreed: NotRequired[list[int]]
    """Of ``warned`` those on whom all agree but as many as may lie: these may be excluded."""
    warned_relays: NotRequired[dict[str, str]]
    """Who added up uploads whose sum counts and stands out of those beside it, and in what."""
    rare_classes: NotRequired[dict[str, list[int]]]
    """With a robust rule: by level the classes whose prototypes came from so few clients that all
    of them may lie."""
    failed: NotRequired[dict[str, str]]
    """The clients that were left out, and why."""
    secure_sum: NotRequired[dict[str, Any]]
    """Of uploads that were summed under masks: the ``groups`` of clients that were asked, their
    ``thresholds``, and the clients whose secrets did not open (``unopened``). Uploads of a group
    with such a client do not count."""
    confusions: NotRequired[dict[str, list[list[int]]]]
    """Of the last interaction: clients' own test examples by true class (K rows) and predicted
    class (K columns), by the view that was scored."""
    arrivals: NotRequired[list[tuple[int, int]]]
    """Asynchronous: each client that answered, in the order of arrival, and the interaction of the
    order that it answered."""
    under_way: NotRequired[list[tuple[int, int]]]
    """Asynchronous: the clients with an order that is not counted yet, and its interaction."""
    growths: NotRequired[list[dict[str, Any]]]
    """Of an open run: what it grew by before this interaction (:mod:`fedsrv.engine.schedule`)."""
    unusual: NotRequired[list[dict[str, Any]]]
    """Of an open run: the tasks that begin with this interaction and are not like their client's
    earlier ones, and in which ways, as the client says it."""
    began_from: NotRequired[dict[str, Any]]
    """Of the first interaction of a run that began with the models of another one: its ``run``, the
    ``interaction`` after which they were, and the ``sha256`` of the weights."""
    privacy: NotRequired[dict[str, float]]
    """With noise that hides clients or their examples: ``epsilon`` at ``delta``. With noise that
    hides clients, also ``epsilon_renyi``, the coarser figure of Renyi accounting, and the number of
    ``releases`` up to this one. Where the bound adapts, also the
    bound here and after: ``clip`` and ``clip_next``."""
    drift: NotRequired[list[dict[str, Any]]]
    """With ``[evaluate] drift``: whose data moved, in which task, and a line on what moved."""
    series: NotRequired[Mapping[str, Any]]
    """Nested lists for the reports, such as ``aggregation_weights``."""


def trained_in(record: Record) -> dict[int, int]:
    """Return the interaction of the order behind each upload that counts in a record."""
    ordered = dict(record.get("arrivals", ()))
    return {client: ordered.get(client, record["interaction"]) for client in record["cohort"]}
