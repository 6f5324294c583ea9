import contextlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

import fedcli.cli
import fedsrv.cli
import fedtide
from fedmodels.console import help_panels
from fedmodels.console.commands import _plain
from fedmodels.console.options import complete_key
from fedmodels.errors import ConfigError, LinkError, pip_line
from fedmodels.facts.config_file import read_experiment
from fedmodels.plugins import known

ROOT = Path(__file__).parents[2]
FEDSRV = {
    "launch": {"CONFIG", "--out", "--set", "--hosts", "--resume"},
    "serve": {
        "CONFIG", "--listen", "--out", "--resume", "--set", "--server-data",
        "--tls-cert", "--tls-key", "--tls-client-ca", "--insecure",
    },
    "report": {"RUNS", "--html"},
    "certs init": {"--dir"},
    "certs issue": {"IDENTITY", "--dir"},
}  # fmt: skip
FEDCLI = {
    "join": {
        "--client-id", "--server", "--data", "--state-dir", "--device", "--give-up-after",
        "--tls-ca", "--tls-cert", "--tls-key",
    },
    "partition": {"CONFIG", "--out", "--set", "--layout"},
    "export-partition": {"--out", "--client-id"},
    "data": set(),
}  # fmt: skip
"""What users rely on: commands and options may be added, never renamed or removed."""


def surface(app):
    """Return the options and arguments of every command, by its words."""
    found = {}

    def visit(command, words):
        for name, below in getattr(command, "commands", {}).items():
            visit(below, [*words, name])
        if not hasattr(command, "commands"):
            found[" ".join(words)] = {
                word
                for p in command.params
                for word in (p.opts if p.param_type_name == "option" else [p.name.upper()])
            }

    visit(typer.main.get_command(app), [])
    return found


@pytest.mark.parametrize(("app", "frozen"), [(fedsrv.cli.app, FEDSRV), (fedcli.cli.app, FEDCLI)])
def test_commands_and_options_stay(app, frozen):
    found = surface(app)
    assert frozen.keys() <= found.keys()
    for command, options in frozen.items():
        assert options <= found[command], command


@pytest.mark.parametrize(("name", "app"), [("fedsrv", fedsrv.cli.app), ("fedcli", fedcli.cli.app)])
def test_the_page_of_commands_has_every_option(name, app):
    page = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"^### `(.*?)`\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE))
    for command, words in surface(app).items():
        told = {*re.findall(r"`([^` ]+)`", sections[f"{name} {command}"])}
        options = {word for word in words if word.startswith("--")}
        own = {"--events", "--run-id", "--told"}  # of processes that others start
        assert options - told <= own, command


@pytest.mark.parametrize("app", [fedsrv.cli.app, fedcli.cli.app])
def test_every_option_is_explained(app):
    def visit(command):
        assert command.help, command.name
        for p in command.params:
            assert getattr(p, "help", None) or p.hidden, (command.name, p.name)
        for below in getattr(command, "commands", {}).values():
            visit(below)

    visit(typer.main.get_command(app))


@pytest.mark.parametrize("app", [fedsrv.cli.app, fedcli.cli.app])
def test_no_help_loses_words_in_brackets(app):
    """The help's markup takes ``[net]`` for a style, and shows nothing there."""

    def visit(command):
        texts = [command.help, command.short_help, command.epilog]
        texts += [getattr(p, "help", None) for p in command.params]
        for text in filter(None, texts):
            assert Text.from_markup(text).plain == text, command.name
        for below in getattr(command, "commands", {}).values():
            visit(below)

    visit(typer.main.get_command(app))


@pytest.mark.parametrize(
    ("app", "words"),
    [(fedsrv.cli.app, w.split()) for w in ("", "certs", "sweep", *FEDSRV)]
    + [(fedcli.cli.app, w.split()) for w in ("", *FEDCLI)],
)
def test_help(app, words):
    found = CliRunner().invoke(app, [*words, "-h"])
    assert found.exit_code == 0
    assert "Usage" in found.output
    assert "<bool>" not in found.output, "a flag takes no value"
    kinds = {kind for kind in re.findall(r"(?<= )<([^>]+)>", found.output) if kind != "id"}
    assert kinds <= {"path", "text", "number"}, "types of Python"


