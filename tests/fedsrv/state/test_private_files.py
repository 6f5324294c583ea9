"""What a run directory shows to other users of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ServerState
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment


def modes(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in out.glob("run.db*")}


@pytest.mark.parametrize("mask", [0o022, 0o000])
@pytest.mark.parametrize("resume", [False, True])
def test_the_database_is_its_owners(tmp_path, mask, resume):
    out, old = tmp_path / "run", os.umask(mask)
    try:
        if resume:
            Store(out, tiny_experiment(), False).close()
            (out / "run.db").chmod(0o644)
            (out / "run.db-wal").touch(0o644)
        store = Store(out, tiny_experiment(), resume)
        store.commit({"interaction": 0, "cohort": []}, ServerState(Bundle()), None)
        found = modes(out)
        store.close()
    finally:
        os.umask(old)
    assert found == dict.fromkeys(("run.db", "run.db-wal", "run.db-shm"), 0o600)
