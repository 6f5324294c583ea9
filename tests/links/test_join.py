"""A Join whose answer was lost on the way is made again, and is the same client's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.sessions import SessionFile
from fedmodels.errors import LinkError
from fedpb.tables import client_json_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.progress.events import EventLog
from fedsrv.transport.refusals import AlreadyConnected
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool


class Losing:
    """A link whose Join arrives, and whose answer does not."""

    address = "nowhere:0"

    def __init__(self, cohort: RemoteCohort, lost: int) -> None:
        self.cohort, self.lost = cohort, lost

    def join(self, request: rpc.JoinRequest) -> rpc.JoinResponse:
        client = int(request.client_id)
        token = self.cohort.join(
            client, client_json_of(request.description), request.token, request.versions
        )
        self.lost -= 1
        if self.lost >= 0:
            raise LinkError("the process was killed, or the link was cut")
        return rpc.JoinResponse(run_id="run", token=token, beat_every_s=2.0)


@pytest.fixture
def cohort(tmp_path: Path) -> RemoteCohort:
    spool = Spool(tmp_path / "spool", 1 << 20)
    return RemoteCohort(3, spool, EventLog(), admission=Admission({}))


def host(cohort: RemoteCohort, data: Path, states: Path, lost: int) -> Host:
    link: Any = Losing(cohort, lost)
    return Host([0], link, data, states, torch.device("cpu"))


def test_a_client_that_died_before_the_answer_came_joins_again_at_once(cohort, digits, tmp_path):
    with pytest.raises(LinkError):
        host(cohort, digits, tmp_path / "states", lost=1).enrolment.join()
    token = cohort.sessions[0].token
    again = host(cohort, digits, tmp_path / "states", lost=0)
    again.enrolment.join()
    stored = SessionFile(tmp_path / "states" / "0").read()
    assert again.enrolment.members[0].token == token == stored.token
    assert (tmp_path / "states" / "0" / "session.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(AlreadyConnected):
        host(cohort, digits, tmp_path / "elsewhere", lost=0).enrolment.join()


def test_a_client_that_takes_a_lapsed_place_can_ask_for_it_twice(cohort, digits):
    description = (digits / "1" / "client.json").read_text()
    cohort.join(1, description, b"first", ())
    cohort.leave(1, "its lease is over")
    assert cohort.join(1, description, b"second", ()) == b"second"
    assert cohort.join(1, description, b"second", ()) == b"second"
    assert len(cohort.join(0, description, b"", ())) == 16  # for callers that bring none