@pytest.mark.needs("studies")
def test_the_help_of_a_sweep_says_where_its_file_is_described():
    found = CliRunner().invoke(fedsrv.cli.app, ["sweep", "--help"]).output
    place, _, section = "docs/results.md#the-file-of-a-sweep".partition("#")
    assert f"{place}#{section}" in found
    titles = re.findall("^## (.*)$", (ROOT / place).read_text(), re.MULTILINE)
    assert section in [title.lower().replace(" ", "-") for title in titles]


def test_help_begins_with_what_a_new_user_needs():
    found = typer.main.get_command(fedsrv.cli.app)
    assert found.list_commands(None)[:3] == ["init", "launch", "serve"]


def panels_of(app):
    """Return the commands of a program, and the heading of each and of its options."""
    group = typer.main.get_command(app)
    context = group.make_context("it", [], resilient_parsing=True)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {
        name: (
            command.rich_help_panel,
            {max(o.opts, key=len): o.rich_help_panel for o in command.params
             if o.param_type_name == "option" and not o.hidden},
        )
        for name, command in found.items()
    }  # fmt: skip


def test_help_has_a_heading_for_every_command_and_for_each_of_many_options():
    found = {**panels_of(fedsrv.cli.app), **panels_of(fedcli.cli.app)}
    assert {name for name, (panel, _) in found.items() if panel is None} == set()
    listed = {*chain.from_iterable(help_panels.COMMANDS.values())}
    of_plugins = {name for brings in known().values() for name in brings.get("commands", ())}
    assert set(found) - of_plugins <= listed <= {*found, *of_plugins}, (
        "each is a command of one of the programs"
    )
    without = {
        (name, option)
        for name in ("launch", "serve", "join")
        for option, panel in found[name][1].items()
        if panel is None
    }
    assert without == set(), "each has a heading"
    options = {*chain.from_iterable(help_panels.OPTIONS.values())}
    assert options <= {option for _, of in found.values() for option in of}


@pytest.mark.parametrize("command", ["launch", "serve"])
def test_help_names_kinds_of_values_in_plain_letters(command):
    shown = CliRunner().invoke(fedsrv.cli.app, [command, "--help"]).output
    assert not re.search(r"\[x[<>]|<(text|path|number)>", shown)


@pytest.mark.parametrize("program", ["fedsrv", "fedcli"])
def test_the_module_of_a_program_runs_it(program):
    done = subprocess.run(
        [sys.executable, "-m", f"{program}.cli", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("fedtide ")


def test_options_come_from_the_environment(monkeypatch, capsys, tmp_path, config):
    monkeypatch.setenv("FEDSRV_INIT_OUT", str(tmp_path / "mine.toml"))
    assert run(monkeypatch, capsys, fedsrv.cli, "init", "quickstart")[0] == 0
    assert "#:schema" not in (tmp_path / "mine.toml").read_text(), "init writes no schema"
    monkeypatch.setenv("FEDSRV_LAUNCH_SET", "seed=1 method.nme=1")
    line = run(monkeypatch, capsys, fedsrv.cli, "launch", str(config))[1]
    assert "'nme'" in line
    assert "(options came from the environment: FEDSRV_LAUNCH_SET)" in line
    assert "FEDSRV_LAUNCH_SET" not in os.environ, "launch keeps it from its processes"
    monkeypatch.setenv("FEDCLI_EXPORT_PARTITION_CLIENT_ID", "many")
    words = "export-partition", str(tmp_path), "--out", str(tmp_path / "x")
    assert "'many'" in run(monkeypatch, capsys, fedcli.cli, *words)[1]
    monkeypatch.setenv("FEDCLI_PREDICT_TOP", "x")
    line = run(monkeypatch, capsys, fedcli.cli, "predict", "a.npy")[1]
    assert "Invalid value for 'FEDCLI_PREDICT_TOP' (the variable that stands" in line
    with pytest.raises(SystemExit):  # words of a program come with no variable
        fedcli.cli.main([*words, "--client-id", "none"])
    assert "'none'" in capsys.readouterr().err


def test_every_package_that_is_recommended_is_of_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name
        for part in ("fedcli", "fedsrv", "fedtide", "models", "proto")
        for path in (ROOT / part).rglob("*.py")
        for name in re.findall(r"pip_line\(['\"]([\w-]+)", path.read_text())
    }
    assert named >= {"onnx", "zstd", "tables"}
    assert named <= project["optional-dependencies"].keys()
    assert pip_line("zstd").startswith("pip install 'zstandard>=")
    with pytest.raises(ConfigError, match="no extra 'nothing'"):
        pip_line("nothing")


# --- what is wrong --------------------------------------------------------------------------------


def run(monkeypatch, capsys, module, *arguments):
    """Return exit status and standard error of a command, as a shell would see them."""
    monkeypatch.setattr(sys, "argv", [module.__name__.partition(".")[0], *arguments])
    try:
        module.main()
    except SystemExit as ended:
        status = ended.code
    else:
        status = 0
    return status, capsys.readouterr().err


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nname = "digits"\n[scenario]\nkind = "iid"\n[net]\nname = "mlp"\n'
        '[method]\nname = "fedprox"\n'
    )
    return path


