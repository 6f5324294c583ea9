"""The check of methods that predict by the net's own classifier."""

from __future__ import annotations

import torch

from fedmodels.training.loop import train_locally
from fedtide.case import Case
from fedtide.trial import context_of, method_of, payload_of


def the_classifier_is_the_net(case: Case) -> None:
    """A rule called ``classifier`` is the stored net's own output, as ``predict`` promises."""
    experiment = case.experiment()
    method, ctx = method_of(experiment), context_of(experiment, case.data)
    payload, state = payload_of(experiment, ctx)
    result = train_locally(method, ctx, payload, state)
    x = ctx.stream.test(0)[0]  # type: ignore[attr-defined]
    ctx.net.eval()
    with torch.no_grad():
        found = method.predict(ctx, payload, result.state, x).get("classifier")
        if found is not None:
            same = torch.allclose(found, ctx.net(x), rtol=1e-3, atol=1e-4)
            assert same, (
                "its rule 'classifier' is not ctx.net(x): give it another name, in rules too"
            )
