"""Plugins are found by entry points; one of our own whose folder is gone is told by its name."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, PathDistribution

import pytest
from typer.testing import CliRunner

from fedmodels import plugins
from fedmodels.console.commands import run_command
from fedmodels.console.options import program
from fedmodels.errors import ConfigError
from fedmodels.plugins import loaded, offered, owner_of, usable
from tests.conftest import script_of, tiny_experiment

GROUP = "fedsrv.commands"


@pytest.fixture
def installed(monkeypatch):
    """Have some entry points installed, and these folders of our own there."""

    def install(*points: tuple[str, str], folders: tuple[str, ...] = ()) -> None:
        found = [EntryPoint(name, place, GROUP) for name, place in sorted(points)]
        monkeypatch.setattr(plugins, "_all", lambda path: {GROUP: found})
        monkeypatch.setattr(plugins, "is_here", lambda name: name in folders)

    return install


def test_a_plugin_of_our_own_is_left_out_where_its_folder_is_gone(installed):
    ours, other = ("ours", "fedplugins.ours.command:app"), ("other", "json:dumps")
    installed(ours, other, folders=())
    assert [point.name for point in offered(GROUP)] == ["other"]
    assert list(loaded(GROUP)) == [json.dumps]
    installed(ours, other, folders=("ours",))
    assert [point.name for point in offered(GROUP)] == ["other", "ours"]


def test_a_plugin_of_others_that_cannot_be_loaded_is_one_line(installed, capsys):
    installed(("broken", "a_module_that_nobody_has:app"), ("other", "json:dumps"))
    line = "the plugin broken cannot be loaded: ModuleNotFoundError: No module named 'a_module"
    with pytest.raises(ConfigError, match=line):
        list(loaded(GROUP))
    assert list(usable(GROUP)) == [json.dumps], "other commands work"
    assert capsys.readouterr().err.startswith(f"note: {line}")


def test_a_folder_with_compiled_files_alone_is_gone(tmp_path, monkeypatch):
    (tmp_path / "ours" / "emptied" / "__pycache__").mkdir(parents=True)
    (tmp_path / "ours" / "whole").mkdir()
    for package in ("ours", "ours/whole"):
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "OURS", "ours")
    assert not plugins.is_here.__wrapped__("emptied")
    assert plugins.is_here.__wrapped__("whole")
    monkeypatch.setattr(plugins, "OURS", "nowhere")
    assert not plugins.is_here.__wrapped__("whole")


def test_a_command_of_a_plugin_that_is_gone_is_told_by_its_name(installed, monkeypatch, capsys):
    monkeypatch.setattr(plugins, "known", lambda: {"studies": {"commands": ["sweep"]}})
    installed()
    app = program("For a test.")
    app.command()(test_a_folder_with_compiled_files_alone_is_gone)
    with pytest.raises(SystemExit) as ended:
        run_command(app, ["sweep", "x.toml"])
    assert ended.value.code == 2
    line = "error: sweep is of the plugin studies, which this installation lacks\n"
    assert capsys.readouterr().err == line
    assert "No such command 'swep'" in CliRunner().invoke(app, ["swep"]).output
    installed(("studies", "json:dumps"))
    assert owner_of("commands", "sweep") == "studies", "a stranger's plugin has its name"
    installed(("studies", "fedplugins.studies.command:app"), folders=("studies",))
    assert owner_of("commands", "sweep") is None


def test_the_table_of_plugins_tells_which_are_gone(installed, monkeypatch):
    monkeypatch.setattr(plugins, "known", lambda: {"ours": {}, "gone": {}})
    installed(("other", "json:dumps"), ("ours", "fedplugins.ours:app"),
              folders=("ours",))  # fmt: skip
    found = [(p.name, p.groups, p.is_here) for p in plugins.plugins()]
    assert found == [("gone", (), False), ("ours", (GROUP,), True), ("other", (GROUP,), True)]


def test_a_config_is_parsed_without_a_look_at_installed_packages(monkeypatch):
    """Each parse read the metadata of the package of each entry point: 30 ms, 94 % of it all."""
    tiny_experiment()
    read = list[str]()
    real = PathDistribution.read_text
    monkeypatch.setattr(
        PathDistribution, "read_text", lambda self, name: read.append(name) or real(self, name)
    )
    tiny_experiment()
    assert read == []


@pytest.mark.needs
def test_what_the_core_knows_of_our_plugins_is_current():
    assert script_of("plugins").content() == dict(plugins.known()), "make docs writes it"
