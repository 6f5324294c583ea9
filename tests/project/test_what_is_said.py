"""What serve and join say while they work, and how quiet they can be."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import fedcli.cli
import fedsrv.cli
from fedcli.runtime.reporting import tell_scored
from fedmodels.console.commands import MAX_LETTERS, run_command
from fedmodels.console.log_lines import JsonFormatter
from fedmodels.console.printable import duration
from fedmodels.errors import ConfigError, RunFailed
from fedmodels.own.own_code import own
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.progress.event_lines import tell
from fedsrv.progress.events import Event, EventLog
from fedsrv.progress.run_status import Pace
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import tiny_experiment


def test_a_server_says_what_happens(caplog):
    events = EventLog()
    events.tell("listening", address="127.0.0.1:5", clients=4, needed=2)
    events.tell("joined", 3)
    events.tell("order", 3, interaction=0, round=0)
    events.tell("failed", 3, interaction=0, round=0, reason="its disk is full")
    sizes = {"down": 1_500_000, "up": 20_000}
    events.tell("commit", interaction=0, round=0, task=0, loss=0.25, of=4, bytes=sizes)
    events.tell("commit", interaction=1, round=0, task=1, loss=0.2, of=4, bytes=sizes)
    events.tell("joined", 3)
    events.close()
    with caplog.at_level(logging.INFO, "fedsrv"):
        tell(events)
    spent = "1.5 MB down, 20 kB up"
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "waiting for 4 clients to join (2 suffice) at 127.0.0.1:5"),
        ("INFO", "client 3 joined (1 of 4)"),
        ("WARNING", "client 3 failed: its disk is full"),
        ("INFO", f"interaction 1 of 4: round 1, task 0 committed, loss 0.25, {spent}"),
        (
            "INFO",
            f"interaction 2 of 4: round 1, task 1 committed, loss 0.2, {spent}, about 0 s left",
        ),
        ("INFO", "client 3 joined again"),
    ]


def test_a_client_says_what_it_did(digits, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "fedcli"):
        run_in_process(tiny_experiment(schedule={"rounds": 1}), digits, tmp_path / "run")
    said = [r.message for r in caplog.records if r.name == "fedcli.runtime.reporting"]
    assert said[0].startswith("client 0, round 1, task 0: loss ")
    assert said[0].endswith(" bytes go back")
    assert f"client 1: the run is over; its model is in {tmp_path / 'run/clients/1'}" in said


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (["--quiet"], "WARNING"),
        (["--log-level", "error"], "ERROR"),
        (["--log-level", "debug"], "DEBUG"),
        ([], "INFO"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "join"])
def test_how_much_is_said(monkeypatch, tmp_path, command, words, level):
    found: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **options: found.update(options))
    if command == "serve":
        CliRunner().invoke(fedsrv.cli.app, ["serve", str(tmp_path / "no.toml"), *words])
    else:
        where = ["--client-id", "x", "--server", "h:1", "--data", str(tmp_path)]
        CliRunner().invoke(fedcli.cli.app, ["join", *where, *words])
    assert found["level"] == level


@pytest.mark.parametrize(
    ("level", "line"),
    [
        ("loud", "error: --log-level 'loud' is none of debug, info, warning, error."),
        ("warn", "error: --log-level 'warn' is none of debug, info, warning, error. "
                 "Did you mean 'warning'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("module", [fedsrv.cli, fedcli.cli], ids=["fedsrv", "fedcli"])
def test_an_unknown_log_level_is_one_line(monkeypatch, capsys, module, level, line):
    join = ["join", "--client-id", "0", "--server", "h:1", "--data", "."]
    command = join if module is fedcli.cli else ["launch", "no.toml"]
    monkeypatch.setattr(sys, "argv", ["it", *command, "--log-level", level])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert (ended.value.code, capsys.readouterr().err.strip()) == (2, line)


def test_output_that_nobody_reads_ends_nothing():
    """As in ``fedsrv launch … --json | head -1``: said once, and then it is as if it were read."""
    program = (
        "import logging, sys\nfrom fedmodels.console.log_lines import LogLevel, set_up_logging\n"
        "set_up_logging(LogLevel.INFO, as_json=True)\n"
        "for number in range(3):\n    print(number)\n    logging.info('x')\n"
        "sys.stdout.flush()\nprint('the end', file=sys.stderr)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=unread, stderr=subprocess.PIPE, text=True,
            timeout=60,
        )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "standard output is closed (Broken pipe); continuing",
        "the end",
    ]


@pytest.mark.parametrize("error", [RunFailed, ConfigError])
def test_the_last_line_of_a_command_is_one_line_whoever_it_quotes(capsys, error):
    def fails(arguments: object) -> None:
        raise error("classes \x1b[2J\x9b31m\nerror: forged" + "x" * 20_000)

    with pytest.raises(SystemExit) as ended:
        run_command(fails)
    assert ended.value.code == error.exit_code
    said = capsys.readouterr().err
    assert said.startswith("error: classes \\x1b[2J\\x9b31m\\nerror: forgedxx")
    assert said[:-1].isprintable()
    assert len(said) == MAX_LETTERS + 1


@pytest.mark.parametrize("call", ["sys.exit()", "exit(0)", "sys.exit('bye')"])
def test_code_of_ones_own_that_ends_the_process_is_a_failure(call, tmp_path, capsys):
    """A run that ends with 0 has finished, and a client that ends with 0 is not started again."""
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\ndef aggregate():\n    {call}  # {file}\n")
    with pytest.raises(SystemExit) as ended:
        run_command(lambda arguments: own(f"{file}:aggregate")())
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {file} (line 3) ends the process; ")


def test_sigterm_ends_a_command_in_the_midst_of_ones_own_code(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("def train(arrives):\n    arrives()\n")

    def arrives() -> None:
        raise SystemExit(143)  # as the handler of the signal does

    with pytest.raises(SystemExit) as ended:
        run_command(lambda arguments: own(f"{file}:train")(arrives))
    assert ended.value.code == 143


def test_grpcs_core_adds_nothing_to_a_line_of_ours():
    program = (
        "from fedmodels.console.log_lines import LogLevel, set_up_logging\n"
        "set_up_logging(LogLevel.INFO)\nimport grpc\n"
        "options = [('grpc.so_reuseport', 0)]\nfirst = grpc.server(None, options=options)\n"
        "port = first.add_insecure_port('127.0.0.1:0')\n"
        "try:\n    grpc.server(None, options=options).add_insecure_port(f'127.0.0.1:{port}')\n"
        "except RuntimeError:\n    print('busy')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("busy\n", "")


def test_how_long_a_run_still_takes():
    pace = Pace()
    assert pace.seconds_left(10) is None
    for interaction, time in ((0, 100.0), (1, 102.0), (2, 110.0)):
        pace.take(Event("commit", interaction=interaction, unix_time=time))
    assert pace.seconds_left(10) == 5.0 * 7
    pace.take(Event("rollback", interaction=0))
    pace.take(Event("commit", interaction=1, unix_time=111.0))
    assert pace.seconds_left(10) is None
    pace.take(Event("commit", interaction=2, unix_time=math.nan))
    assert pace.seconds_left(10) is None
    assert [duration(s) for s in (59, 61, 7260)] == ["59 s", "1 min 1 s", "2 h 1 min"]


def test_json_lines_are_events_or_records():
    def written(**more: Any) -> dict[str, Any]:
        record = logging.makeLogRecord({"name": "a", "levelname": "WARNING", "msg": "x\ny", **more})
        found: dict[str, Any] = json.loads(JsonFormatter().format(record))
        return found

    event = Event("joined", "3").__dict__
    assert written(event=event) == event
    diverged = {**event, "detail": {"loss": math.nan, "metrics": {"a": math.inf, "b": [1.0]}}}
    written_so = {"loss": None, "metrics": {"a": None, "b": [1.0]}}
    assert written(event=diverged)["detail"] == written_so
    found = written()
    assert found.keys() == event.keys()
    assert found["detail"] == {"level": "warning", "logger": "a", "line": "x\ny"}


def test_a_clients_objects_hold_its_figures(caplog):
    order = rpc.Order(client_id="3", interaction=4, round=2, task=1)
    counts = [rpc.Counts(view="global", test_set=f"task/{k}", support=[2, 2], correct=[k, 2])
              for k in (0, 1)]  # fmt: skip
    with caplog.at_level(logging.INFO, "fedcli"):
        tell_scored(order, rpc.Report(counts=counts))
    assert caplog.messages == ["client 3, round 3: scored global 0.625"]
    event = caplog.records[0].event  # type: ignore[attr-defined]
    assert (event["kind"], event["client"], event["interaction"]) == ("scored", "3", 4)
    assert event["detail"]["accuracies"] == {"global": 0.625}


def test_a_command_that_ends_looks_for_no_cycles_once_more(monkeypatch):
    """In all that torch holds that took 0.7 s; a caller in Python goes on, and may need it."""
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    run_command(lambda arguments: None, ["init"])
    assert not frozen
    run_command(lambda arguments: None)
    assert frozen == [True]
