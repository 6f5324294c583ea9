"""Pre-training by masked autoencoding, and runs that start from a file of weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedcli.pretrain as pretrain
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.pretrain import MaskedAutoencoder, Pretraining
from fedmodels.errors import ConfigError, TrainingFailed
from fedmodels.tensors.archive import load, save
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.initial_weights import pin_weights
from fedmodels.training.run import RunFacts
from tests.conftest import method_of, tiny_experiment

CPU = torch.device("cpu")
NET = {
    "name": "hart",
    "blocks": 1,
    "alp": True,
    "prototypes": [8],
    "dropout": 0.0,
    "drop_path": 0.0,
}
PROBLEM = Problem((64, 6), 5)
QUICK = Pretraining(epochs=3, batch_size=16, lr=3e-3, mask=0.5)


def waves(name="waves"):
    """Return 48 windows of sinusoids of two people, the second's ten times as large."""
    rng = np.random.default_rng(0)
    time, shift = np.arange(64)[None, :, None], rng.uniform(0, 6, (48, 1, 6))
    x = np.sin(time / 4 + shift).astype(np.float32)
    x[24:] = 10 * x[24:] + 3
    y = np.zeros(48, dtype=np.int64)
    people = np.repeat([0, 1], 24)
    whole = Examples(x, y, people)
    return Dataset(name, whole, whole.at(np.arange(1)), tuple("abcde"), 1.0, (0.0,), (1.0,))


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Pre-train on the waves; return the experiment, the file, and the losses."""
    monkeypatch.setattr(pretrain, "load", lambda table: waves(table.name))
    experiment = tiny_experiment(net=NET, method="fedali")
    lines: list[str] = []
    path = tmp_path / "weights.safetensors"
    losses = pretrain.pretrain(experiment, ["one", "two"], path, QUICK, CPU, lines.append)
    assert len(lines) == 3
    return experiment, path, losses


def starting_from(experiment, path, **options):
    net = experiment.net.model_copy(update={"weights": str(path), **options})
    return RunFacts(experiment.model_copy(update={"net": net}), PROBLEM)


def test_it_learns_and_a_run_starts_from_it(trained):
    experiment, path, losses = trained
    assert losses[-1] < losses[0]
    bundle, header = load(path)
    assert header["data"] == ["one", "two"]
    fresh = RunFacts(experiment, PROBLEM).initial_weights
    run = starting_from(experiment, path)
    for name, tensor in run.initial_weights.items():
        afresh = name.startswith(("base/fc.", "head/"))
        assert torch.equal(tensor, fresh[name] if afresh else bundle.weights[name]), name
    moved = [name for name in bundle.weights if not torch.equal(bundle.weights[name], fresh[name])]
    assert "base/blocks.0.alp.local_prototypes" in moved
    sent = method_of(experiment).init_server(run).common
    kept = bundle.weights["base/blocks.0.alp.local_prototypes"]
    assert torch.equal(sent.prototypes["alp/0"].vectors, kept)
    assert torch.equal(kept, bundle.weights["base/blocks.0.alp.global_prototypes"])


def test_a_run_is_bound_to_the_file_it_began_with(trained):
    experiment, path, _ = trained
    net = experiment.net.model_copy(update={"weights": str(path)})
    bound = pin_weights(experiment.model_copy(update={"net": net}))
    assert bound.net.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert pin_weights(bound) == bound
    assert RunFacts(bound, PROBLEM).initial_weights
    assert pin_weights(experiment) == experiment
    save(path, Bundle(weights={"head/bias": torch.ones(5)}), {})
    with pytest.raises(ConfigError, match="not the file this run began with"):
        pin_weights(bound)
    with pytest.raises(ConfigError, match="not the file this run began with"):
        _ = RunFacts(bound, PROBLEM).initial_weights
    path.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        pin_weights(bound)


def test_the_same_seed_gives_the_same_weights(trained, tmp_path):
    experiment, path, _ = trained
    pretrain.pretrain(experiment, ["one", "two"], tmp_path / "2", QUICK, CPU, lambda line: None)
    first, second = load(path)[0].weights, load(tmp_path / "2")[0].weights
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_windows_are_normalised_per_person_and_channel():
    x = pretrain.windows_of(waves())
    for rows in (x[:24], x[24:]):
        np.testing.assert_allclose(rows.mean((0, 1)), 0, atol=1e-5)
        np.testing.assert_allclose(rows.std((0, 1)), 1, atol=1e-5)


def test_only_hidden_tokens_count():
    """A decoder that says the window itself has no loss; what is visible is not asked for."""
    model = MaskedAutoencoder(RunFacts(tiny_experiment(net=NET), PROBLEM).make_net().base, 64, 0.5)
    assert model.hidden == 2
    x = torch.full((3, 64, 6), 2.0)
    torch.nn.init.zeros_(model.patches.weight)
    torch.nn.init.constant_(model.patches.bias, 2.0)
    assert float(model(x).detach()) == 0


def test_the_autoencoder_has_the_published_sizes():
    """Of 8 tokens 4 are hidden; the decoder has 4 blocks of width 192, as in the authors' code."""
    net = RunFacts(tiny_experiment(net=NET), Problem((128, 6), 5)).make_net()
    model = MaskedAutoencoder(net.base, 128, Pretraining().mask)
    assert (model.hidden, len(model.decoder)) == (4, 4)
    widths = {model.embed.out_features, *(block.norm1.weight.numel() for block in model.decoder)}
    assert widths == {192}


