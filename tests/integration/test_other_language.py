"""A client in JavaScript, made of the schema and docs/protocol.md, beside one in Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpb import PROTOCOL
from tests.conftest import records_of
from tests.integration.conftest import tables

pytestmark = pytest.mark.loopback

ROOT = Path(__file__).parent.parent.parent
CLIENT = ROOT / "examples" / "extend" / "other-language" / "client.js"
NODE = shutil.which("node")
MODULES = "FEDTIDE_NODE_MODULES"
"""Variable that names a ``node_modules`` with the packages of the client's package.json."""


def packages() -> Path | None:
    """Return a directory that holds the client's packages, if there is one."""
    named = os.environ.get(MODULES)
    places = (
        [Path(named)]
        if named
        else [CLIENT.parent / "node_modules", ROOT / "build/node/node_modules"]
    )
    wanted = json.loads((CLIENT.parent / "package.json").read_text())["dependencies"]
    return next((p for p in places if all((p / name).is_dir() for name in wanted)), None)


PACKAGES = packages()
WITH_NODE = pytest.mark.skipif(
    NODE is None or PACKAGES is None,
    reason=f"node or its packages are missing: npm install, then name node_modules by {MODULES}",
)


def test_it_speaks_the_protocol_of_the_schema_beside_it():
    """Also where there is no node."""
    text = CLIENT.read_text()
    assert f"const PROTOCOL = {PROTOCOL};" in text
    (up,) = re.findall(r"__dirname, ((?:'\.\.', )+)'proto'", text)
    assert CLIENT.parents[up.count("..")] == ROOT


class Script:
    """The client in JavaScript as a process."""

    def __init__(self, port: int, client: str, data: Path, root: Path) -> None:
        self.log = root / f"node-{client}.log"
        words = [f"127.0.0.1:{port}", client, str(data), str(root / f"session-{client}.json")]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [str(NODE), str(CLIENT), *words], stdout=out, stderr=out,
                env={**os.environ, "NODE_PATH": str(PACKAGES)},
            )  # fmt: skip

    def wait(self) -> int:
        return self.process.wait(60)

    def output(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    """Return a list of clients that are ended with the test."""
    started: list[Script] = []
    yield started
    for script in started:
        script.close()


SOFTMAX = tables(
    "fedavg",
    net={"name": "mlp", "hidden": []},
    training={"local_epochs": 3, "batch_size": 1000, "lr": 0.5},
)
"""Each step sees all examples, so that their order in an epoch does not matter."""


@WITH_NODE
def test_a_client_in_javascript_takes_part(loopback, scripts):
    """What it trains, counts and sends is what a Python client does, but for rounding."""
    alone = loopback(SOFTMAX, "python")
    alone.run("0-2")
    mixed = loopback(SOFTMAX, "javascript")
    server = mixed.serve()
    python = mixed.join("0-1")
    scripts.append(Script(mixed.port, "2", mixed.partition, mixed.root))
    server.wait_kind("beat", client="2")
    mixed.finish(server, python, *scripts)
    for ours, theirs in zip(records_of(alone.out), records_of(mixed.out), strict=True):
        assert theirs["metrics"]["loss"] == pytest.approx(ours["metrics"]["loss"], rel=1e-5)
        assert theirs["metrics"]["a_sel"] == pytest.approx(ours["metrics"]["a_sel"], abs=0.01)
        assert theirs["bytes"]["per_client"] == ours["bytes"]["per_client"]
        assert theirs["cohort"] == [0, 1, 2]
    assert "a_glo" in theirs["metrics"]
    assert "ORDER_KIND_FINISH" in scripts[0].output()


@WITH_NODE
def test_a_client_in_javascript_outlives_its_server(loopback, scripts):
    """The coordinator is killed after the first commit; its clients join the next one."""
    run = loopback({**SOFTMAX, "schedule": {"rounds": 6, "clients": 3}})
    server = run.serve()
    scripts.append(Script(run.port, "2", run.partition, run.root))
    python = run.join("0-1")
    server.wait_kind("commit", interaction=0)
    server.kill()
    server = run.serve()
    run.finish(server, python, *scripts)


@WITH_NODE
def test_what_it_does_not_know_ends_it_with_a_line(loopback, scripts):
    run = loopback(tables("fedprox"))
    run.serve()
    scripts.append(Script(run.port, "2", run.partition, run.root))
    assert scripts[0].wait() == 1
    assert "error: this client knows fedavg and an mlp without hidden layers" in scripts[0].output()
