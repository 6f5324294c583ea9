"""What every registered method must do: the suite that ships as ``fedtide.testing``."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import _CLASSES, file_of, make, method_class, names
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.asked import keeps_state, needs_server_data
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.hooks import broadcast, init_server, reduce, takes_means
from fedmodels.training.method import LocalResult, Method
from fedmodels.training.returned import check_upload
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Stepped
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine import reduction
from fedsrv.engine.cohort import Answer
from fedsrv.engine.reduction import StreamingMean
from fedtide.testing import CHECKS, Case, check_method
from fedtide.testing.case import Finished, Trained, states_of
from fedtide.testing.trial import context_of, few_in, method_of, server_context, tiny_experiment
from tests.runs import WholeRuns

ALIGNED = {"name": "vit-tiny", "mlp_ratio": 1, "blocks": 2, "alp": True, "prototypes": [16, 8]}

EXTEND = Path(__file__).parents[3] / "examples" / "extend"

NORMED = {"name": "digits-cnn", "norm": "batch"}

ADAPTED = {"name": "mlp", "hidden": [16], "adapters": 8}

NEEDS: dict[str, dict[str, object]] = {
    "fedali": {"net": ALIGNED}, "fedbn": {"net": NORMED}, "pilora": {"net": ADAPTED},
}  # fmt: skip
"""Tables a method cannot do without, by name: ``{"fedali": {"net": {"name": "hart", …}}}``."""

SMALL_GENERATORS = {"generator_width": 4, "generator_epochs": 5, "n_check": 16}
SMALL_MEMORY = {"latent": 16, "generator_width": 4}
SMALL: dict[str, dict[str, object]] = {
    "gldp": {"t": 2, "s": 3},
    "pfedgrp": {**SMALL_GENERATORS, "server_volume": 12, "w_epochs": 2},
    "fedavg-replay": SMALL_GENERATORS,
    "pfedgraph-replay": SMALL_GENERATORS,
    "fedtgp": {"server_epochs": 4},
    "creff": {"match_steps": 5, "crt_epochs": 2},
    "mfcl": {**SMALL_MEMORY, "generator_steps": 5, "generator_batch": 16, "synthetic_batch": 8},
    "target": {
        **SMALL_MEMORY,
        "batches": 2,
        "synthesis_batch": 16,
        "g_steps": 3,
        "kd_steps": 3,
        "num_images": 24,
        "kd": 1.0,
    },
    "fedic": {"fine_tuning_steps": 5, "calibration_steps": 5, "distillation_steps": 5},
    "af-fcl": {"flow_hidden": 8},
    "glfc": {"r_h": 0.5, "memory": 20, "perturb_steps": 2, "rebuild_steps": 1, "images": 1},
    "fedcil": {"iterations": 2, "md_iter": 2, "generator_width": 2, "replay_batch": 8},
}
"""Hyper-parameters that make a method fast enough for so many runs, by name."""

VARIANTS = [
    ("fedavg", {"weighting": "uniform"}),
    ("centralized", {"data": "own"}),
    ("fedmlp", {"share": "all"}),
    ("fedmlp", {"eval_upload_head": True, "inference": "prototype"}),
    ("gldp", {"heads": "round", "own_moves": "epoch"}),
    ("fedmlp", {"heads": "round"}),
    ("pfedgrp", {"generator_decouple": False, "replay_labels": "soft"}),
    ("fedali", {"wire_prototypes": "both", "keep_personal_prototypes": True}),
]
"""Switches that change what travels or who trains."""

CARRIED = (
    "fedavg", "local", "centralized", "fedper", "fedproto", "gldp", "fedpac", "creff", "fedic",
    "fedmlp", "pfedgrp", "pfedgraph", "pfedgraph-replay", "fedcil", "af-fcl", "mfcl", "glfc",
    "pilora",
)  # fmt: skip
"""A method of each kind that sends, gets or keeps something else than the others."""

NAMES = [name for name in names() if file_of(name)]
"""The methods that come with fedtide, whatever plugins other tests have put into this process."""
CASES = [*((name, {}) for name in NAMES), *VARIANTS]
EVERY_CASE = pytest.mark.parametrize(
    "case", CASES, ids=["-".join([name, *map(str, switches.values())]) for name, switches in CASES]
)
EVERY_NAME = pytest.mark.parametrize("name", NAMES)


def experiment_for(case: tuple[str, dict[str, Any]], **overrides: Any) -> Experiment:
    """Return the tiny experiment of a case, with whole tables or keys of them replaced."""
    name, switches = case
    method = {"name": name, **SMALL.get(name, {}), **switches}
    return tiny_experiment(method=method, **{**NEEDS.get(name, {}), **overrides})


def trained(
    case: tuple[str, dict[str, Any]], root: Path, clients: tuple[int, ...] = (0, 1)
) -> tuple[Method, RunFacts, ServerState, Mapping[int, LocalResult]]:
    """Return method, run, server state, and each client's result of one interaction."""
    name, switches = case
    small = {**SMALL.get(name, {}), **switches}
    made = Case(name, small, NEEDS.get(name, {}), root, root).trained(clients)
    return made.method, made.run, made.state, made.results


