"""Forgetting clients on request: a run is computed again from its beginning without them.

What a client brought is in every later state, also in that of other clients. So an exact model
without it is one that was trained without it. The clients take no part from the first interaction
on, and everything after it is undone for good. All else of the run stays, so what is computed again
has the bits of a run in which they never took part.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmodels.config.combinations import refusals
from fedmodels.errors import ConfigError
from fedsrv.state.store import Store

WHY = "it is forgotten: the run is computed again without it (--forget)"
REMAINS = (
    "of forgotten clients there remain: what they announced of their data in run.db, their lines "
    "in the audit log and in logs, what trackers have got, copies and backups of this directory, "
    "what fedsrv recover moved to set-aside in it, weights that it gave to other runs "
    "(begin-*.safetensors) and these runs, models that were exported or are live at clients until "
    "newer ones are, and all that lies at their own sites"
)


def forget(store: Store, clients: Sequence[int]) -> list[str]:
    """Forget clients, or finish it where an earlier start was killed meanwhile.

    Returns:
        What is computed again, and what remains, a line each; none where nothing is undone.

    Raises:
        ConfigError: the run cannot be computed again.
    """
    fresh = [client for client in clients if store.aside().get(client) != 0]
    if fresh:
        for line in refusals(store.experiment, also="forgetting"):
            raise ConfigError(line)
        store.set_aside(dict.fromkeys(fresh, WHY), first=0)  # first: a crash leaves the wish
    gone = {client for client, first in store.aside().items() if first == 0}
    if not gone:
        return []
    records = [record for record, _ in store.ledger.records()]
    records += store.ledger.undone().values()  # which would count again: a kill came in between
    if not any(gone & {*record["cohort"]} for record in records):
        return [REMAINS] if fresh else []
    seconds = sum(record["seconds"].get("wall", 0.0) for record in records)
    store.take_back(-1)
    named = ", ".join(map(str, sorted(gone)))
    return [
        f"clients {named} are forgotten: {len(records)} interactions are computed again, which "
        f"took {seconds:.1f} s",
        REMAINS,
    ]
