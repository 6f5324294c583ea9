"""The status with which ``fedcli join`` ends: whoever starts clients again goes by it."""

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from fedcli.cli import main
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link, Membership
from fedmodels.errors import DataError, RunFailed, SetOut
from fedmodels.own.own_code import own

CASES: dict[str, tuple[Exception, int, str]] = {
    "data": (DataError("client 0 has no labels"), 2, "error: client 0 has no labels\n"),
    "set out": (SetOut("client 0 takes no part", 0), 3, "error: client 0 takes no part\n"),
    "disk": (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "states/0/secret"),
        1,
        "error: states/0/secret: No space left on device\n",
    ),
}


def test_code_of_ones_own_that_ends_a_client_is_no_stop(tmp_path, monkeypatch, caplog):
    """The coordinator is not told that the client was stopped as somebody asked."""
    file, left = tmp_path / "mine.py", list[str]()
    file.write_text("import sys\ndef work(host):\n    sys.exit()\n")
    link = SimpleNamespace(close=lambda: None, leave=lambda member, why: left.append(why))
    host = Host([0], cast(Link, link), tmp_path, tmp_path / "s", torch.device("cpu"))
    host.enrolment.members[0] = cast(Membership, None)
    monkeypatch.setattr(Host, "join", lambda host: None)
    monkeypatch.setattr(Host, "orders", own(f"{file}:work"))
    with pytest.raises(RunFailed, match=r"mine.py \(line 3\) ends the process"):
        host.run()
    assert left == []
    assert "stopped as asked" not in caplog.text


def _raising(error: Exception) -> Callable[[Host], NoReturn]:
    def run(host: Host) -> NoReturn:
        raise error

    return run


@pytest.mark.parametrize("what", CASES)
def test_join_ends_for_good_with_unusable_data_and_for_now_with_a_full_disk(
    what, tmp_path, monkeypatch, capsys
):
    """2 and 3 say that the same command again is in vain. A disk may have room later: 1."""
    error, status, line = CASES[what]
    monkeypatch.setattr(Host, "run", _raising(error))
    where = ["--server", "127.0.0.1:1", "--data", str(tmp_path), "--state-dir", str(tmp_path / "s")]
    with pytest.raises(SystemExit) as ended:
        main(["join", "--client-id", "0", *where])
    assert ended.value.code == status
    assert capsys.readouterr().err == line