@dataclass
class SharedCase(Case):
    """A case whose whole run serves other tests too."""

    whole_run: WholeRuns = field(kw_only=True)

    @cached_property
    def finished(self) -> Finished:
        return self.whole_run(self.experiment(schedule={"rounds": 1}), self.data)


@pytest.fixture(scope="module")
def cases(
    digits: Path, tmp_path_factory: pytest.TempPathFactory, whole_run: WholeRuns
) -> dict[str, Case]:
    """Every case; its whole run is made once."""
    return {
        repr(each): SharedCase(
            each[0],
            {**SMALL.get(each[0], {}), **each[1]},
            NEEDS.get(each[0], {}),
            digits,
            tmp_path_factory.mktemp("case"),
            whole_run=whole_run,
        )
        for each in CASES
    }


@pytest.fixture(scope="module")
def few(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clients with little to train on; client 1 has one example."""
    return few_in(tmp_path_factory.mktemp("few") / "data", digits)


ALIKE = {
    "bfloat16_stays_within_the_net", "one_example_makes_no_batch_statistics", "the_seed_matters",
}  # fmt: skip
"""Checks that look at what the switches of a variant leave as it is."""


OF_UPLOADS = ("aggregate", "check_upload", "count", "finish")
"""Functions of a method that see what came."""


def _is_held_elsewhere(name: str, switches: Mapping[str, Any], check: str) -> bool:
    """Tell whether another test holds what a check would see of a case.

    ``test_class_growth`` lets every case grow. A run with batch statistics is one with little data,
    but for a batch of one example: ``test_a_client_with_one_example_trains`` has that.
    Of methods that send alike and keep states alike, the engine keeps the states of all as of one.
    Methods that leave the functions of uploads as FedAvg has them, and switches that leave them as
    the method has them, cannot make arrival matter; that equal runs agree is what golden traces
    hold.
    """
    if check == "arrival_does_not_matter":
        plain, cls = method_class(name) if switches else FedAvg, type(make(name, **switches))
        others = (name, switches) != ("fedavg", {})
        return others and all(getattr(cls, f) is getattr(plain, f) for f in OF_UPLOADS)
    if check == "a_class_may_come_later":
        return name != "fedavg"
    if check == "clients_with_little_data_take_part":
        return not switches and name not in NEEDS
    if check == "who_is_not_selected_keeps_its_state":
        return bool(switches) or name not in CARRIED
    return bool(switches) and check in ALIKE


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(
            case, check, id="-".join([case[0], *map(str, case[1].values()), check]),
            marks=[pytest.mark.whole] if _is_held_elsewhere(*case, check) else [],
        )
        for case in CASES
        for check in CHECKS
    ],
)  # fmt: skip
def test_conformance(case, check, cases):
    CHECKS[check](cases[repr(case)])


@EVERY_CASE
def test_a_method_that_takes_means_takes_them_by_the_rule(case, cases):
    made = cases[repr(case)].interaction
    uploads = made.uploads
    made.method.aggregate(server_context(made.run, 0, (0, 1)), made.state, uploads)
    pools = made.method.name == "centralized" and not made.method.private  # one upload alone
    assert uploads.was_asked == (takes_means(made.method) or pools)


@EVERY_NAME
def test_a_client_with_one_example_trains(name, cases, few):
    """A net with batch statistics leaves a batch of one example out, so it cannot show this."""
    case = replace(cases[repr((name, {}))], data=few)
    made = case.trained([1], case.experiment(scenario={"tasks": 1}))
    check_upload(made.method, made.method.upload_spec(made.run), made.sent[1])
    assert made.results[1].num_examples == 1


def means_in_order(made: Trained) -> Uploads:
    """Return the uploads, whose weights were added to their mean as they came."""
    answers = {c: Answer(upload, rpc.Report(), 0) for c, upload in made.sent.items()}
    folding = StreamingMean(answers, made.method.count, 0)
    for answer in answers.values():
        folding.add_answer(answer, answers, {})
    mean, sent = folding.finish(answers), {c: answer.upload for c, answer in answers.items()}
    assert mean is not None
    assert not any(upload.weights for upload in sent.values())
    return Uploads(sent, made.method.count, "mean", mean)


@EVERY_CASE
def test_uploads_added_up_as_they_come_make_the_same_state(case, cases, monkeypatch):
    made = cases[repr(case)].interaction
    if made.method.reduction != "mean" or not made.sent[0].weights:
        return  # its uploads stay whole
    monkeypatch.setattr(reduction, "MAX_WHOLE", 0)
    ctx = server_context(made.run, 0, (0, 1))
    state, metrics = reduce(made.method, ctx, made.state, means_in_order(made))
    whole, as_whole = reduce(made.method, ctx, made.state, made.uploads)
    assert states_of(state) == states_of(whole)
    assert metrics == as_whole


def test_a_method_of_each_kind_that_sends_something_else_is_carried():
    """Another kind needs a line in CARRIED: then it runs over loopback, too."""
    assert {kind_of((name, {})) for name in CARRIED} == set(map(kind_of, CASES))


def kind_of(case: tuple[str, dict[str, Any]]) -> tuple[object, ...]:
    """Return what tells how a case's messages and states differ from those of others."""
    experiment = experiment_for(case)
    method, run = method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10))
    ctx, spec = server_context(run, 0, (0, 1)), method.upload_spec(run)
    common, own = broadcast(method, ctx, init_server(method, run))
    return (
        takes_means(method), keeps_state(method, run), experiment.method.pools_data,
        needs_server_data(method_class(case[0])), parts_of(common.by_key()),
        parts_of(itertools.chain.from_iterable(each.by_key() for each in own.values())),
        parts_of((*spec.required, *spec.optional)),
    )  # fmt: skip


