"""``[privacy]``: what is done so that what leaves a client tells little of it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fedmodels.config.bounds import (
    Count,
    CountDetail,
    Positive,
    PositiveCount,
    Refusal,
    StrictTable,
)
from fedmodels.config.data import Data
from fedmodels.config.reduction import Reduction
from fedmodels.config.scenario import Scenario
from fedmodels.config.schedule import FEW_HAVE_NEW, Schedule
from fedmodels.errors import ConfigError

Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists only
Chance = Annotated[float, Field(gt=0, lt=1)]

LEDGER = "fedtide-privacy.db"
"""The ledger of a site, beside its state directory unless another place is given."""

MIN_GROUP = 3
"""Clients below which a sum tells a client too much of the others."""
ONE_ROUND = (
    "with fixed = false the sums hide a single round's upload and nothing more, and noise at the "
    'clients ([privacy] level = "client", where = "clients") hides more'
)


class SecureSum(StrictTable):
    """``[privacy.secure_sum]``: how uploads are summed under masks."""

    trust: Literal["certificates", "coordinator"] = "certificates"
    """What tells a client who the others are: keys that they sign by the certificates of their
    links, over mutual TLS; or the word of the coordinator, which can then read every upload. Runs
    without mutual TLS need ``"coordinator"``; a run in one process is one with it."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """Part of the cohort, rounded up, whose shares open the masks; two thirds unless given. That
    many clients must stay until the sum is known, and as many together could open one upload."""
    bits: Literal[32, 64] = 32
    """Bits of an integer that stands for a number. With 32 an upload is as large as without."""
    largest: Annotated[float, Field(ge=1, le=1e6)] = 64.0
    """Limit of the numbers of an upload. A client with a number beyond it fails for the round."""
    clip: Annotated[float, Field(ge=0)] | None = None
    """Largest norm of a client's change of the weights it received; a longer one is scaled down to
    it. Left out, it is half the norm of these weights, and 1 at least; 0 is no bound. Clients do it
    themselves, and the coordinator checks the mean of each sum. With noise of clients there is
    none: they bound what they add noise to."""
    groups: PositiveCount = 1
    """Groups that a cohort is cut into. Each agrees on masks and makes a sum of its own. To
    ``[server] reduce`` the mean of a group is one upload."""
    fixed: bool | None = None
    """Whether the clients of each group stay the same for the whole run, so that its sums never
    tell one client from another; a group of which a client is missing does not count in that round.
    Left out, groups are fixed where all clients take part in every round and add no noise of their
    own. Otherwise the sums hide a single round's upload and nothing more."""

    def needed(self, clients: int) -> int:
        """Return how many of so many clients open the masks."""
        return max(2, math.ceil((self.threshold or 2 / 3) * clients - 1e-9))

    def check_clients(self, rule: Reduction, cohort: int, fewest: int, *, noisy: bool) -> None:
        """Check that there are as many clients and groups as sums need.

        Args:
            rule: how the sums of groups become one.
            cohort: clients of a round.
            fewest: clients that a round ends with at least.
            noisy: whether clients add noise.

        Raises:
            ConfigError: there are not, or a bound would be there twice.
        """
        needed = max(3, rule.fewest_uploads)
        if rule.is_robust and self.groups < needed:
            raise ConfigError(
                f"{rule.named} reads uploads one by one, and [privacy] secure_sum shows the mean "
                f"of a group at most: give [privacy.secure_sum] groups, {needed} at least"
            )
        if cohort < MIN_GROUP:
            raise ConfigError(
                f"[privacy] secure_sum needs cohorts of at least {MIN_GROUP} clients: a sum of "
                "fewer tells one client of another"
            )
        if noisy and self.clip:
            raise ConfigError(
                "[privacy.secure_sum] clip would scale an upload down with the noise that its "
                'client added: with where = "clients", leave it out; [privacy] clip is the bound'
            )
        if noisy and fewest < self.groups:
            raise ConfigError(
                f"[server] min_clients = {fewest} of {self.groups} groups of a secure sum: "
                "epsilon counts on the noise of min_clients / groups; take fewer groups, or more "
                "min_clients"
            )

    def bound(self, given: float) -> float:
        """Return the largest norm of a change of weights, by the norm of those that were given."""
        if self.clip is None:
            return max(1.0, given / 2)
        return self.clip or math.inf

    def check_fixed(self, schedule: Schedule) -> None:
        """Check that rounds do not draw their clients, where groups are to be fixed.

        Raises:
            ConfigError: they do.
        """
        if self.fixed and schedule.selects:
            raise ConfigError(
                "[privacy.secure_sum] fixed = true does not go with [schedule] per_round below "
                f"clients: each round draws other clients; {ONE_ROUND}"
            )

    def group_of_each(self, clients: int) -> list[list[int]]:
        """Return the clients of each fixed group, ascending.

        They follow from the ids alone, so that all runs of the same clients have the same groups.
        """
        return [[*range(place, clients, self.groups)] for place in range(self.groups)]

    @property
    def signs(self) -> bool:
        """Whether clients sign their keys, and check what others signed."""
        return self.trust == "certificates"


