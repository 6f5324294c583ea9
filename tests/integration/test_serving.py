"""The page on serving, as it is printed: a model answers while its client trains, and is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import tomllib
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.runtime.deployed import Deployed
from tests.integration.harness import Client, ForkServer, reached, until
from tests.tutorials.test_tutorials import BLOCK, DOCS

pytestmark = pytest.mark.loopback
BLOCKS = BLOCK.findall((DOCS / "serving.md").read_text())
ADDRESS = re.compile(r"answers at (http://127\.0\.0\.1:\d+/)predict")


def got(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


class Page:
    """The commands of the page, in a folder."""

    def __init__(self, folder: Path, forks: ForkServer) -> None:
        self.folder, self.forks = folder, forks
        self.here = {name: str(folder / name) for name in ("inbox", "states")} | {"8100": "0"}

    def words(self, begins: str) -> list[str]:
        """Return the words of the command that begins so, with places of this folder."""
        lines = [
            line
            for language, title, content in BLOCKS
            for line in content.splitlines()
            if language == "sh" and not title and line.startswith(begins)
        ]
        return [self.here.get(word, word) for word in min(lines, key=len).split()[1:]]

    def start(self, begins: str) -> Client:
        words = self.words(begins)
        return self.forks.start(words, self.folder / f"{words[0]}.log")

    def typed(self, begins: str, *more: str) -> str:
        status, said = self.forks.typed(self.folder, "fedcli", *self.words(begins), *more)
        assert status == 0, said
        return said


def test_a_model_answers_while_its_client_trains(loopback, fork_server, tmp_path):
    page = Page(tmp_path, fork_server)
    (config,) = (content for _, title, content in BLOCKS if title == "serving.toml")
    (tmp_path / "serving.toml").write_text(config)
    (tmp_path / "inbox").mkdir()
    page.typed("fedcli partition")
    tables = tomllib.loads(config)
    run = loopback({name: table for name, table in tables.items() if name != "deploy"})
    run.serve()
    where = {"data": tmp_path / "clients", "states": tmp_path / "states"}
    clients = run.join("0-1", "--deploy", **where)  # as [deploy] of the coordinator would have it

    # --- a file that is there before the first model, and one asked over HTTP
    digit = np.load(tmp_path / "clients/0/task-0/test_x.npy")[0]
    np.save(tmp_path / "inbox/one.npy", digit)
    live = Deployed(tmp_path / "states/0")
    reached(live.previous)
    server, watcher = page.start("fedcli serve-model"), page.start("fedcli predict --watch")
    until(lambda: ADDRESS.search(server.output()), "the server did not begin")
    url = ADDRESS.findall(server.output())[0]
    answer = got(f"{url}predict", json.dumps(digit.tolist()).encode())
    assert sum(answer["predictions"][0]["probabilities"]) == pytest.approx(1, abs=1e-5)
    given, refused = (tmp_path / f"inbox/one.npy.{end}" for end in ("predictions.csv", "error.txt"))
    with suppress(AssertionError):
        until(lambda: given.exists() or refused.exists(), "the file has no answer")
    assert given.exists(), watcher.output()

    # --- back to the model before, while rounds go on
    said = page.typed("fedcli rollback")
    back, _ = map(int, re.findall(r"round (\d+)", said))
    before, was = map(int, re.findall(r"interaction (\d+)", said))
    assert before < was
    assert got(f"{url}health")["model"]["round"] == back
    until(lambda: "a roll-back holds its live model" in clients.output(), "nothing is held")
    assert got(f"{url}health")["held"]

    # --- it goes on, and a kill of the client costs no answer
    page.typed("fedcli rollback", "--release")
    counted = live.status().went_live + live.status().refused
    until(lambda: live.status().went_live + live.status().refused > counted, "it is held still")
    clients.kill()
    assert got(f"{url}health")["model"]["round"] >= back
    again = run.join("0-1", "--deploy", **where)
    counted = live.status().went_live + live.status().refused
    until(
        lambda: live.status().went_live + live.status().refused > counted,
        "the client offers no model after its kill",
    )
    assert got(f"{url}health")["status"] == "ok"

    # --- the end
    for process in (server, watcher, again):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 143
        assert "Traceback" not in process.output()
