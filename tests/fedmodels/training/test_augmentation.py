"""Random changes of training images: drawn from a seed, and of no other content."""

from typing import get_args

import pytest
import torch
from torch import nn

from fedmodels.config.training import Training
from fedmodels.training.augmentation import AUGMENTATIONS, augment

IMAGES = torch.rand(24, 3, 10, 12, generator=torch.Generator().manual_seed(7))
NAMES = get_args(Training.model_fields["augment"].annotation)


def changed(name, x=IMAGES, seed=0):
    return augment(x, Training(augment=name), torch.Generator().manual_seed(seed))


def test_every_name_of_a_config_is_known():
    assert list(AUGMENTATIONS) == list(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
@pytest.mark.parametrize("x", [IMAGES, IMAGES[:, :1, :, :10]], ids=["oblong", "square"])
def test_augmentation_keeps_shape_and_is_seeded(name, x):
    before = x.clone()
    one = changed(name, x)
    assert one.shape == x.shape
    assert one.dtype == x.dtype
    assert torch.equal(one, changed(name, x))
    assert not torch.equal(one, changed(name, x, seed=1))
    assert torch.equal(x, before)
    assert torch.isfinite(one).all()
    assert changed(name, x[:0]).shape == x[:0].shape


def test_images_are_as_they_are_without_augmentation():
    assert changed("none") is IMAGES


def test_a_flip_mirrors_some():
    for image, found in zip(IMAGES, changed("flip"), strict=True):
        assert torch.equal(found, image) or torch.equal(found, image.flip(2))


def test_augmented_images_are_crops_of_the_padded_ones():
    padded = nn.functional.pad(IMAGES, (4, 4, 4, 4))
    flipped = 0
    for image, found in zip(padded, changed("crop-flip"), strict=True):
        crops = [image[:, r : r + 10, c : c + 12] for r in range(9) for c in range(9)]
        straight = any(torch.equal(found, crop) for crop in crops)
        mirrored = any(torch.equal(found, crop.flip(2)) for crop in crops)
        assert straight or mirrored
        flipped += mirrored
    assert 0 < flipped < len(IMAGES)


@pytest.mark.parametrize(("x", "turns"), [(IMAGES, (0, 2)), (IMAGES[..., :10], (0, 1, 2, 3))])
def test_turned_images_have_the_pixels_of_the_originals(x, turns):
    met = set()
    for image, found in zip(x, changed("turn-flip", x), strict=True):
        views = {
            (k, mirrored): view.flip(2) if mirrored else view
            for k in turns
            for view in [torch.rot90(image, k, (1, 2))]
            for mirrored in (False, True)
        }
        met |= {key for key, view in views.items() if torch.equal(view, found)}
    assert {k for k, _ in met} == set(turns)
    assert {mirrored for _, mirrored in met} == {False, True}


def test_moved_images_move_a_little():
    """A spot in the middle stays within a tenth of the side and of its turn."""
    x = torch.zeros(200, 1, 41, 41)
    x[:, :, 20, 20] = 1
    found = changed("affine-flip", x)
    rows = torch.arange(41.0)
    mass = found.sum(dim=(1, 2, 3))
    down = (found.sum(dim=(1, 3)) * rows).sum(1) / mass - 20
    across = (found.sum(dim=(1, 2)) * rows).sum(1) / mass - 20
    assert 3 < float(down.abs().max()) < 5.5  # a tenth of 41 pixels, zoomed by a tenth
    assert 3 < float(across.abs().max()) < 5.5


def test_jittered_images_keep_what_they_show():
    for image, found in zip(IMAGES, changed("jitter-flip"), strict=True):
        straight = torch.corrcoef(torch.stack([image.ravel(), found.ravel()]))[0, 1]
        mirrored = torch.corrcoef(torch.stack([image.flip(2).ravel(), found.ravel()]))[0, 1]
        assert max(straight, mirrored) > 0.999
        assert float((found.mean() - image.mean()).abs()) <= 0.2 + 1e-6
