"""A custom aggregation: the weight of an upload in the mean.

fedsrv launch quickstart --out run --set method.name=examples/extend/tempered.py:Tempered
"""

from fedtide import FedAvg


class Tempered(FedAvg):
    """FedAvg in which clients with many examples count less than in proportion."""

    power: float = 0.5
    """An upload of n examples counts n to this power; 1 is FedAvg."""

    def count(self, upload):
        return super().count(upload) ** self.power
