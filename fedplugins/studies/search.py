"""A search for the best settings of each row, by optuna, on validation parts alone.

A trial is a run with one seed. Trials go in groups of as many as run at a time. The settings of a
group follow from the seed and from what the groups before it scored, and all scores are in the
directories of the runs. So the same command after a crash comes to the same trials. The journal,
which optuna's dashboard reads, is written anew by each command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError, ConfigError, RunFailed
from fedmodels.facts.config_file import parse_experiment
from fedmodels.host.files import write_atomically
from fedmodels.numerics.randomness import derive_seed
from fedplugins.studies.execution import Grave, RunCommand, Say, deal_out
from fedplugins.studies.plan import PlannedRun, Range, Search, Sweep, plan
from fedsrv.state.run_directory import make_directory

JOURNAL = "optuna.log"
"""The file in the directory of a search that optuna's dashboard reads, a study for each row."""
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """One trial that has ended."""

    number: int
    settings: Settings
    config: str
    scores: Sequence[float]
    """Of its scored rounds, up to the one after which it was pruned."""
    state: str
    """``finished``, ``pruned`` or ``failed``."""


def run_search(
    sweep: Sweep,
    out: Path,
    rows: Sequence[str],
    seed: int,
    sets: Sequence[str],
    say: Say,
    at_once: int = 1,
) -> None:
    """Search the best settings of each row, and write ``search.json`` and ``best-ROW.toml``.

    ``at_once`` trials run at a time.

    Raises:
        ConfigError: there are no ranges, a trial has no validation part, or one that was run before
            had another config.
        RunFailed: no trial of a row came to its end.
    """
    search = sweep.search
    if search is None:
        raise ConfigError("--search needs the table [search.ranges] in the sweep's file")
    if sweep.settings or sweep.lengths:
        raise ConfigError("a search sets what it tries: leave settings and lengths out")
    make_directory(out, out)
    for name in (JOURNAL, f"{JOURNAL}.lock"):  # optuna would wait for ever for one that was killed
        (out / name).unlink(missing_ok=True)
    found = {row: _searched(sweep, search, out, row, seed, sets, say, at_once) for row in rows}
    write_atomically(out / "search.json", json.dumps(found, indent=1) + "\n")


def _searched(
    sweep: Sweep,
    search: Search,
    out: Path,
    row: str,
    seed: int,
    sets: Sequence[str],
    say: Say,
    at_once: int,
) -> list[dict[str, Any]]:
    """Run the trials of one row; write the best one's config."""
    study = _study(out, row, search)
    kinds = {key: _distribution(_optuna(), each) for key, each in search.ranges.items()}

    def asked(number: int) -> tuple[Any, PlannedRun]:
        """Return what optuna would try next, and its run."""
        drawn = derive_seed(seed, f"search/{row}", number, "method") % 2**32
        study.sampler = _optuna().samplers.TPESampler(seed=drawn, constant_liar=at_once > 1)
        trial = study.ask(kinds)
        more = [*sets, *(f"{key}={_text(value)}" for key, value in trial.params.items())]
        return trial, _planned(sweep, out, row, seed, more, number)

    trials, here = list[Trial](), str(Path.cwd())
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, search.trials, at_once):
            group = [asked(n) for n in range(first, min(first + at_once, search.trials))]
            deal_out([run for _, run in group if not run.is_finished], sweep.launch, here, say)
            tried = [pool.submit(_tried, *each, sweep.launch, here, say) for each in group]
            ended = [future.result() for future in tried]
            for (each, _), trial in zip(group, ended, strict=True):  # none before all have ended
                _tell(study, each, trial)
            trials += ended
    return _told(trials, out, group[-1][1], row, say)


def _study(out: Path, row: str, search: Search) -> Any:
    """Return an empty study, which is written to the journal as it goes."""
    optuna = _optuna()
    backend = optuna.storages.journal.JournalFileBackend(str(out / JOURNAL))
    return optuna.create_study(
        study_name=row,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=search.prune_after),
        storage=optuna.storages.JournalStorage(backend),
    )


