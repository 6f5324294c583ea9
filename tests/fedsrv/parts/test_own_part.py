"""The part of CONTRIBUTING.md, added to the list as a contributor would add it."""

import re
import sys
from types import ModuleType

from fedmodels.config import combinations
from fedmodels.config.combinations import Part
from fedmodels.config.server import Server
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.sizes import ROOT


def test_a_part_of_ones_own_lets_clients_rest(digits, tmp_path, monkeypatch):
    """An upload has 4,848 bytes: after two each has sent 9,000, and client 2 may send no more.

    With the cap for all, nobody could: the run would end, which the second half shows.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    module = ModuleType("fedsrv.parts.daily_cap")
    exec(re.search(r"```python\n(import time.*?)```", text, re.S)[1], vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    part = Part("daily cap", "[server] megabytes_a_day", server="daily_cap:DailyCap")
    monkeypatch.setattr(combinations, "LISTED", (*combinations.LISTED, part))
    monkeypatch.setattr(Server, "megabytes_a_day", 0.009, raising=False)
    rests = module.DailyCap._resting
    with monkeypatch.context() as patch:
        last = lambda *given: [c for c in rests(*given) if c == 2]  # noqa: E731
        patch.setattr(module.DailyCap, "_resting", last)
        experiment = tiny_experiment(server={"min_clients": 2})
        run_in_process(experiment, digits, tmp_path / "one")
    found = [(r["cohort"], r["metrics"]["resting"]) for r in records_of(tmp_path / "one")]
    assert found == [([0, 1, 2], 0)] * 2 + [([0, 1], 1)] * 2
    run_in_process(tiny_experiment(), digits, tmp_path / "all")
    assert len(records_of(tmp_path / "all")) == 2
