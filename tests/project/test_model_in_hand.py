"""The trained model in hand: asked on the command line, and written for other programs."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import fedcli.cli
import fedsrv.cli
import fedtide
from fedmodels.errors import RunFailed
from fedmodels.nets import make_net
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedmodels.tensors.archive import load_named
from fedsrv.trained.export import DESCRIPTION, export

TINY = {
    "seed": 3,
    "data": {"name": "digits", "max_per_class": 20},
    "scenario": {"kind": "per_class_shards", "shards": 5},
    "net": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedavg"},
    "schedule": {"rounds": 1, "clients": 2},
    "training": {"batch_size": 16, "lr": 0.05},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> fedtide.Run:
    """Return a run that has ended."""
    return fedtide.run(TINY, backend="inprocess", out=tmp_path_factory.mktemp("hand") / "run")


def typed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    *words: object,
) -> tuple[object, list[str], list[str]]:
    """Return exit status, output and errors of a command, as a shell would see them."""
    monkeypatch.setattr(sys, "argv", [module.__name__.partition(".")[0], *map(str, words)])
    status: object = 0
    try:
        module.main()
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err.splitlines()


def test_predict_says_what_the_model_says(done, tmp_path, monkeypatch, capsys):
    x = np.repeat(done.example(1).numpy(), 2, axis=0)
    np.save(tmp_path / "two.npy", x)
    np.save(tmp_path / "one.npy", x[0])
    Image.fromarray(x[0, 0].astype(np.uint8)).convert("RGB").save(tmp_path / "one.png")
    files = [tmp_path / name for name in ("two.npy", "one.npy", "one.png")]
    words = ["predict", "--run", done.path, "--client", 1, *files]
    status, out, _ = typed(monkeypatch, capsys, fedcli.cli, *words, "--json", "--top", 10)
    assert status == 0
    facts = [json.loads(line) for line in out]
    assert [f["input"] for f in facts] == [
        f"{files[0]}[0]", f"{files[0]}[1]", str(files[1]), str(files[2]),
    ]  # fmt: skip
    expected = done.personal_model(1)(done.example(1)).softmax(1)[0].tolist()
    for fact in facts:  # however the same input comes
        found = [fact["classes"][str(k)] for k in range(10)]
        assert found == pytest.approx(expected, abs=1e-6)
    _, plain, _ = typed(monkeypatch, capsys, fedcli.cli, *words)
    best = str(int(done.predict(1, x)[0]))
    assert plain[2].startswith(f"{files[1]}: {best} {max(expected):.3f}  ")
    assert len(plain[2].removeprefix(f"{files[1]}: ").split("  ")) == 3


@pytest.mark.parametrize(
    ("name", "array", "line"),
    [
        ("small.npy", np.zeros((1, 4, 4)), "is [1, 4, 4]; the model takes [1, 8, 8]"),
        ("text.npy", np.array(["a"]), "expected numbers"),
        ("none.npy", np.zeros((0, 1, 8, 8)), "none.npy holds no example"),
        ("nan.npy", np.full((1, 8, 8), np.nan), "not finite"),
        ("large.npy", np.full((1, 8, 8), 255), "goes up to 255; the model was trained on values"),
        ("share.npy", np.full((1, 8, 8), 0.5), "holds fractions, up to 0.5; the model was trained"),
        ("deep.npy", np.full((1, 8, 8), -1e300), "not finite in float32"),
        ("no.npy", None, "no.npy"),
        ("no.png", None, "no.png cannot be read"),
    ],
)
def test_what_cannot_be_asked(
    done,
    tmp_path,
    monkeypatch,
    capsys,
    name,
    array,  # type: ignore[type-arg]
    line,
):
    if array is not None:
        np.save(tmp_path / name, array)
    words = ["predict", "--run", done.path, "--client", 0, tmp_path / name]
    status, out, errors = typed(monkeypatch, capsys, fedcli.cli, *words)
    assert (status, out, len(errors)) == (1, [], 1)
    assert errors[0].startswith("error: ")
    assert line in errors[0]


def test_inputs_of_another_scale(done):
    """Digits are whole numbers up to 16."""
    model, digit = done.personal_model(0), np.zeros((1, 1, 8, 8), np.float32)
    digit[0, 0, 4] = 1
    assert model.predict(digit).shape == model.predict(digit * 16).shape == (1,)
    for factor in (0.5, 17, -1):
        with pytest.raises(fedtide.FedtideError, match="trained on values from 0 to 16"):
            model.predict(digit * factor)


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (np.full((2, 1, 8, 8), np.nan), "not finite in float32"),
        (np.full((2, 1, 8, 8), 1e300), "not finite in float32"),
        (np.zeros((8, 8)), r"inputs of shape \[8\]; the model takes \[1, 8, 8\]"),
        (np.float32(1.0), "no array of real numbers"),
        (np.zeros((1, 1, 8, 8), np.complex64), "no array of real numbers"),
        (None, "no array of numbers"),
        ("digits", "no array of numbers"),
    ],
)
def test_what_a_model_in_python_does_not_take(done, x, line):
    with pytest.raises(fedtide.FedtideError, match=line):
        done.personal_model(0).predict(x)


def test_probabilities_that_are_none(done, tmp_path, monkeypatch, capsys):
    """Inputs that float32 just holds may overflow inside a net, where nothing bounds them."""
    np.save(tmp_path / "far.npy", np.zeros((1, 8, 8)))
    nothing = np.full((1, 10), np.nan, np.float32)
    monkeypatch.setattr(fedtide.TrainedModel, "_probabilities", lambda model, x: nothing)
    words = ["predict", "--run", done.path, "--client", 0, tmp_path / "far.npy"]
    status, out, errors = typed(monkeypatch, capsys, fedcli.cli, *words)
    assert (status, out) == (1, [])
    assert "far.npy holds values so large that the model's outputs are none" in errors[0]


def test_a_model_that_is_not_there(done, monkeypatch, capsys):
    words = ["predict", "--run", done.path, "--client", 9, "x.npy"]
    status, _, errors = typed(monkeypatch, capsys, fedcli.cli, *words)
    assert status == 1
    assert "holds no model of client 9" in errors[0]
    words = ["predict", "--run", done.path / "none", "--client", 0, "x.npy"]
    _, _, errors = typed(monkeypatch, capsys, fedcli.cli, *words)
    assert "is no directory" in errors[0]
    words = ["export", "--run", done.path, "--to", "safetensors", "--out", "."]
    status, _, errors = typed(monkeypatch, capsys, fedsrv.cli, *words)
    assert (status, len(errors)) == (1, 1)
    assert "it is a directory" in errors[0]
    words = ["predict", "--run", done.path / "clients", "--client", 0, "x.npy"]
    _, _, errors = typed(monkeypatch, capsys, fedcli.cli, *words)
    assert "x.npy" in errors[0]  # a client's own --state-dir serves as well


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 1000])
def test_the_model_of_a_run_whose_ledger_is_damaged(content, done, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(done.path, run, ignore=shutil.ignore_patterns("run.db*"))
    if content is not None:
        (run / "run.db").write_bytes(content)
    words = ["export", "--run", run, "--to", "safetensors", "--out", tmp_path / "m.safetensors"]
    status, _, errors = typed(monkeypatch, capsys, fedsrv.cli, *words)
    assert (status, len(errors)) == (1, 1)
    assert re.match(rf"error: {run / 'run.db'} cannot be (read|verified): ", errors[0])


def test_a_run_below_a_name_with_marks_of_addresses_is_exported(
    done, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(done.path, tmp_path / "a#b?c%20")
    words = ["export", "--run", "a#b?c%20", "--to", "safetensors", "--out", "m.safetensors"]
    assert typed(monkeypatch, capsys, fedsrv.cli, *words)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a#b?c%20", "m.safetensors"]


@pytest.mark.parametrize("client", [None, 1])
@pytest.mark.parametrize("kind", ["safetensors", "torch.export", "onnx"])
def test_an_exported_model_says_the_same_of_raw_inputs(
    done, tmp_path, monkeypatch, capsys, kind, client
):
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    whose = [] if client is None else ["--client", client]
    out = tmp_path / "model"
    words = ["export", "--run", done.path, "--to", kind, "--out", out, *whose]
    status, said, _ = typed(monkeypatch, capsys, fedsrv.cli, *words)
    assert (status, said[-1]) == (0, f"written to {out}")
    model = done.global_model() if client is None else done.personal_model(client)
    x = torch.from_numpy(np.random.default_rng(0).uniform(0, 16, (3, 1, 8, 8)).astype(np.float32))
    found, facts = read(kind, out, x)
    assert torch.allclose(found, model(x), atol=1e-5)
    assert facts["method"] == "fedavg"
    assert facts["scale"] == 16.0
    assert facts["view"] == model.facts.view


def test_a_net_whose_file_has_changed_is_refused(tmp_path, monkeypatch, capsys):
    code, out = tmp_path / "my_net.py", tmp_path / "run"
    code.write_text(
        "from torch import nn\n"
        "from fedmodels.nets.split import SplitNet\n"
        "def mine(num_classes, input_shape):\n"
        "    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU())\n"
        "    return SplitNet(base, nn.Linear(4, num_classes), 4)\n"
    )
    run = fedtide.run({**TINY, "net": {"name": f"{code}:mine"}}, backend="inprocess", out=out)
    np.save(tmp_path / "one.npy", run.example(0).numpy()[0])
    code.write_text(code.read_text().replace("ReLU", "Tanh"))
    for module, words in (
        (fedcli.cli, ["predict", "--run", out, "--client", 0, tmp_path / "one.npy"]),
        (fedsrv.cli, ["export", "--run", out, "--client", 0, "--to", "safetensors"]),
        (fedsrv.cli, ["export", "--run", out, "--to", "safetensors"]),
    ):
        status, _, errors = typed(monkeypatch, capsys, module, *words)
        assert (status, len(errors)) == (2, 1)
        assert "my_net.py has changed since this run started" in errors[0]


def test_creff_is_kept_with_the_head_that_was_scored(tmp_path):
    quick = {"name": "creff", "match_steps": 2, "crt_epochs": 2}
    run = fedtide.run({**TINY, "method": quick}, backend="inprocess", out=tmp_path / "run")
    state = sorted((run.path / "server").glob("state-*.safetensors"))[-1]
    weights = load_named(state)[0]["common"].weights
    assert not torch.equal(weights["retrained/weight"], weights["head/weight"])
    for model in (run.global_model(), run.personal_model(0)):
        assert torch.equal(model.net.tensors()["head/weight"], weights["retrained/weight"])
        assert model.facts.view == "global"


def test_a_net_that_is_not_all_that_was_scored_says_so(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    quick = {"name": "gldp", "t": 1, "s": 1}
    run = fedtide.run({**TINY, "method": quick}, backend="inprocess", out=out)
    np.save(tmp_path / "one.npy", run.example(0).numpy()[0])
    ask = ["predict", "--run", out, "--client", 0, tmp_path / "one.npy"]
    write = ["export", "--run", out, "--client", 0, "--to", "safetensors"]
    for module, words in ((fedcli.cli, ask), (fedsrv.cli, write)):
        status, _, errors = typed(monkeypatch, capsys, module, *words)
        assert status == 0
        assert errors == [
            "note: gldp is scored by its rule 'gldp_gp', which needs more than this net; the net "
            "predicts with its classifier, and may be less accurate"
        ]
    status, _, errors = typed(monkeypatch, capsys, fedsrv.cli, *write[:3], *write[5:])
    assert (status, len(errors)) == (1, 1)
    assert "gldp has no such model: tensor 'head/bias' is private, or" in errors[0]


def read(kind: str, path: Path, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
    """Return what an exported model answers, and what its file says of it."""
    if kind == "safetensors":
        again = TrainedModel.load(path)
        return again(x), vars(again.facts)
    if kind == "torch.export":
        beside = {DESCRIPTION: ""}
        with path.open("rb") as file:
            program = torch.export.load(file, extra_files=beside)
        return program.module()(x), json.loads(beside[DESCRIPTION])
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    described = json.loads(session.get_modelmeta().custom_metadata_map["fedtide"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), described


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("resnet20", (3, 32, 32), {}),
        ("vit-tiny", (3, 16, 16), {"blocks": 1, "alp": True, "prototypes": [8]}),
        ("hart", (128, 6), {"blocks": 1}),
    ],
)
def test_every_kind_of_net_is_written_for_any_batch(tmp_path, name, shape, options):
    torch.manual_seed(0)
    net = make_net(name, num_classes=4, input_shape=shape, **options)
    model = TrainedModel(ModelFacts(name, options, shape, 4), net.tensors())
    export(model, "torch.export", tmp_path / "m.pt2")
    for batch in (1, 5):
        x = torch.randn(batch, *shape)
        found, _ = read("torch.export", tmp_path / "m.pt2", x)
        assert torch.allclose(found, model(x), atol=1e-4)


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--to", "keras"], 2, "is none of safetensors, torch.export, onnx"),
        (
            ["--to", "safetensors", "--client", 9],
            1,
            "is not there: a client that trained stores",
        ),
        (["--to", "torch.export", "--out", "{run}/no/where"], 1, "cannot write"),
    ],
)
def test_mistakes_of_export(done, monkeypatch, capsys, words, status, line):
    given = ["export", "--run", done.path, *(str(w).format(run=done.path) for w in words)]
    found, _, errors = typed(monkeypatch, capsys, fedsrv.cli, *given)
    assert found == status
    assert line in errors[-1]


def test_a_missing_extra_is_named(done, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["export", "--run", done.path, "--to", "onnx"]
    status, _, errors = typed(monkeypatch, capsys, fedsrv.cli, *words)
    assert status == 2
    assert "pip install 'onnx>=" in errors[-1]


@pytest.mark.parametrize("kind", ["torch.export", "onnx"])
def test_a_disk_that_fills_up_while_a_graph_is_written_is_one_line(tmp_path, kind):
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    net = make_net("digits-cnn", num_classes=10, input_shape=(1, 8, 8))
    model = TrainedModel(ModelFacts("digits-cnn", {}, (1, 8, 8), 10), net.tensors())
    (tmp_path / "graph").write_text("an earlier one")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most[1]))
    try:
        with pytest.raises(RunFailed) as failed:
            export(model, kind, tmp_path / "graph")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert str(failed.value) == f"cannot write {tmp_path / 'graph'}: File too large"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an earlier one"]
