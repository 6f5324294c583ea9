"""What a site requires of a run's privacy, its floor: ``fedcli join --require-privacy``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from fedmodels.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from fedmodels.config.experiment import Experiment

Level = Literal["example", "client"]
Where = Literal["clients", "server"]
OPTION = "--require-privacy"


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
    colluders: int | None = None
    """How many of the others in a signed secure sum may put together what they know, or add no
    noise; with None all of them may, and the client's own noise alone counts."""

    @property
    def covers_sums(self) -> bool:
        """Whether the noise of clients covers sums over whatever sets of clients."""
        return self.level == "client" and self.where == "clients"

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
            "colluders": lambda value: _count("colluders", value, 0),
        }
        found = {key.replace("-", "_"): read[key](value) for key, value in given.items()}
        for key in ("where", "colluders"):
            if found["level"] == "example" and key in found:
                raise _wrong(f"{key} belongs to level=client: clients hide their own examples")
        return cls(**found)

    @property
    def text(self) -> str:
        """It as :meth:`of` reads it."""
        said = {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(self)}
        if self.level == "example":
            del said["where"]
        numbers = {k: f"{v:g}" if isinstance(v, float) else v for k, v in said.items()}
        unsaid = ("inf", None)
        return ",".join(f"{key}={value}" for key, value in numbers.items() if value not in unsaid)

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
        sums = privacy.secure_sum is not None
        if self.min_cohort > 1 and sums and not (self.covers_sums or experiment.fixes_groups):
            raise _wrong(
                f"min-cohort={self.min_cohort}, and the run's sums are over other clients from "
                "round to round, which together tell what one client sends: the run needs "
                "[privacy.secure_sum] fixed = true"
            )


def _cohort_of(experiment: Experiment) -> int:
    """Return the fewest clients in a sum that anybody sees, by the config.

    A coordinator that clients trust with their keys may see each upload.
    """
    from fedmodels.config.privacy import masks_of

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


def _count(key: str, value: str, least: int = 1) -> int:
    if not (value.isascii() and value.isdecimal() and int(value[:9]) >= least and len(value) < 9):
        raise _wrong(f"{key}={value} is no number of clients")
    return int(value)
