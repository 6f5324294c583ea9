"""What a site allows of runs: one value, of the options of ``fedcli join`` or of a file.

The file is TOML, and its keys are those options::

    allow_method = ["fedavg", "gldp"]
    allow_column = ["age", "diagnosis:label"]
    require_privacy = "level=client,epsilon=2,delta=1e-5"
    scores = 20
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, ValidationError

from fedcli.gate.privacy_floor import PrivacyFloor
from fedmodels.config.bounds import Count, StrictTable
from fedmodels.errors import ConfigError, reason_of, suggestion
from fedmodels.methods import names
from fedpb.told import HELD_BACK

if TYPE_CHECKING:
    from fedmodels.config.columns import Columns
    from fedmodels.config.data import Data
    from fedmodels.config.experiment import Experiment
    from fedmodels.tensors.bundle import ClientId

Listed = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists only
TELLS = ("label", "target", "labels", "task", "client")
"""Roles by which values of a column leave, as names or counts: each has to be allowed by name."""
BARE = "bare"
"""What allows every key of an upload, whatever hides it."""
SEEN = "features"
"""What a column is allowed for without a role: to be seen by a net, or to group and order rows."""
FROM = {"file": "@file", "folder": "@folder", "sheet": "@sheet"}
"""What the names of files, folders and sheets are called, where rules speak of columns."""
MAX_BYTES = 1 << 20
"""Of a file of rules."""


class RulesFile(StrictTable):
    """The keys of a file of rules: each is an option of ``fedcli join``."""

    allow_method: Listed = ()
    allow_column: Listed = ()
    require_privacy: str | None = None
    min_cohort: Count = 0
    changing_cohorts: bool = False
    tell: Listed = ()
    scores: Count | str | None = None


@dataclass(frozen=True)
class Rules:
    """The conditions on which a site takes part in runs; without any it takes part in all."""

    methods: frozenset[str] = frozenset()
    """Names of methods, or ``file.py:Name``; none allows any."""
    columns: frozenset[tuple[str, str]] = frozenset()
    """Names of columns as the run calls them, each with a role of :data:`TELLS` or
    :data:`SEEN`; none allows any."""
    floor: PrivacyFloor | None = None
    """What noise has to hide."""
    min_cohort: int = 0
    """Certificates of clients in each secure sum at least; 0 takes any run."""
    changing_cohorts: bool = False
    """Whether the clients of secure sums may change from round to round."""
    told: frozenset[str] = frozenset()
    """What may leave although no noise covers it: classes of fields, and keys of uploads."""
    scores: int | None = None
    """Models that are scored here, over all runs; None for any number."""

    @classmethod
    def of(
        cls,
        *,
        allow_method: Sequence[str] = (),
        allow_column: Sequence[str] = (),
        require_privacy: str | None = None,
        min_cohort: int = 0,
        changing_cohorts: bool = False,
        tell: Sequence[str] = (),
        scores: str | int | None = None,
    ) -> Self:
        """Take what the owner of a site says by the options of ``fedcli join``.

        With ``require_privacy``, no model is scored unless ``scores`` allows it: no noise covers
        what scores tell of test examples.

        Raises:
            ConfigError: an option has no fitting value.
        """
        for name in allow_method:
            if ":" not in name and name not in names():
                raise ConfigError(
                    f"--allow-method {name!r} is no method; fedsrv methods lists them."
                    f"{suggestion(name, names())}"
                )
        for word in tell:
            _check_told(word)
        if tell and require_privacy is None and not allow_column and not min_cohort:
            raise ConfigError(
                "--tell does nothing without a condition that holds something back: "
                "--require-privacy, --allow-column or --min-cohort"
            )
        floor = None if require_privacy is None else PrivacyFloor.of(require_privacy)
        unsaid = None if floor is None else 0
        most = unsaid if scores is None else _scores_of(str(scores))
        columns = frozenset(role for text in allow_column for role in _roles_of(text))
        return cls(
            frozenset(allow_method), columns, floor, min_cohort, changing_cohorts, frozenset(tell),
            most,
        )  # fmt: skip

    @classmethod
    def read(cls, file: Path | None, **options: Any) -> Self:
        """Return the rules of a file, and of options that it does not have.

        Raises:
            ConfigError: the file cannot be read, says what it must not, or what an option says.
        """
        if file is None:
            return cls.of(**options)
        said = _tables_in(file)
        for key in said.model_fields_set:
            if options.get(key):
                raise ConfigError(
                    f"--{key.replace('_', '-')} is given, and --rules {file} has {key}: "
                    "say it in one place"
                )
        given = {key: getattr(said, key) for key in said.model_fields_set}
        return cls.of(**{**options, **given})

    @property
    def counts(self) -> bool:
        """Whether a ledger of the site counts what runs learn of it."""
        return self.floor is not None or self.scores is not None

    @property
    def takes_changing_sums(self) -> bool:
        """Whether secure sums over changing clients are taken: noise covers them, or it is said."""
        return self.changing_cohorts or (self.floor is not None and self.floor.covers_sums)

    # --- what a run has -------------------------------------------------------------------------

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Look at a run, before the site tells it anything; ConfigError for one to stay out of."""
        method = experiment.method.name
        if self.methods and method not in self.methods:
            raise ConfigError(
                f"the run has method {method}, and this site allows {_listed(self.methods)}: "
                "--allow-method"
            )
        self.check_data(experiment.data)
        if self.floor is not None:
            self.floor.check(experiment)
        if self.scores == 0 and (why := experiment.scored_by):
            raise ConfigError(
                f"the run scores models on this site's test examples ({why}), which no noise "
                "covers: --scores N allows so many models, over all runs"
            )

    def check_data(self, data: Data | None) -> None:
        """Look at the ``[data]`` by which files are to be read; ConfigError for what is too much.

        Whether a task is set aside leaves, as whatever its owner decides of one. Where it follows
        from inputs, no noise covers it.
        """
        self._check_columns(data.columns if data else None)
        sets_aside = data is not None and data.unusual == "set-aside"
        if self.floor is not None and sets_aside and "text" not in self.told:
            raise ConfigError(
                'the run sets tasks aside by their inputs, [data] unusual = "set-aside", and '
                "which tasks are unusual would be told: --require-privacy; --tell text would "
                "allow it"
            )

    def _check_columns(self, columns: Columns | None) -> None:
        if not self.columns:
            return
        if not columns or columns.features is None:
            raise ConfigError(
                "the run's config does not name the columns that it reads, [data.columns] features,"
                f" and this site allows {self._columns_text}: --allow-column"
            )
        allowed = {name for name, _ in self.columns}
        if more := {name for name, _ in _read(columns)} - allowed:
            raise ConfigError(
                f"the run reads {_listed(more)}, and this site allows {self._columns_text}: "
                "--allow-column"
            )
        for name, role in sorted(_read(columns) - self.columns):
            raise ConfigError(
                f"the run takes {name} as {role}, and this site allows {self._columns_text}: "
                f"--allow-column {name}{'' if role == SEEN else f':{role}'}"
            )

    def tells(self, key: str) -> bool:
        """Tell whether a key of an upload may leave although nothing hides it."""
        told = self.told
        return BARE in told or any(key == one or key.startswith(f"{one}/") for one in told)

    # --- in words -------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """Yield each condition in a line."""
        if self == ANY:
            yield "no conditions: joins any run"
        if self.methods:
            yield f"methods: {_listed(self.methods)}"
        if self.columns:
            yield f"columns: {self._columns_text}"
        if self.floor is not None:
            yield f"privacy: {self.floor.text}"
        if self.min_cohort:
            yield f"secure sums of {self.min_cohort} certificates or more, and no other upload"
        if self.changing_cohorts:
            yield "secure sums whose clients change from round to round"
        if self.told:
            yield f"told without noise: {_listed(self.told)}"
        if self.scores is not None:
            yield f"models scored, over all runs: {self.scores or 'none'}"

    @property
    def _columns_text(self) -> str:
        return _listed({n if role == SEEN else f"{n}:{role}" for n, role in self.columns})


