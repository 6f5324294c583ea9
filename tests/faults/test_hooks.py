"""The hooks hold what they are meant to: a changed name must not leave a gap in silence."""

import importlib
from importlib.util import find_spec

import pytest

from tests.faults.ground import Setting
from tests.faults.processes import INSIDE

KINDS = {
    "coordinator": """
        fsync.before fsync.after rename.before rename.after write.middle
        sql-insert.before sql-commit.after store-append.after store-sync.before store-end.after
        service-join.after service-push.before service-push.after service-leave.before
        broadcast.before broadcast.middle broadcast.after receive.middle result.before result.after
        method-broadcast.before method-aggregate.before method-aggregate.after method-finish.after
        interact.before train.before score.before commit.after finish.after
    """,
    "client-0": """
        join.before join.after leave.after begin-session.before set-session.before
        save.before save.after save-personal.before
        fsync.after rename.before write.middle unlink.after receive.middle
        train.before train.middle train.after evaluate.after client-finish.before
        upload.before upload.middle upload.after push.before push.after
    """,
}
"""Points that an undisturbed run must come to, by role.

The coordinator deletes states once they are synced, which may be after the end; a client deletes
scored models at once.
"""
OF_RELAY = """
    relay-begin.after relay-told.before service-push.before up-push.before up-push.after
    up-sum.before up-sum.after up.middle up-join.after up-leave.before
    send-sum.before send-sum.after receive.middle
"""


def test_every_module_that_is_changed_is_there(monkeypatch):
    monkeypatch.syspath_prepend(INSIDE)
    hooks = importlib.import_module("fault_hooks")
    assert [name for name in hooks.MODULES if find_spec(name) is None] == []


@pytest.mark.loopback
def test_an_undisturbed_run_comes_to_every_kind_of_point(ground):
    census = ground.undisturbed(Setting("fedper")).census()
    for role, points in KINDS.items():
        assert set(points.split()) - {at.point for at in census if at.role == role} == set()
    census = ground.undisturbed(Setting("fedper", relayed=True)).census()
    assert set(OF_RELAY.split()) - {at.point for at in census if at.role == "relay"} == set()
