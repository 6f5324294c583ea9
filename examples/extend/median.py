"""The coordinate-wise median of the clients' weights: a few liars cannot move it far.

Yin et al., Byzantine-Robust Distributed Learning, ICML 2018. https://arxiv.org/abs/1803.01498

``[server] reduce = "median"`` offers this for every method; here it shows how to read single uploads.

    fedsrv launch quickstart --out run --set method.name=examples/extend/median.py:Median
"""  # noqa: E501

import torch

from fedtide import Bundle, FedAvg, ServerContext, ServerState, Uploads


class Median(FedAvg):
    """FedAvg with a median instead of the mean."""

    reduction = "each"

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        trained = [u.weights for u in uploads.values() if u.scalars["num_examples"]]
        if not trained:
            return state
        rows = {key: torch.stack([each[key] for each in trained]) for key in trained[0]}
        return ServerState(Bundle({key: row.median(dim=0).values for key, row in rows.items()}))
