"""One experiment as one strict table: what a TOML file may say, and what it means.

The server owns the file; a client gets the resolved experiment when it joins. Reading the file is
the commands' business, this module only checks what it says.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedmodels.config.bounds import CodeName, Count, CountDetail, Place, StrictTable, TableAt
from fedmodels.config.evaluate import Evaluate
from fedmodels.config.part import with_plugins
from fedmodels.config.schedule import Schedule, Trigger
from fedmodels.config.server import Server
from fedmodels.config.training import OF_CLASSES, OF_NUMBERS, ServerOptimizer, Training
from fedmodels.errors import ConfigError

if TYPE_CHECKING:
    from fedmodels.config.compression import Compression
    from fedmodels.config.data import Data
    from fedmodels.config.deploy import Deploy
    from fedmodels.config.privacy import Privacy
    from fedmodels.config.scenario import Scenario
else:
    Compression = Annotated[Any, TableAt("fedmodels.config.compression:Compression")]
    Data = Annotated[Any, TableAt("fedmodels.config.data:Data")]
    Deploy = Annotated[Any, TableAt("fedmodels.config.deploy:Deploy")]
    Privacy = Annotated[Any, TableAt("fedmodels.config.privacy:Privacy")]
    Scenario = Annotated[Any, TableAt("fedmodels.config.scenario:Scenario")]


class ClientsNet(BaseModel):
    """``[[net.by_client]]``: a net that some clients have in place of that of ``[net]``."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: CodeName
    """A net's name, or ``file.py:Name``."""
    clients: Annotated[tuple[Count, ...] | None, Field(strict=False, min_length=1)] = None
    """Who has it. Unless given, it takes turns with ``[net]`` and the others without ``clients``:
    client i has the one of number i, counted round, unless another names it."""
    code_sha256: str | None = None
    """SHA-256 of the file in ``name``, if it is ``file.py:Name``; filled in when it is read."""


