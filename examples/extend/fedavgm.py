"""FedAvgM: server momentum on the clients' mean update.

Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019, section 4.3.
https://arxiv.org/abs/1909.06335

``[server_optimizer]`` offers this for every method; here it shows the use of ``finish``.

    fedsrv launch quickstart --out run --set method.name=examples/extend/fedavgm.py:FedAvgM
"""

from fedtide import Bundle, FedAvg, Reduced, ServerContext, ServerState, Uploads


class FedAvgM(FedAvg):
    """FedAvg with a velocity v on the server: v <- beta v + (w - mean), w <- w - v."""

    beta: float = 0.9
    """Momentum; 0 is FedAvg."""

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        before, mean, old = ctx.before.common.weights, state.common.weights, state.own.weights
        moved = ctx.run.parameters  # batch-normalisation statistics have no velocity
        pull = {key: self.beta * old[key] if key in old else 0.0 * mean[key] for key in moved}
        velocity = {key: before[key] - mean[key] + pull[key] for key in moved}
        weights = {**mean, **{key: mean[key] - pull[key] for key in moved}}  # before - velocity
        return ServerState(Bundle(weights), Bundle(velocity)), {}