def parts_of(keys: Iterable[str]) -> frozenset[str]:
    """Return the parts of a bundle that some keys belong to."""
    return frozenset(key.split("/")[0] for key in keys)


@EVERY_NAME
def test_a_method_is_one_class_over_fedavg(name):
    """What methods have in common are functions and settings."""
    cls = method_class(name)
    (above,) = cls.__bases__
    assert above in (Stepped, FedAvg) or above.__module__ == cls.__module__
    assert cls.name == name
    assert cls.citation


def test_the_suite_has_not_shrunk():
    assert len(CHECKS) >= 18


# --- the suite sees what it is there to see -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Broken(FedAvg):
    """A method whose loss changes its batch."""

    citation: ClassVar[str] = "nobody"

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        batch.x.add_(1.0)
        return super().loss(ctx, batch, out, refs)


def test_a_method_that_breaks_a_promise_is_named():
    line = "broken fails 'loss_leaves_inputs_alone': it changes batch.x"
    with pytest.raises(AssertionError, match=line):
        check_method(Broken, checks=["its_views_are_known", "loss_leaves_inputs_alone"])


@dataclass(frozen=True, kw_only=True)
class Mistaken(FedAvg):
    """A method with a mistake that no error shows."""

    citation: ClassVar[str] = "nobody"
    mistake: str = ""
    drawn: ClassVar[Iterator[int]] = itertools.count()
    arrived: ClassVar[list[Bundle]] = []

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        self.arrived.append(upload)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        if self.mistake == "arrival":
            return replace(state, common=Bundle(self.arrived[-1].weights))
        after = super().aggregate(ctx, state, uploads)
        scale = {"random": 1 + 1e-3 * next(self.drawn), "step": 0.5}.get(self.mistake, 1.0)
        weights = {key: scale * tensor for key, tensor in after.common.weights.items()}
        return replace(after, common=Bundle(weights))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        copied = self.mistake != "live"
        return {"w": [p.detach().clone() if copied else p.data for p in ctx.net.parameters()]}


