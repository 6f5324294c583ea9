"""Each part can be taken out again: a plain run loads none of them, and few files name one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from fedmodels.config.combinations import LISTED
from fedmodels.config.part import ROOMS
from fedtide.testing.trial import tiny_experiment
from tests.sizes import CORE, ROOT, sources
from tests.test_architecture import MODULES

PLAIN = tiny_experiment()
HALVES = [
    (place, part.is_on(PLAIN)) for part in LISTED for side in ROOMS if (place := part.at(side))
]
"""Where each part stands, and whether a plain run asks for it."""
NAMED: dict[str, tuple[str, str, str]] = {
    "relays": (
        r"/relays/",
        r"\brelay\w*|\bGroupSum\b",
        """
        fedmodels/console/help_panels.py fedmodels/plugins.py
        fedmodels/numerics/metric_tables.py fedmodels/host/staying.py fedmodels/times.py
        fedsrv/commands/audit.py fedsrv/commands/certs.py
        fedsrv/parts/odd_uploads.py fedsrv/transport/service.py
        """,
    ),
    "secure sums": (
        r"secure_|sum_terms",
        r"Secure[A-Z]\w+|SumTerms|secure_(?!channel|server|port)\w+",
        """
        fedcli/gate/privacy_floor.py fedcli/joining.py
        fedcli/runtime/released.py fedmodels/config/combinations.py fedmodels/config/privacy.py
        """,
    ),
    "client privacy": (
        r"/privacy/|private_rounds|private_uploads|config/privacy",
        r"hides_clients|fedmodels\.privacy|private_(rounds|uploads)|parts\.privacy",
        """
        fedcli/joining.py fedmodels/config/combinations.py fedmodels/training/private_steps.py
        fedmodels/training/secure_upload.py fedsrv/parts/example_privacy.py
        """,
    ),
    "example privacy": (
        r"/privacy/|private_steps|example_privacy|config/privacy",
        r"hides_examples|private_steps|PrivateSteps|HiddenExamples",
        """
        fedmodels/config/combinations.py
        """,
    ),
    "asynchronous rounds": (
        r"buffered_rounds|staleness|config/schedule|parts/open_(buffer|plan)",
        r"is_asynchronous|BufferedRounds|BufferedUploads|buffered_rounds|staleness",
        """
        fedmodels/config/combinations.py fedmodels/numerics/metric_tables.py fedsrv/engine/plan.py
        fedsrv/engine/schedule.py
        """,
    ),
    "compression": (
        r"parts/compression|training/compression|config/compression|compact_forms",
        r"(?<!De)[cC]ompression",
        """
        fedmodels/config/combinations.py fedmodels/config/experiment.py
        """,
    ),
    "robust rules": (
        r"/reductions/|parts/robust|config/reduction",
        r"is_robust|fedmodels\.reductions|parts\.robust|RobustRules",
        """
        fedmodels/config/combinations.py fedmodels/config/open_changes.py
        fedmodels/config/privacy.py
        """,
    ),
    "odd uploads, exclusion": (
        r"odd_uploads|exclusions",
        r"odd_uploads|[eE]xclusions|exclude_after",
        """
        fedmodels/config/combinations.py fedmodels/config/server.py
        """,
    ),
    "live models": (
        r"predicting/(live|whose)|parts/(deployment|kept_models)|runtime/deployed|config/deploy",
        r"\bDeployment\b|experiment\.deploy\b|\bDeployed\b",
        """
        fedcli/predicting/prediction.py fedcli/runtime/workers.py fedmodels/config/combinations.py
        fedtide/open_runs.py
        """,
    ),
    "audit and history": (
        r"state/(audit|verification)|known_history|commands/audit|kept_log|/journal",
        r"\.audit\b|\bA(udit|UDIT)\b|known_history|state\.verification|(self|ledger)\.chain\b",
        """
        fedcli/runtime/enrolment.py fedcli/runtime/link.py fedsrv/cli.py fedsrv/report/tables.py
        fedsrv/state/ledger.py fedsrv/state/recovery.py fedsrv/state/store.py
        """,
    ),
    "report": (
        r"fedsrv/report/",
        r"fedsrv\.report",
        """
        fedsrv/cli.py fedsrv/dashboard/live.py fedsrv/launch/launcher.py fedsrv/launch/progress.py
        fedtide/runs.py
        """,
    ),
    "page server": (
        r"http_server|/dashboard/",
        r"http_server|PageServer|fedsrv\.dashboard",
        """
        fedsrv/cli.py
        fedsrv/commands/watchers.py
        """,
    ),
    "clusters": (
        r"ray_|slurm",
        r"\bray_\w+|\bRay[A-Z]\w+|slurm",
        """
        fedsrv/cli.py fedsrv/launch/launcher.py
        """,
    ),
    "open runs": (
        r"parts/(open_|stages|class_growth|growth_by_method)"
        r"|open_runs|open_changes|runtime/announcer|store/(growing|stream)|config/schedule",
        r"\b_?is_open\b|\bStages\b|schedule\.open\b|\bGrowth\b|StateGrowth|class_growth|growth_by"
        r"|parts[. ]stages\b|Open(Plan|Admission|Buffer|Runs)|get\(\"open\"\)|at_rest"
        r"|parts[. ]open_\w+",
        """
        fedcli/runtime/enrolment.py fedmodels/config/combinations.py fedsrv/progress/run_status.py
        fedtide/inprocess.py fedtide/testing/suite.py
        """,
    ),
}
"""Of each part: its own files, what names it, and the other files that do; these become fewer."""
OF_OPTIONS = """
    fedcli.data.folders fedcli.data.store.image_folder fedcli.data.store.validation
    fedcli.runtime.own_certificate
    fedmodels.config.changes fedmodels.config.columns fedmodels.config.compression
    fedmodels.config.data fedmodels.config.scenario
    fedmodels.config.deploy fedmodels.config.privacy fedmodels.config.timeline
    fedmodels.numerics.algebra fedmodels.numerics.metric_tables fedmodels.numerics.secrecy
    fedmodels.numerics.streams fedmodels.tensors.prototype_means
    fedmodels.training.augmentation fedmodels.training.captured
    fedmodels.training.initial_weights fedmodels.training.kept_references
    fedmodels.training.server_optimizer fedmodels.training.step_audit
    fedmodels.training.step_graphs
    fedpb.peer_certificates fedpb.pem fedpb.revocation fedpb.unreachable fedpb.zstd
    fedsrv.engine.availability fedsrv.identity.certificate_guard fedsrv.identity.roles
    fedsrv.identity.tls fedsrv.state.verification fedsrv.transport.event_messages
