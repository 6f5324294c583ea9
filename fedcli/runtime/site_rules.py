"""What a site allows of runs: ``fedcli join --allow-method`` and ``--allow-column``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from fedmodels.errors import ConfigError, suggestion
from fedmodels.methods import names

if TYPE_CHECKING:  # a site that stays looks at its rules, and imports no torch
    from fedmodels.config.columns import Columns
    from fedmodels.config.experiment import Experiment
    from fedmodels.tensors.bundle import ClientId


@dataclass(frozen=True)
class SiteRules:
    """The methods that runs may have here, and the columns that they may read."""

    methods: frozenset[str]
    """Names of methods, or ``file.py:Name``; none allows any."""
    columns: frozenset[str]
    """By the run's names of columns; none allows any."""

    @classmethod
    def of(cls, methods: Sequence[str], columns: Sequence[str]) -> Self:
        """Take what the owner of a site allows; ConfigError for a name that no method has."""
        for name in methods:
            if ":" not in name and name not in names():
                raise ConfigError(
                    f"--allow-method {name!r} is no method; fedsrv methods lists them."
                    f"{suggestion(name, names())}"
                )
        return cls(frozenset(methods), frozenset(columns))

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Look at a run, before the site tells it anything; ConfigError for one to stay out of."""
        method = experiment.method.name
        if self.methods and method not in self.methods:
            raise ConfigError(
                f"the run has method {method}, and this site allows {_listed(self.methods)}: "
                "--allow-method"
            )
        self.check_columns(experiment.data.columns if experiment.data else None)

    def check_columns(self, columns: Columns | None) -> None:
        """Look at the table by which files are to be read; ConfigError for one that is too much."""
        if not self.columns:
            return
        if not columns or columns.features is None:
            raise ConfigError(
                "the run's config does not name the columns that it reads, [data.columns] features,"
                f" and this site allows {_listed(self.columns)}: --allow-column"
            )
        if more := _read(columns) - self.columns:
            raise ConfigError(
                f"the run reads {_listed(more)}, and this site allows {_listed(self.columns)}: "
                "--allow-column"
            )


def _read(columns: Columns) -> set[str]:
    """Return the columns of a table that are read."""
    return {*(columns.features or ()), *(columns.categories or {}), *columns.named}


def _listed(words: Sequence[str] | frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(words))