def _defaults(value: Any) -> Any:
    """Return the table that ``true`` or ``false`` stands for."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class Privacy(StrictTable):
    """``[privacy]``: what is kept from others; docs/differential-privacy.md tells of the noise."""

    level: Literal["client", "example"] | None = None
    """Whose presence the noise hides: a whole client's, or that of one training example of a
    client. Left out, there is no noise."""
    where: Literal["server", "clients"] = "server"
    """Who adds the noise of ``level = "client"``: the server, which everybody then trusts, to the
    sum of the uploads, or every client its share. Where a method reads uploads one by one, clients
    add all of it to each."""
    colluders: Count = 1
    """With the noise at clients: how many clients that take part may put together what they know.
    They take their own noise off a sum, so epsilon counts on the noise of the others."""
    clip: Positive = 1.0
    """Largest norm of what a client changed in the weights; with ``level = "example"``, of the
    gradient of an example. What is longer is scaled down to it."""
    clip_quantile: Chance | None = None
    """With the noise at the server, let ``clip`` follow this quantile of the clients' norms (Andrew
    et al., 2021); ``clip`` is where it begins."""
    prototype_clip: Positive | None = None
    """Largest norm of all class prototypes of a client together; with ``level = "example"``, of the
    embedding of an example. Needed where a method sends prototypes."""
    histogram_clip: Positive | None = None
    """Largest norm of a client's histograms. Needed where a method sends histograms."""
    noise_multiplier: Positive | None = None
    """Standard deviation of the noise on a sum, divided by the largest norm of one contribution.
    Left out, it is the smallest one that keeps all rounds within ``epsilon``."""
    epsilon: Positive | None = None
    """The run ends before it spends more than this."""
    delta: Chance | None = None
    """The chance that epsilon does not hold; it should be well below 1 / the number of clients, or
    of a client's examples."""
    allow: Names = ()
    """What may leave clients although the noise does not cover it. A run is refused until it lists
    everything of that kind, and the refusal says the names."""

    announce: CountDetail = "exact"
    """How many examples of each class a client tells: as many as it has; ``rounded`` up to a power
    of two; or ``none``, for each task their sum alone. Unless ``exact``, scores are sums over
    classes. Methods that send or read class counts are refused: docs/privacy.md."""
    secure_sum: Annotated[
        SecureSum | None,
        BeforeValidator(_defaults, json_schema_input_type=bool | SecureSum | None),
    ] = None
    """Let the coordinator see sums of uploads alone: ``true``, or a table with what differs from
    the defaults (docs/secure-aggregation.md)."""

    @model_validator(mode="after")
    def _is_whole(self) -> Privacy:
        if self.level is None:
            for key in sorted(_OF_NOISE):
                if self.differs(key):
                    raise ValueError(f'{key} does nothing without level = "client" or "example"')
            return self
        if self.delta is None:
            raise ValueError("give delta, such as 1e-5: well below 1 / the number of clients")
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("give noise_multiplier, or the epsilon that the run may spend")
        if self.clip_quantile is not None and (self.level, self.where) != ("client", "server"):
            raise ValueError('clip_quantile needs level = "client" and where = "server"')
        if self.level == "example" and self.where != "server":
            raise ValueError('where belongs to level = "client": clients hide their own examples')
        if self.where != "clients" and self.differs("colluders"):
            raise ValueError('colluders needs where = "clients": otherwise no client adds noise')
        return self

    def check_inputs(self, data: Data | None, scenario: Scenario | None) -> None:
        """Check that nothing of the inputs is told beside what the noise covers.

        Raises:
            ConfigError: a mean of examples would be.
        """
        if data is None:
            return
        by_client = scenario is not None and scenario.kind == "natural" and data.mean is None
        if data.measures_inputs or by_client:
            raise ConfigError(
                "[privacy] level: without noise, the mean and deviation of inputs would follow "
                "from clients' examples, and be told: give [data] mean and std, of x / scale, such "
                "as mean = [0.5] and std = [0.25]"
            )
        if data.measures_targets:
            raise ConfigError(
                "[privacy] level: without noise, the mean and deviation of the targets would "
                "follow from clients' examples, and be told: give [data.columns] target_mean and "
                "target_std, of which a rough figure does"
            )
        if data.columns is not None and data.columns.missing == "mean":
            raise ConfigError(
                '[privacy] level: [data.columns] missing = "mean" fills empty cells with means of '
                'the examples, which have no noise: take "drop" or "interpolate"'
            )

    @property
    def noise(self) -> float:
        """The noise multiplier, once it is known."""
        assert self.noise_multiplier is not None, "a resolved table has it"
        return self.noise_multiplier

    @property
    def chance(self) -> float:
        """The chance that epsilon does not hold: delta."""
        assert self.delta is not None, "a table with a level has it"
        return self.delta

    @property
    def groups(self) -> int:
        """How many sums a cohort's uploads are opened as."""
        return 1 if self.secure_sum is None else self.secure_sum.groups

    def fixes_groups(self, schedule: Schedule) -> bool:
        """Tell whether the clients of each secure sum are the same all through a run."""
        if self.secure_sum is None or self.secure_sum.fixed is not None:
            return self.secure_sum is not None and bool(self.secure_sum.fixed)
        takes_all = schedule.trains_all and schedule.availability is None
        return takes_all and not self.noise_at_clients

    def has_whole_group(self, schedule: Schedule, gone: Collection[int]) -> bool:
        """Tell whether a fixed group is whole without some clients; True where none is fixed."""
        if self.secure_sum is None or not self.fixes_groups(schedule):
            return True
        groups = self.secure_sum.group_of_each(schedule.clients)
        return any({*group}.isdisjoint(gone) for group in groups)

    @property
    def hides_clients(self) -> bool:
        """Whether the noise hides whole clients."""
        return self.level == "client"

    @property
    def noise_at_clients(self) -> bool:
        """Whether clients add the noise that hides whole clients."""
        return self.hides_clients and self.where == "clients"

    @property
    def noise_at_server(self) -> bool:
        """Whether the server adds it."""
        return self.hides_clients and self.where == "server"

    @property
    def hides_examples(self) -> bool:
        """Whether clients hide their examples."""
        return self.level == "example"