"""
"""Further modules that serve what a plain run does not ask for."""
OF_OPEN_RUNS = """
    fedcli.data.store.growing fedcli.parts.open_runs fedcli.runtime.announcer
    fedmodels.config.open_changes fedmodels.parts.class_growth fedmodels.parts.growth_by_method
    fedsrv.parts.open_admission fedsrv.parts.open_buffer fedsrv.parts.open_plan
    fedsrv.parts.open_wishes fedsrv.parts.stages fedtide.open_runs
"""
OF_DATA_AND_PICTURES = """
    fedcli.data.folders fedcli.data.image_files fedcli.parts.drawing fedmodels.console.charts
    fedmodels.config.columns fedmodels.config.recipe fedmodels.config.transforms
    fedmodels.own.own_code fedmodels.techniques.server_memory
"""
"""What tables, images, code of one's own, and methods with pictures need."""
PROGRAMS = ["fedsrv.coordinator", "fedcli.runtime.host", "fedmodels.methods.fedavg"]
CLOSURE = 142
"""Modules that a coordinator and a client of a plain run load by imports at the top; see below."""
REMOVED = """
import sys
from pathlib import Path

from threading import Thread

gone = set({gone!r})

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name in gone:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuses())
from fedcli.joining import host_of
from fedmodels.host.devices import device_of
from fedmodels.errors import FedtideError
from fedsrv.coordinator import Listen, serve
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import digits_in, tiny_experiment

data = digits_in(Path("data"))
alone = run_in_process(tiny_experiment(), data, Path("run"))["state_sha256"]

def joins(address, events):
    host = host_of([0, 1, 2], address, data, Path("states"), device_of("cpu"))
    Thread(target=host.run, daemon=True).start()

served = serve(tiny_experiment(), Path("served"), Listen("127.0.0.1:0"), on_ready=joins)
assert served["state_sha256"] == alone
for name, table in {{"early": {{"evaluate": {{"prequential": True}}}}}}.items():
    try:
        run_in_process(tiny_experiment(**table), data, Path(name))
    except FedtideError as error:
        print(error)
"""


def test_a_plain_run_needs_no_module_of_a_part(tmp_path):
    """Nothing can import them, at a coordinator, at a client, or in one process.

    A config that asks for one is told which is missing.
    """
    needed = {place.partition(":")[0] for place, is_on in HALVES if is_on}
    gone = {place.partition(":")[0] for place, _ in HALVES} - needed | {*OF_OPEN_RUNS.split()}
    assert len(gone) > 30
    program = REMOVED.format(gone=sorted(gone))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "the config asks for a part that this installation lacks: fedsrv.parts.prequential" in (
        done.stdout
    )


def loaded(modules: Iterable[str]) -> set[str]:
    """Return the modules of this project that some load, with those that these load and so on."""
    seen, due = set[str](), [*modules]
    while due:
        if (module := due.pop()) in seen or module not in MODULES:
            continue
        seen.add(module)
        for node in ast.parse(MODULES[module].read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                due += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            elif isinstance(node, ast.Import):
                due += (alias.name for alias in node.names)
    return seen


def test_a_plain_run_loads_few_modules_and_none_of_options():
    """Lower the bound where fewer are loaded; raise it for what every run needs."""
    plain = loaded(PROGRAMS)
    assert plain & {*OF_OPTIONS.split(), *OF_OPEN_RUNS.split()} == set()
    assert 0.9 * CLOSURE < len(plain) <= CLOSURE


def test_parts_that_are_always_there_load_nothing_for_tables_images_or_charts():
    """A plain run has their modules as well, and a process of clients how it joins."""
    always = [place.partition(":")[0] for place, is_on in HALVES if is_on]
    assert loaded([*PROGRAMS, "fedcli.joining", *always]) & {*OF_DATA_AND_PICTURES.split()} == set()


@pytest.mark.parametrize("part", NAMED)
def test_no_other_file_names_a_part(part):
    """A new name outside of a part's files says that a seam is missing, or a call is in its way.

    A file that names it no longer leaves the list here.
    """
    own, words, known = NAMED[part]
    places = {
        path: path.relative_to(ROOT).as_posix().removeprefix("models/")
        for package in CORE
        for path in sources(package)
        if package != "fedpb"
    }
    naming = {
        name
        for path, name in places.items()
        if not re.search(own, name) and re.search(words, path.read_text())
    }
    assert naming == {*known.split()}
