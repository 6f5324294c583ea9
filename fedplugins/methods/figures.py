"""The figures of these methods, as reports and ``fedsrv metrics`` explain them."""

from __future__ import annotations

from fedmodels.numerics.metric_tables import number, share

FIGURES = (
    share("models_trained", "models that clients trained", "of all k", "IFCA"),
    share("clients_drifted", "clients that no model fits", "they begin a new one", "FedDrift"),
    number("models_kept", "models on the server", "after the round", "FedDrift"),
    number("models_merged", "models merged", "went into another one in the round", "FedDrift"),
    number("clusters", "clusters of clients", "mean over classes of the head's rows", "FedCCFA"),
    share(
        "task_transitions", "clients that met a new task",
        "detected by the entropy of their predictions", "GLFC",
    ),
    share(
        "proxy_accuracy", "accuracy on rebuilt prototypes",
        "of the mean model, by which the server chooses old models", "GLFC",
    ),
)  # fmt: skip
