"""What each command may import before it does its work: whoever types it waits for that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedmodels.methods import method_class
from fedmodels.training import asked

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch", "numpy", "grpc", "pandas", "scipy", "sklearn", "matplotlib", "torchvision", "ot",
    "jinja2",
)  # fmt: skip
"""Packages that take a tenth of a second or more."""
NOWHERE = "127.0.0.1:9 --tls-ca missing.pem"
"""A server that is not asked, since the file is missing: the command has been imported by then."""
COMMANDS = {
    "fedsrv.cli": {
        "--help": "", "serve --help": "", "launch --help": "", "metrics": "", "methods": "",
        "certs init": "", "certs issue 0": "",
        f"health {NOWHERE}": "grpc", f"status {NOWHERE}": "grpc", f"watch {NOWHERE}": "grpc",
    },
    "fedcli.cli": {"--help": "", "join --help": "", "partition --help": "", "data": ""},
}  # fmt: skip
"""By program: commands in turn, and which of the heavy packages each needs beyond those before."""
MODULES = {
    "fedtide": "torch numpy grpc",
    "fedmodels.config.scenario": "torch numpy grpc",
    "fedsrv.report.page": "matplotlib torch",
}
"""By module: what it may not import."""

COMMAND = """
import sys
from importlib import import_module

heavy, allowed = {heavy!r}, set()
for words, needed in {commands!r}.items():
    sys.argv = ["it", *words.split()]
    try:
        import_module({module!r}).main()
    except SystemExit:
        pass
    allowed |= {{*needed.split()}}
    loaded = {{name for name in heavy if name in sys.modules}} - allowed
    assert not loaded, (words, loaded)
"""
RUN = """
import sys
from pathlib import Path
import fedmodels.nets.resnet, fedmodels.numerics.algebra

heavy = ["sklearn", "scipy", "ot", "torchvision", "grpc", "typer"]
loaded = {name for name in heavy if name in sys.modules}
assert not loaded, ("a net", loaded)

import fedsrv.coordinator

loaded = {name for name in ["triton", "sklearn"] if name in sys.modules}
assert not loaded, ("the coordinator", loaded)

from fedtide.inprocess import run_in_process
from fedtide.testing.trial import digits_in, tiny_experiment

heavy = ["torch._dynamo", "sklearn", "scipy", "torchvision", "matplotlib", "pandas", "ot"]
data = digits_in(Path("data"))
for optimizer in ("sgd", "adam", "adamw"):
    experiment = tiny_experiment(training={"optimizer": optimizer})
    run_in_process(experiment, data, Path(optimizer))
loaded = {name for name in heavy if name in sys.modules}
assert not loaded, ("a run", loaded)
"""
"""One process, since torch takes seconds to import: a net, then the coordinator, then runs."""

FORMS = """
import sys
from pathlib import Path

from fedmodels.errors import ConfigError
from fedmodels.methods import names
from fedtide.testing.trial import context_of, digits_in, method_of, tiny_experiment

data, asked = digits_in(Path("data")), 0
for name in names():
    try:
        experiment = tiny_experiment(method={"name": name})
        method, run = method_of(experiment), context_of(experiment, data).run
        method.payload_spec(run), method.upload_spec(run)
    except ConfigError:  # it needs a net or data that the tiny run lacks
        continue
    asked += 1
    assert "sympy" not in sys.modules, name
assert asked > 30, asked
"""
"""One process: what every method says of what travels. Tensors of torch's meta device made *like*
others import sympy and mpmath, 485 modules, at every site."""

JOIN = """
import sys
from pathlib import Path

import torch

from fedcli.joining import host_of
from fedsrv.identity.certificates import init_authority, issue
from fedtide.testing.trial import digits_in, tiny_experiment

place, data = Path("certs"), digits_in(Path("data"))
init_authority(place)
cert, key = issue(place, "0")
host = host_of(
    [0], "localhost:1", data, Path("states"), torch.device("cpu"),
    tls=(place / "ca.pem", cert, key),
)
terms = host.workers.brought["sums"]
terms.joined(tiny_experiment(), "0" * 32, [0])
loaded = {name for name in sys.modules if "secure_" in name.rpartition(".")[2]}
assert not {name for name in loaded if name.startswith("fedcli")}, loaded
terms.joined(tiny_experiment(privacy={"secure_sum": True}), "0" * 32, [0])
assert terms.peers.run_id == "0" * 32
assert "fedcli.parts.secure_peers" in sys.modules
"""
"""A certificate says who a client is, in any run; secure sums alone sign with it."""


def check(program: str, where: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=where, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_imports_what_it_needs(module, tmp_path):
    check(COMMAND.format(heavy=HEAVY, commands=COMMANDS[module], module=module), tmp_path)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_it_needs(module, tmp_path):
    names = MODULES[module].split()
    check(f"import sys, {module}; assert not {{*{names}}} & {{*sys.modules}}", tmp_path)


def test_nets_coordinator_and_runs_load_neither_the_compiler_of_torch_nor_scikit_learn(tmp_path):
    check(RUN, tmp_path)


def test_a_certificate_alone_loads_nothing_of_secure_sums(tmp_path):
    check(JOIN, tmp_path)


@pytest.mark.needs("methods")
def test_what_a_method_says_of_what_travels_imports_no_algebra(tmp_path):
    check(FORMS, tmp_path)


def test_no_method_makes_an_optimiser_that_torch_would_compile():
    """It imports ``torch._dynamo``, for a second; ``fedmodels.training.optimizer`` has others.

    L-BFGS alone calls a closure, which those do not.
    """
    files = [*(ROOT / "models" / "fedmodels").rglob("*.py")]
    assert len(files) > 100
    found = [
        f.name
        for f in files
        if re.search(r"torch\.optim\.(?!LBFGS\()[A-Z]\w+\(", f.read_text("utf-8"))
    ]
    assert found == []


def test_what_a_round_would_wait_for_is_loaded_ahead(monkeypatch):
    """FedMLP's first two rounds, and FedAli's first one, took an import of scikit-learn each."""
    loaded = list[str]()
    monkeypatch.setattr(asked, "import_module", loaded.append)
    for name, half in (("fedavg", "server"), ("fedali", "client"), ("fedavg", "client")):
        asked.load_ahead(name, half)
    assert loaded == []
    for name, half in (("fedmlp", "client"), ("fedmlp", "server"), ("fedali", "server")):
        asked.load_ahead(name, half)
    assert loaded == ["sklearn.cluster"] * 3
    for name in {*asked.AHEAD["client"], *asked.AHEAD["server"]}:
        assert method_class(name).name == name
