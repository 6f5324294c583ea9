"""A method of fedtide as a strategy of Flower: Flower's clients train, the method's server half reduces.

A ``ServerApp`` of yours::

    half = fedtide.ServerHalf("my.toml", input_shape=(1, 28, 28), num_classes=10)
    ByMethod(half, fraction_evaluate=0.0).start(grid, ByMethod.arrays_of(half), num_rounds=10)

``[method]``, ``[net]`` and ``[server_optimizer]`` of the config say what the server does. Arrays have the names of the net's state dict; what a method keeps private at clients,
such as the head of ``fedper``, is not among them: load them with ``strict=False``.
"""  # noqa: E501

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedtide import ServerHalf


class ByMethod(FedAvg):
    """Flower's FedAvg for who is asked; the method for what becomes of what they send."""

    def __init__(self, half: ServerHalf, **options: Any) -> None:
        super().__init__(**options)
        self.half = half

    @staticmethod
    def arrays_of(half: ServerHalf) -> ArrayRecord:
        """Return what clients are to train from."""
        return ArrayRecord(half.weights)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Reduce what came as the method does; its figures stand beside the clients' metrics."""
        answers, _ = self._check_and_log_replies(replies, is_train=True)
        sent = {}
        for answer in answers:
            (arrays,), (metrics,) = (
                answer.content.array_records.values(),
                answer.content.metric_records.values(),
            )
            count = int(metrics[self.weighted_by_key])
            sent[answer.metadata.src_node_id] = arrays.to_torch_state_dict(), count
        if not sent:
            return None, None
        figures = self.half.reduce(sent)
        told = self.train_metrics_aggr_fn([a.content for a in answers], self.weighted_by_key)
        return self.arrays_of(self.half), MetricRecord({**told, **figures})
