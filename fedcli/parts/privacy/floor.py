"""What a site itself wants of privacy: ``fedcli join --require-privacy``, with a ledger of its own.

The floor is checked against the run's config before the first order, and against the site's ledger
before each training. The ledger is a file of the site and not of a run: it counts what all runs
together released, by the content of examples. So the site need not trust the coordinator to count.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import LEDGER, masks_of
from fedmodels.errors import ConfigError, OrderDeclined, suggestion
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases, noise_seen
from fedmodels.privacy.exposures import Keys
from fedmodels.privacy.ledger import Charge, Level, PrivacyLedger
from fedmodels.tensors.bundle import Bundle, ClientId, state_digest
from fedmodels.training.method import Method
from fedmodels.training.private_uploads import noise_share
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc

Where = Literal["clients", "server"]
OPTION = "--require-privacy"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivacyFloor:
    """What a site requires; see :meth:`of` for how it is written."""

    level: Level
    epsilon: float
    """The most that all runs together may cost, for the most exposed example or the client."""
    delta: float
    clip: float = math.inf
    """The largest bound of a contribution that a run may have."""
    min_cohort: int = 1
    """The fewest clients in a sum that anybody sees."""
    where: Where = "clients"
    """Who has to add the noise of ``level=client``; ``server`` trusts the coordinator with it."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read ``level=example,epsilon=2,delta=1e-5,clip=1,min-cohort=5``.

        Raises:
            ConfigError: a key is unknown, missing, given twice or has no fitting value.
        """
        known = [field.name.replace("_", "-") for field in fields(cls)]
        given: dict[str, str] = {}
        for part in text.split(","):
            key, is_set, value = (piece.strip() for piece in part.partition("="))
            if not is_set or key not in known:
                near = suggestion(key, known)
                raise _wrong(f"{part.strip()!r} is none of {', '.join(known)} = VALUE.{near}")
            if key in given:
                raise _wrong(f"{key} is given twice")
            given[key] = value
        if missing := [key for key in ("level", "epsilon", "delta") if key not in given]:
            raise _wrong(f"{missing[0]} is missing, as in level=example,epsilon=2,delta=1e-5")
        read: dict[str, Callable[[str], Any]] = {
            "level": lambda value: _word("level", value, get_args(Level)),
            "where": lambda value: _word("where", value, get_args(Where)),
            "epsilon": lambda value: _number("epsilon", value, math.inf),
            "delta": lambda value: _number("delta", value, 1.0),
            "clip": lambda value: _number("clip", value, math.inf),
            "min-cohort": lambda value: _count("min-cohort", value),
        }
        found = {key.replace("-", "_"): read[key](value) for key, value in given.items()}
        if found["level"] == "example" and "where" in found:
            raise _wrong("where belongs to level=client: clients hide their own examples")
        return cls(**found)

    def check(self, experiment: Experiment) -> None:
        """Check that a run's config keeps to it.

        Raises:
            ConfigError: names what the run has, and what is required.
        """
        privacy = experiment.privacy
        has = None if privacy is None else privacy.level
        if privacy is None or has != self.level:
            raise _wrong(
                f"level={self.level}, and the run has "
                + (f'[privacy] level = "{has}"' if has else "no [privacy] level")
            )
        if privacy.clip_quantile is not None and math.isfinite(self.clip):
            raise _wrong(f"clip={self.clip:g}, and the run's bound adapts: clip_quantile")
        if privacy.clip > self.clip:
            raise _wrong(f"clip={self.clip:g}, and the run has [privacy] clip = {privacy.clip:g}")
        if privacy.noise_at_server and self.where != "server":
            raise _wrong(
                "the run adds noise at the server, which sees each upload: [privacy] where = "
                '"clients" is needed, or where=server here, which trusts the coordinator'
            )
        if (seen := _cohort_of(experiment)) < self.min_cohort:
            raise _wrong(
                f"min-cohort={self.min_cohort}, and somebody sees "
                + ("each upload alone: " if seen == 1 else f"sums of {seen} clients: ")
                + "the run needs a secure_sum of more clients, and min_clients"
            )


def _cohort_of(experiment: Experiment) -> int:
    """Return the fewest clients in a sum that anybody sees, by the config.

    A coordinator that clients trust with their keys may see each upload.
    """
    privacy, rules = experiment.privacy, masks_of(experiment.privacy)
    if rules is not None and rules.signs:
        return experiment.fewest_summed
    trusted = privacy is not None and privacy.noise_at_server
    return experiment.min_clients if trusted else 1


def _wrong(why: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {why}")


def _word(key: str, value: str, words: tuple[str, ...]) -> str:
    if value not in words:
        raise _wrong(f"{key}={value} is none of {', '.join(words)}.{suggestion(value, words)}")
    return value


def _number(key: str, value: str, below: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (0 < number < below):
        limits = "a number above 0" + ("" if math.isinf(below) else f" and below {below:g}")
        raise _wrong(f"{key}={value} is not {limits}")
    return number


def _count(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value[:9]) >= 1 and len(value) < 9):
        raise _wrong(f"{key}={value} is no number of clients")
    return int(value)


class FloorLedger:
    """The floor of a process, and its site's ledger; used by the thread that trains."""

    def __init__(self, floor: PrivacyFloor, path: Path) -> None:
        """Open nothing yet."""
        self.floor, self.path = floor, path
        self._ledger: PrivacyLedger | None = None

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Check that a run's config keeps to the floor; raise ConfigError if it does not."""
        self.floor.check(experiment)

    def check(self, charge: Charge) -> None:
        """Check that a training keeps within the floor.

        Raises:
            OrderDeclined: it would spend more; says how much.
            ArchiveError: the ledger cannot be used.
        """
        with _told():
            self._opened().check(charge, self.floor.epsilon, self.floor.delta)

    def note(self, charge: Charge) -> None:
        """Charge a training before anything of it leaves; raises as :meth:`check`."""
        with _told():
            self._opened().note(charge, self.floor.epsilon, self.floor.delta)

    def _opened(self) -> PrivacyLedger:
        if self._ledger is None:
            self._ledger = PrivacyLedger(self.path, self.floor.level)
        return self._ledger


