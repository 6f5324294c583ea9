"""What can be known at the start is said at the start, and a start that failed leaves nothing."""

from __future__ import annotations

import io
import logging
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console

from fedcli.cli import main as fedcli
from fedmodels.config.places import check_address, check_gpu, gpu_of, http_place
from fedmodels.errors import ConfigError, RunFailed
from fedmodels.facts.config_file import parse_experiment
from fedmodels.facts.resolution import experiment_of
from fedsrv.cli import main as fedsrv
from fedsrv.commands.watchers import wanted
from fedsrv.coordinator import Listen, serve, write_facts
from fedsrv.launch.launcher import check_resumed, check_start, show_end
from fedsrv.launch.progress import JsonProgress, PlainLines
from fedsrv.progress.events import EventLog
from fedsrv.state.run_directory import beginning, launching
from fedtide.inprocess import launch_in_process
from tests.conftest import TABLES, tiny_experiment

LOOPBACK = Listen("127.0.0.1:0")


def status_of(main, capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit status and the last line it said."""
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return int(ended.value.code), said.err.strip().splitlines()[-1]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(TABLES))
    return path


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":5055", "host:x", "host:70000", "host:0", "a b:1", "::1:5", "/h:1"],
)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match=r"--server .* is not HOST:PORT, such as 127\.0\.0\.1"):
        check_address(text, "--server")


@pytest.mark.parametrize(
    "text", ["host:1", "127.0.0.1:65535", "[::1]:5", "unix:/a", "dns:///host:1", "a.b-c.example:80"]
)
def test_what_is_an_address(text):
    check_address(text, "--server")
    check_address("localhost:0", "--listen", lowest_port=0)


def test_where_a_page_is():
    assert http_place("8080", "--x") == ("127.0.0.1", 8080)
    assert http_place("0.0.0.0:0", "--x") == ("0.0.0.0", 0)
    assert http_place("[::1]:80", "--x") == ("::1", 80)
    for text in ("", "x", "99999", "http://a:8080", "a:"):
        with pytest.raises(ConfigError, match=r"--x .* is neither PORT nor HOST:PORT"):
            http_place(text, "--x")


def test_devices_that_are_not_there():
    for fine, gpu in (("auto", None), ("cpu", None), ("cuda", 0), ("cuda:1", 1)):
        check_gpu(fine, 2)
        assert gpu_of(fine) == gpu
    with pytest.raises(ConfigError, match="this machine has cuda:0 to cuda:1"):
        check_gpu("cuda:2", 2)
    with pytest.raises(ConfigError, match="this machine has no CUDA device; use --device cpu"):
        check_gpu("cuda", 0)
    with pytest.raises(ConfigError, match="is not auto, cpu or cuda:K"):
        gpu_of("gpu")


def test_the_launcher_asks_cuda_for_nothing(monkeypatch, tmp_path):
    """CUDA is of no use to forks of a process that has asked it how many GPUs there are."""

    def asked(*_: object) -> int:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr("torch.cuda.is_available", asked)
    monkeypatch.setattr("torch.cuda.device_count", asked)
    monkeypatch.setattr("torch._C._cuda_getDeviceCount", asked, raising=False)
    check_start(tiny_experiment(), None, tmp_path / "server", "cuda:0")


def test_code_that_looks_for_a_gpu_spoils_no_fork(config, tmp_path, capsys, monkeypatch):
    """Files of methods ask ``torch.cuda.is_available()`` when they are imported: by NVML here."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.setenv(name, "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told, method = tmp_path / "told", tmp_path / "mine.py"
    method.write_text(
        "import os\nfrom pathlib import Path\nfrom fedtide import FedAvg\n"
        f"class Mine(FedAvg): pass\nPath({str(told)!r}).write_text(os.environ[{name!r}])\n"
    )
    chosen = ["--set", f"method.name={method}:Mine", "--device", "gpu"]
    out = ["--out", str(tmp_path / "run")]
    status, _ = status_of(fedsrv, capsys, monkeypatch, "launch", str(config), *out, *chosen)
    assert (status, told.read_text()) == (2, "1")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "gpu"], "--device 'gpu' is not auto, cpu or cuda:K"),
        (["--set", "training.local_epochs=0"], "training.local_epochs"),
        (["--set", "net.hiden=[3]"], "Did you mean 'hidden'?"),
        (["--resume"], "holds no run to resume"),
        (["--out", "CONFIG/run"], "cannot be used: Not a directory"),
        (["--dashboard", "loud"], "--dashboard"),
        pytest.param(
            ["--metrics-port", "127.0.0.1:99999"],
            "--metrics-port",
            marks=pytest.mark.needs("trackers"),
        ),
        pytest.param(
            ["--metrics-port", "[::]:0"],
            "--metrics-port [::]:0 can be reached from other machines",
            marks=pytest.mark.needs("trackers"),
        ),
        (["--dashboard", "0.0.0.0:0"], "--dashboard 0.0.0.0:0 can be reached from other machines"),
    ],
)
def test_a_launch_that_cannot_be(arguments, line, config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [a.replace("CONFIG", str(config)) for a in arguments]
    status, said = status_of(fedsrv, capsys, monkeypatch, "launch", str(config), *arguments)
    assert (status, line in said) == (2, True), said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("x", "--serve 'x' is neither PORT"),
        ("0.0.0.0:0", "--serve 0.0.0.0:0 can be reached from other machines without TLS"),
    ],
)
def test_a_page_that_cannot_be(place, line, capsys, monkeypatch):
    status, said = status_of(fedsrv, capsys, monkeypatch, "report", "run", "--serve", place)
    assert (status, line in said) == (2, True), said
    status, said = status_of(
        fedsrv, capsys, monkeypatch, "report", "run", "--serve", "0.0.0.0:0", "--insecure"
    )
    assert "run is not a run directory" in said, "nothing else is wrong with it"


