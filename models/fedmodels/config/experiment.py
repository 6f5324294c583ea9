"""One experiment as one strict table: what a TOML file may say, and what it means.

The server owns the file; a client gets the resolved experiment when it joins. Reading the file is
the commands' business, this module only checks what it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedmodels.config.bounds import Count, PositiveCount
from fedmodels.config.data import Data
from fedmodels.config.privacy import MIN_GROUP, CountDetail, Privacy, SecureSum
from fedmodels.config.reduction import Reduction
from fedmodels.config.scenario import Scenario
from fedmodels.config.strict_table import CodeName, Place, StrictTable
from fedmodels.config.training import ServerOptimizer, Training
from fedmodels.errors import ConfigError
from fedmodels.own_code import short_name

View = Literal["global", "after_local", "after_downlink"]


class NetTable(BaseModel):
    """``[net]``: a registered net and its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: CodeName
    """A net's name, or ``file.py:Name``."""
    weights: Place = None
    """A file of weights that all start from, such as ``fedcli pretrain`` writes. Weights that the
    file lacks are drawn from the seed, and so are all of FedEM's learners but the first. Where a
    part of the net is private, clients on other machines give their copy: ``fedcli join
    --weights FILE``."""
    weights_sha256: str | None = None
    """SHA-256 of the file ``weights``; the coordinator fills it in, and a client takes the file
    that has it."""

    code_sha256: str | None = None
    """SHA-256 of the file in ``name``, if it is ``file.py:Name``; filled in when it is read."""

    def options(self) -> dict[str, Any]:
        """Return what is passed to ``make_net`` beside the name."""
        return dict(self.model_extra or {})