@pytest.mark.parametrize("mask", [0.1, 0.2])
def test_something_is_hidden_and_something_seen(mask):
    base = RunFacts(tiny_experiment(net=NET), PROBLEM).make_net().base
    with pytest.raises(ConfigError, match="of 4 tokens"):
        MaskedAutoencoder(base, 64, mask)


@pytest.mark.parametrize("mask", [float("nan"), -1.0, 2.0])
def test_a_mask_is_a_share(mask):
    base = RunFacts(tiny_experiment(net=NET), PROBLEM).make_net().base
    with pytest.raises(ConfigError, match="is no share of the tokens"):
        MaskedAutoencoder(base, 64, mask)


def test_a_training_that_diverges_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrain, "load", lambda table: waves())
    how, out = replace(QUICK, lr=1e30), tmp_path / "w.safetensors"
    with pytest.raises(TrainingFailed, match="the loss of epoch 1 is not finite; lower --lr"):
        pretrain.pretrain(tiny_experiment(net=NET), [], out, how, CPU, lambda line: None)
    assert not out.exists()


def test_weights_that_the_last_step_broke_are_not_written(monkeypatch, tmp_path):
    class Breaks(torch.optim.Adam):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.fill_(float("nan"))

    monkeypatch.setattr(pretrain, "load", lambda table: waves())
    monkeypatch.setattr(torch.optim, "Adam", Breaks)
    how, out = replace(QUICK, epochs=1, batch_size=48), tmp_path / "w.safetensors"
    with pytest.raises(TrainingFailed, match="the weights are not finite; lower --lr"):
        pretrain.pretrain(tiny_experiment(net=NET), [], out, how, CPU, lambda line: None)
    assert not out.exists()


@pytest.mark.parametrize("place", ["none/w.safetensors", "."])
def test_where_nothing_can_be_written_nothing_is_trained(tmp_path, place):
    with pytest.raises(ConfigError, match="name a file in a directory that can be written"):
        pretrain.pretrain(tiny_experiment(net=NET), [], tmp_path / place, QUICK, CPU, print)


def test_only_hart_on_windows(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrain, "load", lambda table: waves())
    with pytest.raises(ConfigError, match="hart"):
        pretrain.pretrain(tiny_experiment(), [], tmp_path / "w", QUICK, CPU, print)
    pixels = np.zeros((49, 1, 8, 8), dtype=np.uint8)
    images = waves().showing(pixels[:48], pixels[:1])
    with pytest.raises(ConfigError, match="sensor windows"):
        pretrain.windows_of(images)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({}, "holds no weights"),
        ({"base/nothing": torch.zeros(1)}, "'base/nothing', which the net has not"),
        ({"head/bias": torch.zeros(7)}, r"'head/bias' .* \[7\]; the net has torch.float32 \[5\]"),
        ({"head/bias": torch.zeros(5).double()}, "float64"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, weights, why):
    save(tmp_path / "w", Bundle(weights), {})
    with pytest.raises(ConfigError, match=why):
        _ = starting_from(tiny_experiment(net=NET), tmp_path / "w").initial_weights


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"\[net\] weights: .*w is missing"):
        _ = starting_from(tiny_experiment(net=NET), tmp_path / "w").initial_weights
