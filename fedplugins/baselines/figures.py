"""The figures of these methods, as reports and ``fedsrv metrics`` explain them."""

from __future__ import annotations

from fedmodels.numerics.metric_tables import number, share

FIGURES = (
    number(
        "gradient_cosine", "gradient match", "cosine of matched gradients", "CReFF", "−1 … 1"
    ),
    share(
        "teacher_accuracy", "accuracy of the calibrated ensemble",
        "on the server's own examples", "FEDIC",
    ),
    share(
        "synthesis_accuracy", "agreement on made images",
        "share of synthesised images that the old model takes for their label", "TARGET",
    ),
    number(
        "generator_spread", "spread of generated classes",
        "1 − the loss that makes the generator draw all classes alike", "MFCL", "real",
    ),
    share(
        "consolidation_agreement", "agreement after consolidation",
        "share of generated examples on which the consolidated model agrees", "FedCIL",
    ),
    share("alpha", "mixing weight", "weight of the private model in the mixture", "APFL"),
    number("flow_loss", "loss of the flow", "per dimension, of the last step", "AF-FCL", "real"),
    number("flow_density", "density of embeddings", "mean over a batch, last step", "AF-FCL"),
    number("credibility", "credibility of replayed embeddings", "mean, last step", "AF-FCL"),
    number("generator_loss", "loss of the generator", "of the last step", "FedCIL", "real"),
)  # fmt: skip
