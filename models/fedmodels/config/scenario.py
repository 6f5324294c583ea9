"""What ``[scenario]`` of a config may say; nothing here opens any data.

A scenario tells how one data set is dealt out to pairs (client, task), which are numbered client by
client. An example belongs to one pair, but in ``replay_…``, in ``drawn`` and in a user's function:
there clients may have the same examples, and no task of a client holds one twice.

    kind                    who gets what                                             paper
    iid                     equal random pieces
    dirichlet               class proportions ~ Dir(alpha), over pairs or clients     FedMLP
    label_shards            equal pieces of the label-sorted training set             FedMLP
    per_class_shards        [N, S, M]: S pieces of single classes for each pair       GLDP, FedRep
    natural                 one client per subject and device                         FedAli
    replay_gradual          two classes a task, old ones leave, new ones come         pFedGRP
    replay_circulating      the same classes come back again and again                pFedGRP
    replay_heterogeneous    every class comes once                                    pFedGRP
    dirichlet_pooled        training and test data dealt out together                 FedAli, FedTP
    drawn                   a number of examples each, for any number of clients
    file.py:function        what a function of a user's file says
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from fedmodels.config.bounds import CodeName, PositiveCount, StrictTable, TableAt
from fedmodels.errors import ConfigError
from fedmodels.own.code_names import is_own

if TYPE_CHECKING:
    from fedmodels.config.timeline import Concepts, Domains, Timeline
else:
    Domains = Annotated[Any, TableAt("fedmodels.config.timeline:Domains")]
    Concepts = Annotated[Any, TableAt("fedmodels.config.timeline:Concepts")]

Tasks = Annotated[int, Field(ge=1, le=10_000)]
Concentration = Annotated[float, Field(gt=0, allow_inf_nan=False)]


_ADDED = ("domains", "concepts", "blur")


class ScenarioTable(StrictTable):
    """What every kind of scenario has in common."""

    fixes_tasks: ClassVar[bool] = False
    """The kind itself says how many tasks there are."""
    deals_again: ClassVar[bool] = False
    """An example may be in several tasks of a client."""
    has_long_tail: ClassVar[bool] = True
    """A long tail can be cut into the training set before it is dealt out."""
    deals_apart: ClassVar[bool] = False
    """Examples of each domain can be dealt out by themselves."""

    tasks: Tasks | Annotated[list[Tasks], Field(min_length=1)] = 1
    """Tasks of every client, or a list with one number for each client."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Long tail: examples of the rarest class over those of the most frequent one."""
    imbalance_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """GLDP's IF, instead of ``gamma``."""
    if_reading: Literal["ratio", "percent"] = "ratio"
    """``ratio``: gamma = 1 / IF; ``percent``: gamma = IF / 100 (GLDP)."""
    test_long_tail: bool = False
    """Cut the same tail into the test set, which otherwise stays as it is (GLDP)."""
    training_data: Literal["task", "accumulated"] = "task"
    """What clients train on at a task: its own data, or those of all tasks up to it, as a code base
    beside FedMLP and GLDP does against their text. Methods that replay old classes refuse it."""
    domains: Domains | None = None
    """How the inputs of each client and task look: docs/scenarios.md."""
    concepts: Concepts | None = None
    """What the labels of each client and task mean."""
    blur: Annotated[float, Field(gt=0, lt=1)] | None = None
    """M, the part of each task's examples that its client's other tasks give in exchange, so that
    the borders of tasks overlap; none unless given."""

    @model_validator(mode="after")
    def _check_tail(self) -> ScenarioTable:
        factor = self.imbalance_factor
        if factor is not None and self.gamma != 1:
            raise ConfigError("[scenario] gamma and imbalance_factor say the same: give one")
        if factor is None and self.if_reading != "ratio":
            raise ConfigError("[scenario] if_reading reads imbalance_factor: give both or none")
        if factor is not None and self.if_reading == "ratio" and factor < 1:
            raise ConfigError(f"[scenario] imbalance_factor = {factor:g} as a ratio must be >= 1")
        if factor is not None and self.if_reading == "percent" and factor > 100:
            raise ConfigError(f"[scenario] imbalance_factor = {factor:g} percent must be <= 100")
        if self.test_long_tail and self.tail_gamma == 1:
            raise ConfigError(
                "[scenario] test_long_tail cuts the tail of gamma or imbalance_factor: give one"
            )
        if self.tail_gamma < 1 and not self.has_long_tail:
            raise ConfigError(
                f"[scenario] {self.name} keeps the data as they are: it has no gamma or "
                "imbalance_factor"
            )
        return self

    @model_validator(mode="after")
    def _check_shown(self) -> ScenarioTable:
        may_have_tasks = self.tasks != 1 or not self.says_tasks
        if self.blur is not None and (self.deals_again or not may_have_tasks):
            why = "tasks share examples" if self.deals_again else "clients have one task each"
            raise ConfigError(f"[scenario] blur exchanges examples of tasks, and here {why}")
        for line in self.timelines:
            fits = line.when in ("sudden", "gradual") and line.order is None
            if fits and line.every is None and not self.says_tasks:
                raise ConfigError(
                    f"[scenario.{line.table}] every is needed where the kind or the data say how "
                    "many tasks there are"
                )
        if self.domains is not None and self.domains.deals_apart and not self.deals_apart:
            raise ConfigError(
                f"[scenario] {self.name} does not deal the examples of each domain by themselves: "
                "take kind iid, dirichlet, label_shards, per_class_shards, drawn or natural"
            )
        return self

    @model_validator(mode="after")
    def _check_tasks(self) -> ScenarioTable:
        if self.fixes_tasks and self.tasks != 1:  # 1 stands in every resolved config
            raise ConfigError(
                f"[scenario] {self.name} itself fixes the number of tasks: leave out 'tasks'"
            )
        return self

    def identity(self) -> dict[str, object]:
        """Return what a partition follows from: all keys but those that change no partition."""
        # older partitions lack these keys
        absent = {key for key in _ADDED if getattr(self, key) is None}
        return self.model_dump(mode="json", exclude={"training_data", *absent})

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """What changes over the tasks of clients beside the classes that they hold."""
        return tuple(one for one in (self.domains, self.concepts) if one is not None)

    @property
    def says_tasks(self) -> bool:
        """Whether ``tasks`` is the number of tasks; data may have months, where it is 1."""
        return not self.fixes_tasks and not (self.name == "natural" and self.tasks == 1)

    def _tasks_of(self, client: int, least: int) -> int:
        """Return how many tasks a client is dealt; ``least`` where the kind or the data say it.

        No timeline depends on the number there.
        """
        if not self.says_tasks:
            return least
        return self.tasks[client % len(self.tasks)] if isinstance(self.tasks, list) else self.tasks

    def shown(self, client: int, tasks: int) -> list[tuple[float, ...]]:
        """Return what each of a client's first tasks shows, as far as domains and concepts say."""
        of_all = self._tasks_of(client, tasks)
        return [
            tuple(part for line in self.timelines for part in line.shares(client, task, of_all))
            for task in range(tasks)
        ]

    def main_domains(self, client: int, tasks: int) -> list[int]:
        """Return the domain of most examples of each of a client's first tasks."""
        of_all, line = self._tasks_of(client, tasks), self.domains
        return [line.main(client, task, of_all) if line else 0 for task in range(tasks)]

    @property
    def name(self) -> str:
        """The kind, as it is written in the config."""
        return str(getattr(self, "kind", "scenario"))

    @property
    def tail_gamma(self) -> float:
        """Examples of the rarest class over those of the most frequent one, in (0, 1]."""
        if self.imbalance_factor is None:
            return self.gamma
        if self.if_reading == "ratio":
            return 1 / self.imbalance_factor
        return self.imbalance_factor / 100

    def tasks_per_client(self, num_clients: int, num_classes: int) -> list[int]:
        """Return how many tasks each client has, in client order.

        Raises:
            ConfigError: the list ``tasks`` has not one number for each client, or the kind
                needs more classes than there are.
        """
        if isinstance(self.tasks, int):
            return [self.tasks] * num_clients
        if len(self.tasks) != num_clients:
            raise ConfigError(
                f"[scenario] tasks lists {len(self.tasks)} numbers for {num_clients} clients"
            )
        return list(self.tasks)


