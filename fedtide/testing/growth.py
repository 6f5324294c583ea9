"""The check of classes that come while a run goes on."""

from __future__ import annotations

from dataclasses import replace

from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.class_growth import Growth, check_grows
from fedmodels.training.hooks import as_uploads, broadcast, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.returned import check_upload
from fedpb.codec import merged
from fedtide.testing.case import Case
from fedtide.testing.trial import context_of, server_context


def a_class_may_come_later(case: Case) -> None:
    """A run with a class more goes on from what was learnt, unless its method or net takes none."""
    made, client = case.interaction, 0
    method, cohort = made.method, (0, 1)
    try:
        check_grows(method, made.run)
    except ConfigError:
        return  # an open run refuses this method or net from the start
    now = made.run.for_classes(made.run.problem.num_classes + 1)
    growth = Growth(method, made.run, now)
    state = growth.server(made.after(server_context(made.run, 0, cohort)))
    private = growth.client(client, made.results[client].state)
    server = server_context(now, 1, cohort)
    common, own = broadcast(method, server, state)
    ctx = context_of(case.experiment(), case.data, client, interaction=1)
    ctx = replace(ctx, run=now, net=now.make_net())
    payload = merged({"common": common, "personal": own.get(client, Bundle())})
    trained = train_locally(method, ctx, payload, private)
    check_upload(method, now, trained.upload)
    reduce(method, server, state, as_uploads(method, {client: trained.upload}))
