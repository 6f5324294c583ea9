"""The distribution's Python interface: run, open, use, extend, and bring a custom method."""

from __future__ import annotations

import base64
import doctest
import json
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import tomli_w
import torch

import fedtide
from fedmodels.errors import ArchiveError, ConfigError, DataError, FedtideError, RunFailed
from fedmodels.nets.trained import ModelFacts, TrainedModel, header_of
from fedsrv.state.ledger import Ledger
from fedsrv.state.run_directory import launching
from fedtide import runs
from fedtide.inprocess import InProcessCohort

EXTEND = Path(__file__).parents[2] / "examples" / "extend"
TINY = {
    "seed": 3,
    "data": {"name": "digits", "max_per_class": 20},
    "scenario": {"kind": "per_class_shards", "shards": 5, "tasks": 2},
    "net": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedper"},
    "schedule": {"rounds": 1, "clients": 2},
    "training": {"batch_size": 16, "lr": 0.05},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> fedtide.Run:
    """Return a run that has ended."""
    return fedtide.run(TINY, backend="inprocess", out=tmp_path_factory.mktemp("front") / "run")


def test_every_public_name_is_there():
    assert all(getattr(fedtide, name) is not None for name in fedtide.__all__)
    assert set(fedtide._HOMES) == set(fedtide.__all__)
    assert [getattr(fedtide, name).__name__ for name in fedtide._MODULES] == [
        f"fedtide.{name}" for name in fedtide._MODULES
    ]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedtide.nothing


def test_the_examples_of_its_docstring():
    found = doctest.testmod(fedtide)
    assert found.attempted >= 7
    assert found.failed == 0


def test_a_run_is_opened_and_read(done):
    again = fedtide.open(done.path)
    assert again.summary == done.summary
    assert len(again.metrics()["interaction"]) == 2
    clients = again.clients()
    assert sorted(set(clients["client"])) == [0, 1]
    row = again.record.rows[-1]["clients"]["1"]
    assert list(clients["accuracy_after_local"])[-1] == row["views"]["after_local"]["accuracy"]
    with pytest.raises(ArchiveError, match="no such directory"):
        fedtide.open(done.path / "nowhere")


def test_a_personal_model_is_the_one_the_client_stored(done):
    model, x = done.personal_model(1), done.example(1)
    assert model.class_names == [str(k) for k in range(10)]
    assert model.facts.method == "fedper"
    scale = model.facts.scale
    by_hand = model.net((x.float() / scale - model.facts.mean[0]) / model.facts.std[0])
    assert torch.allclose(model(x), by_hand)
    assert done.predict(1, x.numpy()) == by_hand.argmax(1).numpy()
    with pytest.raises(DataError, match="takes"):
        model.predict(np.zeros((1, 3)))
    with pytest.raises(DataError, match="own state directory"):
        done.personal_model(7)


def test_private_parts_make_no_global_model(done):
    with pytest.raises(ArchiveError, match="fedper has no global model here: export a client's"):
        done.global_model()


def test_a_file_that_does_not_describe_its_model(tmp_path):
    facts = ModelFacts("mlp", {}, (1, 8, 8), 10)
    text = header_of(facts)["model"]
    assert ModelFacts.parse(text, "here").num_classes == 10
    with pytest.raises(ArchiveError, match="here does not describe its model"):
        ModelFacts.parse("[]", "here")
    with pytest.raises(ArchiveError, match="does not describe its model"):
        ModelFacts.parse('{"net": "mlp"}', "here")


def test_a_model_is_saved_and_loaded(done, tmp_path):
    model = done.personal_model(0)
    model.save(tmp_path / "m.safetensors")
    again = TrainedModel.load(tmp_path / "m.safetensors")
    assert torch.equal(again(done.example(0)), model(done.example(0)))


def test_a_run_is_extended(tmp_path):
    whole = fedtide.run(TINY, {"schedule.rounds": 2}, backend="inprocess", out=tmp_path / "whole")
    first = fedtide.run(TINY, backend="inprocess", out=tmp_path / "run")
    second = first.extend(1, backend="inprocess")
    assert second.summary["rounds"] == 2
    assert second.summary["state_sha256"] == whole.summary["state_sha256"]


def test_a_run_is_given_data_that_lie_elsewhere(done, tmp_path):
    """It is the run on data that were dealt out for it; and goes on with the same."""
    tables, place = {k: TINY[k] for k in TINY if k != "scenario"}, tmp_path / "run"
    shutil.copytree(done.path / "data", elsewhere := tmp_path / "elsewhere")
    run = fedtide.run(tables, backend="inprocess", out=place, data=str(elsewhere))
    assert run.summary["state_sha256"] == done.summary["state_sha256"]
    assert run.extend(1, backend="inprocess", data=elsewhere).summary["rounds"] == 2
    assert run.resume(backend="inprocess", data=elsewhere).summary["rounds"] == 2
    assert not (place / "data").exists()


def test_processes_are_given_data_as_well(done, tmp_path, monkeypatch):
    class Started(Exception):
        """The process of a launch would start with this command."""

    def popen(command, **options):
        raise Started(*command)

    monkeypatch.setattr("subprocess.Popen", popen)
    data = done.path / "data"
    with pytest.raises(Started) as started:
        fedtide.run(TINY, out=tmp_path / "run", data=data)
    words = started.value.args
    assert words[words.index("--data") + 1] == str(data)


@pytest.mark.parametrize("backend", ["inprocess", "processes"])
def test_what_is_wrong_with_data_is_said_of_the_argument(backend, done, tmp_path):
    """In the words of a caller from Python, whichever backend would find it."""
    own, data = {k: TINY[k] for k in TINY if k not in ("data", "scenario")}, done.path / "data"
    for tables, given, line in (
        (own, None, r"has no \[data\]: .*, or give a directory .* as data$"),
        (own, tmp_path / "nowhere", r"^data \S+/nowhere holds no client directory 0"),
        (TINY | {"seed": 4}, data, r"^data \S+/data is of another partition .*seed = 4"),
        (TINY, 7, r"^data is a int; give the path of a directory"),
        (TINY | {"method": {"name": "centralized"}}, data, r"^data .*: leave out data, or make"),
    ):
        with pytest.raises(FedtideError, match=line) as found:
            fedtide.run(tables, backend=backend, out=tmp_path / "run", data=given)
        assert "--" not in str(found.value).replace("--out", "")


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """Its records have the readings of a method beside its hyper-parameters."""
    reading = {"method": {"name": "gldp", "t": 1, "s": 1, "reading": {"kl_space": "head"}}}
    one = fedtide.run({**TINY, **reading}, backend="inprocess", out=tmp_path / "run")
    as_it_was = one.experiment.to_dict()
    as_it_was["method"] |= as_it_was["method"].pop("reading")
    (one.path / "config.toml").write_text(tomli_w.dumps(as_it_was))
    with closing(Ledger(one.path / "run.db", strict=False, new=False)) as ledger:
        ledger.set_facts(experiment=json.dumps(as_it_was))
    old = fedtide.open(one.path)
    assert old.experiment == one.experiment
    whole = fedtide.run(
        {**TINY, **reading}, {"schedule.rounds": 2}, backend="inprocess", out=tmp_path / "whole"
    )
    longer = old.extend(1, backend="inprocess")
    assert longer.summary["state_sha256"] == whole.summary["state_sha256"]


class _Stop(Exception):
    """What somebody who follows a run raises."""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, _Stop])
