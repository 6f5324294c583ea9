"""``[schedule]`` and ``[trigger]``: how many rounds, over whom, in which order, and when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import Count, Place, PositiveCount, StrictTable
from fedmodels.facts.position import Round

TASKS_IN_TURN = (
    'open = true needs order = "tasks_outer" or "asynchronous", not {!r}: a client goes from one '
    "task to the next, and earlier data may be gone"
)
FEW_HAVE_NEW = (
    "{} needs rounds with as many clients as there can be, and [schedule] participants = "
    "{{0.schedule.participants!r}} lets a round have as few as have new data: leave it out"
)


class Schedule(StrictTable):
    """``[schedule]``: how many rounds, over whom, in which order."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Rounds in all; with ``tasks_outer`` and ``asynchronous``, rounds on each task."""
    clients: Annotated[int, Field(ge=1, le=10_000_000)] = 3
    """Clients of the run."""
    per_round: PositiveCount | None = None
    """Clients in a cohort, with ``asynchronous`` those that train at once; by default all."""
    sampling: Literal["uniform", "weighted", "poisson"] = "uniform"
    """How a cohort is drawn: each client alike, or by its number of training examples. With
    ``poisson`` each client takes part with the chance ``per_round`` / ``clients``, whoever else
    does, drawn anew for each task of a round. So the size of a cohort varies, and a cohort may be
    empty: then nothing changes. ``[privacy]`` spends less for it."""
    over_select: Count = 0
    """Clients beyond ``per_round`` that train as well. A round ends with the first ``per_round``
    uploads, so that stragglers hold up nobody. Which uploads these are depends on time, and is
    recorded."""
    availability: Place = None
    """File that says which clients are there in which rounds: docs/populations.md."""
    availability_sha256: str | None = None
    """SHA-256 of the file ``availability``; filled in when it is read."""
    order: Literal["rounds_outer", "tasks_outer", "asynchronous"] = "rounds_outer"
    """Every round visits every task, or all rounds of a task come before the next task.
    ``asynchronous`` does the latter, and a round ends with the first ``buffer`` uploads (FedBuff):
    docs/asynchronous.md."""
    buffer: PositiveCount | None = None
    """Uploads that end a round with ``asynchronous``: K of FedBuff."""
    staleness_exponent: Annotated[float, Field(ge=0)] = 0.5
    """a: with ``asynchronous``, the difference of an upload with staleness tau is multiplied by
    (1 + tau)^-a: FedBuff's 1 / sqrt(1 + tau) unless given; with 0, stale uploads count in full."""
    patience: PositiveCount | None = None
    """End the run after so many scored rounds in a row without a better score on the validation
    part: ``validation_f1`` or ``validation_accuracy``, as ``evaluate.select_by`` says."""
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    """End the run when that score reaches this."""
    arrivals: Place = None
    """With ``asynchronous``, a run directory whose recorded order of arrivals is followed."""
    open: bool = False
    """The run has no last round: tasks, classes and clients may come while it goes on. ``rounds``
    are then those on each task of a client; ``[trigger]`` says when they begin: docs/streams.md."""
    begin_with: PositiveCount | None = None
    """With ``open``, clients 0 to ``begin_with`` - 1 are those that the run begins with; by default
    all. The others of its ``clients`` may join at any time."""
    newcomers: PositiveCount | None = None
    """With ``open``, how many new clients at most are taken in at the end of a stage, and none
    before it; by default all, before the next round."""
    participants: Annotated[str, Field(pattern=r"^(all|new|new \+ [1-9][0-9]{0,6})$")] = "all"
    """With ``open``, who trains in a round beside the clients with new data, which come first:
    ``all`` others as far as ``per_round`` has room, nobody (``new``), or so many as ``new + 3``
    says. Clients without new data train again on what they have, which costs their time and,
    where there is one, their budget of privacy, and lets the model forget less."""
    wait: Literal["most", "all"] = "most"
    """With ``open``, whether a client that is late holds up what comes next: ``all`` waits without
    end for each client that has begun, before a growth and in a round, so that the digest does not
    depend on who was away; a client that an operator takes out, or whose task is set aside, is not
    waited for. ``most`` waits as ``[server] deadline_s`` says."""
    max_classes: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """With ``open``, limit of the classes that clients may bring in the end."""

    @property
    def selects(self) -> bool:
        """Whether a cohort is smaller than everybody."""
        return self.per_round is not None and self.per_round < self.clients

    @property
    def own_tasks(self) -> bool:
        """Whether clients are on tasks of their own, as in an open run."""
        return self.open

    @property
    def is_asynchronous(self) -> bool:
        """Whether a round ends with the first uploads, and not with its cohort's last one."""
        return self.order == "asynchronous"

    @property
    def orders_last(self) -> bool:
        """Whether a client's order stays under way while later rounds give others theirs."""
        return self.is_asynchronous

    @property
    def trains_all(self) -> bool:
        """Whether all clients that have a task train in each of its rounds."""
        return not (self.selects or self.is_asynchronous or self.open)

    @property
    def stops(self) -> str:
        """The key by which the run may end early; empty where none is given."""
        keys = ("patience", "target")
        return next((key for key in keys if getattr(self, key) is not None), "")

    @property
    def beside_new(self) -> int | None:
        """How many clients train beside those with new data in an open run; None for no limit."""
        if self.participants == "all":
            return None
        return int(self.participants.removeprefix("new").removeprefix(" + ") or 0)

    @property
    def has_no_end(self) -> bool:
        """Whether a run goes on until somebody ends it, or ``[trigger] close_after_s`` does."""
        return self.open

    @property
    def classes_to_come(self) -> int:
        """How many classes the run may have in the end; 0 where it keeps those of its beginning."""
        return self.max_classes if self.open else 0

    def visit(self, round: Round, began: Round) -> int:
        """Return how many rounds on a client's task came before one.

        ``began`` is the round in which the task began, where clients have tasks of their own.
        """
        if self.open:
            return round - began
        return round if self.order == "rounds_outer" else round % self.rounds

    @property
    def beginners(self) -> range:
        """The ids of the clients that a run begins with."""
        return range(self.begin_with or self.clients)

    @model_validator(mode="after")
    def _open_fits(self) -> Schedule:
        if self.open and self.order == "rounds_outer":
            raise ValueError(TASKS_IN_TURN.format(self.order))
        for key in ("begin_with", "newcomers", "max_classes", "wait"):
            if not self.open and self.differs(key):
                raise ValueError(f"{key} belongs to open = true")
        if self.begin_with is not None and self.begin_with > self.clients:
            raise ValueError(f"begin_with = {self.begin_with} exceeds clients = {self.clients}")
        if self.wait == "all" and (self.is_asynchronous or self.over_select):
            key = 'order = "asynchronous"' if self.is_asynchronous else "over_select"
            raise ValueError(f'wait = "all" waits for all, and {key} for the first uploads')
        return self

    @model_validator(mode="after")
    def _cohort_fits(self) -> Schedule:
        if self.per_round is not None and self.per_round > self.clients:
            raise ValueError(f"per_round = {self.per_round} exceeds clients = {self.clients}")
        return self

    @model_validator(mode="after")
    def _selection_fits(self) -> Schedule:
        if self.over_select and not self.selects:
            raise ValueError("over_select needs per_round below clients: none is left to add")
        if self.sampling != "uniform" and not self.selects:
            raise ValueError(f'sampling = "{self.sampling}" needs per_round below clients')
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> Schedule:
        at_once = self.per_round or self.clients
        if not self.is_asynchronous:
            for key in ("buffer", "arrivals"):
                if getattr(self, key) is not None:
                    raise ValueError(f'{key} belongs to order = "asynchronous"')
            if self.differs("staleness_exponent"):
                raise ValueError('staleness_exponent belongs to order = "asynchronous"')
        elif self.buffer is None:
            raise ValueError('order = "asynchronous" needs buffer, the uploads that end a round')
        elif self.buffer > at_once:
            raise ValueError(f"buffer = {self.buffer} exceeds the {at_once} that train at once")
        return self


class Trigger(StrictTable):
    """``[trigger]``: when an open run that has learned all it has goes on."""

    new_data: PositiveCount = 1
    """How many clients with data that they have not trained on begin the next rounds."""
    every_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which one such client is enough."""
    score_drop: Annotated[float, Field(gt=0, le=1)] | None = None
    """One such client is enough, too, where the accuracy of clients' present models on their new
    test data lies this far below that of the last scored round."""
    drift: bool = False
    """One such client is enough, too, where its site says that the inputs which its live model is
    asked have moved."""
    close_after_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds without rounds after which the run ends; by default it waits for ever."""
