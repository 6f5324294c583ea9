"""Every command that a page shows exists, with the options, configs and keys it is shown with."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from fedcli.cli import app as fedcli
from fedmodels.config.presets import preset_file, presets
from fedmodels.facts.config_file import parse_experiment
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


def preset_of(words: list[str]) -> Path | None:
    """Return the config of fedtide that a command is given: by path, or as ``init`` copies it."""
    if (
        len(words) > 2
        and words[1] in ("launch", "serve", "partition", "forecast", "pretrain")
        and words[2] in presets()
    ):
        return preset_file(words[2])
    for word in (word for word in words if word.endswith(".toml")):
        if (ROOT / word).exists() or word.startswith(("examples/", "benchmarks/")):
            return ROOT / word
        if word.removesuffix(".toml") in presets():
            return preset_file(word.removesuffix(".toml"))
    return None


def benchmarked(page: Path) -> list[str]:
    """Return the benchmarks that a page starts."""
    text = re.sub(r"\\\n", " ", page.read_text())
    return re.findall(r"python -m (benchmarks\b[^`#\n]*)", text)


def deployed(path: Path) -> list[str]:
    """Return the commands that a file of ``deploy/`` starts."""
    text = re.sub(r"\n +(?=--)", " ", path.read_text())
    text = re.sub(r"\n +- (?=--|localhost|/etc)", " ", text)  # a list of words
    program = {"serve": "fedsrv serve", "join": "fedcli join", "health": "fedsrv health"}
    found = re.findall(r"^\s+(?:- )?(serve|join|health) (.*)$", text, flags=re.MULTILINE)
    found += re.findall(r"bin/fedsrv (serve) (.*)'$", text, flags=re.MULTILINE)
    return [f"{program[name]} {rest}" for name, rest in found]


DEPLOY = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())
SHOWN = [(page.name, line) for page in PAGES for line in shown(page)]
SHOWN += [(path.name, line) for path in DEPLOY for line in deployed(path)]


@pytest.mark.needs
def test_shown_commands_exist():
    for line in {line for _, line in SHOWN}:
        check_command(line)


def check_command(line: str) -> None:
    """Check that there are the command and the options of a line."""
    words = shlex.split(line, comments=True)
    command: Any = COMMANDS[words.pop(0)]
    while words and hasattr(command, "commands") and re.match(r"[a-z]", words[0]):
        for name in words.pop(0).split("|"):
            assert name in command.commands, line
        command = command.commands[name]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in words:
        if option := re.match(r"--[a-z][\w-]*", word):
            assert option[0] in options, (line, sorted(options))


def started() -> list[tuple[str, list[str], Path]]:
    """Return page, words and config of every shown command that takes a config of fedtide."""
    found = [(page, shlex.split(line, comments=True)) for page, line in SHOWN]
    return [(page, words, path) for page, words in found if (path := preset_of(words)) is not None]


STARTED = started()


@pytest.mark.parametrize(
    ("words", "path"), [row[1:] for row in STARTED], ids=[" ".join(w)[:60] for _, w, _ in STARTED]
)
def test_a_shown_config_takes_the_keys_it_is_shown_with(words, path):
    assert path.exists()
    if words[1] != "sweep":  # test_studies.py reads those
        keys = [after for word, after in itertools.pairwise(words) if word == "--set"]
        parse_experiment(path.read_text(), path.name, keys)


def test_configs_with_keys_were_found():
    assert {"README.md", "fedali.md", "populations.md"} <= {page for page, *_ in STARTED}
    assert len([words for _, words, _ in STARTED if "--set" in words]) >= 15


BENCHMARKED = [line for page in PAGES for line in benchmarked(page)]


def test_shown_benchmarks_exist():
    for line in {*BENCHMARKED}:
        module, *words = shlex.split(line)
        place = ROOT / module.replace(".", "/")
        source = place.with_suffix(".py")
        source = source if source.exists() else place / "__main__.py"
        assert source.exists(), line
        text = source.read_text()
        shared = ["--keep"] if re.search(r"parser_of\(.*, __doc__, ", text) else []
        for word in words:
            assert not word.startswith("--") or f'"{word}"' in text or word in shared, line
            assert not word.endswith(".toml") or "/" not in word or (ROOT / word).exists(), line


def test_shown_studies_exist():
    studies = [s for page in PAGES for s in re.findall(r"STUDY=([\w-]+)", page.read_text())]
    assert len(studies) >= 10
    results = [page.read_text() for page in (ROOT / "docs" / "results").glob("*.md")]
    linked = re.compile(r"\[`([a-z]+(?:-[a-z]+)*)`\]\([\w-]*(?:\.md)?#?[\w-]*\)")
    studies += (verdicts := [study for text in results for study in linked.findall(text)])
    assert len({*verdicts}) >= 20
    assert {s for s in studies if not (ROOT / "benchmarks/studies" / f"{s}.toml").exists()} == set()
    assert len(BENCHMARKED) >= 15


def test_the_readme_shows_its_commands():
    assert len([1 for page, _ in SHOWN if page == "README.md"]) >= 5
    assert len([1 for page, _ in SHOWN if page == "commands.md"]) >= 10


def test_deployed_commands_are_found():
    assert len([1 for page, _ in SHOWN if page == "compose.yml"]) == 4
    assert len([1 for page, _ in SHOWN if page == "fedsrv.service"]) == 1
    assert len([1 for page, _ in SHOWN if page == "coordinator.yaml"]) == 2
    assert len([1 for page, _ in SHOWN if page == "sites.yaml"]) == 1


def test_the_picture_of_the_readme_shows_its_quickstart_and_one_digest():
    """``docs/site/kill_picture.py`` draws it from a real run."""
    picture = (ROOT / "docs" / "img" / "kill.svg").read_text()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", picture)
    digests = [text for text in texts if text.startswith("state digest: ")]
    assert len(digests) == 2
    assert len({*digests}) == 1
    readme = (ROOT / "README.md").read_text()
    assert "fedsrv launch quickstart --out run\n" in readme
    assert "$ fedsrv launch quickstart --out run --resume" in texts
    ends = {text for text in texts if text.startswith("the run has finished")}
    (reached,) = (re.findall(r"a_loc ([\d.]+) %", text)[0] for text in ends)
    assert f"| **{float(reached):.0f} %** |" in readme
