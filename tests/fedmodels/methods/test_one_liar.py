"""What one client of ten does to the others by numbers within all bounds: the table of a page.

docs/robustness.md says which methods give a liar one voice. Here the liar takes its step ten times
as far, as the coordinator lets through, or turns it round, and claims 50,000 examples or its own.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.training.hooks import as_uploads, broadcast, reduce
from fedtide.testing.case import Case
from tests.conftest import server_context
from tests.fedmodels.methods.test_conformance import EVERY_NAME, NAMES, NEEDS, SMALL

PAGE = Path(__file__).parents[3] / "docs" / "robustness.md"
TEN, LIAR, CLAIMED, FAR = range(10), 9, 50_000, 10.0
VOICE = 0.3
"""More than a tenth: half of the clients have a class, and steps are longer than their mean."""
ROWS = {
    "one voice, whatever it claims": "one",
    "one voice, and more with the examples that it claims": "weighs",
    "more than one voice": "more",
}


def on_the_page():
    """Return by method what the page says, and the methods whose liar moves a choice."""
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE))
    found = {n: does for row, does in ROWS.items() for n in re.findall(r"`([\w-]+)`", rows[row])}
    return found, re.findall(r"`([\w-]+)`", rows["a choice that all are sent"])


@pytest.mark.needs("methods")
def test_the_page_has_every_method_once():
    assert sorted(on_the_page()[0]) == sorted(NAMES)


def sent_to_others(method, ctx, state):
    """Return what the honest clients are given next, by whose it is and key."""
    common, own = broadcast(method, ctx, state)
    parts = {"common": common, **{c: part for c, part in own.items() if c != LIAR}}
    return {(whose, key): t for whose, part in parts.items() for key, t in part.by_key().items()}


def lie_of(upload, given, factor, claims):
    """Return an upload whose every number is scaled within its bounds.

    Args:
        upload: the honest one.
        given: what the client began with, by key.
        factor: of its step; what has no step is scaled itself.
        claims: whether it has as many examples of each class as it likes.
    """
    lie = {}
    for key, tensor in upload.by_key().items():
        found = tensor
        if key == "scalars/num_examples" or (tensor.dtype == torch.int32 and "labels" not in key):
            if claims:
                found = torch.where(tensor > 0, torch.full_like(tensor, CLAIMED), tensor)
        elif key.startswith("scalars/"):
            found = abs(factor) * tensor
        elif tensor.is_floating_point():
            start = given.get(key) if key.startswith("weights/") else None
            start = torch.zeros_like(tensor) if start is None else start
            found = start + factor * (tensor - start)
            found = found.abs() if key.endswith("running_var") else found
        lie[key] = found
    return Bundle.from_keys(lie)


def voices(honest, lying, before):
    """Return of how many clients' worth a lie is, and which integers it changed.

    One of ten whose step goes ten times as far, backwards, moves a mean by 11 tenths of a step,
    which is a voice of a tenth. Prototypes have no step: there it is a part of what they are.
    """
    moved, steps = defaultdict(float), defaultdict(float)
    choices = set()
    for (whose, key), tensor in honest.items():
        other, kind = lying[whose, key], key.split("/")[0]
        if not tensor.is_floating_point():
            if key.startswith("weights/") and not torch.equal(tensor, other):
                choices.add(key)
            continue
        start = before.get((whose, key)) if kind == "weights" else None
        if start is None or start.shape != tensor.shape:
            start = torch.zeros_like(tensor)
        moved[kind] += float((tensor - other).double().square().sum())
        steps[kind] += float((tensor - start).double().square().sum())
    parts = [math.sqrt(moved[kind] / steps[kind]) for kind in moved if moved[kind]]
    return max(parts, default=0.0) / (1 + FAR), choices


@EVERY_NAME
def test_one_client_of_ten_does_what_the_page_says(name, digits, tmp_path, monkeypatch):
    if name == "glfc":  # the images that its proxy rebuilds matter little here
        monkeypatch.setattr("fedplugins.methods.lbfgs.ITERATIONS", 2)
    fields = {"reading": {"begins": "one"}} if name == "feddrift" else SMALL.get(name, {})
    case = Case(name, fields, NEEDS.get(name, {}), digits, tmp_path)
    made = case.trained((0, 1), case.experiment(schedule={"clients": 10}))
    method, state, two = made.method, made.state, [made.sent[0], made.sent[1]]
    ctx = server_context(made.run, 0, tuple(TEN))
    before = sent_to_others(method, ctx, state)
    given = {key: tensor for (whose, key), tensor in before.items() if whose in ("common", 1)}
    announced = DeclaredCounts(LIAR, *[torch.full((10,), 10 * CLAIMED)] * 3)

    def after(uploads):
        found, _ = reduce(method, ctx, state, as_uploads(method, uploads))
        later = replace(ctx, at=replace(ctx.at, interaction=1))
        return sent_to_others(method, later, found)

    uploads = {client: two[client % 2] for client in TEN}
    honest, moved, largest = after(uploads), set[str](), {False: 0.0, True: 0.0}
    for claims, factor in itertools.product((False, True), (FAR, -FAR)):
        lie = lie_of(two[1], given, factor, claims)
        method.check_upload(ctx, state, lie, announced)
        voice, choices = voices(honest, after({**uploads, LIAR: lie}), before)
        largest[claims] = max(largest[claims], voice)
        moved |= choices
    more, weighs = largest[False] > VOICE, largest[True] > max(2 * largest[False], 1e-6)
    by_method, choosing = on_the_page()
    assert by_method.get(name) == ("more" if more else "weighs" if weighs else "one"), largest
    assert bool(moved) == (name in choosing), moved
