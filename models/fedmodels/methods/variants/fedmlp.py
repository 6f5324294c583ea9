"""Other readings of FedMLP's paper; docs/methods/fedmlp.md says where each comes from."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from fedmodels.methods.fedmlp import FedMLP
from fedmodels.methods.variants import Variants
from fedmodels.methods.variants.heads import HeadsOfARound, ScoredHeads


class AllShared(FedMLP):
    """Heads travel as the extractor does: there is one model for all."""

    private = ()


class PrototypesAlone(FedMLP):
    """Prototypes travel and nothing else: a client's net is its own."""

    private = ("",)


class OfNormalised(FedMLP):
    """Eq. 7 compares distributions over embeddings of length 1."""

    def divergence(self, z: Tensor, c: Tensor) -> Tensor:
        return super().divergence(normalize(z, dim=1), normalize(c, dim=1))


class FromPrototype(FedMLP):
    """Eq. 7 the other way round: KL(prototype || embedding)."""

    def divergence(self, z: Tensor, c: Tensor) -> Tensor:
        return super().divergence(c, z)


OF = {
    "fedmlp": Variants(
        readings={
            "share": {"extractor": None, "all": AllShared, "prototypes": PrototypesAlone},
            "heads": {"private": None, "round": HeadsOfARound},
            "kl_norm": {"softmax": None, "l2_softmax": OfNormalised},
            "kl_dir": {"z_c": None, "c_z": FromPrototype},
        },
        switches={"eval_upload_head": {False: None, True: ScoredHeads}},
        apart=(
            ("share", "heads"),
            ('share = "prototypes"', "eval_upload_head"),
            ('share = "prototypes"', 'weighting = "examples"'),  # of weights, and none travel
        ),
    )
}
