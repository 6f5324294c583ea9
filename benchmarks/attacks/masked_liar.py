"""What one liar of six does to a model under the masks of secure sums, with a bound and without.

    python -m benchmarks.attacks.masked_liar [--seeds 1] [--keep]

Six clients learn digits by FedAvg for ten rounds in one process, under masks. Nobody sees a single
upload. The last client sends its change reversed and times ten. It scales it down to ``clip`` as
its program does, or does not. ``honest_accuracy`` is the mean of the honest clients' accuracies, in
percent, of the last model that counts; ``counted`` are the rounds in which an upload counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rich.console import Console

from benchmarks.measure import parser_of, records_of, tell
from benchmarks.measured import given_as, keep
from fedcli.data.store.commands import run_partition
from fedcli.parts.secure_client import SecureSums
from fedcli.runtime.client_part import Training
from fedmodels.errors import FedtideError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.secure_upload import SecureUpload
from fedtide.inprocess import run_in_process

CONFIG = Path(__file__).with_name("digits.toml")
TITLE = "One liar of six under masks"
LIAR, TIMES = 5, -10.0
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "nobody lies": ("", {}),
    "clip = 0": ("clips", {"clip": 0}),
    "clip = 0, groups = 2": ("clips", {"clip": 0, "groups": 2}),
    "default, and the liar clips": ("clips", {}),
    "default, and the liar does not clip": ("does not", {}),
    "default, groups = 2, and the liar clips": ("clips", {"groups": 2}),
    "default, groups = 2, and the liar does not clip": ("does not", {"groups": 2}),
}
"""What is tried: how the last client lies, and the keys of ``[privacy.secure_sum]``."""


def main() -> None:
    """Print the table, and keep it as a record where that is asked for."""
    parser = parser_of("attacks.masked_liar", __doc__, "masked-liar")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    rows = [tried(name, options.rounds, options.seeds) for name in FORMS]
    tell(TITLE, rows)
    if options.keep:
        keep(options.keep, given_as("attacks.masked_liar"), {TITLE: rows})


def tried(name: str, rounds: int, seeds: int) -> dict[str, Any]:
    """Return what a form comes to, a mean over seeds."""
    lie, sums = FORMS[name]
    with TemporaryDirectory() as made:
        found = [run(lie, sums, rounds, seed, Path(made) / str(seed)) for seed in range(seeds)]
    means = {
        key: round(fmean(each[key] for each in found), 1) for key in ("honest_accuracy", "counted")
    }
    return {"what": name, **means, "ended": sum(each["ended"] for each in found)}


def run(lie: str, sums: dict[str, Any], rounds: int, seed: int, place: Path) -> dict[str, float]:
    """Return accuracy in percent, rounds that counted, and whether the run ended before its end."""
    more = [f"seed={seed}", f"schedule.rounds={rounds}", "schedule.clients=6", "evaluate.every=1"]
    given = {"trust": "coordinator", **sums}
    more += [f"privacy.secure_sum.{key}={value}" for key, value in given.items()]
    more += ["server.min_clients=3"] if "groups" in sums else []
    experiment = parse_experiment(CONFIG.read_text(), "digits", more)
    assert experiment.data is not None
    assert experiment.scenario is not None
    data, out, quiet = place / "data", place / "run", Console(quiet=True)
    run_partition(experiment.data, experiment.scenario, 6, seed, data, quiet)
    failed = False
    with lying(lie):
        try:
            run_in_process(experiment, data, out)
        except FedtideError:
            failed = True
    records = records_of(out)
    scored = [rows for record in records if (rows := _accuracies(record["clients"]))]
    counted = sum(bool(record["cohort"]) for record in records)
    ended = failed or len(records) < rounds
    return {"honest_accuracy": 100 * fmean(scored[-1]), "counted": counted, "ended": ended}


def _accuracies(rows: Any) -> list[float]:
    """Return the accuracies of the honest clients; none where the model was not scored."""
    named = [rows[str(client)].get("views", {}) for client in range(LIAR) if str(client) in rows]
    return [views["global"]["accuracy"] for views in named if "global" in views]


@contextmanager
def lying(how: str) -> Iterator[None]:
    """Let the last client reverse its change, and clip it as its program does or not."""
    honest = SecureSums.leaves

    def leaves(part: SecureSums, half: Training, upload: Bundle) -> Bundle:
        if not how or part.client.client != LIAR:
            return honest(part, half, upload)
        given = half.payload.weights
        sent = {k: given[k] + TIMES * (w - given[k]) for k, w in upload.weights.items()}
        lie = replace(upload, weights=sent)
        form = part.client.set_up.wire.part(SecureUpload)
        if how == "does not":
            form = replace(form, rules=form.rules.model_copy(update={"clip": 0.0}))
        return part._talk.masked(half.order, lie, half.payload, form)

    with patch.object(SecureSums, "leaves", leaves):
        yield


if __name__ == "__main__":
    main()