@pytest.mark.parametrize("module", [fedsrv.cli, fedcli.cli], ids=["fedsrv", "fedcli"])
@pytest.mark.parametrize("arguments", [["nothing"], ["--nothing"]])
def test_wrong_usage(monkeypatch, capsys, module, arguments):
    status, error = run(monkeypatch, capsys, module, *arguments)
    assert status == 2
    assert "Usage" in error


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["serve", "{missing}"], "error: cannot read the config"),
        (["launch", "{missing}"], "error: cannot read the config"),
        (["serve", "{config}", "--set", "method.mue=1"], "unknown key 'mue' in [method]"),
        (["launch", "{config}", "--set", "seed"], "is not key=value"),
        (
            ["launch", "{config}", "--out", "{full}"],
            "holds files that are no run; give another --out",
        ),
        (
            ["launch", "{config}", "--out", "{full}", "--resume"],
            "holds files that are no run; give",
        ),
        (
            ["serve", "{config}", "--out", "{full}"],
            "holds files that are no run; give another --out",
        ),
        (["serve", "{config}", "--out", "{full}", "--resume"], "holds files that are no run; give"),
        (["serve", "{config}", "--out", "{out}", "--listen", "0.0.0.0:0"], "without TLS"),
        (["serve", "{config}", "--tls-cert", "x"], "belong together"),
        (["serve", "{config}", "--tls-client-ca", "x"], "needs --tls-cert"),
        (["methods", "fedprx"], "Did you mean 'fedprox'?"),
        (["launch", "{config}", "--set", "method.name=mine.py"], "by its file: 'mine.py:Name'"),
        (["launch", "{config}", "--set", "net.name=mine.py"], "by its file: 'mine.py:Name'"),
        (["export", "--run", "{out}", "--client", "3", "--to", "pickle"], "is none of safetensors"),
    ],
)
def test_mistakes_under_fedsrv(monkeypatch, capsys, tmp_path, config, command, line):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("")
    places = {"config": config, "missing": tmp_path / "no.toml"}
    places |= {name: tmp_path / name for name in ("full", "out")}
    arguments = [word.format(**places) for word in command]
    status, error = run(monkeypatch, capsys, fedsrv.cli, *arguments)
    assert status == 2
    errors = [text for text in error.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        (["partition", "{missing}", "--out", "{out}"], 2, "cannot read the config"),
        (["partition", "{config}", "--out", "{out}", "--set", "sed=1"], 2, "unknown key 'sed'"),
        (["join", "--client-id", "2-1"], 2, "is no id, no range"),
        (["join", "--client-id", "-1"], 2, "is no id, no range"),
        (["join", "--client-id", "0", "--device", "tpu"], 2, "is not auto, cpu or cuda:K"),
        (["join", "--client-id", "0", "--tls-cert", "x"], 2, "belong together; one of them"),
        (["join", "--client-id", "0", "--tls-cert", "x", "--tls-key", "x"], 2, "need --tls-ca"),
        (
            ["join", "--client-id", "0", "--state-dir", "{config}"],
            2,
            "run.toml is a file, not a directory; give another one",
        ),
        (["join", "--client-id", "0"], 2, "is not there: it should be this client's data"),
        (["join", "--client-id", "evaluator"], 2, "the evaluator has nothing to do"),
    ],
)
def test_mistakes_under_fedcli(monkeypatch, capsys, tmp_path, config, command, status, line):
    places = {"config": config, "missing": tmp_path / "no.toml", "out": tmp_path / "out"}
    arguments = [word.format(**places) for word in command]
    if command[0] == "join":
        arguments += ["--server", "127.0.0.1:1", "--data", str(tmp_path)]
        arguments[1:1] = ["--state-dir", str(tmp_path / "state")]  # a later one counts
    found, error = run(monkeypatch, capsys, fedcli.cli, *arguments)
    assert found == status
    errors = [text for text in error.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in error


LONG = "a" * 300


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (fedsrv.cli, ["serve", "{config}", "--out", LONG]),
        (fedsrv.cli, ["launch", "{config}", "--out", LONG]),
        (fedsrv.cli, ["launch", "{config}", "--data", LONG, "--out", "{out}"]),
        (fedsrv.cli, ["report", LONG]),
        (fedsrv.cli, ["recover", LONG]),
        (fedsrv.cli, ["export", "--run", LONG, "--to", "safetensors"]),
        (fedcli.cli, ["predict", "--run", LONG, "--client", "0", "x.npy"]),
        (fedcli.cli, ["check", LONG]),
        (fedcli.cli, ["partition", "{config}", "--out", LONG]),
        (fedcli.cli, ["export-partition", LONG, "--out", "{out}"]),
        (fedcli.cli, ["join", "--client-id", "0", "--server", "h:1", "--data", LONG]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_name_that_is_too_long_is_one_line(
    monkeypatch, capsys, tmp_path, config, module, command
):
    monkeypatch.chdir(tmp_path)
    arguments = [word.format(config=config, out=tmp_path / "out") for word in command]
    status, error = run(monkeypatch, capsys, module, *arguments)
    assert status in (1, 2)
    assert [line for line in error.splitlines() if line.startswith("error: ")]
    assert "File name too long" in error or "is not there" in error
    assert "Traceback" not in error


NO_TEXT = "runs\udce9"
"""A name of bytes that are no UTF-8, as Python has it."""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (fedsrv.cli, ["serve", "{config}", "--out", NO_TEXT]),
        (fedsrv.cli, ["launch", "{config}", "--out", NO_TEXT]),
        (fedsrv.cli, ["sweep", "{config}", "--out", NO_TEXT]),
        (fedsrv.cli, ["report", NO_TEXT]),
        (fedsrv.cli, ["status", NO_TEXT]),
        (fedsrv.cli, ["export", "--run", NO_TEXT, "--to", "safetensors"]),
        (fedcli.cli, ["predict", "--run", NO_TEXT, "--client", "0", "x.npy"]),
        (fedcli.cli, ["partition", "{config}", "--out", NO_TEXT]),
        (fedcli.cli, ["join", "--client-id", "0", "--state-dir", NO_TEXT]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_name_that_is_no_text_is_one_line(monkeypatch, capsys, tmp_path, config, module, command):
    """A run began in such a directory, trained to its end, and could not be read."""
    monkeypatch.chdir(tmp_path)
    arguments = [word.format(config=config) for word in command]
    line = "error: runs\\udce9 is not written in UTF-8, as names of files have to be: rename it\n"
    assert run(monkeypatch, capsys, module, *arguments) == (2, line)
    assert not list(tmp_path.glob("runs*"))


def test_a_name_that_is_no_text_comes_from_a_variable_or_from_python(monkeypatch, capsys, config):
    monkeypatch.setenv("FEDSRV_LAUNCH_OUT", NO_TEXT)
    status, error = run(monkeypatch, capsys, fedsrv.cli, "launch", str(config))
    assert (status, error.count("\n")) == (2, 1)
    assert "runs\\udce9 is not written in UTF-8" in error
    with pytest.raises(ConfigError, match="is not written in UTF-8"):
        fedtide.run(str(config), out=NO_TEXT)
    with pytest.raises(ConfigError, match="is not written in UTF-8"):
        fedtide.client("127.0.0.1:1", 0, NO_TEXT)


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("x"), 2), (LinkError("x"), 1), (KeyboardInterrupt(), 130)]
)
@pytest.mark.parametrize("module", [fedsrv.cli, fedcli.cli], ids=["fedsrv", "fedcli"])
def test_exit_status(monkeypatch, capsys, module, error, status):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(module, "app", fails)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run(monkeypatch, capsys, module)[0] == status


