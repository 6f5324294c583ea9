"""Classes that come while a run goes on: what every method's states become."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.methods.fedavg import FedAvg
from fedmodels.parts.class_growth import StateGrowth, check_grows
from fedmodels.tensors.archive import save
from fedmodels.tensors.bundle import Bundle, ClientId, Problem
from fedmodels.training.asked import keeps_state
from fedmodels.training.compression import RESIDUAL, Compression
from fedmodels.training.contexts import ClientContext, Position, ServerState
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.method import Method
from fedmodels.training.returned import check_upload
from fedmodels.training.run import RunFacts
from fedpb.codec import merged
from fedplugins.baselines.fedcil import LABELLED
from fedtide.testing.case import bytes_of, states_of
from fedtide.testing.trial import method_of, server_context, tiny_experiment
from tests.fedmodels.methods.test_conformance import ALIGNED, CASES, experiment_for

SHAPE = (1, 8, 8)
EARLIER, LATER = 2, 4
"""Classes before and after; as many before as clients, so that the two could be mixed up."""
CLIENTS = (0, 1)


@dataclass
class Made:
    """Made-up data of one client, eight examples of some classes."""

    seed: int
    classes: int

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        y = torch.arange(8) % self.classes
        return torch.randn(8, *SHAPE, generator=draw) + y.view(-1, 1, 1, 1), y

    def train_up_to(self, task: int) -> tuple[Tensor, Tensor]:
        return self.train(task)

    def train_each(self, task: int) -> dict[int, tuple[Tensor, Tensor]]:
        return {task: self.train(task)}

    def limits(self) -> tuple[Tensor, Tensor]:
        return torch.full((1,), -3.0), torch.full((1,), 8.0)


@dataclass
class World:
    """A run of two clients without processes."""

    method: Method
    run: RunFacts
    server: ServerState
    clients: dict[int, Bundle]
    interaction: int = 0

    @classmethod
    def begun(cls, experiment: Experiment, classes: int = EARLIER) -> World:
        method, run = method_of(experiment), RunFacts(experiment, Problem(SHAPE, classes))
        states = {c: init_client(method, run, c) for c in CLIENTS}
        return cls(method, run, init_server(method, run), states)

    def context(self, client: ClientId, view: str = "") -> ClientContext:
        data = Made(1 if client == 1 else 0, self.run.problem.num_classes)
        at = Position(self.interaction, self.interaction, self.interaction)
        net = self.run.make_net()
        return ClientContext(self.run, client, at, net, data, torch.device("cpu"), view=view)

    def payloads(self, *, scores: bool = False) -> dict[int, Bundle]:
        ctx = replace(server_context(self.run, self.interaction, CLIENTS), scores=scores)
        common, own = broadcast(self.method, ctx, self.server)
        return {c: merged({"common": common, "personal": own.get(c, Bundle())}) for c in CLIENTS}

    def interact(self) -> None:
        sent = {}
        for client, payload in self.payloads().items():
            done = train_locally(self.method, self.context(client), payload, self.clients[client])
            check_upload(self.method, self.method.upload_spec(self.run), done.upload)
            sent[client] = done.upload
            if keeps_state(self.method, self.run):
                self.clients[client] = done.state
        ctx = server_context(self.run, self.interaction, CLIENTS)
        at = Position(self.interaction, self.interaction, self.interaction)
        uploads = as_uploads(self.method, sent)
        self.server, _ = reduce(self.method, replace(ctx, at=at), self.server, uploads)
        self.interaction += 1

    def scores(self) -> dict[str, Tensor]:
        """Return the scores of client 0's model by rule."""
        ctx, state = self.context(0, "after_downlink"), self.clients[0]
        payload = self.payloads(scores=True)[0]
        self.method.load(ctx, payload, state)
        ctx.net.eval()
        with torch.no_grad():
            x, _ = Made(5, EARLIER).train(0)
            return {**self.method.predict(ctx, payload, state, x), "net": ctx.net(x)}

    def grown(self, *steps: int) -> World:
        """Return a world with more classes, which come in steps."""
        run, server, clients = self.run, self.server, self.clients
        for classes in steps:
            now = run.for_classes(classes)
            growth = StateGrowth(self.method, run, now)
            server = growth.server(server)
            clients = {c: growth.client(c, state) for c, state in clients.items()}
            run = now
        return World(self.method, run, server, clients, self.interaction)

    def bundles(self) -> dict[str, Bundle]:
        return {**dict(self.server.named()), **{f"client {c}": s for c, s in self.clients.items()}}