def floor_of(text: str, ledger: Path | None, states: Path) -> FloorLedger:
    """Return what a site requires, with its ledger; beside the states unless a place is given."""
    return FloorLedger(PrivacyFloor.of(text), ledger or states.absolute().parent / LEDGER)


@contextmanager
def _told() -> Iterator[None]:
    """Keep what the site has spent in other runs in its own log: the coordinator learns a word."""
    try:
        yield
    except OrderDeclined as error:
        log.warning("%s: %s", OPTION, error)
        raise OrderDeclined(
            "one more training would pass the epsilon that this client requires over all its runs"
        ) from None


def charge_of_client(
    method: Method,
    run: RunFacts,
    order: rpc.Order,
    parts: tuple[Bundle, Bundle],
    contents: Keys,
    secret: Secret,
) -> Charge:
    """Return what a training is charged for whose noise hides the whole client.

    The client takes part for certain, as it cannot check with what chance it was drawn. The noise
    is that of the smallest sum that anybody sees; of a single upload, the client's own.

    Args:
        method: says whether uploads are summed.
        run: the run.
        order: what the client is to do.
        parts: the payload, and the client's private state.
        contents: of the examples that it trains on (n,).
        secret: tells this training from that of another run.
    """
    experiment = run.experiment
    privacy = experiment.privacy
    assert privacy is not None, "the floor was checked"
    noise = noise_seen(experiment, privacy.noise)
    if privacy.noise_at_clients and masks_of(privacy) is None:
        noise = privacy.noise * noise_share(method, run)
    known = state_digest([("payload", parts[0]), ("state", parts[1])])
    made = hashlib.blake2b(f"client/{order.interaction}/{known}".encode(), key=secret.key)
    made.update(contents.tobytes())
    what = f"client {order.client_id}, round {order.round + 1}, task {order.task}"
    return Charge(made.hexdigest()[:32], (GaussianReleases(noise),), what=what)