def test_a_config_may_begin_with_the_mark_of_some_editors(config):
    config.write_text(config.read_text(), "utf-8-sig")
    assert read_experiment(config).method.name == "fedprox"


@pytest.mark.parametrize("module", [fedsrv.cli, fedcli.cli], ids=["fedsrv", "fedcli"])
def test_ctrl_c_is_one_line(monkeypatch, capsys, module):
    """Also while a command only begins; another Ctrl-C does not disturb the end."""

    def interrupted(self, *_):
        raise KeyboardInterrupt

    told = []
    monkeypatch.setattr(typer.core.TyperGroup, "invoke", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *words: told.append(words))
    assert run(monkeypatch, capsys, module, "init" if module is fedsrv.cli else "data") == (
        130,
        "stopped\n",
    )
    assert told == [(signal.SIGINT, signal.SIG_IGN)]


def test_client_ids():
    assert fedcli.cli.clients_of("7") == [7]
    assert fedcli.cli.clients_of("0-3") == [0, 1, 2, 3]
    assert fedcli.cli.clients_of("1-9:4") == [1, 5, 9]
    assert fedcli.cli.clients_of("0-2:2") == [0, 2]
    assert fedcli.cli.clients_of("evaluator") == ["evaluator"]
    for text in ("", "a", "1-", "-", "3-1", "1,2", "1 - 2", "٣", "1-2-3", "0-4:0", "3:2"):
        with pytest.raises(ConfigError):
            fedcli.cli.clients_of(text)


