"""Run a method of PFLlib's own code, unmodified, on the rows and first weights that ours have.

    python -m benchmarks.pfllib.theirs PLACE SPLIT SHARE ROW ROUNDS EVERY

It does what PFLlib's ``main.py`` does (seed, net, its parts), without importing its forty servers,
and writes PLACE/theirs-SPLIT-SHARE-ROW.json: right answers by rounds and client, of what clients
hold after so many rounds, before the next one trains. PLACE/pfllib is PFLlib's repository at
``COMMIT``, fetched by :mod:`benchmarks.pfllib`; nothing of it is in this repository.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

COMMIT = "d832e76f6a23b833038949ec1e4fdefe63a4d350"
SERVERS = {
    **{"FedAvg": "avg", "Local": "local", "FedRep": "rep", "FedPer": "per", "FedBABU": "babu"},
    **{"FedALA": "ala", "FedProto": "proto"},
}
OPTIONS: dict[str, Any] = {
    "goal": "test",
    "device": "cpu",
    "num_classes": 10,
    "batch_size": 10,
    "local_learning_rate": 0.005,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99,
    "top_cnt": 100,
    "local_epochs": 1,
    "join_ratio": 1.0,
    "random_join_ratio": False,
    "num_clients": 20,
    "save_folder_name": "items",
    "auto_break": False,
    "dlg_eval": False,
    "dlg_gap": 100,
    "batch_num_per_client": 2,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
    "few_shot": 0,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "time_select": False,
    "time_threthold": 10000,
    "lamda": 1.0,
    "plocal_epochs": 1,
    "fine_tuning_epochs": 10,
    "eta": 1.0,
    "rand_percent": 80,
    "layer_idx": 2,
}
"""PFLlib's arguments: ``main.py``'s defaults with batches of 10 and 20 clients."""


def main() -> int:
    place, split, share, row = sys.argv[1:5]
    rounds, every = map(int, sys.argv[5:7])
    out = Path(place).resolve() / f"theirs-{split}-{share}-{row}.json"
    os.chdir(Path(place) / "pfllib" / "system")
    sys.path.insert(0, ".")
    without = types.ModuleType("utils.dlg")  # an attack on gradients, which needs more packages
    without.DLG = None  # type: ignore[attr-defined]
    sys.modules["utils.dlg"] = without
    torch.set_num_threads(1)
    models = importlib.import_module("flcore.trainmodel.models")
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    last = rounds - (row == "FedBABU")  # its scores end with one after fine-tuning
    names = {"dataset": f"{split}-{share}", "algorithm": row, "global_rounds": last}
    names["eval_gap"] = every
    args = types.SimpleNamespace(**OPTIONS, **names)
    args.model = models.FedAvgCNN(in_features=1, num_classes=10, dim=1024)
    if row != "FedALA":
        args.head = copy.deepcopy(args.model.fc)
        args.model.fc = nn.Identity()
        args.model = models.BaseHeadSplit(args.model, args.head)
    module = importlib.import_module(f"flcore.servers.server{SERVERS[row]}")
    server = getattr(module, row)(args, 0)
    seen: list[Any] = []
    asked, began = server.test_metrics, time.process_time()

    def noted() -> Any:
        found = asked()
        scores = {"right": [*map(float, found[2])], "of": [*map(float, found[1])]}
        seen.append({"rounds": every * len(seen), **scores})
        content = {"commit": COMMIT, "seconds": time.process_time() - began, "evaluations": seen}
        out.write_text(json.dumps(content))
        if len(seen) > rounds // every:
            sys.exit()  # it would train once more, for nothing that is scored
        return found

    server.test_metrics = noted
    server.train_metrics = lambda: ([0], [1], [0.0])  # a pass over training rows; shown, not used
    server.save_results = server.save_global_model = lambda: None
    server.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
