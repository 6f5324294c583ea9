"""Resume, lineage, report and forget × parts, in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from fedcli.predicting.prediction import personal_file
from fedcli.runtime.worker import Result
from fedmodels.config import combinations
from fedmodels.config.combinations import Part, refusals
from fedmodels.errors import ConfigError, DataError
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import state_digest
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.parts.private_rounds import OTHER_NOISE
from fedsrv.report.comparison import comparison
from fedsrv.report.frame import SeedGroup
from fedsrv.state.lineage import Lineage, lineage_of
from fedsrv.state.run_record import read_run
from fedsrv.state.state_files import StateFiles
from fedsrv.state.store import Store
from fedsrv.state.verification import differences
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.matrix.rows import Row, dealt, rows
from tests.matrix.witness import Witness, watching
from tests.runs import Killed, assert_same, dies, killed

EACH = pytest.mark.parametrize("row", rows(), ids=lambda row: row.part.name.replace(" ", "-"))
"""Of tests that ``make test-whole`` alone runs."""
HAS_CODE = [
    row for row in rows()
    if (row.part.server or row.part.client or row.part.shared)
    and (row.part.name == "final models" or not row.part.is_on(tiny_experiment()))
]  # fmt: skip
"""Parts with halves of their own; of those that are always on, one stands for all."""
CHEAP = pytest.mark.parametrize(
    "row",
    [row if row in HAS_CODE else pytest.param(row, marks=pytest.mark.whole) for row in rows()],
    ids=lambda row: row.part.name.replace(" ", "-"),
)
"""Of a test that ``make test`` runs for parts with halves of their own."""


def test_a_part_that_is_added_is_a_row_and_needs_a_small_config(place, monkeypatch):
    """As one of an installed plugin is."""

    def listed(part: Part) -> Row:
        monkeypatch.setattr(combinations, "LISTED", (*combinations.LISTED, part))
        return next(row for row in rows() if row.part is part)

    def is_on(experiment: Any) -> bool:
        return bool(experiment.schedule.clients == 4)

    with pytest.raises(LookupError, match=r"'odd' has no small config .* sample = \{\.\.\.\}"):
        listed(Part("odd", "[schedule] clients", is_on)).tables(place)
    sample = {"schedule": {"rounds": 1, "clients": 5}}
    with pytest.raises(LookupError, match=r"of the part 'odd' does not switch it on: .*5"):
        listed(Part("odd", "[schedule] clients", is_on, sample=sample)).tables(place)
    sample = {"schedule": {"rounds": 1, "clients": 4}}
    tables = listed(Part("odd", "[schedule] clients", is_on, sample=sample)).tables(place)
    assert tables["schedule"] == sample["schedule"]


def sources(found: Lineage) -> dict[int, dict[int, dict[int, int | None]]]:
    """Return rows by interaction, client and task, as a lineage has them."""
    return {
        version.interaction: {
            share.client: dict(zip(map(int, share.tasks), share.rows_of, strict=True))
            for share in version.shares
        }
        for version in found.versions
    }


def check_lineage(run: Path, seen: Witness, hides: bool) -> None:
    """Compare what a run says of its versions with what was seen; rows may be hidden."""
    told = sources(lineage_of(run))
    if hides:
        tasks = [{c: [*t] for c, t in each.items()} for each in told.values()]
        really = [{c: [*t] for c, t in seen.counted[i].items()} for i in told]
        assert tasks == really
    else:
        assert told == {i: seen.counted.get(i, {}) for i in told}


def report_of(run: Path) -> dict[str, Any]:
    """Return all that a report and trackers say, apart from times."""
    record = read_run(run)
    table = comparison([SeedGroup("run", (record,))], everything=True)
    cells = {name.text: row for name, row in zip(table.rows, table.cells, strict=True)}
    found: dict[str, Any] = {n: r for n, r in cells.items() if not re.fullmatch(r"[\d.]+ s", r[0])}
    noted = run / "noted.jsonl"
    lines = noted.read_text().splitlines() if noted.exists() else []
    return {**found, "noted": dict(map(json.loads, lines)), "without": record.without}


TIMES = frozenset({"seconds", "peak_rss_bytes"})


def timeless(value: Any) -> Any:
    """Return a record without times and memory."""
    if isinstance(value, dict):
        return {key: timeless(one) for key, one in value.items() if key not in TIMES}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def check_twin(twin: Path, whole: Path, since: int = 0) -> None:
    """Check that a run that was disturbed tells what an undisturbed one does, from a record on."""
    mine, other = (timeless(records_of(run)[since:]) for run in (twin, whole))
    assert mine == other
    assert report_of(twin) == report_of(whole)
    assert differences(twin) == []


@CHEAP
def test_a_run_that_dies_goes_on_to_the_same_bits_lineage_and_report(row, place, tmp_path):
    whole, twin = tmp_path / "whole", tmp_path / "twin"
    experiment = row.experiment(place, whole)
    data = dealt(experiment, place)
    hides = experiment.privacy is not None
    with watching(data) as seen:
        summary = run_in_process(experiment, data, whole, facts=True)
    check_lineage(whole, seen, hides)
    assert len(seen.counted) > 1
    experiment = row.experiment(place, twin)
    with watching(data) as seen:
        killed(experiment, data, twin, facts=True, before=dies(interaction=1))
        assert_same(run_in_process(experiment, data, twin, facts=True, resume=True), summary)
    check_lineage(twin, seen, hides)
    check_twin(twin, whole)


STEPS: tuple[tuple[type, str], ...] = (
    (StateFiles, "write"), (Store, "commit"), (Store, "add_scores"), (Store, "advance"),
    (Store, "grow"), (Store, "publish"),
)  # fmt: skip
"""What a coordinator does, before and after which it dies."""


class Deaths:
    """Ends a process at each moment once: it dies where no process before it has died."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: set[str] = set()
        self.at = -1
        """The interaction whose orders were last given."""
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._around(getattr(owner, name), name))

    def _around(self, function: Any, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name} {self.at}")
            done = function(*args, **kwargs)
            self.reach(f"after {name} {self.at}")
            return done

        return called

    def reach(self, moment: str) -> None:
        if moment not in self.met:
            self.met.add(moment)
            raise Killed

    def before(self, order: rpc.Order) -> None:
        """Die at the first order of each kind of each interaction."""
        self.at = order.interaction
        self.reach(f"order {order.kind} {order.interaction}")

    def after(self, result: Result) -> None:
        """Die once client 2 has done one of them, so that others have not."""
        if result.order.client_id == "2":
            self.reach(f"result {result.order.kind} {result.order.interaction}")