def test_an_older_typer_names_kinds_of_values_by_itself():
    class Option:
        metavar, is_flag, show_envvar = None, True, True

    (made,) = _plain([Option()])
    assert (made.metavar, made.show_envvar) == ("", False)
    assert not hasattr(made, "display_type")


@pytest.mark.parametrize(
    ("begun", "some"),
    [
        ("schedule.ro", ["schedule.rounds="]),
        ("server.red", ["server.reduce="]),
        ("see", ["seed="]),
        ("method.name=fedpro", ["method.name=fedprox", "method.name=fedproto"]),
        ("net.name=ml", ["net.name=mlp"]),
        ("seed=1", []),
        ("no.such", []),
    ],
)
def test_a_key_of_set_is_completed(begun, some):
    assert complete_key(begun) == some


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("init qui", ["quickstart"]),
        ("launch x --set method.name = fedpro", ["fedprox", "fedproto"]),
        ("launch x --set = net.name = mlp", ["mlp"]),
        ("launch x --set seed = 1 --set schedule.ro", ["schedule.rounds="]),
    ],
)
def test_values_are_completed_in_a_shell(words, offered):
    """As bash takes words apart: a sign ``=`` is a word of its own."""
    given = ["fedsrv", *words.split()]
    shell = {
        "_FEDSRV_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(given),
        "COMP_CWORD": str(len(given) - 1),
    }
    command = [str(Path(sys.executable).with_name("fedsrv"))]
    found = subprocess.run(
        command, env={**os.environ, **shell}, capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == offered


@pytest.mark.parametrize(
    ("is_terminal", "options", "asked"),
    [
        (True, [], True),
        (False, [], False),
        (True, ["--json"], False),
        (False, ["--forecast"], True),
        (True, ["--no-forecast"], False),
    ],
)
def test_a_launch_that_nobody_watches_tries_no_client(
    tmp_path, monkeypatch, is_terminal, options, asked
):
    """Sweeps, queues, agents and jobs of CI write to a file or a pipe."""
    told = list[bool]()
    monkeypatch.setattr(
        "fedsrv.launch.launcher.launch", lambda *args, forecasts, **more: told.append(forecasts)
    )
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.setattr(sys, "argv", ["fedsrv", "launch", "quickstart"])
    sys.argv += ["--out", str(tmp_path / "run"), *options]
    with contextlib.suppress(SystemExit):
        fedsrv.cli.app(standalone_mode=False)
    assert told == [asked]
