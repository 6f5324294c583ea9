"""What the functions of a method are given: the server's state, and the position in the run.

Shapes: n and m examples, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.facts.position import Interaction, Round, Stage, Task
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import derive_seed
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId
from fedmodels.training.run import RunFacts

if TYPE_CHECKING:
    from fedmodels.numerics.secrecy import Secret

Metrics = dict[str, float]
T = TypeVar("T")


def _fresh() -> Secret:
    from fedmodels.numerics.secrecy import Secret  # private runs alone need it

    return Secret.fresh()


@dataclass(frozen=True)
class ServerState:
    """Everything the server half remembers from one interaction to the next."""

    common: Bundle
    """What every client may be sent."""
    own: Bundle = field(default_factory=Bundle)
    """What only the server needs, such as features that the server optimises."""
    clients: Mapping[int, Bundle] = field(default_factory=dict)
    """What the paper keeps on the server for each client; empty for most methods."""
    optimizer: Bundle = field(default_factory=Bundle)
    """Moments of the server's optimiser, if the run has one; methods neither read nor keep it."""

    def named(self) -> list[tuple[str, Bundle]]:
        """Return its bundles by name, for the archive and the digest."""
        return [
            ("common", self.common),
            ("own", self.own),
            *([("optimizer", self.optimizer)] if self.optimizer.weights else []),
            *((f"clients/{c}", self.clients[c]) for c in sorted(self.clients)),
        ]


@dataclass(frozen=True)
class ServerData:
    """The server's own examples, normalised; for methods that declare ``needs_server_data``."""

    x: Tensor  # (n, *input_shape)
    y: Tensor  # (n,) int64
    unlabelled: Tensor  # (m, *input_shape)


class Context:
    """Where a half of a method is in the run, and its random numbers."""

    run: RunFacts
    at: Position

    @property
    def interaction(self) -> Interaction:
        """Return the interaction, counted over the whole run."""
        return self.at.interaction

    @property
    def round(self) -> Round:
        """Return the round, counted over the whole run."""
        return self.at.round

    @property
    def whose(self) -> int | str:
        """Return whose random numbers are drawn."""
        return "server"

    def seed(self, purpose: str) -> int:
        """Return the seed of (run, client or server, interaction, purpose)."""
        return derive_seed(self.run.experiment.seed, self.whose, self.interaction, purpose)

    def generator(self, purpose: str = "method") -> torch.Generator:
        """Return a fresh CPU generator for one purpose."""
        return torch.Generator().manual_seed(self.seed(purpose))


@dataclass(frozen=True)
class ServerContext(Context):
    """Where the server half is in the run."""

    run: RunFacts
    at: Position
    cohort: Sequence[int]
    """The clients of this interaction, ascending; of a payload for scores alone, all clients."""
    series: dict[str, Any] = field(default_factory=dict)
    """Nested lists for the report, such as ``aggregation_weights`` (n, n); put in by ``finish``."""
    server_data: ServerData | None = None
    """Present for every method that ``needs_server_data``."""
    labels: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The classes each client of the cohort trains on now, by its announcement."""
    tasks: Mapping[int, Task] = field(default_factory=dict)
    """Of an open run: the present task of each client of the cohort; elsewhere ``task`` is
    everybody's."""
    limits: tuple[Tensor, Tensor] | None = None
    """Black and white of each channel after normalisation, (C,) or (1,) each, as announced."""
    scores: bool = False
    """Whether a payload is for scores alone."""
    ends_task: bool = False
    """Whether the next interaction is on another task. False for the last interaction, so that no
    run ends with the training of a generator that nobody will use."""
    before: ServerState = field(default_factory=lambda: ServerState(Bundle()))
    """The state before ``aggregate``, for ``finish``; empty outside of the two."""
    tell: Callable[[str, int, int, float], None] = lambda what, step, of, loss: None
    """Reports the progress of long work on the server: what, step, number of steps, loss."""

    @property
    def task(self) -> Stage:
        """Return the task that all clients train on; of an open run, its stage."""
        return Stage(self.at.task)

    def task_of(self, client: int) -> Task:
        """Return the task that a client of the cohort trains on."""
        return self.tasks.get(client, Task(self.at.task))


