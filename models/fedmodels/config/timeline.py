"""``[scenario.domains]`` and ``[scenario.concepts]``: what a task shows, and to whom when.

A domain is a way in which inputs look, a concept what labels mean. Both tables list some, by words
that :data:`LOOKS` and :data:`MEANINGS` explain, and say which of them a client has at a task. They
stand beside any ``kind`` of scenario: examples are dealt out first, and then shown so. The truth of
what changed when follows from the config alone, at coordinators as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import Count, PositiveCount, StrictTable
from fedmodels.errors import ConfigError, suggestion

PLAIN = "plain"
"""Inputs, or labels, as they are."""
FROM = "from"
"""``from mnist``: examples of this domain of a data set that has several of its own."""
AND = " + "
"""Between the steps of a domain or a concept, which are taken one after the other."""


@dataclass(frozen=True)
class Word:
    """A step that changes inputs or labels, and the numbers behind it."""

    lowest: tuple[float, ...] = ()
    """Of each number."""
    highest: tuple[float, ...] = ()
    whole: bool = False
    """Whether they are whole numbers."""

    def fault(self, numbers: Sequence[float]) -> str:
        """Return what is wrong with the numbers of a step, in words; nothing where they fit."""
        if len(numbers) != len(self.lowest):
            return f"takes {len(self.lowest)} numbers, not {len(numbers)}"
        for number, low, high in zip(numbers, self.lowest, self.highest, strict=True):
            if not low <= number <= high or (self.whole and number % 1):
                kind = "a whole number" if self.whole else "a number"
                return f"takes {kind} from {low:g} to {high:g}, not {number:g}"
        return ""


_SEVERITY = Word((1,), (5,), whole=True)
_TURN = Word((-360,), (360,))
_LABELS = Word((0, 0), (99_999, 99_999), whole=True)
LOOKS: Mapping[str, Word] = {
    **dict.fromkeys(("rotate", "turn"), _TURN),
    "colour": _TURN,
    "invert": Word(),
    **dict.fromkeys(("noise", "blur", "contrast", "brightness", "jpeg"), _SEVERITY),
}
"""Steps of domains: docs/scenarios.md says what each does."""
MEANINGS: Mapping[str, Word] = {
    **dict.fromkeys(("swap", "merge"), _LABELS),
    "noise": Word((0,), (1,)),
    "sine": Word(),
    "circle": Word((-10, -10, 0), (10, 10, 10)),
    "sea": Word((0,), (20,)),
    "reverse": Word(),
}
"""Steps of concepts."""
Shown = Annotated[str, Field(max_length=200)]
Step = tuple[str, tuple[float, ...]]


def steps_of(text: str) -> list[Step]:
    """Return the steps of a domain or concept: ``rotate 90 + blur 2``; ``plain`` has none.

    Raises:
        ValueError: a word that should be a number is none.
    """
    parts = [part.split() for part in text.split(AND) if part.strip() != PLAIN]
    return [(word, tuple(map(float, rest))) for word, *rest in parts if word != FROM]


def origin_of(text: str) -> str:
    """Return which domain of the data a domain takes its examples from; empty for any."""
    parts = (part.strip() for part in text.split(AND))
    return next((part[len(FROM) + 1 :] for part in parts if part.startswith(f"{FROM} ")), "")


class Timeline(StrictTable):
    """What is shown, and which of it a client has at a task."""

    words: ClassVar[Mapping[str, Word]]
    table: ClassVar[str]

    show: Annotated[tuple[Shown, ...], Field(strict=False, min_length=1, max_length=1000)]
    """What is shown, numbered from 0: steps with their numbers, such as ``"rotate 90"``, joined by
    `` + ``; ``"plain"`` changes nothing. docs/scenarios.md lists them."""
    when: Literal["never", "sudden", "gradual", "recurring"] = "sudden"
    """``sudden``: one after the other, each for ``every`` tasks, and the last one from then on;
    ``recurring``: the first one comes again after the last; ``gradual``: over ``every`` tasks the
    examples of a task pass from one to the next, a growing part of them; ``never``: a client keeps
    its first one."""
    first: Literal["same", "by_client"] = "same"
    """``by_client``: client i begins with the one of number i, counted round. With ``when =
    "never"`` clients differ, and nothing changes over time: feature shift."""
    every: PositiveCount | None = None
    """Tasks from one to the next. Unless given 1 with ``recurring``, else so many that all fit
    evenly."""
    waves: PositiveCount = 1
    """Staggered: of so many waves, client i is in number i modulo ``waves``, and everything comes
    to a wave one task later than to the one before."""
    clients: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    """Clients for which anything changes; by default all."""
    order: Annotated[
        tuple[Annotated[tuple[Count, ...], Field(strict=False, min_length=1)], ...] | None,
        Field(strict=False, min_length=1),
    ] = None
    """In place of these keys: for each client a list of what it has at each task, by number. Client
    i has list i, counted round; a list that ends early goes on as it ended."""

    @model_validator(mode="after")
    def _check_words(self) -> Timeline:
        for text in self.show:
            where = f"[scenario.{self.table}] show = {text!r}:"
            for part in text.split(AND):
                word, *rest = part.split() or [""]
                if part.strip() == PLAIN or (word == FROM and rest and self.table == "domains"):
                    continue
                known = self.words.get(word)
                if known is None:
                    names = [PLAIN, *self.words]
                    hint = suggestion(word, names)
                    raise ConfigError(
                        f"{where} {word!r} is not known.{hint} Known are: {', '.join(names)}"
                    )
                try:
                    fault = known.fault([float(number) for number in rest])
                except ValueError:
                    fault = f"takes numbers, not {' '.join(rest)!r}"
                if fault:
                    raise ConfigError(f"{where} {word!r} {fault}")
            if sum(part.split()[:1] == [FROM] for part in text.split(AND)) > 1:
                raise ConfigError(f"{where} examples come {FROM!r} one domain, not several")
        written = [" ".join(text.split()) for text in self.show]
        again = next((text for v, text in enumerate(written) if text in written[:v]), None)
        if again is not None:
            raise ConfigError(
                f"[scenario.{self.table}] show has {again!r} twice: list it once, and say by order "
                'or when = "recurring" that it comes again'
            )
        return self

    @model_validator(mode="after")
    def _check_times(self) -> Timeline:
        where = f"[scenario.{self.table}]"
        others = [k for k in ("when", "first", "every", "waves", "clients") if self.differs(k)]
        if self.order is not None:
            if others:
                raise ConfigError(f"{where} order says all of it: leave {others[0]} out")
            if (most := max(map(max, self.order))) >= len(self.show):
                raise ConfigError(
                    f"{where} order has number {most}, and show lists 0 to {len(self.show) - 1}"
                )
        if self.when == "never" and self.first == "same" and self.order is None:
            raise ConfigError(f'{where} when = "never" shows the first one to everybody: set first '
                              '= "by_client"')  # fmt: skip
        for key in ("every", "waves", "clients"):
            if self.when == "never" and self.differs(key):
                raise ConfigError(f'{where} {key} does nothing with when = "never": leave it out')
        if self.when == "gradual" and self.every == 1:
            raise ConfigError(f'{where} when = "gradual" with every = 1 is "sudden": raise every')
        return self

    @property
    def mixes(self) -> bool:
        """Whether a task may have examples of two of them."""
        return self.when == "gradual" and self.order is None

    def pace(self, tasks: int) -> int:
        """Return how many tasks lie between one and the next, for a client with so many tasks."""
        count = len(self.show)
        if self.every is not None:
            return self.every
        if self.when == "recurring":
            return 1
        if self.when == "gradual":
            return max(2, (tasks - 1) // max(count - 1, 1))
        return max(1, tasks // count)

    def shares(self, client: int, task: int, tasks: int) -> tuple[float, ...]:
        """Return which part of the examples of a client's task shows each of them, (V,).

        Args:
            client: its number.
            task: from 0.
            tasks: how many the client has.
        """
        count, found = len(self.show), [0.0] * len(self.show)
        if self.order is not None:
            row = self.order[client % len(self.order)]
            found[row[min(task, len(row) - 1)]] = 1.0
            return tuple(found)
        place, over = 0, 0.0
        if self.when != "never" and (self.clients is None or client in self.clients):
            step, rest = divmod(max(task - client % self.waves, 0), self.pace(tasks))
            place = step % count if self.when == "recurring" else min(step, count - 1)
            if self.mixes and place < count - 1:
                over = rest / self.pace(tasks)
        begin = client if self.first == "by_client" else 0
        found[(begin + place) % count] += 1 - over
        if over:
            found[(begin + place + 1) % count] += over
        return tuple(found)

    def main(self, client: int, task: int, tasks: int) -> int:
        """Return the number of what most examples of a task show; of equal ones the later one."""
        shares = self.shares(client, task, tasks)
        before = max(range(len(shares)), key=lambda v: shares[v])
        equal = [v for v, share in enumerate(shares) if share == shares[before]]
        return equal[-1]


class Domains(Timeline):
    """How inputs look."""

    words: ClassVar[Mapping[str, Word]] = LOOKS
    table: ClassVar[str] = "domains"
    whole: bool = False
    """Each domain is dealt out by itself, from all examples: an example may be at clients of
    several domains (IFCA's rotated MNIST). For clients that keep their domain alone."""

    @model_validator(mode="after")
    def _check_whole(self) -> Domains:
        stay = self.when == "never" or (
            self.order is not None and all(len(set(row)) == 1 for row in self.order)
        )
        if self.whole and not stay:
            raise ConfigError(
                "[scenario.domains] whole = true is for clients that keep their domain: set when = "
                '"never", or leave it out'
            )
        if self.whole and any(map(origin_of, self.show)):
            raise ConfigError(
                f"[scenario.domains] whole and {FROM!r} both say which examples a domain has: "
                "leave one of them out"
            )
        if self.mixes and any(map(origin_of, self.show)):
            raise ConfigError(
                '[scenario.domains] when = "gradual" mixes looks of the same examples, and '
                f'{FROM!r} names others: take "sudden", with [scenario] blur for mixed borders'
            )
        if len({bool(origin_of(text)) for text in self.show}) > 1:
            raise ConfigError(
                f"[scenario.domains] show has {FROM!r} for some domains alone: give it for all"
            )
        return self

    @property
    def deals_apart(self) -> bool:
        """Whether examples of each domain are dealt out by themselves."""
        return self.whole or any(map(origin_of, self.show))


class Concepts(Timeline):
    """What labels mean."""

    words: ClassVar[Mapping[str, Word]] = MEANINGS
    table: ClassVar[str] = "concepts"
