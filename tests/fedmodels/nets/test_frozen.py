"""What is frozen stays home: it neither trains nor travels, whatever the method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedtide
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import method_class, names
from fedmodels.nets import make_net
from fedmodels.nets.adapters import add_adapters
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Problem
from fedmodels.training.hooks import as_uploads, init_server, reduce, takes_frozen
from fedmodels.training.initial_weights import pin_weights
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedsrv.trained.trained_models import personal_model
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import server_context
from tests.conftest import context_of, method_of, payload_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import SMALL

NET = """
from torch import nn
from fedtide.nets import add_adapters

class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16),
        )
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, num_classes)
        add_adapters(self.stem, rank=2)

    def features(self, x):
        return self.norm(self.stem(x)).relu()
"""
FROZEN = {
    "base/net.stem.0.layer.weight", "base/net.stem.0.layer.bias", "base/net.stem.1.weight",
    "base/net.stem.1.bias", "base/net.stem.1.running_mean", "base/net.stem.1.running_var",
    "base/net.stem.1.num_batches_tracked", "base/net.stem.5.layer.weight",
    "base/net.stem.5.layer.bias",
}  # fmt: skip
WHOLE = {n for n in names() if not takes_frozen(method_class(n))}
"""Methods that train nets whole."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of a net with adapters in a frozen stem, and a norm that trains."""
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(NET)
    return f"{file}:Net"


def experiment(name: str, net: str) -> Experiment:
    fields = {"rank": 1} if name == "pilora" else SMALL.get(name, {})  # the run has two tasks
    return tiny_experiment(method={"name": name, **fields}, net=net)


@pytest.mark.parametrize("name", [name for name in names() if name not in WHOLE])
def test_what_is_frozen_stays_home(name, net, digits):
    ctx = context_of(experiment(name, net), digits)
    method, run = method_of(ctx.run.experiment), ctx.run
    assert ctx.net.frozen == FROZEN
    before = {key: tensor.clone() for key, tensor in ctx.net.frozen_tensors().items()}
    payload, state = payload_of(run.experiment, ctx)
    for _ in range(2):
        result = train_locally(method, ctx, payload, state)
        state = result.state
    assert result.loss > 0
    server, sent = init_server(method, run), as_uploads(method, {0: result.upload})
    server, _ = reduce(method, server_context(run, 0, (0,)), server, sent)
    bundles = (payload, result.upload, result.state, server.common, server.own)
    travelling = [key for bundle in bundles for key in bundle.weights]
    assert not [k for k in travelling if any(k.endswith(f.partition("/")[2]) for f in FROZEN)]
    after = ctx.net.frozen_tensors()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert not any(p.grad is not None for p in ctx.net.parameters() if not p.requires_grad)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_who_trains_nets_whole_refuses(name, net):
    run = RunFacts(experiment(name, net), Problem((1, 8, 8), 10))
    with pytest.raises(ConfigError, match=f"method '{name}' trains the whole net, and a part of"):
        init_server(method_of(run.experiment), run)


def test_a_run_with_a_frozen_part_ends_with_whole_models(net, digits, tmp_path):
    summary = run_in_process(experiment("fedper", net), digits, tmp_path / "fedper")
    file = Path(net.rpartition(":")[0]).with_name("plain.py")
    file.write_text(NET.replace("add_adapters(self.stem, rank=2)", "pass"))
    plain = tiny_experiment(net=f"{file}:Net", method="fedper")
    whole = run_in_process(plain, digits, tmp_path / "whole")
    assert summary["bytes"]["up"] != whole["bytes"]["up"]
    tables = experiment("fedavg", net).to_dict()
    made = fedtide.run(tables, backend="inprocess", out=tmp_path / "fedavg")
    ended = [made.global_model(), personal_model(tmp_path / "fedper", 0)]
    run = RunFacts(experiment("fedavg", net), Problem((1, 8, 8), 10))
    for model in ended:
        held = model.net.everything()
        assert held.keys() > FROZEN
        assert all(torch.equal(held[k], t) for k, t in run.frozen_weights.items())


def test_an_adapter_begins_as_nothing_and_moves_as_the_product():
    """W x + alpha / r B A x by hand: W = (1, 2), x = (1, 1), A = (1, 3), B = 2, alpha 3, r 1."""
    module = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
    add_adapters(module, rank=1, alpha=3.0)
    x = torch.ones(1, 2)
    assert module(x).item() == 3.0
    with torch.no_grad():
        module[0].down.weight.copy_(torch.tensor([[1.0, 3.0]]))
        module[0].up.weight.fill_(2.0)
    assert module(x).item() == 3.0 + 3.0 * 2.0 * 4.0
    trains = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trains == ["0.down.weight", "0.up.weight"]