class Stream(Protocol):
    """A client's data, one task at a time."""

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        """Return inputs (n, …) and labels (n,) of the current task; any other task raises."""
        ...

    def train_up_to(self, task: int) -> tuple[Tensor, Tensor]:
        """Return the data of all tasks up to ``task``; needs ``trains_on = "history"``."""
        ...

    def train_each(self, task: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the same by task, but for tasks that the run passes over."""
        ...

    def contents(self, task: int, *, up_to: bool = False) -> NDArray[np.uint64]:
        """Return a hash of the content of each input of ``train`` or of ``train_up_to``, (n,)."""
        ...

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest value of each channel after normalisation, (C,) each."""
        ...


@dataclass
class ClientContext(Context):
    """Where the client half is in the run, and the net it works on."""

    run: RunFacts
    client: ClientId
    at: Position
    net: SplitNet
    stream: Stream
    device: torch.device
    tick: Callable[[int, int, Tensor], None] = lambda epoch, batch, loss: None
    """Called after every step with epoch, batch and loss of the batch."""
    metrics: Metrics = field(default_factory=dict)
    """The method's own numbers for the run's records; any function may add some."""
    num_examples: int = 0
    """Examples that the client trains on in this interaction."""
    skipped: int = 0
    """Training examples that the last epoch left out, as a batch of one cannot be normalised."""
    view: str = ""
    """Which of the method's views is being loaded and scored; empty while it trains."""
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    """The run's loss of logits (B, K) and labels (B,)."""
    epoch: int = 0
    """The present epoch of local training."""
    asked: set[str] = field(default_factory=set)
    """What the method took from the run: ``criterion``, ``optimizer``; and, where examples are
    hidden, ``private`` steps and ``class means``."""
    hidden: Any = None
    """What takes steps and class means in the stock ones' place, as it hides single examples."""
    may_train: Callable[[Any], None] = lambda hidden: None
    """Raises what stands against a training that hides its examples, before its first step."""
    secret: Callable[[], Secret] = field(default_factory=lambda: cache(_fresh))
    """Returns the client's secret; a worker keeps it in its state directory."""
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    """What was made :meth:`once`, and the bundles that it was made of."""

    @property
    def task(self) -> Task:
        """Return the task that the client trains on."""
        return Task(self.at.task)

    @property
    def whose(self) -> int | str:
        """Return the client, whose random numbers are drawn."""
        return self.client

    def seed(self, purpose: str) -> int:
        """Return a seed as that of the run's other halves; of who hides examples, a secret one.

        What is drawn for an example, such as dropout, may depend on its place in its batch. Nobody
        may be able to draw it again, or the presence of one example would show in all others.
        """
        known = super().seed(purpose)
        if not self.run.hides_draws or self.client == EVALUATOR:
            return known
        return int(self.secret().chance(f"seed/{known}") * 2**53)

    def once(self, make: Callable[..., T], *bundles: Bundle) -> T:
        """Return ``make(ctx, *bundles)``, made once for these bundles and this view.

        It is for ``predict``, which is called for each batch: what depends on payload and state
        alone, such as prototypes laid out by class, is the same for all of them.
        """
        key = (make, self.view, *map(id, bundles))
        if key not in self.made:
            self.made[key] = make(self, *bundles), bundles  # held, so that no other has their id
        found: T = self.made[key][0]
        return found

    def secret_normal(self, content: Tensor, purpose: str) -> Tensor:
        """Return N(0, 1) numbers to blur ``content``; nobody else can draw them again."""
        return self.secret().normal(content, f"{self.interaction}/{purpose}")


@dataclass(frozen=True)
class Position:
    """An interaction of a run, with the round it belongs to and the task it trains on."""

    interaction: Interaction
    round: Round
    task: int
    began: Round = field(default=Round(0), kw_only=True)
    """Of an open run: the round in which the client's present task began."""


START = Position(Interaction(0), Round(0), 0)
"""The first interaction of every run."""
