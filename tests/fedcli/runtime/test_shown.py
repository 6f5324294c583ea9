"""What leaves a client is written down first: every field, in a bounded file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedcli.runtime import shown
from fedcli.runtime.link import Link
from fedcli.runtime.shown import Shown, fields_of
from fedmodels.errors import ArchiveError, ConfigError, LinkError
from fedmodels.tensors.bundle import Bundle, Prototypes, state_digest
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.description_pb2 import ClientDescription, TaskCounts

PROTOTYPES = Prototypes.of({3: (torch.ones(2), 5)}, 2)
UPLOAD = Bundle({"base/w": torch.arange(100.0)}, {"class": PROTOTYPES}, scalars={"n": 5.0})
PUSH = rpc.PushHeader(
    client_id="3", token=b"secret", kind=rpc.ORDER_KIND_TRAIN, interaction=7,
    report=rpc.Report(loss=0.5, extra={"gap": 2.0}, counts=[rpc.Counts(support=[1, 2])]),
)  # fmt: skip


def test_every_field_has_a_line_and_secrets_stay():
    assert dict(fields_of(PUSH, UPLOAD)) == {
        "client_id": "'3'",
        "token": "6 bytes, the secret of the session",
        "kind": "ORDER_KIND_TRAIN",
        "interaction": "7",
        "report.loss": "0.5",
        "report.extra[gap]": "2.0",
        "report.counts[0].support": "1, 2",
        "upload.weights/base/w": "float32 (100,): from 0 to 99, mean 49.5",
        "upload.prototypes/class/vectors": "float32 (1, 2): 1.0, 1.0",
        "upload.prototypes/class/labels": "int32 (1,): 3",
        "upload.prototypes/class/counts": "int32 (1,): 5",
        "upload.scalars/n": "float64 (): 5.0",
    }
    told = ClientDescription(
        tasks=[TaskCounts(train=range(100))], partition=table_of({"data": {"name": "digits"}})
    )
    found = dict(fields_of(rpc.JoinRequest(description=told)))
    assert found["description.partition.data.name"] == "'digits'"
    assert found["description.tasks[0].train"].endswith("63 … (100 in all)")


def test_files_are_bounded_and_a_restart_goes_on_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "KEPT_TENSORS", 2)
    for number in range(4):
        show = Shown(tmp_path, [3], tensors=True)  # as after a restart
        show("Push", rpc.PushHeader(client_id="3", interaction=number), UPLOAD)
    (tmp_path / "client-30-interaction-1.safetensors").touch()  # of another process
    show("Push", PUSH, UPLOAD)
    text = (tmp_path / "client-3.txt").read_text()
    assert text.count(f"an upload of 424 bytes, sha256 {state_digest([('upload', UPLOAD)])}") == 5
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        f"client-{one}.safetensors"
        for one in ("3-interaction-4", "3-interaction-8", "30-interaction-1")
    }
    monkeypatch.setattr(shown, "MAX_FILE_BYTES", 1000)
    for _ in range(9):
        show("Push", PUSH, UPLOAD)
    show("Beat", rpc.BeatRequest(client_id="3", epoch=1))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.txt")) < 5 * len(text)
    assert (tmp_path / "client-3.txt").read_text().endswith(" Beat: client_id '3'; epoch 1\n")


def test_what_cannot_be_written_is_not_sent(tmp_path):
    show = Shown(tmp_path / "place", [3])
    (tmp_path / "place" / "client-3.txt").mkdir()
    link: Any = Link("127.0.0.1:1", show=show)
    link._join = link._beat = lambda *_, **more: pytest.fail("it is sent")
    with pytest.raises(ArchiveError, match="Join is not sent, since"):
        link.join(rpc.JoinRequest(client_id="3"))
    member: Any = type("Member", (), {"client": 3, "token": b""})
    progress: Any = type("Progress", (), {"epoch": 0, "batch": 1, "interaction": 0})
    assert link.beat(member, progress, 0) is False
    link.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--show-uploads .* cannot be used: File exists"):
        Shown(tmp_path / "file", [3])


def test_a_person_may_be_asked(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="--ask needs a terminal"):
        Shown(tmp_path, [3], asks=True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["yes", "no"])
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or next(answers))
    show = Shown(None, [3], asks=True)
    show("Beat", rpc.BeatRequest(client_id="3"))
    show("Push", PUSH, UPLOAD)
    with pytest.raises(LinkError, match="Push is not sent: the answer was 'no'"):
        show("Push", PUSH, UPLOAD)
    assert len(asked) == 2
    assert capsys.readouterr().out.count(" Push: an upload of") == 2
