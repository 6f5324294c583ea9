"""What values of an upload could do to each method's server half, and that they do not."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, check_finite
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.hooks import as_uploads
from fedsrv.engine.reduction import reduced
from tests.conftest import server_context
from tests.fedmodels.methods.test_conformance import EVERY_CASE, trained

INT32, WIDE = 2**31 - 1, 2**62


def told_of(ctx, y):
    """Return what a client with these labels announced, in its first order."""
    now = torch.bincount(y, minlength=ctx.run.problem.num_classes)
    return DeclaredCounts(1, now, now, now)


@pytest.fixture(scope="module")
def honest(digits):
    """Method, run, state, uploads and labels of a case, made once."""
    made = {}

    def of(case):
        if repr(case) not in made:
            method, run, state, results = trained(case, digits)
            uploads = {c: r.upload for c, r in results.items()}
            labels = torch.from_numpy(np.load(digits / "1" / "task-0" / "train_y.npy"))
            made[repr(case)] = method, server_context(run, 0, (0, 1)), state, uploads, labels
        return made[repr(case)]

    return of


def lies_about(upload: Bundle):
    """Yield (what, upload) with one value of each kind in each field made impossible."""
    flat = upload.by_key()

    def changed(key, tensor):
        return key, Bundle.from_keys({**flat, key: tensor})

    for key, tensor in flat.items():
        if key.startswith("scalars/"):
            for value in (1e300, -1e300, 1e30):
                yield changed(key, torch.tensor(value, dtype=torch.float64))
        elif key.endswith("/version"):
            for value in (WIDE, 0, -1):
                yield changed(key, torch.tensor(value))
        elif not tensor.numel():
            continue
        elif tensor.is_floating_point():
            for value in (3e38, -1e30):
                yield changed(key, torch.full_like(tensor, value))
        elif tensor.dtype == torch.int32:
            for value in (INT32, -INT32):
                last = tensor.clone()
                last[-1] = value
                yield changed(key, last)
        else:
            yield changed(key, torch.full_like(tensor, WIDE))


@EVERY_CASE
def test_impossible_values_are_refused(case, honest):
    method, ctx, state, uploads, labels = honest(case)
    told = told_of(ctx, labels)
    method.check_upload(ctx, state, uploads[1], told)
    for key, lie in lies_about(uploads[1]):
        with pytest.raises(PayloadError, match=key.rsplit("/tensors", 1)[0]) as caught:
            method.check_upload(ctx, state, lie, told)
        assert "\n" not in str(caught.value)


def test_a_generator_is_asked_for_and_newer_than_the_last(honest):
    method, ctx, state, uploads, labels = honest(("pfedgrp", {}))
    told, upload = told_of(ctx, labels), uploads[1]
    key, one = next(iter(upload.generators.items()))
    other = str(next(k for k in range(10) if not told.now[k]))
    unasked = replace(upload, generators={other: one})
    with pytest.raises(PayloadError, match=f"generator '{other}' is of a class that was not"):
        method.check_upload(ctx, state, unasked, told)
    after = method.aggregate(ctx, state, as_uploads(method, uploads))
    again = replace(ctx, at=replace(ctx.at, interaction=1))
    for version in (0, 3):
        lying = {k: replace(g, version=version) for k, g in upload.generators.items()}
        line = f"'generators/{key}/version' is {version}; expected 1 to 2"
        with pytest.raises(PayloadError, match=line):
            method.check_upload(again, after, replace(upload, generators=lying), told)
    for version in (1, 2):  # a client that started over counts from 1 again
        honest_ones = {k: replace(g, version=version) for k, g in upload.generators.items()}
        method.check_upload(again, after, replace(upload, generators=honest_ones), told)


def test_a_variance_is_not_below_zero(honest):
    method, ctx, state, uploads, labels = honest(("fedpac", {}))
    said = {**uploads[1].scalars, "variance": -1e-3}
    with pytest.raises(PayloadError, match="'scalars/variance' is below zero"):
        method.check_upload(ctx, state, replace(uploads[1], scalars=said), told_of(ctx, labels))


def test_rows_may_come_in_any_order(honest):
    """What is refused is a class twice."""
    method, ctx, state, uploads, labels = honest(("fedproto", {}))
    told, rows = told_of(ctx, labels), uploads[1].prototypes["class"]

    def said(at):
        turned = replace(
            rows, vectors=rows.vectors[at], labels=rows.labels[at], counts=rows.counts[at]
        )
        return replace(uploads[1], prototypes={"class": turned})

    last = len(rows.labels) - 1
    method.check_upload(ctx, state, said(torch.arange(last, -1, -1)), told)
    with pytest.raises(PayloadError, match="twice"):
        method.check_upload(ctx, state, said(torch.zeros(2, dtype=torch.int64)), told)


def at_the_edge(tensors, value):
    """Return tensors of one value; a variance is not below zero."""
    return {
        k: torch.full_like(t, abs(value) if k.endswith("running_var") else value)
        if t.is_floating_point() else t
        for k, t in tensors.items()
    }  # fmt: skip


def extremes_of(upload: Bundle):
    """Yield uploads whose values are at the edge of what is let through."""
    for value in (1e6, -1e6):
        weights = at_the_edge(upload.weights, value)
        prototypes = {
            level: replace(rows, vectors=torch.full_like(rows.vectors, value))
            for level, rows in upload.prototypes.items()
        }
        generators = {
            key: replace(g, tensors=at_the_edge(g.tensors, value))
            for key, g in upload.generators.items()
        }
        scalars = {"variance": abs(value) ** 2.5} if "variance" in upload.scalars else {}
        yield replace(
            upload, weights=weights, prototypes=prototypes, generators=generators,
            scalars={**upload.scalars, **scalars},
        )  # fmt: skip
    if "num_examples" in upload.scalars:
        nobody = {
            level: type(rows)(rows.vectors[:0], rows.labels[:0], rows.counts[:0])
            if len(rows.labels) else rows
            for level, rows in upload.prototypes.items()
        }  # fmt: skip
        scalars = {**upload.scalars, "num_examples": 0.0}
        yield replace(upload, scalars=scalars, prototypes=nobody)


@EVERY_CASE
def test_the_edge_of_what_is_possible_leaves_a_finite_state(case, honest):
    """The state that follows is finite, with the extreme upload in it or without."""
    method, ctx, state, uploads, labels = honest(case)
    told = told_of(ctx, labels)
    for extreme in extremes_of(uploads[1]):
        method.check_upload(ctx, state, extreme, told)
        both = Uploads({0: uploads[0], 1: extreme}, method.count, method.reduction)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, on the way to a refusal
            found = reduced(method, ctx, state, both, needed=1)
        assert found.left_out.keys() <= {1}
        for _, bundle in found.state.named():
            check_finite(bundle)
        assert all(isinstance(value, float | int) for value in found.metrics.values())