class Iid(ScenarioTable):
    """Every pair gets an equal random piece of the training and of the test set."""

    deals_apart: ClassVar[bool] = True
    kind: Literal["iid"]


class Dirichlet(ScenarioTable):
    """Per class, the pairs' proportions are drawn from Dir(alpha) (FedMLP's DDA)."""

    deals_apart: ClassVar[bool] = True
    kind: Literal["dirichlet"]
    alpha: Concentration
    """Concentration; small values give each pair few classes."""
    over: Literal["pairs", "clients"] = "pairs"
    """``clients``: deal out to clients, then cut each client's, class by class, in tasks."""
    min_size: Annotated[int, Field(ge=0)] = 10
    """Training examples every pair (client) must have; redrawn up to 1000 times, then mended."""


class LabelShards(ScenarioTable):
    """The training set sorted by label is cut in equal shards; each pair gets some (FedMLP)."""

    deals_apart: ClassVar[bool] = True
    kind: Literal["label_shards"]
    shards: PositiveCount
    """Shards of each pair (client, task); a shard may straddle two classes."""


class PerClassShards(ScenarioTable):
    """GLDP's [N, S, M]: every class is cut in equally many shards; each pair gets S of them."""

    deals_apart: ClassVar[bool] = True
    kind: Literal["per_class_shards"]
    shards: PositiveCount
    """S, label shards of each pair (client, task)."""
    distinct_labels: bool = False
    """No pair gets two shards of one class; otherwise S is an upper bound on its classes."""
    sharding: Literal["per_class", "equal_size"] = "per_class"
    """``equal_size`` cuts the label-sorted set in shards of one size, as ``label_shards`` does."""

    @model_validator(mode="after")
    def _distinct_labels_are_of_shards_per_class(self) -> PerClassShards:
        if self.distinct_labels and self.sharding == "equal_size":
            raise ConfigError(
                "[scenario] distinct_labels needs shards of one class each; with sharding = "
                "'equal_size' a shard may straddle two: leave one of them out"
            )
        return self