READINGS = [
    ("gldp", {"eval_model": "stage_mean"}),
    ("fedper", {"eval_upload_head": True}),
    ("fedrep", {"heads": "round"}),
]
"""Beside those of the conformance tests: what else changes the states."""


@pytest.mark.parametrize("case", [*CASES, *READINGS], ids=str)
def test_the_states_of_every_method_grow(case):
    name, switches = case
    small = {"net": {**ALIGNED, "blocks": 1, "prototypes": [4]}} if name == "fedali" else {}
    optimizer = "adam" if name == "af-fcl" else "sgd"  # its moments are kept
    if name == "fedbabu":  # fine-tuning on more classes moves the scores of all
        switches = {**switches, "fine_tune_epochs": 0}
    if name == "per-fedavg":
        switches = {**switches, "personal_steps": 0}
    experiment = experiment_for((name, switches), training={"optimizer": optimizer}, **small)
    world = World.begun(experiment)
    world.interact()
    world.interact()
    before, after = world.scores(), world.grown(LATER)
    _check_bundles(world, after, begins_alike=name != "fedcil")
    in_steps = world.grown(EARLIER + 1, LATER)
    assert states_of(in_steps.server) == states_of(after.server)
    assert bytes_of(*in_steps.clients.values()) == bytes_of(*after.clients.values())
    for rule, scores in after.scores().items():
        assert scores.shape[1] == LATER
        if rule != "mixture":  # a mean of probabilities, which sum to 1 over all classes
            # the same weights, but a library may add up more columns in another order
            torch.testing.assert_close(scores[:, :EARLIER], before[rule], rtol=1e-5, atol=1e-6)
    after.interact()
    assert all(scores.shape[1] == LATER for scores in after.scores().values())


def _check_bundles(world: World, after: World, *, begins_alike: bool) -> None:
    """Check the bits of earlier classes, and the shapes against those of a run of all classes."""
    of_few, of_many = (
        World.begun(world.run.experiment, classes).bundles() for classes in (EARLIER, LATER)
    )
    for where, kept in world.bundles().items():
        found, form = after.bundles()[where].by_key(), of_few.get(where, Bundle()).by_key()
        assert found.keys() == kept.by_key().keys()
        for key, tensor in kept.by_key().items():
            part = found[key][tuple(slice(n) for n in tensor.shape)]
            # FedCIL's generators see a label where they saw noise
            assert torch.equal(part, tensor) or (not begins_alike and LABELLED in key), (where, key)
            if key in form and form[key].shape == tensor.shape:
                assert found[key].shape == of_many[where].by_key()[key].shape, (where, key)


def test_a_client_that_goes_on_while_another_stays_has_another_last_generator():
    """The server reads from its own copies which generator is the last one of an earlier task."""
    world = World.begun(experiment_for(("fedcil", {"md_iter": 0})))
    sent = {
        c: train_locally(world.method, world.context(c), payload, world.clients[c]).upload
        for c, payload in world.payloads().items()
    }
    ctx, state = server_context(world.run, 0, CLIENTS), world.server
    for tasks in ({0: 0, 1: 0}, {0: 1, 1: 0}):
        state = world.method.aggregate(
            replace(ctx, tasks=tasks), state, as_uploads(world.method, sent)
        )
    assert [sorted(state.clients[c].generators) for c in CLIENTS] == [["last", "now"], ["now"]]


def test_the_coordinate_of_a_new_label_was_noise_to_the_generator():
    """For two classes z is (label, label, noise, …): the third class takes coordinate 2."""
    world = World.begun(experiment_for(("fedcil", {})))
    name = f"generator/{LABELLED}"
    initial = world.server.own.weights[name]
    trained = {**world.server.own.weights, name: torch.ones_like(initial)}
    state = replace(world.server, own=Bundle(trained))
    grown = StateGrowth(world.method, world.run, world.run.for_classes(3)).server(state)
    found = grown.own.weights[name]
    assert torch.equal(found[:, 2], initial[:, 2])
    assert bool((found[:, [0, 1, *range(3, found.shape[1])]] == 1).all())


