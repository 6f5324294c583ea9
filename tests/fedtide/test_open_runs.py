"""Open runs of this process, on directories of one's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtide
from fedmodels.errors import ConfigError, DataError
from tests.conftest import records_of
from tests.tutorials.test_tutorials import BLOCK, DOCS


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the tutorial, and what its script makes of them.

    A month has two rounds in place of eight, to save time.
    """
    place = tmp_path_factory.mktemp("months")
    for _, title, content in BLOCK.findall((DOCS / "tutorial-stream.md").read_text()):
        if title:
            (place / title).write_text(content.replace("rounds = 8", "rounds = 2"))
    subprocess.run([sys.executable, "months.py"], cwd=place, check=True)
    return place


def test_the_example_of_the_page_runs_with_the_config_of_the_tutorial(months, monkeypatch):
    """It failed: the config has no ``[data]``, and no directories could be given."""
    monkeypatch.chdir(months)
    page = (DOCS / "streams.md").read_text()
    (example,) = re.findall(r"```python\n(import fedtide\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["summary"]["metrics"]["a_glo"] > 0.9
    growths = [g for record in records_of(months / "run") for g in record.get("growths", ())]
    assert [dict(g["tasks"]) for g in growths] == [{0: 1, 1: 1}, {0: 2}]
    assert not (months / "run" / "data").exists()
    assert (months / "data" / "0" / "task-1").is_dir()
    again = fedtide.open_run("stream.toml", data="data", out="run", resume=True)
    assert again.close().summary["state_sha256"] == names["summary"]["state_sha256"]


def test_what_cannot_be_is_refused_in_a_line(months, tmp_path):
    config = months / "stream.toml"
    with pytest.raises(ConfigError, match=r"the config has no \[data\]"):
        fedtide.open_run(config, out=tmp_path / "none")
    with pytest.raises(DataError, match=r"^data .*nowhere holds no client directory 0"):
        fedtide.open_run(config, data=months / "nowhere", out=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^data .* has no data of client 2, and"):
        fedtide.open_run(
            config, {"schedule.begin_with": 3}, data=months / "data", out=tmp_path / "none"
        )
    assert not os.path.exists(tmp_path / "none")
    run = fedtide.open_run(config, data=os.fspath(months / "data"), out=tmp_path / "run")
    never = "client 1 has never joined this run: it cannot retire"  # and has data
    with pytest.raises(ConfigError, match=never):
        run.retire([1, 2])
    with pytest.raises(ConfigError, match="retire takes the numbers of clients, and '1' is none"):
        run.retire(["1"])
    with pytest.raises(DataError):
        run.add_task(2, months / "march")
    with pytest.raises(DataError, match="has no task 9: it has "):
        run.drop_task(0, 9)


def test_a_run_that_goes_on_shows_its_figures_and_deployed_models(tmp_path):
    """Both were there after close() alone."""
    tables = {
        "data": {"name": "digits", "max_per_class": 20},
        "scenario": {"kind": "iid", "tasks": 1},
        "net": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedavg"},
        "schedule": {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2},
    }
    run = fedtide.open_run(tables, {"deploy": {}}, out=tmp_path / "run")
    with pytest.raises(DataError, match=r"client 0 has no deployed model yet: learn\(\) with a"):
        run.personal_model(0)
    run.learn()
    assert len(run.metrics()["interaction"]) == 1
    inputs = np.zeros((3, *run.personal_model(0).facts.input_shape), np.float32)
    given = run.predict(0, inputs)
    assert given.tolist() == run.personal_model(0).predict(inputs).tolist()
    run.close()
