"""Every command the README shows exists, with the options it is shown with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from fedcli.cli import app as fedcli
from fedsrv.cli import app as fedsrv

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = {"fedsrv": typer.main.get_command(fedsrv), "fedcli": typer.main.get_command(fedcli)}


def shown(page: Path) -> list[str]:
    """Return the command lines of a page: in blocks of code, and in backticks."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.S | re.M)
    lines = [part for block in blocks for line in block.splitlines() for part in line.split("&&")]
    lines += re.findall(r"`((?:fedsrv|fedcli) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [line.strip() for line in lines if re.match(r"\s*(fedsrv|fedcli) [a-z]", line)]


def deployed(path: Path) -> list[str]:
    """Return the commands that a file of ``deploy/`` starts."""
    text = re.sub(r"\n +(?=--)", " ", path.read_text())
    text = re.sub(r"\n +- (?=--|localhost)", " ", text)  # a list of words
    program = {"serve": "fedsrv serve", "join": "fedcli join", "health": "fedsrv health"}
    found = re.findall(r"^\s+(?:- )?(serve|join|health) (.*)$", text, flags=re.MULTILINE)
    found += re.findall(r"bin/fedsrv (serve) (.*)'$", text, flags=re.MULTILINE)
    return [f"{program[name]} {rest}" for name, rest in found]


DEPLOY = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())
SHOWN = [(page.name, line) for page in PAGES for line in shown(page)]
SHOWN += [(path.name, line) for path in DEPLOY for line in deployed(path)]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[line[:60] for _, line in SHOWN])
def test_a_shown_command_exists(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    command: Any = COMMANDS[words.pop(0)]
    while words and hasattr(command, "commands") and re.match(r"[a-z]", words[0]):
        for name in words.pop(0).split("|"):
            assert name in command.commands, line
        command = command.commands[name]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in words:
        if re.match(r"--[a-z]", word):
            assert word.partition("=")[0].rstrip("…") in options, (line, sorted(options))


def test_the_readme_shows_its_commands() -> None:
    assert len([1 for page, _ in SHOWN if page == "README.md"]) >= 10


def test_deployed_commands_are_found() -> None:
    assert len([1 for page, _ in SHOWN if page == "compose.yml"]) == 3
    assert len([1 for page, _ in SHOWN if page == "fedsrv.service"]) == 1
    assert len([1 for page, _ in SHOWN if page == "coordinator.yaml"]) == 2
    assert len([1 for page, _ in SHOWN if page == "sites.yaml"]) == 1
