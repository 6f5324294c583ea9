"""The page "A site is lost": each of its sentences names the tests that try it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "operations.md"
ENGINE, ABSENCE = "tests/fedsrv/engine", "tests/integration/test_absence.py"
OPEN, ASIDE = f"{ENGINE}/test_open_run.py", f"{ENGINE}/test_tasks_aside.py"
RECOVERING, STATUS = "tests/fedcli/data/test_recovering.py", "tests/fedsrv/test_run_status.py"
STAYING, TRACKING = (
    "tests/fedcli/runtime/test_staying.py",
    "fedplugins/trackers/tests/test_tracking.py",
)
RESTORED = f"{ABSENCE}::test_a_site_restored_from_a_backup_goes_on_once_it_is_recovered"
NEW = f"{RECOVERING}::test_what_is_new_comes_behind_what_the_run_knows"
ROSTER = f"{STATUS}::test_the_roster_says_who_is_away_who_is_out_and_whose_file_was_refused"
MEANS = (
    "tests/fedsrv/test_who_is_in_means.py::test_the_log_and_the_status_say_over_whom_and_since_when"
)
TRIED = {
    "`fedsrv status HOST:PORT`, or": [ROSTER, MEANS],
    "The coordinator keeps this in `run.db`": [
        f"{TRACKING}::test_prometheus_counts_a_site_that_was_away_when_the_coordinator_began_again",
        f"{ENGINE}/test_gone_clients.py::test_every_mean_says_over_whom_it_is",
    ],
    "**It comes back**": [
        f"{ABSENCE}::test_a_client_that_is_stopped_for_longer_than_its_lease_comes_back"
    ],
    "**It comes back without its `--state-dir`:**": [
        "tests/fedsrv/transport/test_cohort.py::test_an_id_is_connected_once"
    ],
    "Where the method keeps private state": [
        f"{ABSENCE}::test_a_site_without_its_states_starts_over_once_it_counts_as_gone"
    ],
    "**It is gone for good:**": [
        "tests/links/test_set_out.py::test_a_retired_client_is_told_and_told_again_after_a_restart"
    ],
    "The answer comes once that is on disk": [
        f"{OPEN}::test_what_an_operator_decides_in_the_middle_of_a_round_outlives_a_crash"
    ],
    "`--forget` concerns the clients": [
        f"{OPEN}::test_a_client_is_forgotten_where_it_was_said_of_that_one"
    ],
    "**Its data come from a backup:**": [RESTORED],
    "The coordinator recognises a task by its content": [
        RESTORED, f"{RECOVERING}::test_a_digest_tells_nobody_of_the_data",
    ],
    "Stop the client and run `fedcli recover": [
        RESTORED, f"{RECOVERING}::test_the_command_asks_the_coordinator_what_it_knows",
    ],
    "New tasks get numbers behind": [
        NEW, f"{OPEN}::test_a_restored_site_learns_its_new_month_behind_those_of_the_run",
    ],
    "If you find their files again": [NEW],
    "The directory as it was stays beside": [NEW],
    "Runs and tasks from before there were digests": [
        f"{OPEN}::test_what_a_client_had_stays_and_what_comes_is_bounded"
    ],
    "**A month of it is wrong:**": [
        f"{ASIDE}::test_a_site_sets_tasks_aside_before_and_after_the_run_knows_of_them"
    ],
    "This also works after the run has ended": [
        f"{ASIDE}::test_a_site_takes_back_the_task_whose_round_came_to_nothing"
    ],
    "Without it, the task is set aside once": [
        f"{ASIDE}::test_a_round_that_came_to_nothing_counts_and_its_task_goes"
    ],
    "**What it brings is refused:**": [
        ROSTER, f"{OPEN}::test_a_run_that_rests_says_who_is_away_and_whose_data_are_refused",
    ],
    "A site with `--stay` tries again": [
        f"{STAYING}::test_a_site_looks_again_once_its_owner_has_mended_its_files",
        f"{STAYING}::test_the_files_of_a_site_are_its_data_and_what_it_says_of_them",
    ],
    "**Its folder is missing,**": [
        f"{ASIDE}::test_one_missing_directory_of_a_client_ends_no_run"
    ],
}  # fmt: skip
"""How each sentence begins, and what tries it."""


def sentences() -> list[str]:
    """Return the sentences of the page; one ends where the next begins as one of the table."""
    part = PAGE.read_text().partition("\n## A site is lost\n")[2].partition("\n## ")[0]
    text = " ".join(part.replace("\n- ", "\n").split())
    return re.split(r"(?<=[.`:])\s+(?=\*\*[A-Z]|[A-Z`])", text)


def test_each_sentence_is_tried():
    begun = [next((key for key in TRIED if one.startswith(key)), None) for one in sentences()]
    alone = [one for one, key in zip(sentences(), begun, strict=True) if key is None]
    assert not [one for one in alone if one[0] != "`"], "a sentence that no test tries"
    assert {*begun} - {None} == {*TRIED}


def test_what_tries_them_is_there():
    for one in (name for names in TRIED.values() for name in names):
        path, _, name = one.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), one