@pytest.mark.parametrize(
    ("mistake", "check", "line"),
    [
        ("arrival", "arrival_does_not_matter", "the order in which uploads come changes a run"),
        ("random", "arrival_does_not_matter", "two equal runs differ: draw by ctx.generator"),
        ("step", "one_upload_is_its_own_mean", "another 'base/1.*' of one upload: what goes be"),
        ("live", "references_stay_while_the_net_trains", "'base/1.*' of ctx.net itself, which mov"),
    ],
)
def test_a_mistake_that_no_error_shows_is_told(mistake, check, line):
    with pytest.raises(AssertionError, match=f"mistaken fails '{check}': .*{line}"):
        check_method(Mistaken, checks=[check], mistake=mistake)
    check_method(Mistaken, checks=[check])


@dataclass(frozen=True, kw_only=True)
class Inverse(FedAvg):
    """A method whose predictions are not the net's, under the name of those."""

    citation: ClassVar[str] = "nobody"

    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        return {"classifier": -ctx.net(x)}


def test_a_rule_that_is_not_the_nets_has_a_name_of_its_own():
    with pytest.raises(AssertionError, match=r"'classifier' is not ctx\.net"):
        check_method(Inverse, checks=["the_classifier_is_the_net"])


@dataclass(frozen=True, kw_only=True)
class Misspelt(FedAvg):
    """A method one of whose functions nobody calls; the loss may well have helpers."""

    citation: ClassVar[str] = "nobody"
    temperature: float | None = None

    def aggregates(self) -> None:
        """Is not aggregate."""

    def losses(self) -> None:
        """Is a helper."""


def test_a_function_that_is_nearly_a_known_one_is_found():
    with pytest.raises(AssertionError, match="aggregates is never called: did you mean aggregate"):
        check_method(Misspelt, checks=["its_functions_are_spelt_as_known"])


def test_batches_of_one_example_are_told(monkeypatch):
    monkeypatch.setattr(SplitNet, "normalises_batches", False)
    with pytest.raises(AssertionError, match=r"fails 'one_example_.*than 1 value per channel"):
        check_method("fedavg", checks=["one_example_makes_no_batch_statistics"])


def test_a_field_may_be_none_unless_a_config_says_it():
    check_method(Misspelt, checks=["hyper_parameters_survive_toml"])
    check_method(Misspelt, checks=["hyper_parameters_survive_toml"], temperature=0.5)