def masks_of(privacy: Privacy | None) -> SecureSum | None:
    """Return how uploads are summed under masks; None where they travel as they are."""
    return privacy.secure_sum if privacy else None


_OF_NOISE = frozenset(Privacy.model_fields) - {"level", "announce", "secure_sum"}
NO_COHORT = (
    "[schedule] {} does not go with [privacy] secure_sum: its masks are agreed on by a cohort that "
    "is known before it trains"
)
NO_BOUND = (
    "[server] reduce = {0.server.reduce!r} does not go with [privacy] level: how far one client "
    "moves its result has no bound; leave it out, as each upload has one"
)
BY_TIME = (
    "[privacy] needs cohorts that time does not choose: leave out over_select and order = "
    '"asynchronous"'
)
NOISE = ("noise at the server", "noise at clients")
OWN_TASKS = (
    "[privacy] epsilon alone needs a known number of tasks, and here clients bring their own: give "
    "noise_multiplier as well, and the run ends before it spends epsilon"
)
PAID_ONCE = (
    "--forget trains all others once more, which [privacy] level would have to pay for: begin a "
    "new run without the client"
)
NO_GROUP = (
    "--forget: a fixed group of [privacy.secure_sum] without one of its clients comes to nothing, "
    "and none would be left: begin a new run without the client"
)
REFUSED: tuple[Refusal, ...] = (
    Refusal(
        ("participants", "noise at clients"),
        FEW_HAVE_NEW.format('[privacy] where = "clients"'),
    ),
    Refusal(("participants", "secure sums"), FEW_HAVE_NEW.format("[privacy] secure_sum")),
    Refusal(
        ("open runs", "secure sums"),
        "[privacy.secure_sum] fixed = true does not go with [schedule] open = true: clients come, "
        "leave and get tasks at times of their own, so the difference of two sums is what one "
        f"client's upload changed by; {ONE_ROUND}",
        when=lambda e: bool((masks := masks_of(e.privacy)) and masks.fixed), where="fixed = true",
    ),
    Refusal(
        ("open runs", "hidden counts"),
        '[privacy] announce = "none" cannot be kept: an open run has to know which classes its '
        "clients bring",
        when=lambda e: e.announced == "none", where='announce = "none"',
    ),
    *(Refusal(
        ("open runs", noise), OWN_TASKS,
        when=lambda e: e.privacy is not None and e.privacy.noise_multiplier is None,
        where="epsilon without noise_multiplier",
    ) for noise in ("noise at the server", "noise at clients")),
    *(Refusal((level, "forgetting"), PAID_ONCE)
      for level in ("noise at the server", "noise at clients", "example privacy")),
    Refusal(
        ("secure sums", "forgetting"),
        "--forget sums the uploads of all others once more, which they refuse: the difference of "
        "two sums is what the client uploaded; begin a new run with another seed, without it",
        when=lambda e: not e.fixes_groups, where="fixed = false",
    ),
    Refusal(
        ("secure sums", "forgetting"), NO_GROUP,
        when=lambda e: e.fixes_groups and e.privacy is not None and e.privacy.groups == 1,
        where="one fixed group",
    ),
    Refusal(
        ("stopping", "hidden counts"),
        '[privacy] announce = "{0.announced}" leaves no F1 to end the run by: set [evaluate] '
        'select_by = "accuracy"',
        when=lambda e: e.evaluate.select_by == "f1", where='[evaluate] select_by = "f1"',
    ),
    Refusal(
        ("trained by all", "example privacy"),
        '[evaluate] trained = "all" trains for scores alone, and [privacy] level = "example" '
        "would charge those trainings: leave it out",
    ),
    Refusal(
        ("secure sums", "asynchronous rounds"), NO_COHORT.format('order = "asynchronous"')
    ),
    Refusal(("secure sums", "over-selection"), NO_COHORT.format("over_select")),
    Refusal(
        ("secure sums", "noise at the server"),
        "[privacy] secure_sum hides each upload from the server, which then bounds none: with it, "
        'where = "clients"',
    ),
    *(Refusal(("robust rules", noise), NO_BOUND) for noise in NOISE),
    *(Refusal((noise, "asynchronous rounds"), BY_TIME) for noise in NOISE),
    *(Refusal((noise, "over-selection"), BY_TIME) for noise in NOISE),
    Refusal(
        ("noise at clients", "poisson sampling"),
        '[privacy] where = "clients" needs cohorts of a known size, whose noise adds up: leave out '
        'sampling = "poisson"',
        only="mean",
    ),
    Refusal(
        ("example privacy", "balanced weights"),
        "[training] class_weights = 'balanced' follows from how many examples of each class a "
        'client has, so one example would move the gradients of all others, and [privacy] level = '
        '"example" bounds those of one alone: give the weights themselves',
    ),
)  # fmt: skip
"""Pairs of parts of which one is of this section, and that do not go together."""