def test_nothing_new_is_the_same_object():
    world = World.begun(tiny_experiment())
    again = replace(world.run)
    assert StateGrowth(world.method, world.run, again).server(world.server) is world.server
    assert (
        StateGrowth(world.method, world.run, again).client(0, world.clients[0]) is world.clients[0]
    )


# --- by hand --------------------------------------------------------------------------------------

NETS = """
import torch
from torch import nn

class Ruled(nn.Module):
    '''Row k of the head for K classes is 10 K + k.'''
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
        self.head = nn.Linear(1, num_classes, bias=False)
        rows = 10.0 * num_classes + torch.arange(num_classes)
        self.head.weight.data = rows[:, None]

class Late(nn.Module):
    '''The base is drawn after the head, and frozen.'''
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.head = nn.Linear(4, num_classes)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).requires_grad_(False)

class Wide(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 2 * num_classes))
        self.head = nn.Linear(2 * num_classes, num_classes)

class Cooled(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.classes, self.inner = num_classes, nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        self.head = nn.Linear(2, num_classes)

    def features(self, x):
        return self.inner(x) * self.classes
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("nets") / "nets.py"
    file.write_text(NETS, "utf-8")
    return file


def test_rows_by_hand(nets):
    """Class 2 gets the last row for 3 classes, 30 + 2; class 3 the last one for 4, 40 + 3.

    The trained rows 7 and 8 stay. A client still owes -1 and 5 of them, and nothing of new ones.
    Newcomers begin with the rows of a run of 2 classes, 20 and 21, and with the same new rows.
    """
    experiment = tiny_experiment(
        net={"name": f"{nets}:Ruled"}, method={"name": "fedper"}, compression={"up": "top-k"}
    )
    world = World.begun(experiment)
    now, method = world.run.for_classes(LATER), world.method
    heads = {"head/weight": torch.tensor([[7.0], [8.0]])}
    state = Bundle({**heads, f"{RESIDUAL}head/weight": torch.tensor([[-1.0], [5.0]])})
    found = StateGrowth(method, world.run, now).client(0, state, (RESIDUAL,)).weights
    assert found["head/weight"].flatten().tolist() == [7.0, 8.0, 32.0, 43.0]
    assert found[f"{RESIDUAL}head/weight"].flatten().tolist() == [-1.0, 5.0, 0.0, 0.0]
    newcomer = init_client(method, now, 0).weights["head/weight"]
    assert newcomer.flatten().tolist() == [20.0, 21.0, 32.0, 43.0]
    check_grows(method, world.run)


def test_a_file_of_weights_gives_the_rows_of_its_classes(tmp_path, nets):
    """The head of the file is 5 and 6; later rows are the seed's, 32 and 43."""
    file = tmp_path / "trained.safetensors"
    save(file, Bundle({"head/weight": torch.tensor([[5.0], [6.0]])}), {})
    table = {"name": f"{nets}:Ruled", "weights": str(file)}
    world = World.begun(tiny_experiment(net=table))
    now = world.run.for_classes(LATER)
    grown = StateGrowth(world.method, world.run, now).server(world.server).common.weights
    for weights in (grown, now.initial_weights):
        assert weights["head/weight"].flatten().tolist() == [5.0, 6.0, 32.0, 43.0]
    check_grows(world.method, world.run)


def test_what_is_frozen_stays_as_the_run_began(nets):
    run = RunFacts(tiny_experiment(net={"name": f"{nets}:Late"}), Problem(SHAPE, EARLIER))
    first, later = (each.make_net() for each in (run, run.for_classes(LATER)))
    for key, tensor in first.frozen_tensors().items():
        assert torch.equal(later.frozen_tensors()[key], tensor)
    assert len(first.frozen_tensors()) == 2
    check_grows(make("fedavg"), run)


def test_a_later_run_knows_its_own_width_and_forms():
    """What a process derives once of a run is derived anew of the later one."""
    experiment = tiny_experiment(compression={"up": "int8"})
    run = RunFacts(experiment, Problem(SHAPE, EARLIER))
    assert run.forms["head/bias"].shape == (EARLIER,)
    now, method = run.for_classes(LATER), method_of(experiment)
    assert now.forms["head/bias"].shape == (LATER,)
    assert Compression.of(method, now).returned["head/bias"] == (LATER,)
    assert method.upload_spec(now).required["weights/head/bias"].shape == (LATER,)
    assert method.payload_spec(now)[0].required["weights/head/bias"].shape == (LATER,)


