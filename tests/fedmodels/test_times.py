"""One factor makes all times longer that others get, where links or machines are slow."""

import os
import subprocess
import sys

import pytest

from fedmodels import times

SAYS = "from fedmodels import times; print(times.LEASE_S, times.LOOK_EVERY_S, times.KEEPALIVE_MS, "
SAYS += "times.transfer_s(1 << 14))"


def said(code, patience):
    done = subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, timeout=120,
        env={**os.environ, times.VARIABLE: patience},
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    ("patience", "expected"), [("", "15.0 1.0 20000 1.0"), ("4", "60.0 1.0 80000 4.0")]
)
def test_a_slow_site_gives_others_more_time(patience, expected):
    assert said(["-c", SAYS], patience) == (0, expected)


@pytest.mark.parametrize("patience", ["much", "0", "-1", "nan", "inf", "1e9"])
def test_what_is_no_factor_gets_one_line(patience, monkeypatch):
    assert times._patience(patience) != times._patience(patience), "not a number"
    monkeypatch.setattr(times, "_said", times._patience(patience))
    monkeypatch.setenv(times.VARIABLE, patience)
    with pytest.raises(times.ConfigError, match=f"^FEDTIDE_PATIENCE is '{patience}': it is how"):
        times.check()


def test_a_command_says_so_and_ends():
    status, line = said(["-m", "fedsrv", "plugins"], "much")
    assert status == 2
    assert line.startswith("error: FEDTIDE_PATIENCE is 'much'")
    assert "\n" not in line
