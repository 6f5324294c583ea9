"""Run PFLlib's code and ours on the same rows, first weights and rounds; keep both scores.

    python -m benchmarks.pfllib PLACE --split practical --share 10 --rounds 50 [--rows FedAvg …]
    python -m benchmarks.pfllib PLACE --share 10 --keep     # into benchmarks/records/pfllib

PLACE gets PFLlib's repository at the pinned commit (from ``--source``), its data files, our runs
and scores. FEDTIDE_DATA has FashionMNIST/raw. What is finished is not run again. ``--share 10``
trains on a tenth of each client's rows, and tests on a quarter; 1 is the whole split.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import fedtide
from benchmarks.measure import parser_of
from benchmarks.pfllib import split as splits
from benchmarks.pfllib.net import Cnn4
from benchmarks.pfllib.theirs import COMMIT, SERVERS

HERE = Path(__file__).parent
RECORDS = HERE.parent / "records" / "pfllib"
SOURCE = "https://github.com/TsingZ0/PFLlib"
OURS: dict[str, dict[str, Any]] = {
    "FedAvg": {"method.name": "fedavg"},
    "Local": {"method.name": "local"},
    "FedRep": {"method.name": "fedrep", "method.weighting": "examples"},
    "FedPer": {"method.name": "fedper", "method.weighting": "examples"},
    "FedBABU": {
        "method.name": "fedbabu",
        "method.weighting": "examples",
        "method.fine_tune_epochs": 10,
    },
    "FedALA": {"method.name": "fedala"},
    "FedProto": {"method.name": "fedproto", "method.weighting": "uniform"},
}
"""Our settings by row of the leaderboard: PFLlib's defaults, and how it weighs a mean."""
VIEWS = {"FedAvg": ("global",), "FedBABU": ("global", "after_downlink")}
"""What a client holds after the download: with FedAvg everybody's model."""
FACTS = {"input_shape": [1, 28, 28], "num_classes": 10, "scale": 255, "mean": [0.5], "std": [0.5]}
AT_THE_END = ("FedBABU",)
"""Rows that fine-tune before each score: scored once, after the last round."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    parser = parser_of("pfllib", __doc__)
    parser.add_argument("place", type=Path)
    parser.add_argument("--split", default="practical", choices=("practical", "pathological"))
    parser.add_argument("--share", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--every", type=int, default=1, help="rounds from score to score")
    parser.add_argument("--rows", nargs="+", default=[*OURS], choices=[*OURS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of ours: the batches")
    parser.add_argument("--source", default=SOURCE, help="where PFLlib is fetched from")
    parser.add_argument("--keep", action="store_true", help="write the record, and run nothing")
    options = parser.parse_args(arguments)
    place, name = options.place.resolve(), f"{options.split}-{options.share}"
    if options.keep:
        print(f"kept {keep(place, name)}")
        return 0
    prepare(place, options.source, options.split, options.share)
    for row in options.rows:
        for seed in options.seeds:
            ours(place, name, row, seed, options.rounds, options.every)
        theirs(place, name, row, options.rounds, options.every)
    return 0


def prepare(place: Path, source: str, split: str, share: int) -> None:
    """Fetch PFLlib, and write the split and the first weights for both sides."""
    place.mkdir(parents=True, exist_ok=True)
    code = place / "pfllib"
    if not (code / "system").is_dir():
        subprocess.run(["git", "clone", "-q", "--no-checkout", source, str(code)], check=True)
        git = ["git", "-C", str(code)]
        subprocess.run([*git, "checkout", "-q", COMMIT, "--", "system"], check=True)
    torch.manual_seed(0)
    first = Cnn4(10, (1, 28, 28)).state_dict()
    save_file({key: t.contiguous() for key, t in first.items()}, place / "first.safetensors")
    name = f"{split}-{share}"
    folder = code / "dataset" / name
    if (place / name / "19" / "client.json").is_file():
        return
    x, y, half = splits.pictures(), splits.labels(), np.float32(0.5)
    for client, parts in enumerate(getattr(splits, split)(share=share)):
        for part, rows in zip(("train", "test"), parts, strict=True):
            (folder / part).mkdir(parents=True, exist_ok=True)
            pictures = (x[rows].astype(np.float32) / np.float32(255) - half) / half
            np.savez(folder / part / f"{client}.npz", data={"x": pictures, "y": y[rows]})
            own = place / name / str(client) / "task-0"
            own.mkdir(parents=True, exist_ok=True)
            np.save(own / f"{part}_x.npy", x[rows])
            np.save(own / f"{part}_y.npy", y[rows])
        (own.parent / "client.json").write_text(json.dumps(FACTS))


def ours(place: Path, name: str, row: str, seed: int, rounds: int, every: int) -> None:
    """Run our method, and write right answers by round and client, and by rule and classes."""
    out, file = place / f"run-{name}-{row}-{seed}", place / f"ours-{name}-{row}-{seed}.json"
    if file.is_file():
        return
    shutil.rmtree(out, ignore_errors=True)
    last = row in AT_THE_END
    tables = {
        "seed": seed,
        "net.name": f"{HERE}/net.py:Cnn4",
        "net.weights": str(place / "first.safetensors"),
        "schedule.rounds": rounds,
        "evaluate.every": rounds if last else every,
        "evaluate.views": [*VIEWS.get(row, ("after_downlink",))],
    }
    quiet = {"backend": "inprocess", "progress": lambda line: None}
    fedtide.run(HERE / "config.toml", OURS[row] | tables, out=out, data=place / name, **quiet)
    seen: list[dict[str, list[float] | int]] = []
    for line in (out / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        if not any(row.get("views") for row in record["clients"].values()):
            continue
        views = [record["clients"][str(client)]["views"] for client in range(splits.CLIENTS)]
        scores = {view: [each[view]["accuracy"] for each in views] for view in views[0]}
        seen.append({"rounds": record["round"] + 1, **scores})
    file.write_text(json.dumps({"evaluations": seen}))
    for each in out.glob("clients/*"):
        shutil.rmtree(each, ignore_errors=True)


def theirs(place: Path, name: str, row: str, rounds: int, every: int) -> None:
    """Run PFLlib's method in a process of its own."""
    split, _, share = name.partition("-")
    if (place / f"theirs-{name}-{row}.done").is_file():
        return
    words = [str(place), split, share, row, str(rounds), str(every)]
    program = [sys.executable, "-m", "benchmarks.pfllib.theirs"]
    subprocess.run([*program, *words], check=True, stdout=subprocess.DEVNULL)
    (place / f"theirs-{name}-{row}.done").touch()


