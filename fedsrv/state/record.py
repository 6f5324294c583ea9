"""The record of an interaction: a JSON object, the same in ``run.db`` and ``rounds.jsonl``.

The engine makes it (:mod:`fedsrv.engine.commits`) and adds scores, the ledger stores it, the
summary and the reports read it. It stays a JSON object in memory. So a record goes back to the disk
as it came, with what another version of fedtide put into it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from fedmodels.facts.position import Interaction, Round, Stage

MAX_CHANGES = 20
"""Changes of who is in a mean that are told of: where clients come and go, each round has one."""
MAX_GONE = 10
"""Clients that a line names."""
ClientRow = dict[str, Any]
"""What a client reported: ``loss``, ``seconds``, ``num_examples``, ``peak_rss_bytes``, the method's
own numbers, ``skipped_examples`` where the last epoch left out some, and ``views`` once the client
is scored: by view ``accuracy``, ``loss``, ``auroc`` where it was asked for, the accuracy on each
class, and on each of ``tasks`` from ``first_task`` on, which is left out where it is 0. What an
upload was trained on is ``trained``, pairs of a task and its rows, where that is not the order's
task with ``num_examples``; rows are None where they are not told. ``models`` names which of a
method's several models it fed. Also what
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
    """What is committed of an interaction; clients' keys are their ids as text.

    A part adds fields of its own (:func:`of_parts`); its ``records`` says which.
    """

    round: Round
    interaction: Interaction
    task: Stage
    """The stage of an open run; of any other run the task that all clients are on."""
    cohort: list[int]
    """The clients whose uploads count, ascending."""
    definitions: NotRequired[int]
    """What its metrics mean: :data:`fedmodels.numerics.metric_names.DEFINITIONS`."""
    metrics: dict[str, float]
    """Finite numbers alone: JSON has no others."""
    bytes: Traffic
    seconds: Durations
    clients: dict[str, ClientRow]
    failed: NotRequired[dict[str, str]]
    """The clients that were left out, and why."""
    unscored: NotRequired[list[int]]
    """The clients that should be in the means of its metrics, and are not: nothing came of them."""
    withheld: NotRequired[dict[str, list[str]]]
    """What sites keep to themselves, by client: names of fields of its row, which has none."""
    confusions: NotRequired[dict[str, list[list[int]]]]
    """Of the last interaction: clients' own test examples by true class (K rows) and predicted
    class (K columns), by the view that was scored."""
    arrivals: NotRequired[list[tuple[int, Interaction]]]
    """Asynchronous: each client that answered, in the order of arrival, and the interaction of the
    order that it answered."""
    under_way: NotRequired[list[tuple[int, Interaction]]]
    """Asynchronous: the clients with an order that is not counted yet, and its interaction."""
    growths: NotRequired[list[dict[str, Any]]]
    """Of an open run: what it grew by before this interaction (:mod:`fedsrv.engine.schedule`)."""
    series: NotRequired[Mapping[str, Any]]
    """Nested lists for the reports, such as ``aggregation_weights``."""


def of_parts(record: Record) -> dict[str, Any]:
    """Return a record with the fields that parts have in it."""
    return cast(dict[str, Any], record)


def trained_in(record: Record) -> dict[int, Interaction]:
    """Return the interaction of the order behind each upload that counts in a record."""
    ordered = dict(record.get("arrivals", ()))
    return {client: ordered.get(client, record["interaction"]) for client in record["cohort"]}


def scored_in(record: Mapping[str, Any]) -> list[str]:
    """Return the clients that the means of a record's metrics are over."""
    without = {*map(str, record.get("unscored", ()))}
    return [name for name in _views_in(record) if name not in without]


def _views_in(record: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the views in which each client is scored; a file may hold anything."""
    rows = record.get("clients")
    each = rows.items() if isinstance(rows, dict) else ()
    views = {n: row.get("views") for n, row in each if n.isdecimal() and isinstance(row, dict)}
    return {name: {*some} for name, some in views.items() if some and isinstance(some, dict)}


def means_of(record: Mapping[str, Any]) -> dict[str, int]:
    """Return over how many clients each accuracy of a record is a mean, by its name.

    ``a_loc`` is of one view, as received where clients keep a model, and as trained elsewhere.
    """
    metrics, scored, views = record.get("metrics"), scored_in(record), _views_in(record)
    if not scored or not isinstance(metrics, dict):
        return {}
    count = Counter(view for name in scored for view in views[name])
    received, trained = count["after_downlink"] or count["global"], count["after_local"]
    of = {"a_glo": count["global"], "a_loc_received": received, "a_loc_trained": trained}
    of["a_loc"] = received if metrics.get("a_loc") == metrics.get("a_loc_received") else trained
    of["a_sel"] = len({*map(str, record.get("cohort") or ())} & {*scored})
    return {name: count for name, count in of.items() if name in metrics and count}


class MeansOver:
    """Which clients a run's means are over, scored round by scored round."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Take records in order."""
        self._names = set[str]()
        self.changes = list[tuple[int, list[str], list[str]]]()
        """The last rounds from which on others are in them: the clients that left, and came."""
        for record in records:
            self.take(record)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record in; one without scores changes nothing, nor do scores of a cohort alone."""
        views, round_ = _views_in(record), record.get("round")
        now = {name for name in scored_in(record) if views[name] - {"after_local"}}
        if self._names and now and now != self._names and isinstance(round_, int):
            left, came = (sorted(s, key=int) for s in (self._names - now, now - self._names))
            self.changes = [*self.changes[1 - MAX_CHANGES :], (round_, left, came)]
        self._names = now or self._names


def change_text(round: int, left: Sequence[str], came: Sequence[str]) -> str:
    """Return from which round on means are over other clients, and who left and came."""
    parts = (
        f"without {some_text(left)}" if left else "",
        f"with {some_text(came)}" if came else "",
    )
    return f"since round {round + 1} {' and '.join(filter(None, parts))}"


def some_text(names: Sequence[str]) -> str:
    """Return clients by name, of many the first ones."""
    more = f" and {len(names) - MAX_GONE} more" if len(names) > MAX_GONE else ""
    return ", ".join(names[:MAX_GONE]) + more


def named_aside(first: Mapping[int, int], tasks: Iterable[tuple[int, int]]) -> dict[str, list[Any]]:
    """Return what a summary says of who a run is without; empty lists are left out.

    Args:
        first: by client, the first interaction without it; 0 of one that is forgotten.
        tasks: the clients and tasks that are forgotten.
    """
    found: dict[str, list[Any]] = {
        "clients_set_aside": sorted(first),
        "clients_forgotten": sorted(client for client, at in first.items() if at == 0),
        "tasks_forgotten": [f"{client}:{task}" for client, task in sorted(tasks)],
    }
    return {key: named for key, named in found.items() if named}