class Natural(ScenarioTable):
    """One client per subject and device of a sensor data set (FedAli)."""

    kind: Literal["natural"]
    deals_apart: ClassVar[bool] = True
    has_long_tail: ClassVar[bool] = False
    split: float = 0.8
    """Training part of each client and class, in tenths; the paper's 0.8, its code's 0.7. Custom
    data keep the parts that they have."""
    zscore: Literal["per_client_channel", "official"] = "per_client_channel"
    """``official``: one mean and deviation per sensor and device model, over all its data."""

    @model_validator(mode="after")
    def _check_split(self) -> Natural:
        if self.train_folds not in range(1, 10) or abs(self.split * 10 - self.train_folds) > 1e-9:
            raise ConfigError(
                f"[scenario] split = {self.split:g} must be a number of tenths: 0.1, 0.2 … 0.9"
            )
        return self

    @property
    def train_folds(self) -> int:
        """How many of ten folds are for training."""
        return round(self.split * 10)


class ReplayTable(ScenarioTable):
    """What pFedGRP's three streams share: each client pairs up the classes by its own seed."""

    fixes_tasks: ClassVar[bool] = True
    parts: PositiveCount = 30
    """P, parts each class is cut in; a client uses a part in one task only."""
    images_per_part: PositiveCount = 200
    """Training images in a part, at most."""

    def pairs_of(self, num_classes: int) -> int:
        """Return the number of class pairs on the ring, at least two."""
        if num_classes < 4:
            raise ConfigError(f"[scenario] {self.name} needs 4 classes or more, not {num_classes}")
        return num_classes // 2

    def num_tasks(self, num_classes: int) -> int:
        """Return R, the number of tasks (the paper's rounds)."""
        raise NotImplementedError

    def tasks_per_client(self, num_clients: int, num_classes: int) -> list[int]:
        """Return R for each client."""
        return [self.num_tasks(num_classes)] * num_clients