ANY = Rules()
"""Takes part in any run."""


def _roles_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the roles that ``--allow-column`` allows a column for.

    ``diag:label`` allows it as label alone. A name with other words behind a colon is a name.
    """
    name, colon, role = text.rpartition(":")
    if colon and role in (*TELLS, SEEN):
        yield name, role
    else:
        yield text, SEEN


def _read(columns: Columns) -> set[tuple[str, str]]:
    """Return the columns of a table that are read, each with what it is read as."""
    seen = {*(columns.features or ()), *(columns.categories or {})}
    grouping = (columns.split, columns.session, columns.time, columns.group, columns.file)
    found = {(name, SEEN) for name in (*seen, *grouping) if name}
    if columns.label_from is not None:
        found.add((FROM[columns.label_from], "label"))
    elif not columns.targets:
        found.add((columns.label, "label"))
    if columns.client_from is not None:
        found.add((FROM[columns.client_from], "client"))
    named = ((columns.client, "client"), (columns.task, "task"))
    found |= {(name, role) for name, role in named if name}
    found |= {(name, "target") for name in columns.target or ()}
    return found | {(name, "labels") for name in columns.labels or ()}


def _check_told(word: str) -> None:
    """Check that a site can tell something; ConfigError for what is no class and no key."""
    known = [of for of in HELD_BACK if of != "scores"] + [BARE, "generators"]
    if word == "scores":
        raise ConfigError("--tell scores has no bound: --scores N allows so many models")
    if word not in known and "/" not in word:
        raise ConfigError(
            f"--tell {word!r} is none of {', '.join(known)}, and no key of an upload such as "
            f"weights/head.{suggestion(word, known)}"
        )


def _scores_of(text: str) -> int:
    if text == "none":
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 9):
        raise ConfigError(f"--scores {text} is neither none nor a number of models")
    return int(text)


def _tables_in(file: Path) -> RulesFile:
    """Read a file of rules; ConfigError where it says what it must not."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"--rules {file} has more than {MAX_BYTES} bytes")
        tables: Mapping[str, Any] = tomllib.loads(file.read_text("utf-8-sig"))
        return RulesFile.model_validate(tables)
    except OSError as error:
        raise ConfigError(f"--rules {file} cannot be read: {reason_of(error)}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        near = suggestion(key, RulesFile.model_fields) if "extra" in first["type"] else ""
        raise ConfigError(f"--rules {file}: {key}: {first['msg']}{near and '.'}{near}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--rules {file} is not valid TOML: {error}") from None


def _listed(words: Sequence[str] | frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(words))