def test_a_server_and_a_client_that_cannot_be(config, tmp_path, capsys, monkeypatch, digits):
    monkeypatch.chdir(tmp_path)
    for arguments, line in (
        (["--listen", "127.0.0.1"], "--listen '127.0.0.1' is not HOST:PORT"),
        (["--resume"], "run holds no run to resume"),
        (["--dashboard", "0.0.0.0:0"], "--dashboard 0.0.0.0:0 can be reached from other machines"),
    ):
        status, said = status_of(fedsrv, capsys, monkeypatch, "serve", str(config), *arguments)
        assert (status, line in said) == (2, True), said
    join = ["join", "--client-id", "0", "--data", str(digits), "--server", "coordinator"]
    status, said = status_of(fedcli, capsys, monkeypatch, *join)
    assert (status, "--server 'coordinator' is not HOST:PORT" in said) == (2, True), said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.toml"]


def test_a_server_that_cannot_listen_leaves_nothing(tmp_path):
    elsewhere = Listen("192.0.2.1:5055", insecure=True)  # nobody's address
    for _ in range(2):
        with pytest.raises(RunFailed, match="cannot listen on"):
            serve(tiny_experiment(), tmp_path / "run", elsewhere)
    assert not (tmp_path / "run").exists()


def test_what_was_there_before_a_failed_start_stays(tmp_path):
    for name in ("notes.txt", "logs"):
        (tmp_path / name).write_text("mine")
    _fail(tmp_path, "run.db")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "notes.txt"]
    with beginning(tmp_path) as began:
        (tmp_path / "run.db").write_text("")
        began.set()
    _fail(tmp_path, "config.toml")
    assert {"run.db", "config.toml"} <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_launch_that_deals_out_data_keeps_others_out(config, tmp_path, capsys, monkeypatch, more):
    """There is no coordinator yet, whose lock would."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    with launching(run):
        (run / "data").mkdir()
        arguments = ["launch", str(config), "--out", str(run), *more]
        status, said = status_of(fedsrv, capsys, monkeypatch, *arguments)
        assert (status, said) == (
            1,
            f"error: {run} is in use by another process; wait until that has ended",
        )
        assert {p.name for p in run.iterdir()} == {"logs", "data"}
    with launching(run):
        pass


def test_an_out_that_cannot_be_written_to_gets_one_line(config, tmp_path, capsys, monkeypatch):
    """As on a full disk, where the first file of a launch has no room."""
    (tmp_path / "run" / "logs" / "launch.toml").mkdir(parents=True)  # no file can take its place
    arguments = ["launch", str(config), "--out", str(tmp_path / "run")]
    status, said = status_of(fedsrv, capsys, monkeypatch, *arguments)
    assert (status, said) == (2, f"error: --out {tmp_path / 'run'} cannot be used: Is a directory")


def test_a_launch_that_is_refused_takes_back_nothing_of_the_other_one(tmp_path):
    """Both found the directory free in the same moment."""
    run = tmp_path / "run"
    with ExitStack() as other:

        def refused() -> None:
            with beginning(run):
                (run / "logs").mkdir(parents=True)
                other.enter_context(launching(run))
                (run / "data").mkdir()
                with launching(run):
                    pytest.fail("two launches in one directory")

        with pytest.raises(RunFailed, match="in use by another process"):
            refused()
        assert {p.name for p in run.iterdir()} == {"logs", "data"}


def _fail(path: Path, name: str) -> None:
    """Begin in a directory, write a file there, and fail."""

    def begin() -> None:
        with beginning(path):
            (path / name).write_text("")
            raise RunFailed("no more")

    with pytest.raises(RunFailed, match="no more"):
        begin()


def test_a_run_in_this_process_that_cannot_begin_leaves_nothing(tmp_path):
    experiment = experiment_of({name: t for name, t in TABLES.items() if name != "scenario"})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the config has no \[scenario\]"):
            launch_in_process(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", [PlainLines, JsonProgress])
def test_a_finished_run_whose_page_cannot_be_written_is_no_failure(how, tmp_path):
    """A full disk shows like this: the run is there, its page is not."""
    out, said = tmp_path / "run", io.StringIO()
    launch_in_process(tiny_experiment(), out)
    (out / "report.html").mkdir()  # no file can take its place
    show_end(out, how(Console(file=said, width=1000)))
    (line,) = [
        line for line in said.getvalue().splitlines() if "report" in line and "cannot" in line
    ]
    assert "the run has finished, but its page" in line
    assert "Is a directory" in line
    assert f"fedsrv report {out} --html {out / 'report.html'}" in line
    (out / "report.html").rmdir()
    show_end(out, how(Console(file=said, width=1000)))
    assert (out / "report.html").is_file()


def test_a_figure_that_fails_does_not_fail_a_finished_run(tmp_path, monkeypatch):
    out, said = tmp_path / "run", io.StringIO()
    launch_in_process(tiny_experiment(), out)

    def fails(*_, **__):
        raise ValueError("cannot draw")

    monkeypatch.setattr("fedsrv.report.tables.write_html", fails)
    monkeypatch.setattr(PlainLines, "end", fails)
    show_end(out, PlainLines(Console(file=said, width=1000)))
    table, _, page = said.getvalue().splitlines()
    assert table == "the table cannot be shown: ValueError"
    assert page.startswith("the run has finished, but its page")
    assert "cannot be written: ValueError: cannot draw; when that is mended: fedsrv report" in page


def test_another_method_drops_the_keys_of_the_former(caplog):
    text = tomli_w.dumps({**TABLES, "method": {"name": "fedprox", "mu": 0.3}})
    with caplog.at_level(logging.WARNING):
        found = parse_experiment(text, "run.toml", ["method.lam=0.7", "method.name=gldp"])
    assert found.method.name == "gldp"
    assert "method.name is set to gldp: mu of fedprox in the file is left out" in caplog.text
    caplog.clear()
    same = parse_experiment(text, "run.toml", ["method.name=fedprox"])
    assert same.method.hyper_parameters()["mu"] == 0.3
    assert not caplog.text


def test_options_of_a_net_are_checked_with_the_config():
    with pytest.raises(ConfigError, match=r"unknown option 'hiden' of net 'mlp'.*'hidden'"):
        experiment_of({**TABLES, "net": {"name": "mlp", "hiden": [3]}})


def test_a_resume_with_another_config_is_refused_before_data_are_dealt(tmp_path):
    before = tiny_experiment()
    (tmp_path / "config.toml").write_text(tomli_w.dumps(before.to_dict()))
    more = {**before.to_dict()["schedule"], "rounds": before.schedule.rounds + 1}
    check_resumed(tiny_experiment(schedule=more, scenario={"tasks": 1}), tmp_path / "none")
    with pytest.raises(ConfigError, match=r"it differs in seed\. Resume with the config in "):
        check_resumed(tiny_experiment(seed=3), tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text("damaged =")
    check_resumed(tiny_experiment(seed=3), tmp_path / "config.toml")  # run.db decides


def test_a_wrong_trace_is_said_before_anybody_joins(config, tmp_path, capsys, monkeypatch):
    trace, run = tmp_path / "there.csv", tmp_path / "run"
    trace.write_text("client,from,until\n0,5,5\n")
    given = ["--set", f"schedule.availability='{trace}'", "--out", str(run)]
    for command in ("launch", "serve"):
        status, said = status_of(fedsrv, capsys, monkeypatch, command, str(config), *given)
        assert (status, "there.csv, line 2: '0,5,5' is not a client" in said) == (2, True), said
        assert not run.exists()
    with pytest.raises(ConfigError, match="line 2: '0,5,5' is not"):
        launch_in_process(tiny_experiment(schedule={"availability": str(trace)}), run)
    assert not run.exists()


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["schedule.order=asynchronous", "schedule.buffer=1", "method.name=pfedgrp"],
            "pfedgrp is none: its server half reads single uploads",
        ),
        (
            ["schedule.order=asynchronous", "schedule.buffer=1", "schedule.arrivals=nothere"],
            "[schedule] arrivals: nothere is no run directory (No such file or directory)",
        ),
        (
            ["schedule.order=asynchronous", "schedule.buffer=1", "schedule.arrivals=cut"],
            "[schedule] arrivals: cut/rounds.jsonl is damaged: Unterminated string",
        ),
        (
            ["schedule.availability=never.csv"],
            "no client is there in any round; the run's are 0 to",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_said_before_anything_is_written(
    sets, line, config, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("cut").mkdir()
    Path("cut/rounds.jsonl").write_text('{"interaction')
    Path("never.csv").write_text("client,from,until\n0,500,600\n1,500,600\n2,500,600\n")
    given = [word for item in sets for word in ("--set", item)]
    for command in ("launch", "serve"):
        status, said = status_of(fedsrv, capsys, monkeypatch, command, str(config), *given)
        assert (status, line in said) == (2, True), said
        assert not Path("run").exists()
    with pytest.raises(ConfigError, match=re.escape(line)):
        launch_in_process(parse_experiment(config.read_text(), "run.toml", sets), Path("run"))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("place", "insecure"),
    [("8080", False), ("localhost:80", False), ("[::1]:80", False), ("0.0.0.0:80", True)],
)
def test_a_page_may_be_here_or_where_it_is_meant(place, insecure):
    assert len(wanted({"--dashboard": place}, Path("run"), insecure)) == 1


@pytest.mark.parametrize(
    ("server", "needed"),
    [({}, 3), ({"min_clients": 2}, 3), ({"min_clients": 2, "deadline_s": 5}, 2)],
)
def test_how_many_suffice_to_begin(server, needed, tmp_path):
    """Without a deadline everybody is waited for, also where a round is of fewer."""
    told = []

    def begun(address: str, events: EventLog) -> None:
        events.close()
        told.extend(events.listen(from_start=True))
        raise KeyboardInterrupt

    how = {"clients": 3, "per_round": 2} if server == {} else {"clients": 3}
    experiment = tiny_experiment(server=server, schedule=how)
    with pytest.raises(KeyboardInterrupt):
        serve(experiment, tmp_path / "run", LOOPBACK, on_ready=begun)
    assert [e.detail["needed"] for e in told if e.kind == "listening"] == [needed]


def test_the_config_of_a_run_outlives_a_loss_of_power(tmp_path, monkeypatch):
    """The beginning of a config is a config: a resume would be refused for what it lacks."""
    synced: list[str] = []
    monkeypatch.setattr(
        "fedmodels.host.files.sync_path",
        lambda path: synced.append(path.read_text() if path.is_file() else str(path)),
    )
    experiment = tiny_experiment(seed=3)
    write_facts(tmp_path, experiment)
    assert synced == [(tmp_path / "config.toml").read_text(), str(tmp_path)]
    check_resumed(experiment, tmp_path / "config.toml")
