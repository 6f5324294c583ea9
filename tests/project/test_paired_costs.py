"""CI's comparison of a no-op round with the parent commit: what it calls a regression."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import paired

BEFORE = {"server_cpu_s": 0.010, "hosts_cpu_s": 0.020}


@pytest.mark.parametrize(
    ("factors", "status", "tries"),
    [
        ([1.04], 0, 1),
        ([1.2, 1.04], 0, 2),  # something else had the machine
        ([1.06, 1.2, 1.06], 1, 3),
        ([0.8], 0, 1),
    ],
)
@pytest.mark.parametrize("process", paired.PROCESSES)
def test_a_process_that_takes_more_in_each_try_fails(
    monkeypatch, capsys, tmp_path, process, factors, status, tries
):
    sides = list[Path]()

    def launched(tables, place, hosts, tree):
        number = len(sides) // 4
        sides.append(tree)
        found = {
            **BEFORE,
            "round_s": 9.0 if tree == paired.HERE else 1.0,
        }  # of the clock, not compared
        return found if tree == tmp_path else {**found, process: BEFORE[process] * factors[number]}

    monkeypatch.setattr(paired, "launched", launched)
    monkeypatch.setattr(sys, "argv", ["paired", str(tmp_path), "--nets", "digits-cnn"])
    assert paired.main() == status
    assert sides == [tmp_path, paired.HERE, paired.HERE, tmp_path] * tries
    line = f"more than 1.05 times as much in each try: digits-cnn: {process}\n"
    assert capsys.readouterr().err == line * status


def test_a_process_that_is_slow_once_in_each_try_is_no_other_ones_fault(monkeypatch, tmp_path):
    """Now the coordinator, now the hosts: neither takes more each time."""
    slow = iter([("server_cpu_s", 1.2), ("hosts_cpu_s", 1.2)])

    def ratios(tables, before):
        return {**dict.fromkeys(paired.PROCESSES, 1.0), **dict([next(slow)])}

    monkeypatch.setattr(paired, "ratios", ratios)
    monkeypatch.setattr(sys, "argv", ["paired", str(tmp_path), "--nets", "resnet20"])
    assert paired.main() == 0