def test_a_run_that_was_interrupted_here_goes_on(stop, done, tmp_path, monkeypatch):
    commit = InProcessCohort.commit

    def interrupted(cohort: InProcessCohort, interaction: int, watermark: int) -> None:
        commit(cohort, interaction, watermark)
        raise stop

    monkeypatch.setattr(InProcessCohort, "commit", interrupted)
    with pytest.raises(stop) as caught:
        fedtide.run(TINY, backend="inprocess", out=tmp_path / "run")
    note = f"fedtide.open({str(tmp_path / 'run')!r}).resume() continues the run"
    assert getattr(caught.value, "__notes__", [note]) == [note]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"run: fedtide\.open\(.*resume\(\) continues"):
        fedtide.run(TINY, backend="inprocess", out=tmp_path / "run")
    ended = fedtide.open(tmp_path / "run").resume("inprocess")
    assert ended.summary["state_sha256"] == done.summary["state_sha256"]


def test_a_start_killed_before_it_wrote_its_config_is_begun_again(done, tmp_path, monkeypatch):
    """The copy is what a kill at that moment leaves: run.db is there, and config.toml is not."""
    left = tmp_path / "left"

    def killed(out: Path, *args: object, **options: object) -> str:
        shutil.copytree(out, left)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedtide.inprocess.write_facts", killed)
        with pytest.raises(KeyboardInterrupt):
            fedtide.run(TINY, out=tmp_path / "run", backend="inprocess")
    assert (left / "run.db").exists()
    assert not (left / "config.toml").exists()
    other = {**TINY, "training": {**TINY.get("training", {}), "lr": 0.123}}
    with pytest.raises(ConfigError) as refused:
        fedtide.run(other, out=left, backend="inprocess")
    assert "differs in training.lr. Resume with the config that it was" in str(refused.value)
    assert "its start ended before it wrote config.toml" in str(refused.value)
    again = fedtide.run(TINY, out=left, backend="inprocess")
    assert again.summary["state_sha256"] == done.summary["state_sha256"]
    with pytest.raises(ConfigError, match="already holds a run"):
        fedtide.run(TINY, out=left, backend="inprocess")