def _planned(
    sweep: Sweep, out: Path, row: str, seed: int, sets: Sequence[str], number: int
) -> PlannedRun:
    """Return the run of a trial; ConfigError if its clients keep no part for validation."""
    (run,) = plan(sweep.model_copy(update={"search": None}), out, [row], [seed], sets)
    experiment = parse_experiment(run.config, row)
    if experiment.data is None or experiment.data.validation_share is None:
        raise ConfigError(
            "a search chooses on validation parts, and never on test data: give [data] "
            "validation_share"
        )
    return replace(run, directory=run.directory.with_name(f"{run.directory.name}-trial{number}"))


def _tried(asked: Any, run: PlannedRun, further: Sequence[str], here: str, say: Say) -> Trial:
    """Run a trial to its end, or until it is pruned; go on where it was.

    Raises:
        ConfigError: it was run before with another config.
    """
    run.check_config()
    by, told = parse_experiment(run.config).chosen_by, list[float]()

    def is_pruned() -> bool:
        """Tell optuna of further scores, one after the other; whether it has seen enough."""
        for score in scores_of(run.directory, by)[len(told) :]:
            told.append(score)
            asked.report(score, len(told))
            if asked.should_prune():
                return True
        return False

    pruned, failure = is_pruned(), ""
    if not pruned and not run.is_finished:
        failure = RunCommand(further, here)(run, say, is_pruned)
        pruned = (bool(told) and asked.should_prune()) or is_pruned()
    state = "pruned" if pruned else "finished" if run.is_finished and told else "failed"
    if state == "failed":
        say(Grave(failure or f"{run.directory.name} has no score on validation parts"))
    return Trial(asked.number, dict(asked.params), run.config, told, state)


def _tell(study: Any, asked: Any, trial: Trial) -> None:
    """Tell optuna how a trial ended."""
    states = _optuna().trial.TrialState
    if trial.state == "finished":
        study.tell(asked, max(trial.scores))
    else:
        study.tell(asked, state=states.PRUNED if trial.state == "pruned" else states.FAIL)


def scores_of(run: Path, by: str) -> list[float]:
    """Return the validation scores of a run's rounds so far, in order."""
    try:
        lines = (run / "rounds.jsonl").read_text("utf-8").split("\n")[:-1]  # whole ones
        found = [json.loads(line)["metrics"].get(by) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArchiveError(f"{run / 'rounds.jsonl'} is damaged: {error}") from None
    return [float(score) for score in found if score is not None]


def _told(
    trials: Sequence[Trial], out: Path, run: PlannedRun, row: str, say: Say
) -> list[dict[str, Any]]:
    """Say what a search found, and write the best config; RunFailed if no trial came to its end."""
    ended = [trial for trial in trials if trial.state == "finished"]
    if not ended:
        raise RunFailed(f"no trial of {row} finished; {out} has their logs")
    best = max(ended, key=lambda trial: max(trial.scores))  # of equal ones the first
    name = run.directory.name.partition("-seed")[0]
    write_atomically(out / f"best-{name}.toml", best.config)
    by = parse_experiment(best.config).chosen_by
    settings = ", ".join(f"{key} = {value}" for key, value in best.settings.items())
    pruned = sum(trial.state == "pruned" for trial in trials)
    say(
        f"{row}: trial {best.number} is the best of {len(trials)} on validation parts "
        f"({by} = {max(best.scores):.4f}, {pruned} pruned): {settings}; "
        f"its config: {out / f'best-{name}.toml'}"
    )
    return [
        {
            "number": trial.number,
            "settings": dict(trial.settings),
            "state": trial.state,
            "scores": list(trial.scores),
        }
        for trial in trials
    ]


def _distribution(optuna: Any, given: Range) -> Any:
    kinds = optuna.distributions
    if given.choices is not None:
        return kinds.CategoricalDistribution(given.choices)
    whole = isinstance(given.low, int) and isinstance(given.high, int)
    make: Callable[..., Any] = kinds.IntDistribution if whole else kinds.FloatDistribution
    return make(given.low, given.high, log=given.log)


def _text(value: Any) -> str:
    """Return a value as ``--set`` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _optuna() -> Any:
    """Import optuna; ConfigError if the extra is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("--search optuna needs optuna: pip install 'fedtide[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