class MethodTable(BaseModel):
    """``[method]``: a registered method and its hyper-parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: CodeName
    """One of ``fedsrv methods``, or ``file.py:Name``."""
    code_sha256: str | None = None
    """SHA-256 of the file in ``name``, if it is ``file.py:Name``; filled in when it is read."""

    @property
    def pools_data(self) -> bool:
        """Whether the clients' training data belong into one place: Centralized, unless its own."""
        return self.name == "centralized" and self.hyper_parameters().get("data") != "own"

    def hyper_parameters(self) -> dict[str, Any]:
        """Return what is passed to ``make`` beside the name."""
        return dict(self.model_extra or {})


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
    max_classes: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """With ``open``, limit of the classes that clients may bring in the end."""

    @property
    def selects(self) -> bool:
        """Whether a cohort is smaller than everybody."""
        return self.per_round is not None and self.per_round < self.clients

    @property
    def is_asynchronous(self) -> bool:
        """Whether a round ends with the first uploads, and not with its cohort's last one."""
        return self.order == "asynchronous"

    @property
    def beginners(self) -> range:
        """The ids of the clients that a run begins with."""
        return range(self.begin_with or self.clients)

    @model_validator(mode="after")
    def _open_fits(self) -> Schedule:
        if self.open and self.order != "tasks_outer":
            raise ValueError(
                f'open = true needs order = "tasks_outer", not {self.order!r}: a client goes from '
                "one task to the next, and earlier data may be gone"
            )
        if self.open and self.availability is not None:
            raise ValueError("availability does nothing with open = true: who has joined is there")
        for key in ("begin_with", "newcomers"):
            if not self.open and getattr(self, key) is not None:
                raise ValueError(f"{key} belongs to open = true")
        if self.begin_with is not None and self.begin_with > self.clients:
            raise ValueError(f"begin_with = {self.begin_with} exceeds clients = {self.clients}")
        return self

    @model_validator(mode="after")
    def _cohort_fits(self) -> Schedule:
        if self.per_round is not None and self.per_round > self.clients:
            raise ValueError(f"per_round = {self.per_round} exceeds clients = {self.clients}")
        return self

    @model_validator(mode="after")
    def _selection_fits(self) -> Schedule:
        for key in ("sampling", "over_select", "availability"):
            if self.is_asynchronous and getattr(self, key) not in (None, 0, "uniform"):
                raise ValueError(f'{key} has no meaning with order = "asynchronous"')
        if self.over_select and not self.selects:
            raise ValueError("over_select needs per_round below clients: there is nobody else")
        if self.sampling != "uniform" and not self.selects:
            raise ValueError(f'sampling = "{self.sampling}" needs per_round below clients')
        if self.sampling == "poisson" and (self.over_select or self.availability or self.open):
            raise ValueError(
                'sampling = "poisson" knows no over_select, no availability and no open run'
            )
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
    close_after_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds without rounds after which the run ends; by default it waits for ever."""


class Evaluate(StrictTable):
    """``[evaluate]``: when, and which models, are scored."""

    every: Count = 1
    """Score each time this many rounds have passed, and after the last; 0: after the last only."""
    clients: PositiveCount | None = None
    """How many clients score the models, the same ones in every round, beside the round's cohort;
    all clients unless given. Metrics are means over the clients that score."""
    views: Annotated[tuple[View, ...], Field(strict=False)] = (  # TOML has lists only
        "global",
        "after_local",
        "after_downlink",
    )
    """Which of a client's models are scored: docs/metrics.md."""
    last_rounds: PositiveCount = 1
    """Summary metrics are means over this many last scored rounds."""
    reference: Place = None
    """Run directory against which the average forgetting measure is taken."""
    batch_size: PositiveCount = 256
    """Examples that are scored together."""
    generalization: bool = False
    """Score clients' models on the global test set too, where there is one: costly. It gives
    FedAli's Generalization and FedMLP's A_loc (``a_loc_own_classes``)."""
    trained: Literal["cohort", "all"] = "cohort"
    """Whose models are scored right after local training. With ``all``, the clients beside the
    cohort train in the last interaction of a scored round as well, and keep and send nothing of it.
    Then ``a_loc_trained`` is of the same clients as ``a_loc_received``."""
    class_masks: bool = False
    """Score clients' models twice more by the method's own rule: among the classes a client has
    met (``…_seen_classes``), as GLDP does, and among all (``…_all_classes``), as others do."""
    pictures: Count = 2
    """Clients, from the first on, that draw what they learnt into their own directory in the end:
    prototypes among the embeddings of their test data, images they replay."""
    probabilities: bool = False
    """Let clients report how good the probabilities of their models are on their own test data:
    ``…_auroc`` and ``…_ece``."""
    influence: bool = False
    """Let FedAli's clients measure after training how much prototypes change their tokens
    (``prototype_share``, ``prototype_angle``): a further forward pass."""
    last_tasks: PositiveCount | None = None
    """Score clients on their last so many tasks alone; by default on all so far. In an open run the
    cost of scoring then does not grow with its past."""
    drift: bool = False
    """Let clients report how far the inputs and the predictions of a task moved from those of the
    task before (``input_drift``, ``prediction_drift``): two forward passes of at most 1000 test
    examples, and a summary of the inputs in the private state. What is beyond chance is a warning:
    docs/metrics.md."""
    select_by: Literal["f1", "accuracy"] = "f1"
    """What makes a round the best: mean macro-F1, or mean accuracy as FedAli's published code. With
    ``validation_share`` the scores are those of validation parts; ``best_…`` looks at test data
    in any case."""

    @model_validator(mode="after")
    def _views_are_named_once(self) -> Evaluate:
        for view in self.views:
            if self.views.count(view) > 1:
                raise ValueError(f"views names {view!r} twice; name it once")
        return self


class Server(Reduction):
    """``[server]``: how the coordinator waits, keeps and computes."""

    min_clients: PositiveCount | None = None
    """How many clients suffice when others fail or, with ``deadline_s``, are late or dead: at the
    start, in an interaction, in an evaluation and at the end; by default all."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which the answers of ``min_clients`` suffice. With a deadline, nobody waits for
    a client known to be dead once all others have answered. Without one, the run waits for
    everybody who has not failed."""
    durability: Literal["watermark", "strict"] = "watermark"
    """``strict`` syncs every commit to the disk before it counts."""
    max_rollback: Count = 2
    """How many interactions are computed again at most for a client that lost its private states,
    beyond what a power failure explains. States of this many interactions are always kept.
    ``--resume`` may change it."""
    exclude_after: PositiveCount | None = None
    """Set a client aside for good when this many of its uploads in a row stood out of their cohorts
    (docs/robustness.md), in rounds of five uploads or more of which fewer than a third lie; by
    default only ``fedsrv exclude`` sets a client aside."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Torch threads of the coordinator; the count changes floats."""
    upload_memory_mb: Count = 256
    """Uploads of a round beyond this many MiB are added up as they come, where the method allows
    it, and those that have to wait go to a memory-mapped spool. An upload beyond half of it goes
    there at once."""

    @model_validator(mode="after")
    def _deadline_has_a_meaning(self) -> Server:
        if self.deadline_s is not None and self.min_clients is None:
            raise ValueError(
                f"deadline_s = {self.deadline_s:g} changes nothing while all clients are needed; "
                "give min_clients as well"
            )
        return self


