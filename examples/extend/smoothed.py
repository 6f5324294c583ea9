"""A custom loss: label smoothing.

fedsrv launch quickstart --out run --set method.name=examples/extend/smoothed.py:Smoothed
"""

from fedtide import FedAvg


class Smoothed(FedAvg):
    """FedAvg with label smoothing."""

    eps: float = 0.1
    """Share of an example that is spread over the classes; 0 is FedAvg."""

    def loss(self, ctx, batch, out, refs):
        log_p = out.logits.log_softmax(1)
        return (1 - self.eps) * super().loss(ctx, batch, out, refs) - self.eps * log_p.mean()
