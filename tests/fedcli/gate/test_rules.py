"""On which conditions a site takes part: how they are written, and which runs they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedcli.gate.privacy_floor import PrivacyFloor
from fedcli.gate.rules import Rules
from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment

FLOOR = "level=client,epsilon=2,delta=1e-05"
RUN = """
[data]
name = "table"
classes = ["a", "b"]
[data.columns]
label = "kind"
session = "walk"
features = ["ax", "ay"]
window = 8
[net]
name = "mlp"
[method]
name = "fedrep"
[schedule]
clients = 2
rounds = 1
"""


def test_the_rules_of_a_file_are_those_of_the_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "allow_method": ["fedavg"], "allow_column": ["age", "diag:label"],
        "require_privacy": FLOOR, "min_cohort": 3, "tell": ["loss"], "scores": 20,
    }  # fmt: skip
    file = tmp_path / "rules.toml"
    file.write_text(
        'allow_method = ["fedavg"]\nallow_column = ["age", "diag:label"]\nmin_cohort = 3\n'
        f'require_privacy = "{FLOOR}"\ntell = ["loss"]\nscores = 20\n'
    )
    found = Rules.read(file)
    assert found == Rules.of(**options)
    assert [*found.lines()] == [
        "methods: fedavg",
        "columns: age, diag:label",
        f"privacy: {FLOOR},min-cohort=1,where=clients",
        "secure sums of 3 certificates or more, and no other upload",
        "told without noise: loss",
        "models scored, over all runs: 20",
    ]
    assert Rules.of(require_privacy=FLOOR, tell=["loss"]) == Rules(
        floor=PrivacyFloor("client", 2.0, 1e-5), told=frozenset({"loss"}), scores=0
    )
    with pytest.raises(ConfigError, match=r"--scores is given, and --rules .* has scores"):
        Rules.read(file, scores="none")
    assert [*Rules().lines()] == ["no conditions: joins any run"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("min_cohorts = 3", "min_cohorts: .*Did you mean 'min_cohort'"),
        ("min_cohort = -1", "min_cohort: "),
        ("min_cohort", "is not valid TOML"),
        ('scores = "some"', "--scores some is neither none nor a number of models"),
        ('allow_method = ["fedavgg"]', "'fedavgg' is no method.*Did you mean 'fedavg'"),
        ('require_privacy = "level=row"', "epsilon is missing"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ConfigError, match=line) as caught:
        Rules.read(tmp_path / "rules.toml")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Rules.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("tell", "more", "line"),
    [
        ("los", {"require_privacy": FLOOR}, r"--tell 'los' is none of .*Did you mean 'loss'\?"),
        ("scores", {"require_privacy": FLOOR}, "--scores N allows so many models"),
        ("loss", {}, "--tell does nothing without a condition"),
        ("loss", {"allow_method": ["fedavg"]}, "--tell does nothing without a condition"),
    ],
)
def test_what_is_told_is_a_class_or_a_key(tell: str, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Rules.of(tell=[tell], **more)
    Rules.of(tell=["weights/grads", "bare", "moments"], require_privacy=FLOOR)


def test_rules_are_looked_at_without_torch() -> None:
    """A site that stays has a small process."""
    code = (
        "import sys; from fedcli.gate.rules import Rules; import fedcli.runtime.staying;"
        f"Rules.of(require_privacy='{FLOOR}', allow_method=['fedavg']);"
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


@pytest.mark.parametrize(
    ("methods", "columns", "why"),
    [
        ([], [], None),
        (["fedavg", "fedrep"], [], None),
        (["fedavg", "gldp"], [], "has method fedrep, and this site allows fedavg, gldp"),
        ([], ["ax", "ay", "kind:label", "walk", "more"], None),
        ([], ["ax", "kind:label", "walk"], "reads ay, and this site allows ax, kind:label, walk"),
        (["fedrep"], ["ax", "ay"], "reads kind, walk, and"),
    ],
)
def test_a_site_allows_methods_and_columns(
    methods: list[str], columns: list[str], why: str | None
) -> None:
    rules = Rules.of(allow_method=methods, allow_column=columns)
    experiment = parse_experiment(RUN)
    if why is None:
        return rules.joined(experiment, "run", [0])
    with pytest.raises(ConfigError, match=why):
        rules.joined(experiment, "run", [0])


LABEL = 'label = "kind"'
TARGET = 'target = "kind"\ntarget_mean = [0.0]\ntarget_std = [1.0]'
SEEN = ["ax", "ay", "walk"]


@pytest.mark.parametrize(
    ("columns", "said", "why"),
    [
        ([*SEEN, "kind"], LABEL, "takes kind as label.*--allow-column kind:label"),
        (["ax:label", "ay", "walk", "kind:label"], LABEL, "takes ax as features"),
        (SEEN, 'label_from = "file"', "reads @file, and this site allows ax, ay, walk"),
        ([*SEEN, "kind:label"], f'{LABEL}\nclient_from = "folder"', "reads @folder"),
        ([*SEEN, "kind"], TARGET, "takes kind as target.*--allow-column kind:target"),
        ([*SEEN, "kind:label", "day"], f'{LABEL}\ntask = "day"', "takes day as task"),
    ],
)
def test_a_column_is_allowed_for_a_role(columns: list[str], said: str, why: str) -> None:
    """An allowed column taken as label sends its distinct values as names of classes."""
    text = RUN.replace(LABEL, said)
    if said is TARGET:
        text = text.replace('classes = ["a", "b"]\n', "")
    with pytest.raises(ConfigError, match=why):
        Rules.of(allow_column=columns).joined(parse_experiment(text), "run", [0])


def test_names_of_files_folders_and_sheets_can_be_allowed() -> None:
    text = RUN.replace(LABEL, 'label_from = "file"\nclient_from = "sheet"')
    allowed = ["ax", "ay", "walk", "@file:label", "@sheet:client"]
    Rules.of(allow_column=allowed).joined(parse_experiment(text), "run", [0])


def test_a_run_that_names_no_columns_may_read_any_and_is_not_allowed() -> None:
    unnamed = RUN.replace('features = ["ax", "ay"]\n', "")
    with pytest.raises(ConfigError, match="does not name the columns"):
        Rules.of(allow_column=["ax"]).joined(parse_experiment(unnamed), "run", [0])


def test_a_method_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fedavgg' is no method.*Did you mean 'fedavg'"):
        Rules.of(allow_method=["fedavgg"])
    assert Rules.of(allow_method=["mine.py:Mine"]).methods == {"mine.py:Mine"}