@EACH
@pytest.mark.whole
def test_a_run_that_dies_at_each_moment(row, place, tmp_path, monkeypatch):
    whole, twin = tmp_path / "whole", tmp_path / "twin"
    experiment = row.experiment(place, whole)
    data = dealt(experiment, place)
    summary = run_in_process(experiment, data, whole, facts=True)
    deaths, lives = Deaths(monkeypatch), 0
    hooks: dict[str, Any] = {"before": deaths.before, "after": deaths.after}
    with watching(data) as seen:
        while True:
            lives += 1
            assert lives < 100
            experiment = row.experiment(place, twin)
            known = (twin / "run.db").exists()
            if not known:  # what a launcher clears away
                shutil.rmtree(twin, ignore_errors=True)
            try:
                found = run_in_process(experiment, data, twin, facts=True, resume=known, **hooks)
                break
            except Killed:
                continue
    assert lives > 10
    assert_same(found, summary)
    check_lineage(twin, seen, experiment.privacy is not None)
    check_twin(twin, whole)


@EACH
@pytest.mark.whole
def test_who_is_forgotten_is_in_nothing_that_is_left(row, place, tmp_path):
    """Or it is refused in the table's line, and the run stays as it was."""
    never, run = tmp_path / "never", tmp_path / "run"
    experiment = row.experiment(place, run)
    data, how = dealt(experiment, place), {"facts": True, "resume": True}
    whole = run_in_process(experiment, data, run, facts=True)
    if line := next(refusals(experiment, also="forgetting"), ""):
        with pytest.raises(ConfigError) as refused:
            run_in_process(experiment, data, run, forgotten=[1], **how)
        assert str(refused.value) == line
        assert_same(run_in_process(experiment, data, run, **how), whole)
        assert personal_file(run, 1).is_file()
        return
    expected = run_in_process(row.experiment(place, never), data, never, facts=True, without=[1])
    with watching(data) as seen:
        assert_same(run_in_process(experiment, data, run, forgotten=[1], **how), expected)
    assert not any(client == 1 for client, _ in seen.trainings)
    check_lineage(run, seen, experiment.privacy is not None)
    told = json.dumps(lineage_of(run).to_json()["versions"])
    assert '"client": 1,' not in told
    assert read_run(run).without == ["client 1, forgotten"]
    with pytest.raises(DataError, match="holds no model of client 1"):
        personal_file(run, 1)
    assert personal_file(run, 2).is_file()
    assert differences(run) == []