# --- refusals -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Odd(FedAvg):
    """A method whose server keeps something for each class."""

    citation: ClassVar[str] = "nobody"
    keeps: str = "flat"

    def init_server(self, run: RunFacts) -> ServerState:
        classes = run.problem.num_classes
        own = {
            "flat": Bundle({"margins": torch.zeros(2 * classes)}),
            "halves": Bundle({"margins": torch.zeros((classes + 1) // 2)}),
            "scalar": Bundle(scalars={"classes": float(classes)}),
            "named": Bundle({f"margins/{k}": torch.full((2,), float(k)) for k in range(classes)}),
            "later": Bundle(),
        }
        return replace(super().init_server(run), own=own[self.keeps])


class Fixed(Odd):
    """A method that takes none."""

    grows_classes = False


class Told(Odd):
    """A method that says how."""

    def grown(self, run: RunFacts, state: Bundle) -> dict[str, Tensor]:
        held = state.weights.get("margins")
        return {} if held is None else {"weights/margins": torch.cat([held, torch.ones(2)])}


@pytest.mark.parametrize(
    ("method", "net", "line"),
    [
        (make("fedic"), "mlp", "'fedic' with net 'mlp' .*: its server half trains on examples"),
        (Fixed(), "mlp", r"'fixed'.*: its class says grows_classes = False"),
        (Odd(), "mlp", r"'odd'.*: 'weights/margins' of shape \[4\] has the shapes \[6\] and"),
        (Odd(keeps="halves"), "mlp", r"shape \[1\] has the shapes \[2\] and \[2\] for one class"),
        (Odd(keeps="scalar"), "mlp", "'scalars/classes' of shape .*, or another value"),
        (make("fedavg"), "Wide", r"'base/1.weight' of the net is \[4, 64\] for 2"),
        (make("fedavg"), "Cooled", "scores of old classes change with the number of classes"),
    ],
)
def test_what_cannot_grow_is_told_before_anything_is_trained(method, net, line, nets):
    name = net if net == "mlp" else f"{nets}:{net}"
    type(method).name = vars(type(method)).get("name", type(method).__name__.lower())
    run = RunFacts(tiny_experiment(net={"name": name}), Problem(SHAPE, EARLIER))
    with pytest.raises(ConfigError, match=line) as told:
        check_grows(method, run)
    assert str(told.value).endswith("; list every class in [data] classes from the start")
    assert "\n" not in str(told.value)


def test_a_method_of_ones_own_may_tell_how():
    run = RunFacts(tiny_experiment(), Problem(SHAPE, EARLIER))
    check_grows(Told(), run)
    own = Bundle({"margins": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    state = replace(Told().init_server(run), own=own)
    found = StateGrowth(Told(), run, run.for_classes(3)).server(state).own.weights["margins"]
    assert found.tolist() == [1.0, 2.0, 3.0, 4.0, 1.0, 1.0]


def test_a_tensor_for_each_class_gets_one_for_the_new_class():
    run, method = RunFacts(tiny_experiment(), Problem(SHAPE, EARLIER)), Odd(keeps="named")
    check_grows(method, run)
    found = StateGrowth(method, run, run.for_classes(3)).server(method.init_server(run)).own.weights
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "margins/0": [0.0, 0.0], "margins/1": [1.0, 1.0], "margins/2": [2.0, 2.0],
    }  # fmt: skip


def test_what_only_a_later_state_holds_is_not_guessed():
    run, method = RunFacts(tiny_experiment(), Problem(SHAPE, EARLIER)), Odd(keeps="later")
    state = replace(method.init_server(run), own=Bundle({"seen": torch.zeros(EARLIER)}))
    with pytest.raises(ConfigError, match="nothing tells whether 'weights/seen' of shape"):
        StateGrowth(method, run, run.for_classes(LATER)).server(state)
    momentum = replace(state, own=Bundle({"head/bias": torch.ones(EARLIER)}))
    found = (
        StateGrowth(method, run, run.for_classes(LATER)).server(momentum).own.weights["head/bias"]
    )
    assert found.tolist() == [1.0, 1.0, 0.0, 0.0]  # what the server keeps for itself is no weight