def test_a_run_in_this_process_says_how_it_goes(tmp_path, capsys):
    """Without a terminal and without ``progress`` it says nothing."""
    lines = list[str]()
    told = fedtide.run(TINY, backend="inprocess", out=tmp_path / "run", progress=lines.append)
    assert [line[:18] for line in lines if "committed" in line] == [
        "interaction 1 of 2", "interaction 2 of 2",
    ]  # fmt: skip
    told.extend(1, backend="inprocess")
    assert capsys.readouterr().out == ""

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="continues the run"):
        fedtide.run(TINY, backend="inprocess", out=tmp_path / "stopped", progress=stop)


@pytest.mark.loopback
def test_no_process_outlives_what_follows_it(tmp_path):
    """Somebody who presses Ctrl-C in a notebook does not want the run to go on unseen."""

    def stop(line: str) -> None:
        if "committed" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="continues the run"):
        fedtide.run(TINY, {"schedule.rounds": 1000}, out=tmp_path / "run", progress=stop)
    with launching(tmp_path / "run"):
        pass  # nobody else holds it


@pytest.mark.loopback
def test_no_process_outlives_one_that_is_killed(tmp_path):
    """A kernel that is restarted, too."""
    script = (
        "import fedtide, os, signal\n"
        "def stop(line):\n"
        "    if 'committed' in line:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"fedtide.run({TINY!r}, {{'schedule.rounds': 1000}}, out='run', progress=stop)\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, bufsize=0
    )
    assert killed.wait(300) == -signal.SIGKILL  # most of it is the start of processes
    assert killed.stdin is not None
    readers = select.poll()
    readers.register(killed.stdin, 0)
    assert readers.poll(60_000), "somebody still holds the standard input that was inherited"
    killed.stdin.close()


def test_another_method_leaves_out_the_keys_of_the_former():
    """As --set does: the preset's TARGET has keys of its own."""
    tables = runs._tables("target-small", {"method.name": "fedrep"})
    assert tables["method"] == {"name": "fedrep"}


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(
        ConfigError, match=r"neither a file nor a preset\. Did you mean 'quickstart'"
    ):
        fedtide.run("quikstart")
    with pytest.raises(ConfigError, match="unknown key 'muu'"):
        fedtide.run(TINY, {"method.muu": 1})
    with pytest.raises(ConfigError, match="backend 'threads'"):
        fedtide.run(TINY, backend="threads", out=tmp_path / "x")  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="files that are no run"):
        fedtide.run(TINY, backend="inprocess", out=tmp_path / "full")


# --- custom code ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavgm.py:FedAvgM", "median.py:Median", "anchored.py:Anchored"])
def test_examples_of_methods_run_from_the_config(name, tmp_path):
    out = tmp_path / "run"
    overrides = {"method.name": f"{EXTEND / name}"}
    run = fedtide.run(TINY, overrides, backend="inprocess", out=out)
    assert run.summary["metrics"]["a_glo"] > 0
    assert len(run.experiment.method.code_sha256 or "") == 64
    code = [
        line
        for line in (EXTEND / name.partition(":")[0]).read_text().split('"""')[2].splitlines()
        if line.strip() and not line.strip().startswith(("#", '"""'))
    ]
    assert len(code) <= 70


def test_without_momentum_it_is_fedavg(tmp_path):
    base = {**TINY, "method": {"name": "fedavg"}}
    plain = fedtide.run(base, backend="inprocess", out=tmp_path / "a")
    own = {"method.name": f"{EXTEND / 'fedavgm.py'}:FedAvgM", "method.beta": 0.0}
    zero = fedtide.run(base, own, backend="inprocess", out=tmp_path / "b")
    assert zero.summary["metrics"] == pytest.approx(plain.summary["metrics"], abs=1e-6)


def test_a_changed_file_is_another_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text((EXTEND / "median.py").read_text())
    run = fedtide.run(
        TINY, {"method.name": f"{file}:Median"}, backend="inprocess", out=tmp_path / "run"
    )
    file.write_text(file.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="has changed since this run started"):
        run.extend(1, backend="inprocess")


