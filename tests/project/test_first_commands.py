"""What a new user types first: the version, completion, the list of presets and a copy of one."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcli.cli
import fedsrv.cli
from fedmodels.config.presets import FOLDERS, preset_directory, preset_file, preset_files, presets
from fedmodels.facts.config_file import parse_experiment, read_experiment
from fedmodels.methods import names
from fedplugins.presets.presets import about, text_of

BOTH = pytest.mark.parametrize("module", [fedsrv.cli, fedcli.cli], ids=["fedsrv", "fedcli"])


@BOTH
def test_the_version_is_printed(module):
    found = CliRunner().invoke(module.app, ["--version"])
    assert found.exit_code == 0
    assert found.output == f"fedtide {version('fedtide')}\n"


@BOTH
def test_completion_can_be_installed(module):
    found = CliRunner().invoke(module.app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert "--install-completion" in re.sub(r"\x1b\[[0-9;]*m", "", found.output)


def test_every_preset_is_listed_with_a_sentence():
    found = CliRunner().invoke(fedsrv.cli.app, ["init"])
    assert found.exit_code == 0
    lines = found.output.splitlines()
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == presets()
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == [*FOLDERS]
    assert any("quickstart" in line for line in lines[1:4])
    assert all(len(about(name)) > 20 for name in presets())


def test_a_preset_is_copied_with_its_comments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(fedsrv.cli.app, ["init", "quickstart"])
    assert found.exit_code == 0
    assert "fedsrv launch quickstart.toml" in found.output
    text = Path("quickstart.toml").read_text()
    schema, _, preset = preset_file("quickstart").read_text().partition("\n")
    assert schema == "#:schema ../fedtide.schema.json"  # of a file that nobody wrote here
    assert text == preset
    assert text.startswith("#")
    parse_experiment(text, "quickstart.toml", ())
    found = CliRunner().invoke(fedsrv.cli.app, ["init", "quickstart", "--out", "my own.toml"])
    assert found.output.endswith("fedsrv launch 'my own.toml' --out run\n")


def test_a_name_is_that_of_one_preset():
    stems = [p.stem for p in preset_directory().glob("*/*.toml")]
    assert sorted(stems) == presets()
    assert {path.parent.name for path in preset_files().values()} == FOLDERS.keys()


def test_a_preset_goes_by_its_name_unless_a_file_is_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_experiment(Path("quickstart")).method.name == "fedmlp"
    Path("gldp-small").mkdir()  # the directory of a run
    assert read_experiment(Path("gldp-small")).method.name == "gldp"
    Path("quickstart").write_text(preset_file("ifca-small").read_text())
    assert read_experiment(Path("quickstart")).method.name == "ifca"


@pytest.mark.parametrize("method", sorted(names()))
def test_every_method_has_a_small_config(method):
    assert parse_experiment(text_of(method), method).method.name == method


def test_a_sweep_is_copied_with_its_own_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(fedsrv.cli.app, ["init", "compare"])
    assert found.output.endswith("fedsrv sweep compare.toml --out run\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["quikstart"], "is no preset. Did you mean 'quickstart'?"),
        (["../quickstart"], "is no preset."),
        (["quickstart", "--out", "there.toml"], "there.toml exists; give another name"),
        (["quickstart", "--out", "no/where.toml"], "cannot write no/where.toml: No such file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["fedsrv", "init", *words])
    with pytest.raises(SystemExit) as ended:
        fedsrv.cli.main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert line in errors[0]
    assert Path("there.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("a/quickstart.toml", "; fedsrv init quickstart writes the preset of that name to quick"),
        ("quikstart", ". Did you mean 'quickstart'? fedsrv init copies a preset"),
        ("mine", "; mine.toml is there"),
        ("something-else.toml", "No such file or directory"),
        pytest.param("a" * 252, "No such file or directory", id="long"),  # with .toml too long
    ],
)
@pytest.mark.parametrize("words", ["fedsrv launch", "fedsrv serve", "fedcli partition"])
def test_a_preset_in_place_of_a_file_is_told_how_it_becomes_one(
    tmp_path, monkeypatch, capsys, words, given, line
):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").touch()
    program, command = words.split()
    monkeypatch.setattr(sys, "argv", [program, command, given, "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        {"fedsrv": fedsrv.cli, "fedcli": fedcli.cli}[program].main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith(f"error: cannot read the config {given}: No such file")
    assert line in errors[0]


@pytest.mark.needs("reference")
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "LANG": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "C"],
)
def test_letters_that_standard_output_lacks_are_replaced(environment):
    found = subprocess.run(
        [sys.executable, "-m", "fedsrv", "metrics"], capture_output=True, timeout=180,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"?" in found.stdout
    assert found.stdout.isascii()


@pytest.mark.parametrize(
    "words", [["fedsrv", "plugins"], ["fedsrv", "--help"], ["fedcli", "data"]], ids=" ".join
)
def test_a_full_disk_behind_standard_output_is_one_line(words):
    with open("/dev/full", "wb") as full:
        found = subprocess.run(
            [sys.executable, "-m", *words], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=180,
        )  # fmt: skip
    line = "error: cannot write output: No space left on device\n"
    assert (found.returncode, found.stderr) == (2, line)


def test_a_mistake_is_one_line_where_standard_output_is_closed(tmp_path):
    command = f"exec {sys.executable} -m fedsrv report {tmp_path / 'nowhere'} >&-"
    found = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=180)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_opened_on_nothing(tmp_path, closed):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from fedsrv.launch.forked import open_standard_streams\n"
        "open_standard_streams()\n"
        "print('out', flush=True), print('error', file=sys.stderr, flush=True), sys.stdin.read()\n"
        "assert min(os.pipe()) > 2\n"
    )
    command = f"exec {sys.executable} {script} {closed}"
    found = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=180, input=""
    )
    assert (found.returncode, "Traceback" in found.stderr) == (0, False), found.stderr


def test_a_current_directory_that_is_gone_is_one_line(tmp_path):
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m fedsrv plugins"
    found = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=180, cwd=tmp_path
    )
    line = "error: the current directory is gone: change to one that is there\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", line)