STORED = Path(__file__).parent / "stored"
"""Runs that earlier releases began, by the day of the release."""
SMALL = {"net": {"name": "mlp", "hidden": [2]}}


def store(row: Row, place: Path, run: Path) -> None:
    """Begin a run, die after the first interaction, and keep its directory."""
    experiment = row.experiment(place, run, **SMALL)
    data = dealt(experiment, place)
    killed(experiment, data, run, facts=True, before=dies(interaction=1))
    day = STORED / date.today().isoformat()
    day.mkdir(parents=True, exist_ok=True)
    with tarfile.open(day / f"{slug(row)}.tar.xz", "w:xz", preset=9) as archive:
        archive.add(run, ".")


def slug(row: Row) -> str:
    return row.part.name.replace(" ", "-")


def archives(row: Row) -> list[Path]:
    """Return the archives of runs with a part that earlier releases began."""
    return sorted(STORED.glob(f"*/{slug(row)}.tar.xz"))


KEEPS_MORE = {"asynchronous rounds", "open runs"}
UPGRADED = [
    row for row in rows()
    if (row.part.shared or row.part.name in KEEPS_MORE) and not row.part.sample
]  # fmt: skip
"""Parts of which a run directory holds more than that of a plain run."""


def test_each_part_that_keeps_more_has_a_run_of_an_earlier_release(place, tmp_path):
    for row in UPGRADED:
        if os.environ.get("FEDTIDE_STORE") == slug(row):
            store(row, place, tmp_path / "stored")
        assert archives(row), (
            f"no release has a run with the part {row.part.name!r} to go on with: "
            f"FEDTIDE_STORE={slug(row)} python -m pytest tests/matrix -k has_a_run"
        )


def begins_alike(one: Path, other: Path) -> bool:
    """Tell whether two runs had the same state after the first interaction."""
    first = Path("server", "state-00000000.safetensors")
    named = [load_named(run / first)[0].items() for run in (one, other)]
    return state_digest(named[0]) == state_digest(named[1])


@pytest.fixture(scope="module")
def rounds_alike(place, tmp_path_factory) -> bool:
    """Tell whether this processor rounds as that of the archives did, by a run without noise."""
    row = next(row for row in UPGRADED if row.part.name == "own loss")
    root = tmp_path_factory.mktemp("alike")
    with tarfile.open(archives(row)[0]) as packed:
        packed.extractall(root / "run", filter="data")
    experiment = row.experiment(place, root / "whole", **SMALL)
    run_in_process(experiment, dealt(experiment, place), root / "whole", facts=True)
    return begins_alike(root / "run", root / "whole")


@pytest.mark.parametrize(
    ("row", "archive"),
    [pytest.param(row, archive, id=f"{slug(row)}-{archive.parent.name}")
     for row in UPGRADED for archive in archives(row)],
)  # fmt: skip
def test_a_run_of_an_earlier_release_goes_on(row, archive, rounds_alike, place, tmp_path, caplog):
    """To the bits of a whole run, where this processor rounds as the other did.

    Where clients' noise follows from their trainings by another rule than then, it cannot: the
    first state has noise that no run of this release has. Who resumes the run is told.
    """
    whole, run = tmp_path / "whole", tmp_path / "run"
    with tarfile.open(archive) as packed:
        packed.extractall(run, filter="data")
    experiment = row.experiment(place, run, **SMALL)
    data, before = dealt(experiment, place), records_of(run)
    summary = run_in_process(experiment, data, whole, facts=True)
    assert OTHER_NOISE not in caplog.messages
    with watching(data) as seen:
        found = run_in_process(experiment, data, run, facts=True, resume=True)
    assert min(seen.counted) == 1, "it began anew"
    assert records_of(run)[: len(before)] == before
    assert differences(run) == []
    told = sources(lineage_of(run))
    assert {c for each in told.values() for c in each} <= {*range(experiment.schedule.clients)}
    assert found["metrics"].keys() == summary["metrics"].keys()
    if OTHER_NOISE in caplog.messages:
        assert row.part.name in {"noise at clients", "example privacy"}
        assert not begins_alike(run, whole)
        caplog.clear()
        assert_same(run_in_process(experiment, data, run, facts=True, resume=True), found)
        assert OTHER_NOISE not in caplog.messages, "it is told once"
    elif rounds_alike:
        assert_same(found, summary)
        check_twin(run, whole, since=len(before))