def test_a_file_that_was_edited_runs_as_it_is_now(tmp_path):
    file = tmp_path / "mine.py"
    name = f"{file}:Median"
    text = (EXTEND / "median.py").read_text()

    def digest(text: str, out: str) -> str:
        file.write_text(text)
        run = fedtide.run(TINY, {"method.name": name}, backend="inprocess", out=tmp_path / out)
        return str(run.summary["state_sha256"])

    lazy = text + "\n    def fit(self, ctx, x, y, refs):\n        return 1.0\n"
    first = digest(text, "first")
    assert digest(lazy, "second") != first
    assert digest(text, "third") == first
    file.write_text(lazy)
    assert fedtide.make_method(name).fit(*[None] * 4) == 1.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "defines no 'Mine'"),
        ("Mine = 3", "is no method"),
        ("1\n1 / 0", r"mine.py cannot be run \(line 2\): ZeroDivisionError: division by zero$"),
        ("import sys\nsys.exit(0)", r"\(line 2\): SystemExit: 0; what a script does goes unde"),
        ("import beside", "No module named 'beside'; a file cannot import its neighbours: inst"),
        ("raise ValueError('a\\nb')", r"\(line 1\): ValueError: a$"),
        (
            "import fedtide\nclass Mine(fedtide.FedAvg):\n    held: list = []",
            "makes no dataclass: mut",
        ),
    ],
)
def test_a_file_that_holds_no_method(text, line, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    (tmp_path / "beside.py").touch()
    with pytest.raises(ConfigError, match=line):
        fedtide.run(TINY, {"method.name": f"{file}:Mine"}, backend="inprocess")


@pytest.mark.parametrize("half", ["aggregate", "loss"])
def test_a_method_that_ends_the_process_fails_its_run_alone(half, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys\nfrom dataclasses import dataclass\nfrom fedtide import FedAvg\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n"
        f"    def {half}(self, *given): sys.exit()\n"
    )
    with pytest.raises(RunFailed, match=r"mine.py \(line 6\) ends the process; in a run, code re"):
        fedtide.run(TINY, {"method.name": f"{file}:Mine"}, backend="inprocess")


def test_a_server_cannot_make_a_client_run_any_file(tmp_path):
    from fedmodels.facts.resolution import experiment_of

    file = tmp_path / "mine.py"
    file.write_text((EXTEND / "median.py").read_text())
    told = experiment_of({**TINY, "method": {"name": f"{file}:Median"}}).to_dict()
    with pytest.raises(ConfigError, match="join with --code FILE"):
        experiment_of(told, code=())
    elsewhere = tmp_path / "copy.py"
    elsewhere.write_text(file.read_text() + "# and more\n")
    with pytest.raises(ConfigError, match=r"--code .*copy.py has other content: this run needs"):
        experiment_of(told, code=[elsewhere])
    elsewhere.write_text(file.read_text())
    assert experiment_of(told, code=[elsewhere]).method.name == f"{elsewhere}:Median"


def test_the_example_of_a_private_head_begins_as_fedper(done, tmp_path):
    """The first head is taken as it was trained; its figure is among those of the clients."""
    method = {"name": f"{EXTEND / 'own_head.py'}:OwnHead"}
    config = {**TINY, "method": method}
    found = fedtide.run(config, backend="inprocess", out=tmp_path / "run")
    first = [run.record.rows[0]["metrics"]["a_sel"] for run in (found, done)]
    assert first[0] == first[1]
    assert list(found.clients()["rounds_trained"]) == [1, 1, 2, 2]


def test_a_method_that_shares_a_part_is_told_of_its_views(tmp_path):
    text = (EXTEND / "own_head.py").read_text()
    shares = '    private = ("head/",)'
    (tmp_path / "mine.py").write_text(text.replace(shares, f'    views = ("global",)\n{shares}'))
    changes = {"method.name": f"{tmp_path}/mine.py:OwnHead"}
    line = r"OwnHead has no global model: what travels lacks 'head/\w+' \(2 in all\); let views"
    with pytest.raises(FedtideError, match=line):
        fedtide.run(TINY, changes, backend="inprocess")


def test_wrong_types_get_a_line():
    for config in (None, 3):
        with pytest.raises(ConfigError, match="give a TOML file, a mapping or a preset's name"):
            fedtide.run(config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="overrides is a list"):
        fedtide.run("quickstart", ["seed=1"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="overrides names 1; give a dotted key"):
        fedtide.run("quickstart", {1: 1})  # type: ignore[dict-item]
    for rounds in (1.5, 0, True):
        with pytest.raises(ConfigError, match="give a whole number of rounds"):
            runs.Run(Path("nowhere")).extend(rounds)  # type: ignore[arg-type]


def test_a_notebook_shows_a_run_as_a_table_and_charts(done):
    shown = done._repr_html_()
    assert "fedper on digits" in shown
    assert re.search(r"\(a_loc\) %\s*<small>chance \d+\.\d %, most frequent class", shown)
    (address,) = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', shown)
    drawn = ElementTree.fromstring(base64.b64decode(address))
    texts = {"".join(node.itertext()) for node in drawn.iter()}
    assert any(text.startswith("How good: ") for text in texts)
    assert "<script" not in shown
