"""The ledger of what trainings spent: whose examples meet, what is charged, and what is kept."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fedmodels.errors import ArchiveError, ArchiveNotWritten, OrderDeclined
from fedmodels.host.shortages import is_passing
from fedmodels.privacy.accounting import GaussianReleases, epsilon_of, renyi_epsilon_of
from fedmodels.privacy.exposures import (
    MAX_COMPARED,
    MAX_EXACT,
    Exposures,
    coarse,
    epsilon_of_histories,
    joined,
    largest,
)
from fedmodels.privacy.ledger import Charge, PrivacyLedger

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
DELTA = 1e-3
SIX, TWO = GaussianReleases(2.0, 6, 0.5), GaussianReleases(2.0, 2, 0.25)


def keys(*numbers):
    return np.array(sorted(numbers), dtype=np.uint64)


def charge(name, contents, releases=(SIX,), cut="as it is"):
    contents = None if contents is None else np.array(contents, dtype=np.uint64)
    return Charge(name, releases, contents, cut)


def test_examples_have_the_trainings_that_they_were_in():
    """1 was in both, 2 in the first alone, 3 in the second; 4 in none, until one is asked for."""
    found = Exposures()
    found.add(keys(1, 2), [SIX])
    found.add(keys(1, 3), [TWO])
    six, two = ((2.0, 0.5), 6), ((2.0, 0.25), 2)
    assert {*found.histories()} == {(six,), (two,), (two, six)}
    assert {*found.histories(keys(3, 4), [TWO])} == {
        (six,), (two, six), (((2.0, 0.25), 4),), (two,)
    }  # fmt: skip
    assert {*found.histories()} == {(six,), (two,), (two, six)}, "nothing changed"
    assert largest(found.histories()) == [(two, six)]


def test_histories_are_those_that_a_loop_over_examples_counts():
    rng = np.random.default_rng(0)
    found, wanted = Exposures(), {}
    for number in range(30):
        chosen = np.unique(rng.integers(0, 60, 20)).astype(np.uint64)
        one = GaussianReleases(1.0, 1, 0.1 * (1 + number % 3))
        found.add(chosen, [one])
        for key in chosen.tolist():
            wanted.setdefault(key, Counter())[one.noise, one.rate] += 1
    assert {*found.histories()} == {tuple(sorted(one.items())) for one in wanted.values()}
    assert len(found) == len(wanted)


def test_histories_of_too_many_kinds_are_taken_for_one_that_holds_all():
    many = [(((1.0, 0.5), n), ((2.0, 0.5), 1000 - n)) for n in range(1, MAX_COMPARED + 2)]
    assert largest(many) == [(((1.0, 0.5), MAX_COMPARED + 1), ((2.0, 0.5), 999))]
    a, b = (((1.0, 0.5), 1),), (((2.0, 0.5), 1),)
    assert {*joined([[a, b], [a]])} == {(((1.0, 0.5), 2),), (*a, *b)}
    some = [(((1.0, 0.5), n),) for n in range(1, MAX_COMPARED)]
    others = [(((2.0, 0.5), n),) for n in (3, 5, 4)]
    assert joined([some, others]) == [(((1.0, 0.5), MAX_COMPARED - 1), ((2.0, 0.5), 5))]


def test_rates_of_many_kinds_are_rounded_up_to_few():
    """17 rates from 1/16 to 1 become 16, each 16^(1/15) times the one below.

    The rate 16^(n/16) / 16 lies at most at 16^(k/15) / 16 for the least k >= 15 n / 16. That is
    k = n up to n = 15, and 15 for n = 16.
    """
    history = tuple(((1.0, 16 ** (n / 16 - 1)), 1) for n in range(17))
    found = coarse(history)
    assert [n for _, n in found] == [1] * 15 + [2]
    assert [q for (_, q), _ in found] == pytest.approx([16 ** (k / 15 - 1) for k in range(16)])
    assert coarse(history[:16]) == history[:16], "so few stay as they are"


def test_of_many_histories_that_cost_alike_a_coarser_bound_of_the_rest_counts():
    """Four are looked at exactly; the fifth costs no more than Renyi accounting says of it."""
    alike = [(((8.0, 1.0), n), ((8.1, 1.0), 40 - n)) for n in range(1, MAX_EXACT + 3)]
    each = [tuple(GaussianReleases(z, n, q) for (z, q), n in history) for history in alike]
    bounds = sorted((renyi_epsilon_of(one, DELTA) for one in each), reverse=True)
    exact = max(epsilon_of(one, DELTA) for one in each)
    assert epsilon_of_histories(alike, DELTA) == bounds[MAX_EXACT] > exact
    few = alike[-MAX_EXACT:]
    assert epsilon_of_histories(few, DELTA) == exact


def test_what_meets_composes_and_what_does_not_is_the_worse_of_both(tmp_path):
    ledger = PrivacyLedger(tmp_path / "privacy.db", "example")
    first, other = charge("a", [1, 2]), charge("b", [3, 4], (TWO,))
    ledger.note(first, None, DELTA)
    ledger.note(other, None, DELTA)
    assert ledger.epsilon(DELTA) == epsilon_of((SIX,), DELTA)
    grown = charge("c", [4, 2, 5, 2])
    after = ledger.epsilon(DELTA, grown)
    assert after == epsilon_of((GaussianReleases(2.0, 12, 0.5),), DELTA)
    assert ledger.epsilon(DELTA) == epsilon_of((SIX,), DELTA), "it was asked for, and not done"
    ledger.note(grown, None, DELTA)
    again = PrivacyLedger(tmp_path / "privacy.db", "example")
    assert again.epsilon(DELTA) == ledger.epsilon(DELTA) == after
    apart = charge("d", [6], cut="in windows of 64")
    assert again.epsilon(DELTA, apart) == epsilon_of((GaussianReleases(2.0, 18, 0.5),), DELTA), (
        "nobody knows which example of another cut it is"
    )


def test_a_training_is_charged_once_and_never_beyond_the_limit(tmp_path):
    one, other = (PrivacyLedger(tmp_path / "privacy.db", "client") for _ in range(2))
    limit = epsilon_of((SIX,), DELTA)
    first = charge("a", None)
    one.note(first, limit, DELTA)
    other.note(first, limit, DELTA)  # a process that died and came again
    assert other.epsilon(DELTA) == limit
    other.check(first, limit, DELTA)
    for refuses in (one.check, one.note):
        with pytest.raises(OrderDeclined, match=r"would make epsilon .* at delta 0.001, beyond"):
            refuses(charge("b", None), limit, DELTA)
    assert one.epsilon(DELTA) == limit
    both = epsilon_of((GaussianReleases(2.0, 12, 0.5),), DELTA)
    for refuses in (one.check, one.note):
        with pytest.raises(OrderDeclined):
            refuses(charge("b", None), 0.999 * both, DELTA)
    one.note(charge("b", None), both, DELTA)
    assert one.epsilon(DELTA) == both
    assert (tmp_path / "privacy.db").stat().st_mode & 0o077 == 0, "it is nobody else's"


def test_a_full_disk_is_told_as_one_that_may_have_room_later(tmp_path):
    ledger = PrivacyLedger(tmp_path / "privacy.db", "example")
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    many = charge("a", range(10_000))
    line = "cannot be used: database or disk is full"
    with pytest.raises(ArchiveNotWritten, match=line) as full:
        ledger.note(many, None, DELTA)
    assert is_passing(full.value), "the training is tried again"
    assert not ledger.has(many)
    ledger._db.execute("PRAGMA max_page_count = 1000000")
    ledger.note(many, None, DELTA)
    assert ledger.has(many)


def test_a_file_that_is_no_ledger_or_of_another_level_is_refused_in_a_line(tmp_path):
    place = tmp_path / "privacy.db"
    place.write_text("no database, and long enough to be none" * 10)
    with pytest.raises(ArchiveError, match=r"is damaged .* put a copy of it back"):
        PrivacyLedger(place, "example")
    place.unlink()
    PrivacyLedger(place, "example").close()
    with pytest.raises(ArchiveError, match="counts what hides each example, and"):
        PrivacyLedger(place, "client")
    with sqlite3.connect(place) as db:
        db.execute("UPDATE facts SET value = '2' WHERE name = 'format'")
    with pytest.raises(ArchiveError, match="a later version"):
        PrivacyLedger(place, "example")
    with pytest.raises(ArchiveError, match="cannot be used: "):
        PrivacyLedger(tmp_path, "example")


def test_other_bytes_of_one_training_are_charged_as_all_of_its_batches(tmp_path):
    """Both took the same batches, so who is in a batch is in both: their chances do not compose."""
    ledger = PrivacyLedger(tmp_path / "ledger.db", "example")
    first, second = (replace(charge("one", [1, 2]), made=made) for made in ("this", "that"))
    ledger.note(first, None, DELTA)
    ledger.note(first, None, DELTA)
    assert ledger.epsilon(DELTA) == epsilon_of((SIX,), DELTA)
    assert ledger.has(second), "before it is done, it is the same"
    with pytest.raises(OrderDeclined):
        ledger.note(second, 1.5 * ledger.epsilon(DELTA), DELTA)
    ledger.note(second, None, DELTA)
    both = epsilon_of((SIX, GaussianReleases(2.0, 6, 1.0)), DELTA)
    assert ledger.epsilon(DELTA) == pytest.approx(both)
    assert PrivacyLedger(tmp_path / "ledger.db", "example").epsilon(DELTA) == pytest.approx(both)


def test_what_an_earlier_version_charged_counts(tmp_path):
    """Its names are of trainings alone, and no training of now has one of them."""
    file = tmp_path / "ledger.db"
    with closing(sqlite3.connect(file)) as db, db:
        db.executescript("""
            CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
            CREATE TABLE examples (digest BLOB PRIMARY KEY, cut TEXT NOT NULL,
                keys BLOB NOT NULL);
            CREATE TABLE trainings (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
                examples BLOB, releases TEXT NOT NULL, what TEXT NOT NULL,
                seconds INTEGER NOT NULL);
            INSERT INTO facts VALUES ('format', '1'), ('level', 'client'), ('key', 'aa');
            INSERT INTO trainings VALUES (1, '0123456789abcdef0123456789abcdef', NULL,
                '[[2.0, 6, 0.5]]', 'client 0, round 1, task 0', 1);
        """)
    ledger = PrivacyLedger(file, "client")
    assert ledger.epsilon(DELTA) == epsilon_of((SIX,), DELTA)
    ledger.note(replace(charge("one", None), made="this"), None, DELTA)
    assert ledger.epsilon(DELTA) == pytest.approx(epsilon_of((SIX, SIX), DELTA))


def test_what_is_told_after_a_training_counts_none_that_was_charged_later(tmp_path):
    """As where a client had trained on already when an interaction is done again."""
    first, later = charge("first", [1, 2]), charge("later", [1])
    again = replace(first, made="otherwise")
    with closing(PrivacyLedger(tmp_path / "privacy.db", "example")) as ledger:
        ledger.note(first, None, DELTA)
        told = ledger.epsilons_after(DELTA, first)
        assert told == (ledger.epsilon(DELTA), ledger.epsilon(DELTA, first))
        ledger.note(later, None, DELTA)
        ledger.note(first, None, DELTA)
        assert ledger.epsilons_after(DELTA, first) == told
        whole = ledger.epsilon(DELTA), ledger.epsilon(DELTA, later)
        assert ledger.epsilons_after(DELTA, later) == whole > told
        ledger.note(again, None, DELTA)  # other bytes leave: all of it is spent
        assert ledger.epsilons_after(DELTA, again)[0] == ledger.epsilon(DELTA) > whole[0]
