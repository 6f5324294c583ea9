"""Write ``docs/combinations.md`` from the table of the parts that a config can switch on.

python docs/site/combinations.py > docs/combinations.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fedmodels.config.bounds import Refusal  # noqa: E402
from fedmodels.config.combinations import NEEDED, PARTS, RESTS, refused_by  # noqa: E402
from fedmodels.errors import ConfigError  # noqa: E402
from fedmodels.methods import make, names  # noqa: E402
from fedmodels.parts.class_growth import check_grows  # noqa: E402
from fedmodels.tensors.bundle import Problem  # noqa: E402
from fedmodels.training.asked import check_announcement  # noqa: E402
from fedmodels.training.compression import Compression  # noqa: E402
from fedmodels.training.criterion import check_own_loss  # noqa: E402
from fedmodels.training.hooks import takes_frozen  # noqa: E402
from fedmodels.training.method import Method  # noqa: E402
from fedmodels.training.own_nets import takes_own_nets  # noqa: E402
from fedmodels.training.private_steps import check_hides_examples  # noqa: E402
from fedmodels.training.private_uploads import contributions  # noqa: E402
from fedmodels.training.run import RunFacts  # noqa: E402
from fedmodels.training.secure_upload import check_secure_sum  # noqa: E402
from fedmodels.training.server_optimizer import check_server_optimizer  # noqa: E402
from fedsrv.parts.buffered_rounds import check_asynchronous  # noqa: E402
from fedtide.testing.trial import tiny_experiment  # noqa: E402
from tests.combinations import one_key, tables_of  # noqa: E402
from tests.fedmodels.methods.test_conformance import NEEDS, SMALL  # noqa: E402

HEAD = """# Combinations

Which options of a config can be combined. The page is generated from the table that configs are
checked with (`make docs` updates it), so it is complete: two parts that are not listed together
work together, and a test runs each such pair, kills it and resumes it. Other pairs are rejected
before a run starts, with the message given here. A key of a part that is off is rejected as well.