def test_a_frozen_a_is_drawn_from_the_seed_and_stays_home(tmp_path):
    """With A frozen the mean of two clients' B A is the mean of B times A; a file needs no A."""
    models = pytest.importorskip("torchvision").models
    with seeded(1):
        published = models.get_model("mobilenet_v3_small", weights=None)
    file = tmp_path / "published.safetensors"
    save_file(published.state_dict(), file)
    table = {"name": "torchvision", "model": "mobilenet_v3_small", "adapters": 2}
    given = tiny_experiment(net={**table, "adapter_a": "frozen", "weights": str(file)})
    nets = [RunFacts(pin_weights(given), Problem((3, 32, 32), 10)).make_net(role=r) for r in "ab"]
    downs = [k for k in nets[0].frozen if k.endswith(".down.weight")]
    assert downs
    held = [net.frozen_tensors() for net in nets]
    assert all(torch.equal(held[0][key], held[1][key]) for key in downs)
    travels = weights_of(nets[0])
    assert not any(key.endswith(".down.weight") for key in travels)
    assert any(key.endswith(".up.weight") for key in travels)


def test_a_may_be_shared_alone(digits):
    """B of each adapter stays with its client: FedSA-LoRA."""
    net = {"name": "torchvision", "model": "mobilenet_v3_small", "adapters": 2}
    method = {"name": "lg-fedavg", "private": ["base/*.up."]}
    run = RunFacts(tiny_experiment(net=net, method=method), Problem((3, 32, 32), 10))
    made = method_of(run.experiment)
    shared, kept = init_server(made, run).common.weights, made.init_client(run, 0).weights
    assert {key.rpartition(".up.")[1] for key in kept} == {".up."}
    assert any(key.endswith(".down.weight") for key in shared)
    assert not any(".up." in key for key in shared)
    assert {*shared, *kept} == {*run.forms}


def test_a_net_of_torchvision_begins_with_a_file_of_its_own_names(tmp_path):
    """The file is for 1000 classes: its head is left out."""
    with seeded(1):
        from torchvision import models  # takes seconds to import

        published = models.get_model("mobilenet_v3_small", weights=None)
    file = tmp_path / "published.safetensors"
    save_file(published.state_dict(), file)
    table = {"name": "torchvision", "model": "mobilenet_v3_small", "adapters": 2}
    given = pin_weights(tiny_experiment(net={**table, "weights": str(file)}))
    run = RunFacts(given, Problem((3, 32, 32), 10))
    net, own = run.make_net(), published.state_dict()
    assert isinstance(net, SplitNet)
    assert net.frozen
    for key, tensor in net.frozen_tensors().items():
        assert torch.equal(tensor, own[net.own_names[key]]), key
    travels = sum(tensor.nbytes for tensor in run.initial_weights.values())
    assert travels < 0.05 * sum(tensor.nbytes for tensor in own.values())
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    published.classifier[3] = nn.Identity()
    torch.testing.assert_close(net.eval().base(x), published.eval()(x))
    lacking = {key: t for key, t in own.items() if key != "features.0.0.weight"}
    save_file(lacking, tmp_path / "lacking.safetensors")
    poor = tiny_experiment(net={**table, "weights": str(tmp_path / "lacking.safetensors")})
    with pytest.raises(ConfigError, match=r"lacks 'base/features\.0\.0\.layer\.weight', which is"):
        RunFacts(pin_weights(poor), run.problem).make_net()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": "resnet17"}, "torchvision has no model 'resnet17'; it has"),
        ({"head": "layer1"}, r"head = 'layer1' of net 'resnet18' is Sequential, not a linear"),
        ({"head": "top"}, r"head = 'top': net 'resnet18' has no such layer"),
        ({"frozen": ["stem"]}, r"no parameter of net 'resnet18' begins with 'stem'; some: base/c"),
        ({"frozen": ["base/", "head/"]}, "nothing of net 'resnet18' is left to train"),
        ({"adapters": -1}, "the rank of adapters is at least 1"),
        ({"adapter_a": "frozen"}, "'frozen' where adapters are"),
        ({"adapters": 1, "adapter_a": "no"}, "adapter_a = 'no': it is 'trained', or 'frozen'"),
        ({"weights_backbone": "DEFAULT"}, "unknown option 'weights_backbone'"),
    ],
)
def test_a_wrong_option_of_a_published_net_gets_one_line(options, line):
    with pytest.raises(ConfigError, match=line) as caught:
        make_net("torchvision", num_classes=3, input_shape=(3, 32, 32), **options)
    assert "\n" not in str(caught.value)


def test_a_plain_module_of_torchvision_needs_no_wrapper(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torchvision.models import shufflenet_v2_x0_5\n"
        "def net(*, num_classes, input_shape):\n"
        "    return shufflenet_v2_x0_5(weights=None, num_classes=num_classes)\n"
    )
    made = make_net(f"{file}:net", num_classes=3, input_shape=(3, 32, 32))
    assert made.width == 1024
    assert made.own_names["head/weight"] == "fc.weight"


def test_a_net_of_timm_is_split_likewise():
    pytest.importorskip("timm", reason="needs timm: pip install 'fedtide[timm]'")
    made = make_net("timm", num_classes=3, input_shape=(1, 32, 32), model="resnet10t", adapters=2)
    assert made.own_names["head/weight"] == "fc.weight"
    assert made.frozen
    with pytest.raises(ConfigError, match="timm has no model 'hf-hub:somebody/net'"):
        make_net("timm", num_classes=3, input_shape=(1, 32, 32), model="hf-hub:somebody/net")
