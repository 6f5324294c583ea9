"""The file that tells what a run has spent of its clients' privacy."""

import pytest
import torch

from fedmodels.errors import ArchiveError
from fedmodels.privacy.releases import NAME, Over, ReleaseLog

SUM = torch.tensor([1.0, 2.0], dtype=torch.float64)


def test_the_same_release_is_spent_once_and_another_one_twice(tmp_path):
    made = ReleaseLog(tmp_path / NAME, committed=-1)
    for content in (SUM, SUM, SUM + 1):
        made.note(0, content)
    again = ReleaseLog(tmp_path / NAME, committed=0)
    again.note(0, SUM)
    assert len(made) == len(again) == 2
    assert again.secret == made.secret
    assert again.after(0) == 2, "interaction 0 has its release"
    assert again.after(2) == 4, "interactions 1 and 2 have none yet"
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0, "it is nobody else's"


def test_a_sum_over_others_of_the_same_training_is_found_after_a_restart(tmp_path):
    made, first = ReleaseLog(tmp_path / NAME), Over("w", (0, 1, 2))
    made.note(0, SUM, first)
    for log in (made, ReleaseLog(tmp_path / NAME, committed=0)):
        assert log.others(0, Over("w", (0, 1))) == (0, 1, 2)
        assert log.others(0, first) == ()
        assert log.others(0, Over("v", (0, 1))) == log.others(1, Over("w", (0, 1))) == ()


def test_a_torn_line_left_before_anything_else_did(tmp_path):
    made = ReleaseLog(tmp_path / NAME, committed=-1)
    made.note(0, SUM)
    whole = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(whole + '{"interaction": 1, "dig')
    again = ReleaseLog(tmp_path / NAME, committed=0)
    again.note(1, SUM)
    assert len(ReleaseLog(tmp_path / NAME, committed=1)) == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "is gone"),
        ("", "cannot be read"),
        ('{"secret": "00"}\n', "holds no secret"),
        ('{"secret": "%s"}\n' % ("00" * 32), "lacks the release of interaction 1"),
        ('{"secret": "%s"}\n[1]\n' % ("00" * 32), "cannot be read"),
    ],
)
def test_a_run_that_lost_it_does_not_go_on(tmp_path, text, line):
    if text is not None:
        (tmp_path / NAME).write_text(text)
    with pytest.raises(ArchiveError, match=f"{line}.*put a copy of it back"):
        ReleaseLog(tmp_path / NAME, committed=0)


def test_releases_until_an_interaction_leave_out_those_of_later_ones(tmp_path):
    """As where an interaction is computed once more, whose successor was released already."""
    log = ReleaseLog(tmp_path / NAME)
    for interaction, value in ((0, 1.0), (1, 2.0), (2, 3.0)):
        log.note(interaction, torch.tensor([value]))
    assert [log.until(interaction) for interaction in range(3)] == [1, 2, 3]
    log.note(1, torch.tensor([4.0]))  # of other clients
    assert ([log.until(interaction) for interaction in range(3)], len(log)) == ([1, 3, 4], 4)
