"""pFedGRP's ablations that change functions; docs/methods/pfedgrp.md lists all of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.methods.pfedgrp import PFedGRP
from fedmodels.methods.variants import Variants
from fedmodels.techniques.class_replay import Rehearsal
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.stepped import Batch, Output


class FromPersonal(PFedGRP):
    """Local training starts from the personal model; with ``lam = 0`` it is ablation ASP."""

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Rehearsal:
        refs = super().prepare(ctx, payload, state)
        self.load(ctx, payload, state)  # C <- C_{g,i}
        return refs


class SoftLabels(PFedGRP):
    """Replayed examples have the classifier's probabilities for labels (ablation AS3)."""

    def supervised(self, batch: Batch, out: Output, refs: Rehearsal) -> Tensor:
        assert refs.replayed.soft is not None
        if not len(refs.replayed.soft):
            return super().supervised(batch, out, refs)
        replayed, place = self.replayed(batch, refs)
        hard = cross_entropy(out.logits, batch.y, reduction="none")
        soft = cross_entropy(out.logits, refs.replayed.soft[place], reduction="none")
        return torch.where(replayed, soft, hard).mean()


OF = {
    "pfedgrp": Variants(
        switches={
            "init_from": {"global": None, "personal": FromPersonal},
            "replay_labels": {"hard": None, "soft": SoftLabels},
        },
    )
}