def keep(place: Path, name: str) -> Path:
    """Write the record of a split: by row, both sides' shares of right answers, pooled."""
    split, _, share = name.partition("-")
    dealt = getattr(splits, split)(share=int(share))
    n = np.array([len(test) for _, test in dealt], float)
    rows: dict[str, Any] = {}
    for row in SERVERS:
        own: dict[str, Any] = {}
        for file in sorted(place.glob(f"ours-{name}-{row}-*.json")):
            own[file.stem.rpartition("-")[2]] = _pooled(json.loads(file.read_text()), n)
        other = place / f"theirs-{name}-{row}.json"
        if own and other.is_file():
            seen = json.loads(other.read_text())
            found = {e["rounds"]: sum(e["right"]) / sum(e["of"]) for e in seen["evaluations"]}
            rows[row] = {"ours": own, "theirs": {k: round(v, 6) for k, v in found.items()}}
    common = [np.bincount(splits.labels()[train]).argmax() for train, _ in dealt]
    of = [splits.labels()[test] for _, test in dealt]
    always = sum(float((y == k).sum()) for y, k in zip(of, common, strict=True)) / n.sum()
    content = {"commit": COMMIT, "commonest": round(always, 6), "rows": rows}
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return RECORDS / f"{name}.json"


def _pooled(content: dict[str, Any], n: np.ndarray[Any, Any]) -> dict[str, dict[str, float]]:
    """Return by view and rounds the share of right answers over all clients' test rows."""
    views: dict[str, dict[str, float]] = {}
    for each in content["evaluations"]:
        rounds = each.pop("rounds")
        for view, scores in each.items():
            score = float((np.array(scores, float) * n).sum() / n.sum())
            views.setdefault(view, {})[str(rounds)] = round(score, 6)
    return views


if __name__ == "__main__":
    sys.exit(main())
