"""How a data set is dealt out to clients and tasks: pure functions of labels and a seed."""

from __future__ import annotations

from fedcli.data.cuts.dirichlet import dirichlet
from fedcli.data.cuts.long_tail import long_tail_counts
from fedcli.data.cuts.replay_streams import replay_stream_rounds
from fedcli.data.cuts.shards import label_shards, per_class_shards

__all__ = [
    "dirichlet",
    "label_shards",
    "long_tail_counts",
    "per_class_shards",
    "replay_stream_rounds",
]
