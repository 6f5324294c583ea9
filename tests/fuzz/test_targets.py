"""Every target of ``make fuzz`` on a few thousand inputs, without the extra it needs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS

FEW = {"directories": 150, "config": 40, "experiment": 60, "request": 100}
INPUTS = 500


def mutated(seed: bytes, changes: list[tuple[int, bytes, bool]]) -> bytes:
    """Return a seed with bytes put in, or written over, at some places."""
    for place, new, over in changes:
        at = place % (len(seed) + 1)
        seed = seed[:at] + new + seed[at + (len(new) if over else 0) :]
    return seed


CHANGES = st.lists(
    st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=6), st.booleans()), max_size=4
)


def test_there_are_seeds_for_every_target():
    assert SEEDS.keys() == TARGETS.keys()


@pytest.mark.filterwarnings("ignore:Reading .*Python 2:UserWarning")  # numpy reads it all the same
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_target_takes_whatever_comes(name):
    seeds, target = SEEDS[name](), TARGETS[name]

    @given(st.binary(max_size=200) | st.builds(mutated, st.sampled_from(seeds), CHANGES))
    @settings(max_examples=FEW.get(name, INPUTS), database=None, derandomize=True)
    def takes(data: bytes) -> None:
        target(data)

    takes()
    for seed in seeds:
        target(seed)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("codec", ZeroDivisionError), ("archive", ZeroDivisionError), ("config", ZeroDivisionError)],
)
def test_a_target_lets_what_is_unexpected_out(name, wrong, monkeypatch):
    """A target that swallowed everything would never find anything."""

    def broken(*_: object, **__: object) -> None:
        raise wrong

    call = {"codec": "read_chunk", "archive": "load_named", "config": "parse_experiment"}[name]
    monkeypatch.setattr(f"tests.fuzz.targets.{call}", broken)
    with pytest.raises(wrong):
        TARGETS[name](SEEDS[name]()[0])