FEWEST_JUDGED = 5
"""Uploads of a round among which one may stand out."""

Form = Literal["float32", "float16", "bfloat16", "int8"]


class Compression(StrictTable):
    """``[compression]``: how parameters of the net travel; docs/compression.md has cost and effect.

    Left out, everything travels as it is.
    """

    up: Form | Literal["top-k"] = "float32"
    """Form of what clients' training changed; ``top-k`` sends the largest changes alone."""
    down: Form = "float32"
    """Form of the parameters that everybody gets."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Part of the parameters that ``top-k`` sends."""
    feedback: bool = True
    """With ``int8`` and ``top-k``, clients keep what they did not send, and send it later."""
    zstd: bool = False
    """Compress all payloads as well, without loss, where that makes them smaller; the coordinator
    and all clients need the extra ``zstd``."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Compression:
        if self.differs("share") and self.up != "top-k":
            raise ValueError(f"share does nothing with up = {self.up!r}: leave it out")
        if not self.feedback and self.up not in ("int8", "top-k"):
            raise ValueError(f"feedback does nothing with up = {self.up!r}: leave it out")
        return self


class Deploy(StrictTable):
    """``[deploy]``: which models of a client are served while it trains: docs/serving.md.

    Left out, models are there when the run ends, and a client may still ``fedcli join --deploy``.
    """

    guard: Literal["held_out", "none"] = "held_out"
    """What a client compares a new model with the live one on. ``held_out``: what it keeps for
    validation of the tasks that it has met (``data.validation_share``); without such a part its own
    test data, on which the accuracy of a live model is flattered then. ``none``: every new model
    goes live."""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A new model goes live with an accuracy this much lower than the live one's; with more than 0,
    models may get worse step by step."""


class Tracking(StrictTable):
    """``[tracking]``: where else the numbers go."""

    tensorboard: bool = False
    """Write metrics to OUT/tensorboard as they come; needs the extra ``tensorboard``."""
    mlflow: bool = False
    """Log metrics to ``$MLFLOW_TRACKING_URI``, or OUT/mlflow.db; needs the extra ``mlflow``. A
    resumed run goes on in the same run of MLflow. A finished one leaves its page and the server's
    model there."""
    wandb: bool = False
    """Log metrics to Weights & Biases, as its environment says; needs the extra ``wandb``. A
    resumed run has the same id there. A finished one leaves its page and the server's model."""