class ReplayGradual(ReplayTable):
    """Classes change gradually: one type of ``2 * width`` classes leaves per segment (§4.2)."""

    kind: Literal["replay_gradual"]
    width: PositiveCount = 1
    """w, class pairs in a type; adjacent types share ``2 * (w - 1)`` classes."""

    def num_tasks(self, num_classes: int) -> int:
        """Return R = pairs * 2 * floor(P / (2 w)); 5 pairs for 10 classes."""
        pairs = self.pairs_of(num_classes)
        if self.width > pairs:
            raise ConfigError(f"[scenario] width = {self.width} exceeds the {pairs} class pairs")
        if self.parts < 2 * self.width:
            raise ConfigError(f"[scenario] parts = {self.parts} must be at least 2 * width")
        return pairs * 2 * (self.parts // (2 * self.width))


class ReplayCirculating(ReplayTable):
    """All types in a random order, one per task, again and again (§4.3)."""

    kind: Literal["replay_circulating"]

    def num_tasks(self, num_classes: int) -> int:
        """Return pairs * 2 * floor(P / 2), as many as the gradual stream of width 1 has."""
        if self.parts < 2:
            raise ConfigError("[scenario] parts must be at least 2")
        return self.pairs_of(num_classes) * 2 * (self.parts // 2)


class ReplayHeterogeneous(ReplayTable):
    """All types once, in a random order: 50 tasks for 100 classes (§4.4)."""

    kind: Literal["replay_heterogeneous"]
    parts: Literal[1] = 1
    test_images: PositiveCount = 100
    """Test images of a class, at most."""

    def num_tasks(self, num_classes: int) -> int:
        """Return the number of class pairs."""
        return self.pairs_of(num_classes)


class DirichletPooled(ScenarioTable):
    """Training and test data are pooled, dealt out to clients, and split again (FedAli §5.2)."""

    kind: Literal["dirichlet_pooled"]
    has_long_tail: ClassVar[bool] = False
    alpha: Concentration = 0.3
    """Concentration; small values give each client few classes."""
    same_props: bool = False
    """FedTP: do not pool; cut training and test set separately with the same proportions."""
    pachinko: bool = False
    """Coarse classes ~ Dir(alpha), fine ones within ~ Dir(fine_alpha); needs coarse labels."""
    fine_alpha: Concentration = 10.0
    """Concentration of the fine classes within a coarse one."""
    split: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Training part of each client."""
    min_size: Annotated[int, Field(ge=0)] = 10
    """Examples every client must have."""

    @model_validator(mode="after")
    def _check_switches(self) -> DirichletPooled:
        if self.same_props and self.pachinko:
            raise ConfigError("[scenario] same_props and pachinko exclude each other")
        unused = "split" if self.same_props else "min_size" if self.pachinko else ""
        if unused and self.differs(unused):
            which = "same_props" if self.same_props else "pachinko"
            raise ConfigError(f"[scenario] {unused} does nothing with {which}: leave it out")
        return self


class Drawn(ScenarioTable):
    """Every pair draws its examples; one comes again only after all of its class were dealt."""

    deals_again: ClassVar[bool] = True
    deals_apart: ClassVar[bool] = True
    kind: Literal["drawn"]
    examples: PositiveCount = 20
    """Training examples of each pair (client, task)."""
    test_examples: Annotated[int, Field(ge=0)] = 10
    """Test examples of each pair, of the same classes."""
    classes: PositiveCount | None = None
    """Classes of each pair; by default as many as there are, and no more than ``examples``."""

    @model_validator(mode="after")
    def _check_enough(self) -> Drawn:
        if self.classes is not None and self.classes > self.examples:
            raise ConfigError(
                f"[scenario] classes = {self.classes} exceeds examples = {self.examples}: every "
                "class of a client needs an example"
            )
        return self


class OwnScenario(ScenarioTable):
    """A function of a user's file deals the data out; other keys are its keyword arguments."""

    model_config = ConfigDict(extra="allow")
    deals_again: ClassVar[bool] = True
    kind: Annotated[CodeName, Field(pattern=r"\.py:")]
    """``file.py:function``."""
    code_sha256: str | None = None
    """SHA-256 of that file; filled in when it is read."""

    def options(self) -> dict[str, Any]:
        """Return what is passed to the function beside what there is to deal out."""
        return dict(self.model_extra or {})


OWN = "own"
_Listed = Annotated[
    Iid
    | Dirichlet
    | LabelShards
    | PerClassShards
    | Natural
    | ReplayGradual
    | ReplayCirculating
    | ReplayHeterogeneous
    | DirichletPooled
    | Drawn,
    Field(discriminator="kind"),
]


def _whose(table: Any) -> str:
    """Tell a scenario of a user's file from those that are listed."""
    kind = table.get("kind") if isinstance(table, dict) else getattr(table, "kind", None)
    return OWN if isinstance(kind, str) and is_own(kind) else "listed"


Scenario = Annotated[
    Annotated[_Listed, Tag("listed")] | Annotated[OwnScenario, Tag(OWN)], Discriminator(_whose)
]
"""Any scenario, told apart by its ``kind``."""