def test_the_class_that_is_given_is_checked():
    """Not another one of its name: the class before a change, or a method that comes along."""
    checks = ["loss_leaves_inputs_alone"]

    def made(name: str, *bases: type[FedAvg]) -> type[FedAvg]:
        cls = type(name, bases, {"citation": "nobody"})
        return dataclass(frozen=True, kw_only=True)(cls)

    for name in ("Fresh", "FedProx"):
        check_method(made(name, FedAvg), checks=checks)
        with pytest.raises(AssertionError, match=f"{name.lower()} fails 'loss_leaves"):
            check_method(made(name, Broken), checks=checks)
    assert "fresh" not in _CLASSES
    assert method_class("fedprox").__module__ == "fedmodels.methods.fedprox"
    with pytest.raises(AssertionError, match="broken fails"):
        check_method(Broken, checks=checks)


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    """A method with mistakes that a check meets."""

    citation: ClassVar[str] = "nobody"
    mistake: str = ""

    @property
    def views(self) -> tuple[str, ...]:
        return () if self.mistake == "views" else ("global", "after_local")

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        if self.mistake == "loss":
            assert len(batch.y) == 0
        return super().loss(ctx, batch, out, refs)

    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        if self.mistake == "predict":
            state.scalars["seen"]
        return super().predict(ctx, payload, state, x)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        return Bundle(scalars={"seen": 1.0})


@pytest.mark.parametrize(
    ("mistake", "check", "line"),
    [
        ("views", "its_views_are_known", r"AssertionError at suite.py:\d+: assert views$"),
        ("loss", "loss_leaves_inputs_alone", r"loss failed \(test_conf.*: AssertionError"),
        ("predict", "predictions_are_scores_of_classes", r"predict failed \(.*KeyError: 'seen'"),
    ],
)
def test_every_failure_has_a_name_and_a_reason(mistake, check, line):
    with pytest.raises(AssertionError, match=f"failing fails '{check}': .*{line}"):
        check_method(Failing, checks=[check], mistake=mistake)
    check_method(Failing, checks=[check] if mistake != "predict" else [])


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """A method whose clients come to keep a number for each class, which its beginning lacks."""

    citation: ClassVar[str] = "nobody"

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        _, y = ctx.stream.train(ctx.task)
        return Bundle({"met": torch.bincount(y, minlength=ctx.run.problem.num_classes)})


def test_what_may_have_a_row_for_each_class_is_asked_for():
    line = (
        r"'a_class_may_come_later': nothing tells whether 'weights/met' of shape \[10\] has a row"
    )
    with pytest.raises(AssertionError, match=line):
        check_method(Counting, checks=["a_class_may_come_later"])


def test_an_unknown_check_gets_a_line():
    with pytest.raises(ConfigError, match="unknown check 'its_views'; known: hyper_param"):
        check_method("fedavg", checks=["its_views"])


EXAMPLES = {
    "smoothed": "Smoothed",
    "tempered": "Tempered",
    "fedavgm": "FedAvgM",
    "median": "Median",
    "anchored": "Anchored",
    "own_head": "OwnHead",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_conform(name):
    check_method(f"{EXTEND / name}.py:{EXAMPLES[name]}")


def test_there_is_no_other_example():
    """But for a scenario, which ``tests/fedcli/data/test_own_scenario.py`` tries."""
    assert {file.stem for file in EXTEND.glob("*.py")} == EXAMPLES.keys() | {"sliding"}


@pytest.mark.parametrize("name", ["smoothed", "tempered"])
def test_one_function_of_ones_own_is_a_short_file(name):
    """A method that changes the loss or the aggregation alone needs one import."""
    tree = ast.parse((EXTEND / f"{name}.py").read_text("utf-8"))
    _, imported, cls = tree.body
    assert ast.unparse(imported) == "from fedtide import FedAvg"
    assert cls.end_lineno is not None
    assert cls.end_lineno - cls.lineno < 13


def test_label_smoothing_by_hand(digits):
    """Logits (0, ln 3) of label 1: p = (1/4, 3/4); .9 ln 4/3 + .1 (ln 4 + ln 4/3) / 2 = .342613."""
    cls = method_class(f"{EXTEND / 'smoothed'}.py:Smoothed")
    logits, y = torch.tensor([[0.0, math.log(3)]]), torch.tensor([1])
    batch, out = Batch(logits, y, torch.arange(1)), Output(logits, logits)
    ctx = context_of(tiny_experiment(), digits)
    assert cls().loss(ctx, batch, out, None).item() == pytest.approx(0.342613, abs=1e-6)