class Experiment(StrictTable):
    """A whole config file, resolved: every key has its value."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: Data | None = None
    """Left out, with ``scenario``, where every client's directory is there already."""
    scenario: Scenario | None = None
    net: NetTable
    method: MethodTable
    schedule: Schedule = Schedule()
    trigger: Trigger | None = None
    training: Training = Training()
    evaluate: Evaluate = Evaluate()
    server: Server = Server()
    server_optimizer: ServerOptimizer | None = None
    compression: Compression | None = None
    privacy: Privacy | None = None
    tracking: Tracking = Tracking()
    deploy: Deploy | None = None

    @model_validator(mode="after")
    def _clients_suffice(self) -> Experiment:
        needed, clients = self.server.min_clients or 0, self.schedule.clients
        if needed > clients:
            raise ConfigError(f"[server] min_clients = {needed} exceeds clients = {clients}")
        return self

    @model_validator(mode="after")
    def _noise_covers_inputs(self) -> Experiment:
        data, scenario = self.data, self.scenario
        if data is None or self.privacy is None or self.privacy.level is None:
            return self
        by_client = scenario is not None and scenario.kind == "natural" and data.mean is None
        if data.measures_inputs or by_client:
            raise ConfigError(
                "[privacy] level: without noise, the mean and deviation of inputs would follow "
                "from clients' examples, and be told: give [data] mean and std, of x / scale, such "
                "as mean = [0.5] and std = [0.25]"
            )
        if data.columns is not None and data.columns.missing == "mean":
            raise ConfigError(
                '[privacy] level: [data.columns] missing = "mean" fills empty cells with means of '
                'the examples, which have no noise: take "drop" or "interpolate"'
            )
        return self

    @model_validator(mode="after")
    def _rule_has_enough(self) -> Experiment:
        needed, named = self.server.fewest_uploads, self.server.named
        at_once = self.schedule.buffer or self.cohort_size
        if needed > at_once:
            raise ConfigError(
                f"{named} needs {needed} uploads in a round, and rounds have {at_once}: take "
                "another rule, fewer attackers or more clients"
            )
        if (fewest := self.server.min_clients) is not None and fewest < needed:
            raise ConfigError(
                f"[server] min_clients = {fewest} lets a round end with too few uploads: {named} "
                f"needs {needed}"
            )
        return self

    @model_validator(mode="after")
    def _open_runs_forget(self) -> Experiment:
        if not self.schedule.open:
            if self.trigger is not None:
                raise ConfigError("[trigger] belongs to [schedule] open = true")
            return self
        if self.accumulates:
            raise ConfigError(
                '[scenario] training_data = "accumulated" needs the data of all earlier tasks, and '
                "in an open run they may be gone: leave it out"
            )
        if self.evaluate.reference is not None:
            raise ConfigError("[evaluate] reference needs the rounds of a run that is not open")
        if self.data is not None and self.data.validation_share is not None:
            raise ConfigError(
                "[data] validation_share needs the training data of all tasks so far, and in an "
                "open run they may be gone: leave it out"
            )
        if self.training.lr_schedule is not None and self.training.lr_schedule.follows_rounds:
            raise ConfigError(
                "[training.lr_schedule] ends with the run, and an open run has no last round: give "
                "length"
            )
        return self

    @model_validator(mode="after")
    def _stopping_looks_at_validation(self) -> Experiment:
        for key in ("patience", "target"):
            if getattr(self.schedule, key) is None:
                continue
            if self.data is None or self.data.validation_share is None:
                raise ConfigError(
                    f"[schedule] {key} looks at a validation part: give [data] validation_share"
                )
            if not self.evaluate.every:
                raise ConfigError(f"[schedule] {key} looks at scored rounds: let every be 1")
            if self.schedule.is_asynchronous:
                raise ConfigError(f'[schedule] {key} has no meaning with order = "asynchronous"')
        return self

    @model_validator(mode="after")
    def _cohorts_are_known(self) -> Experiment:
        if self.evaluate.trained == "all" and self.privacy and self.privacy.hides_examples:
            raise ConfigError(
                '[evaluate] trained = "all" trains for scores alone, and [privacy] level = '
                '"example" would charge those trainings: leave it out'
            )
        if self.evaluate.trained == "all" and self.schedule.is_asynchronous:
            raise ConfigError(
                '[evaluate] trained = "all" needs rounds with a cohort: leave it out with '
                'order = "asynchronous"'
            )
        return self

    @model_validator(mode="after")
    def _sums_are_possible(self) -> Experiment:
        if self.secure_sum is None:
            return self
        unfit = {
            'order = "asynchronous"': self.schedule.is_asynchronous,
            "open = true": self.schedule.open,
            "over_select": self.schedule.over_select > 0,
        }
        for key in (key for key, given in unfit.items() if given):
            raise ConfigError(
                f"[schedule] {key} does not go with [privacy] secure_sum: its masks are agreed on "
                "by a cohort that is known before it trains"
            )
        table = self.compression
        if table is not None and (table.up, table.down) != ("float32", "float32"):
            raise ConfigError(
                "[compression] up and down do not go with [privacy] secure_sum: masked numbers "
                "look random, and nothing of them can be left out"
            )
        groups, needed = self.secure_sum.groups, max(3, self.server.fewest_uploads)
        if self.server.is_robust and groups < needed:
            raise ConfigError(
                f"{self.server.named} reads uploads one by one, and [privacy] secure_sum shows the "
                f"mean of a group at most: give [privacy.secure_sum] groups, {needed} at least"
            )
        if self.method.pools_data or self.cohort_size < MIN_GROUP:
            raise ConfigError(
                f"[privacy] secure_sum needs cohorts of at least {MIN_GROUP} clients: a sum of "
                "fewer tells one client of another"
            )
        assert self.privacy is not None, "secure_sum is a key of it"
        if self.privacy.noise_at_clients and self.secure_sum.clip is not None:
            raise ConfigError(
                "[privacy.secure_sum] clip would scale an upload down with the noise that its "
                'client added: with where = "clients", leave it out; [privacy] clip is the bound'
            )
        if self.privacy.noise_at_clients and self.min_clients < groups:
            raise ConfigError(
                f"[server] min_clients = {self.min_clients} of {groups} groups of a secure sum: "
                "epsilon counts on the noise of min_clients / groups; take fewer groups, or more "
                "min_clients"
            )
        return self

    @model_validator(mode="after")
    def _nobody_is_judged_by_what_noise_hides(self) -> Experiment:
        hides = self.privacy is not None and self.privacy.hides_clients
        if hides and self.server.exclude_after is not None:
            raise ConfigError(
                "[server] exclude_after looks at single uploads, and [privacy] level hides them: "
                "leave it out; fedsrv exclude sets a client aside by hand"
            )
        return self

    @model_validator(mode="after")
    def _nobody_is_excluded_by_liars(self) -> Experiment:
        if self.server.exclude_after is None:
            return self
        if self.secure_sum is not None:
            raise ConfigError(
                "[server] exclude_after looks at single uploads, and [privacy] secure_sum hides "
                "them: leave it out; fedsrv exclude sets a client aside by hand"
            )
        at_once = self.schedule.buffer or self.cohort_size
        if at_once < FEWEST_JUDGED:
            raise ConfigError(
                f"[server] exclude_after needs {FEWEST_JUDGED} uploads in a round to tell which "
                f"one stands out, and rounds have {at_once}: leave it out"
            )
        if (f := self.server.attackers or 0) > (most := (at_once - 1) // 3):
            raise ConfigError(
                f"[server] attackers = {f} of {at_once} uploads could aim exclude_after at an "
                f"honest client, {most} could not: leave exclude_after out, or let rounds have "
                f"{3 * f + 1} uploads"
            )
        return self

    @property
    def secure_sum(self) -> SecureSum | None:
        """Return how uploads are summed under masks; None where they travel as they are."""
        return self.privacy.secure_sum if self.privacy else None

    @property
    def announced(self) -> CountDetail:
        """How exactly clients tell how many examples of each class they have."""
        return "exact" if self.privacy is None else self.privacy.announce

    @property
    def begins(self) -> Trigger:
        """Return when an open run goes on."""
        return self.trigger or Trigger()

    @property
    def accumulates(self) -> bool:
        """Return whether clients train on the data of all tasks up to the present one."""
        return self.scenario is not None and self.scenario.training_data == "accumulated"

    @property
    def chosen_by(self) -> str:
        """Return the metric that chooses a round or a setting: of validation parts alone."""
        return f"validation_{self.evaluate.select_by}"

    @property
    def cohort_size(self) -> int:
        """Return how many clients take part in a round."""
        return self.schedule.per_round or self.schedule.clients

    @property
    def selected(self) -> str:
        """Return how many clients a figure of the cohort is of; empty where that is all of them."""
        if not self.schedule.selects or self.evaluate.trained == "all":
            return ""
        return f"{self.schedule.per_round} of {self.schedule.clients} clients"

    @property
    def min_clients(self) -> int:
        """Return how many uploads an interaction needs at least."""
        return min(self.server.min_clients or self.cohort_size, self.cohort_size)

    @property
    def zstd(self) -> bool:
        """Return whether payloads are compressed without loss."""
        return self.compression is not None and self.compression.zstd

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved experiment as plain values; parsing it again is the same run."""
        return self.model_dump(mode="json", exclude_none=True)


def difference(one: Experiment, other: Experiment) -> list[str]:
    """Return the dotted keys in which two experiments differ."""
    a, b = (leaves(e.to_dict()) for e in (one, other))
    for found in (a, b):  # what a custom function returns tells data apart, not its place
        if "data.name" in found:
            found["data.name"] = short_name(json.loads(found["data.name"]))
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def forbidden_changes(before: Experiment, now: Experiment) -> list[str]:
    """Return the dotted keys in which a resumed run differs from what it was, and must not.

    It may have another ``max_rollback``, and more rounds at the end, unless learning rates of
    earlier rounds would change with their number.
    """
    scenario, schedule = now.scenario, now.schedule
    one_task = scenario is not None and scenario.tasks == 1 and not scenario.fixes_tasks
    allowed = {"server.max_rollback"}
    rate = now.training.lr_schedule
    longer = schedule.rounds >= before.schedule.rounds and not (rate and rate.follows_rounds)
    if longer and (schedule.order == "rounds_outer" or one_task):
        allowed.add("schedule.rounds")
    return [key for key in difference(before, now) if key not in allowed]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested tables by dotted key, as JSON."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out.update(leaves(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = json.dumps(value)
    return out