class NetTable(BaseModel):
    """``[net]``: a registered net and its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: CodeName
    """A net's name, or ``file.py:Name``."""
    by_client: Annotated[tuple[ClientsNet, ...], Field(min_length=1)] | None = None
    """Further nets, each a table ``[[net.by_client]]``: clients have nets of their own."""
    weights: Place = None
    """A file of weights that all start from, such as ``fedcli pretrain`` writes. Weights that the
    file lacks are drawn from the seed, and so are all of FedEM's learners and of IFCA's models but
    the first. Where a part of the net is private, clients on other machines give their copy:
    ``fedcli join --weights FILE``."""
    weights_sha256: str | None = None
    """SHA-256 of the file ``weights``; the coordinator fills it in, and a client takes the file
    that has it."""
    begin_from: Place = None
    """Directory of a run whose shared weights all start from, in place of ``weights``. Its classes
    come first, in their order; heads get rows for others: docs/streams.md."""

    code_sha256: str | None = None
    """SHA-256 of the file in ``name``, if it is ``file.py:Name``; filled in when it is read."""

    def options(self) -> dict[str, Any]:
        """Return what is passed to ``make_net`` beside the name."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _check_nets(self) -> NetTable:
        """Refuse a client with two nets, and weights of one net where there are several."""
        named = Counter(client for net in self.by_client or () for client in net.clients or ())
        if twice := sorted(client for client, times in named.items() if times > 1):
            raise ConfigError(f"[[net.by_client]] names client {twice[0]} twice: it has one net")
        for net in self.by_client or ():
            for key in sorted(NetTable.model_fields.keys() & (net.model_extra or {}).keys()):
                raise ConfigError(f"[[net.by_client]] has no {key}: leave it out")
        for key in ("weights", "begin_from"):
            if self.by_client is not None and getattr(self, key) is not None:
                raise ConfigError(
                    f"[net] {key} is of one net, and [[net.by_client]] gives clients others: "
                    "leave one out"
                )
        return self

    @property
    def each(self) -> tuple[NetTable, ...]:
        """Each net of the run by itself, that of ``[net]`` first."""
        alone = self.model_copy(update={"by_client": None})
        further = (
            NetTable(name=net.name, code_sha256=net.code_sha256, **(net.model_extra or {}))
            for net in self.by_client or ()
        )
        return (alone, *further)

    def number_of(self, client: int | str) -> int:
        """Return which of :attr:`each` a client has; the evaluator has that of ``[net]``."""
        if self.by_client is None or not isinstance(client, int):
            return 0
        named, turns = self._numbers
        return named.get(client, turns[client % len(turns)])

    @cached_property
    def _numbers(self) -> tuple[dict[int, int], list[int]]:
        """Which net each client that one names has, and those that take turns."""
        nets = [(0, None), *enumerate((net.clients for net in self.by_client or ()), 1)]
        named = {client: number for number, clients in nets for client in clients or ()}
        return named, [number for number, clients in nets if clients is None]


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
    deploy: Deploy | None = None

    @model_validator(mode="after")
    def _cuts_tasks_once(self) -> Experiment:
        """Refuse two ways to cut tasks, and data that say their tasks where others deal them."""
        if self.data is None or self.scenario is None or not self.data.cuts_tasks:
            return self
        key = "[data] tasks" if self.data.tasks else "[data.columns] task"
        if self.scenario.name != "natural":
            raise ConfigError(
                f"{key} cuts the data of a natural client, or of a site: set [scenario] kind = "
                f"'natural' in place of {self.scenario.name!r}, or leave it out"
            )
        if self.scenario.tasks != 1:
            raise ConfigError(f"{key} says what a task is: leave out tasks in [scenario]")
        return self

    @model_validator(mode="after")
    def _changes_are_of_clients_there_are(self) -> Experiment:
        """Refuse a change of domains or concepts at a client that the run does not have."""
        for line in self.scenario.timelines if self.scenario else ():
            if (last := max(line.clients or (), default=0)) >= self.schedule.clients:
                raise ConfigError(
                    f"[scenario.{line.table}] clients has client {last}, and with [schedule] "
                    f"clients = {self.schedule.clients} they go from 0 to "
                    f"{self.schedule.clients - 1}"
                )
        return self

    @model_validator(mode="after")
    def _nets_are_of_clients_there_are(self) -> Experiment:
        """Refuse a net of a client that the run does not have, and one that nobody has."""
        clients = self.schedule.clients
        for net in self.net.by_client or ():
            if (last := max(net.clients or (), default=0)) >= clients:
                raise ConfigError(
                    f"[[net.by_client]] clients has client {last}, and with [schedule] clients = "
                    f"{clients} they go from 0 to {clients - 1}"
                )
        had = {*map(self.net.number_of, range(clients if self.net.by_client else 1))}
        for number, one in enumerate(self.net.each):
            if number not in had:
                raise ConfigError(
                    f"[[net.by_client]] leaves no client for net {one.name!r}, number {number} "
                    "counted from [net]: leave it out, or give it clients"
                )
        return self

    @model_validator(mode="after")
    def _loss_is_of_what_is_learned(self) -> Experiment:
        """Let numbers and several labels have their own loss, and refuse another one."""
        columns, training = self.data.columns if self.data else None, self.training
        fitting: tuple[str, ...] = OF_CLASSES
        if columns is not None and columns.targets:
            fitting = ("quantile",) if columns.quantiles else OF_NUMBERS
            fitting = fitting if columns.target else ("sigmoid",)
            if "loss" not in training.model_fields_set and training.loss not in fitting:
                training = Training.model_validate(
                    {**training.model_dump(exclude_unset=True), "loss": fitting[0]}
                )
                self.__dict__["training"] = training
        if training.loss not in fitting:
            names = {OF_CLASSES: "classes", OF_NUMBERS: "numbers", ("sigmoid",): "several labels"}
            raise ConfigError(
                f"[training] loss = {training.loss!r} is no loss of "
                f"{names.get(fitting, 'quantiles')}: give {' or '.join(map(repr, fitting))}, or "
                "leave it out"
            )
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns that are learned in place of a class; none where classes are learned."""
        return self.data.targets if self.data is not None else ()

    @property
    def fewest_summed(self) -> int:
        """Return the fewest uploads of a sum that anybody sees.

        The server opens the sum of each group of a secure sum. So it is a group's part of the
        fewest uploads that an interaction may end with. No sum of fewer uploads is opened.
        """
        return self.min_clients // (self.privacy.groups if self.privacy else 1)

    @property
    def fixes_groups(self) -> bool:
        """Whether the clients of each secure sum are the same all through the run."""
        return self.privacy is not None and self.privacy.fixes_groups(self.schedule)

    @property
    def announced(self) -> CountDetail:
        """How exactly clients tell how many examples of each class they have."""
        return "exact" if self.privacy is None else self.privacy.announce

    @property
    def begins(self) -> Trigger:
        """Return when a run that has learned all it has goes on."""
        return self.trigger or Trigger()

    @property
    def accumulates(self) -> bool:
        """Return whether clients train on the data of all tasks up to the present one."""
        return self.scenario is not None and self.scenario.training_data == "accumulated"

    @property
    def most_tasks(self) -> int | None:
        """Return how many tasks a client has at most; None where the data alone say it."""
        scenario = self.scenario
        if scenario is None or scenario.fixes_tasks or (self.data and self.data.cuts_tasks):
            return None
        return scenario.tasks if isinstance(scenario.tasks, int) else max(scenario.tasks)

    @property
    def guards_models(self) -> bool:
        """Whether clients compare models before they serve them, and tell of those they refuse."""
        return self.deploy is not None and self.deploy.guard != "none"

    @property
    def scored_by(self) -> str:
        """Return the key by which models are scored on clients' own examples; empty if none is."""
        schedule, begins = self.schedule, self.begins
        others = {
            "[deploy] guard": self.guards_models,
            "[schedule] patience": schedule.patience is not None,
            "[schedule] target": schedule.target is not None,
            "score_drop": begins.score_drop is not None,
        }
        return self.evaluate.scored_by or next((key for key in others if others[key]), "")

    @property
    def chosen_by(self) -> str:
        """Return the metric that chooses a round or a setting: of validation parts alone."""
        if self.targets:
            numbers = self.data and self.data.columns and self.data.columns.target
            return "validation_r2" if numbers else "validation_auroc"
        return f"validation_{self.evaluate.select_by}"

    @property
    def cohort_size(self) -> int:
        """Return how many clients take part in a round."""
        return self.schedule.per_round or self.schedule.clients

    @property
    def at_once(self) -> int:
        """Return how many uploads a round ends with."""
        return self.schedule.buffer or self.cohort_size

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


if not TYPE_CHECKING:  # types know the core's own tables alone
    Experiment = with_plugins(Experiment)
