"""What values of an upload could do to each method's server half, and that they do not."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmodels.announced import Announced
from fedmodels.errors import PayloadError
from fedmodels.types import Bundle, check_finite
from fedsrv.reduction import reduced
from tests.conftest import server_context
from tests.methods.test_conformance import EVERY_CASE, trained

INT32, WIDE = 2**31 - 1, 2**62


def told_of(ctx, y):
    """Return what a client with these labels announced, in its first order."""
    now = torch.bincount(y, minlength=ctx.run.problem.num_classes)
    return Announced(1, now, now, now)


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
    flat = upload.flat()

    def changed(key, tensor):
        return key, Bundle.from_flat({**flat, key: tensor})

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


def extremes_of(upload: Bundle):
    """Yield uploads whose values are at the edge of what is let through."""
    for value in (0.0, 1e6, -1e6):
        weights = {
            k: torch.full_like(t, value) if t.is_floating_point() else t
            for k, t in upload.weights.items()
        }
        prototypes = {
            level: replace(rows, vectors=torch.full_like(rows.vectors, value))
            for level, rows in upload.prototypes.items()
        }
        generators = {
            key: replace(g, tensors={k: torch.full_like(t, value) for k, t in g.tensors.items()})
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
        both = {0: uploads[0], 1: extreme}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, on the way to a refusal
            found = reduced(method, ctx, state, both, needed=1)
        assert found.left_out.keys() <= {1}
        for _, bundle in found.state.named():
            check_finite(bundle)
        assert all(isinstance(value, float | int) for value in found.metrics.values())