Two values of one key, such as the two kinds of `[schedule] sampling`, exclude each other.
"""
REFUSED = refused_by(PARTS)
Ask = Callable[[Method, RunFacts], object]


def _noise(method: Method, run: RunFacts) -> None:
    if not contributions(method, run).clips:
        raise ConfigError("nothing to hide")


def _noise_at_the_server(method: Method, run: RunFacts) -> None:
    _noise(method, run)
    if method.reduction == "each":
        raise ConfigError("reads uploads one by one")


def _frozen(method: Method, run: RunFacts) -> None:
    if not takes_frozen(method):
        raise ConfigError("trains the whole net")


def _own_nets(method: Method, run: RunFacts) -> None:
    if not takes_own_nets(method):
        raise ConfigError("trains one net over clients")


ASKS: Mapping[str, Ask | None] = {
    "asynchronous rounds": check_asynchronous,
    "open runs": check_grows,
    "accumulated data": None,
    "compressed uploads": Compression.of,
    "noise at the server": _noise_at_the_server,
    "noise at clients": _noise,
    "example privacy": check_hides_examples,
    "hidden counts": check_announcement,
    "secure sums": check_secure_sum,
    "robust rules": None,
    "server optimiser": check_server_optimizer,
    "own loss": check_own_loss,
    "frozen parts": _frozen,
    "own nets": _own_nets,
}
"""What each part asks of a method, beside what a config is checked with anyway."""
LETTERS = {
    "asynchronous rounds": "asynchronous", "accumulated data": "accumulated",
    "compressed uploads": "compression", "noise at the server": "noise, server",
    "noise at clients": "noise, clients", "example privacy": "examples",
    "hidden counts": "counts", "secure sums": "sums", "robust rules": "rules",
    "server optimiser": "optimiser", "own loss": "loss", "frozen parts": "frozen",
    "own nets": "nets",
}  # fmt: skip


def page() -> str:
    """Return the whole page."""
    return "\n".join([*sections(), _methods()])


def sections() -> list[str]:
    """Return what the page has of parts alone."""
    return [HEAD, _parts(), _pairs(), _refusals()]


def _parts() -> str:
    rows = []
    for part in PARTS.values():
        others = [other for other in PARTS if any({*r.pair} == {part.name, other} for r in REFUSED)]
        where = f"[{part.name}]({part.page})" if part.page else part.name
        rows.append(f"| {where} | `{part.keys}` | {', '.join(others) or '–'} |")
    head = ["## Parts\n", "| part | switched on by | rejected with |", "|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _pairs() -> str:
    named = [n for n in PARTS if any(n in r.pair for r in REFUSED)]
    rows = [f"| | {' | '.join(str(i + 1) for i in range(len(named)))} |"]
    rows.append("|---" * (len(named) + 1) + "|")
    for number, one in enumerate(named, 1):
        cells = [_cell(one, other) for other in named]
        rows.append(f"| {number} {one} | {' | '.join(cells)} |")
    text = (
        "## Parts × parts\n\nParts that are rejected with another one: `×` is rejected, `(×)` "
        "under a condition, `=` are values of one key, and an empty cell works. Columns have the "
        "numbers of the rows.\n"
    )
    return "\n".join([text, *rows]) + "\n"


def _cell(one: str, other: str) -> str:
    if one == other:
        return "·"
    found = [r for r in REFUSED if {*r.pair} == {one, other}]
    if found:
        return "(×)" if found[0].where or found[0].only else "×"
    return "=" if one_key(one, other) else ""


def _refusals() -> str:
    rows = [f"| {' with '.join(r.pair)} | {_line(r)} |" for r in REFUSED]
    needs = [f"| {r.pair[0]} without {r.pair[1]} | {_line(r)} |" for r in NEEDED]
    rests = [f"- {one} while there is {other}: {why}." for (one, other), why in RESTS.items()]
    head = ["## Messages of rejected pairs\n", "| pair | message |", "|---|---|"]
    also = [
        "\n## What is switched off\n",
        "Parts that are on by default, and off where they would contradict another one:\n",
    ]
    return "\n".join([*head, *rows, *needs, *also, *rests]) + "\n"


def _line(refusal: Refusal) -> str:
    line = re.sub(r"\{0[^}]*\}", "…", refusal.why).replace("|", "\\|")
    only = {"mean": "a method that reads the mean", "each": "a method that reads each upload"}
    where = refusal.where or only.get(refusal.only, "")
    return f"{line} (with {where})" if where else line


def _methods() -> str:
    rows = [f"| method | {' | '.join(LETTERS.get(part, part) for part in ASKS)} |"]
    rows.append("|---" * (len(ASKS) + 1) + "|")
    rows += [row_of(name) for name in names()]
    text = (
        "## Methods × parts\n\n`×`: the part rejects the method, with its defaults, before a run "
        "starts, and the message says why. Open runs: whether new classes may arrive. Parts that "
        "are not listed work with every method. Your own methods are asked in the same way: "
        "[Python](api.md#what-parts-of-a-run-ask).\n"
    )
    return "\n".join([text, *rows]) + "\n"


def row_of(name: str) -> str:
    """Return the row of a method."""
    page = f"methods/{name}.md" if (ROOT / "docs/methods" / f"{name}.md").is_file() else ""
    cells = ["" if _goes(name, part) else "×" for part in ASKS]
    return f"| {f'[{name}]({page})' if page else name} | {' | '.join(cells)} |"


def _goes(name: str, part: str) -> bool:
    """Tell whether a part takes a method."""
    clips: dict[str, float] = {}
    for clip in ("", "prototype_clip", "histogram_clip"):  # given where a method sends such things
        clips |= {clip: 1.0} if clip else {}
        if _takes(name, part, clips):
            return True
    return False


def _takes(name: str, part: str, clips: Mapping[str, float]) -> bool:
    tables = tables_of([part], ROOT)
    if part in ("frozen parts", "own nets"):
        tables.pop("net")
    if "level" in tables.get("privacy", {}):
        tables["privacy"] = {**tables["privacy"], **clips}
    elif clips:
        return False
    tables |= NEEDS.get(name, {}) | {"method": {"name": name, **SMALL.get(name, {})}}
    try:
        experiment = tiny_experiment(**tables)
        if part == "open runs" and experiment.method.pools_data:
            return False
        method = make(name, **experiment.method.hyper_parameters())
        if (ask := ASKS[part]) is not None:
            ask(method, RunFacts(experiment, Problem((1, 8, 8), 10)))
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    print(page(), end="")
