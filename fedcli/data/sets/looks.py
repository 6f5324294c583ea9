"""What the steps of domains do to inputs, and those of concepts to labels.

Corruptions are those of Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations, ICLR 2019, with the strengths that their CIFAR-10-C has for the
severities 1 to 5. Images are (n, C, H, W) from 0 to 1 here.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import Inputs, IntArray
from fedcli.data.cuts.cut_input import rng_of
from fedcli.data.cuts.shown import Shown
from fedcli.data.sets.dataset import Dataset, both
from fedmodels.config.scenario import ScenarioTable
from fedmodels.config.timeline import Domains, Step, origin_of, steps_of
from fedmodels.errors import ConfigError

NOISE = (0.04, 0.06, 0.08, 0.09, 0.10)
BLUR = (0.4, 0.6, 0.7, 0.8, 1.0)
CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
BRIGHTNESS = (0.05, 0.1, 0.15, 0.2, 0.3)
JPEG = (80, 65, 58, 50, 40)
AT_ONCE = 4096
"""Images that are changed together."""
GEOMETRY = ("rotate", "turn")
"""Steps that change no value, and so go with inputs of any type."""
Images = NDArray[Any]


def as_shown(
    dataset: Dataset, scenario: ScenarioTable, train: Shown, test: Shown, seed: int
) -> Dataset:
    """Return the data set of these rows, each with the inputs and the label that it shows.

    Raises:
        ConfigError: a step does not fit the data.
    """
    out = dataset.at(train=train.examples, test=test.examples)
    if scenario.concepts is not None:
        if dataset.train.y.ndim != 1:
            raise ConfigError("[scenario.concepts] changes labels, and [data] learns numbers")
        show, rows = scenario.concepts.show, (train.concepts, test.concepts)
        labels = [_labels(out, place, own, show, seed) for place, own in enumerate(rows)]
        out = replace(
            out, train=replace(out.train, y=labels[0]), test=replace(out.test, y=labels[1])
        )
    if scenario.domains is not None:
        out = _looking(out, scenario.domains, train, test, seed)
    return out


def origins(dataset: Dataset, domains: Domains) -> IntArray | None:
    """Return which domain each training, then each test example may be shown in (n + m,); or -1.

    None where domains take any examples.

    Raises:
        ConfigError: the data have no domain of that name.
    """
    names = [origin_of(text) for text in domains.show]
    if not any(names):
        return None
    known = dataset.domain_names
    of_each = both(dataset.train.domains, dataset.test.domains)
    if of_each is None:
        raise ConfigError(f"[scenario.domains] 'from' needs data with domains, unlike "
                          f"{dataset.name}: docs/scenarios.md lists them")  # fmt: skip
    for name in names:
        if name not in known:
            raise ConfigError(
                f"[scenario.domains] {dataset.name} has no domain {name!r}: it has "
                f"{', '.join(known)}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"[scenario.domains] two domains take their examples from {name!r}")
    places = np.array([names.index(n) if n in names else -1 for n in known], dtype=np.int64)
    found: IntArray = places[of_each]
    return found


# --- inputs ---------------------------------------------------------------------------------------


def _looking(dataset: Dataset, domains: Domains, train: Shown, test: Shown, seed: int) -> Dataset:
    steps = [steps_of(text) for text in domains.show]
    words = {word for several in steps for word, _ in several}
    parts: list[Images] = [dataset.train.x, dataset.test.x]
    where = f"[scenario.domains] {dataset.name}:"
    for word in sorted(words):
        is_sensor = parts[0].ndim == 3 and parts[0].shape[-1] % 3 == 0
        if word == "turn" and not is_sensor:
            raise ConfigError(f"{where} 'turn' is for windows of three axes a sensor")
        if word != "turn" and parts[0].ndim != 4:
            raise ConfigError(f"{where} {word!r} is for images")
        if word not in GEOMETRY and parts[0].dtype.kind != "u":
            raise ConfigError(f"{where} {word!r} is for images whose shades are whole numbers")
    if "jpeg" in words and parts[0].shape[1] not in (1, 3):
        raise ConfigError(f"{where} 'jpeg' is for grey images, and for those of three colours")
    if "colour" in words:
        if parts[0].shape[1] != 1:
            raise ConfigError(f"{where} 'colour' is for grey images")
        parts = [np.repeat(part, 3, axis=1) for part in parts]
    for place, rows in enumerate((train, test)):
        x = parts[place].copy()
        for domain, several in enumerate(steps):
            chosen = np.flatnonzero(rows.domains == domain)
            rng = rng_of(seed, "looks", domain, place)
            for start in range(0, len(chosen) if several else 0, AT_ONCE):
                some = chosen[start : start + AT_ONCE]
                x[some] = _looks(x[some], several, dataset.scale, rng)
        parts[place] = x
    return dataset.showing(*parts)


def _looks(x: Images, steps: list[Step], scale: float, rng: np.random.Generator) -> Images:
    """Return inputs after some steps, of the type that they had."""
    for word, numbers in steps:
        if word == "turn":
            x = turned(x, numbers[0])
        elif word == "rotate" and numbers[0] % 90 == 0:
            x = _quarters(x, round(numbers[0] / 90))
        else:
            shade = LOOK[word](x / np.float64(scale), *numbers, rng)
            x = (
                np.rint(np.clip(shade, 0, 1) * scale) if x.dtype.kind == "u" else shade * scale
            ).astype(x.dtype)
    return x


def _quarters(x: Images, turns: int) -> Images:
    if turns % 2 and x.shape[-1] != x.shape[-2]:
        raise ConfigError("[scenario.domains] images are no squares: 'rotate' takes 180 alone")
    return np.asarray(np.rot90(x, turns, axes=(-2, -1)))


def turned(x: Images, degrees: float) -> Images:
    """Return windows (n, T, 3 s) of s sensors as one turned about its third axis records them."""
    sin, cos = np.sin(np.deg2rad(degrees)), np.cos(np.deg2rad(degrees))
    out = x.copy()
    out[..., 0::3] = cos * x[..., 0::3] - sin * x[..., 1::3]
    out[..., 1::3] = sin * x[..., 0::3] + cos * x[..., 1::3]
    return out


def _rotate(x: Images, degrees: float, rng: np.random.Generator) -> Images:
    from scipy.ndimage import rotate

    return np.asarray(rotate(x, degrees, axes=(-1, -2), reshape=False, order=1))


def _colour(x: Images, hue: float, rng: np.random.Generator) -> Images:
    red_green_blue = np.array(colorsys.hsv_to_rgb(hue % 360 / 360, 1.0, 1.0))
    return np.asarray(x * red_green_blue[:, None, None])


def _noise(x: Images, severity: float, rng: np.random.Generator) -> Images:
    return np.asarray(x + rng.normal(size=x.shape, scale=NOISE[int(severity) - 1]))


def _blur(x: Images, severity: float, rng: np.random.Generator) -> Images:
    from scipy.ndimage import gaussian_filter

    sigma = BLUR[int(severity) - 1]
    return np.asarray(gaussian_filter(x, (0, 0, sigma, sigma), mode="nearest"))


def _contrast(x: Images, severity: float, rng: np.random.Generator) -> Images:
    mean = x.mean(axis=(-2, -1), keepdims=True)
    return np.asarray((x - mean) * CONTRAST[int(severity) - 1] + mean)


def _brightness(x: Images, severity: float, rng: np.random.Generator) -> Images:
    """Raise the V of HSV, the largest channel; hue and saturation stay."""
    value = x.max(axis=1, keepdims=True)
    higher = np.minimum(value + BRIGHTNESS[int(severity) - 1], 1)
    return np.asarray(np.where(value > 0, x * (higher / np.where(value > 0, value, 1)), higher))


def _jpeg(x: Images, severity: float, rng: np.random.Generator) -> Images:
    from PIL import Image

    shades = np.rint(x * 255).astype(np.uint8)
    out = np.empty_like(shades)
    for place, image in enumerate(shades):
        packed = io.BytesIO()
        grey = len(image) == 1
        made = Image.fromarray(image[0] if grey else image.transpose(1, 2, 0))
        made.save(packed, "JPEG", quality=JPEG[int(severity) - 1])
        read = np.asarray(Image.open(packed))
        out[place] = read if grey else read.transpose(2, 0, 1)
    return np.asarray(out / 255)


LOOK: dict[str, Callable[..., Images]] = {
    "rotate": _rotate,
    "colour": _colour,
    "invert": lambda x, rng: 1 - x,
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "jpeg": _jpeg,
}
"""Functions of images (n, C, H, W) from 0 to 1, the numbers of a step, and a generator."""


# --- labels ---------------------------------------------------------------------------------------


def _labels(
    dataset: Dataset, place: int, concepts: IntArray, show: tuple[str, ...], seed: int
) -> IntArray:
    """Return the labels (R,) of rows by what they mean in the concept of each."""
    part = (dataset.train, dataset.test)[place]
    x, y = part.x, part.y.copy()
    for concept, text in enumerate(show):
        chosen = np.flatnonzero(concepts == concept)
        rng = rng_of(seed, "concepts", concept, place)
        for word, numbers in steps_of(text):
            y[chosen] = meant(word, numbers, x[chosen], y[chosen], dataset.num_classes, rng)
    return np.asarray(y)


def meant(
    word: str, numbers: tuple[float, ...], x: Inputs, y: IntArray, num_classes: int,
    rng: np.random.Generator,
) -> IntArray:  # fmt: skip
    """Return labels (n,) after one step of a concept.

    Raises:
        ConfigError: the step names a class that is not there, or needs other inputs.
    """
    where = f"[scenario.concepts] {word!r}"
    if word in ("swap", "merge"):
        a, b = map(int, numbers)
        if max(a, b) >= num_classes:
            raise ConfigError(
                f"{where}: there is no class {max(a, b)}, they go to {num_classes - 1}"
            )
        found = np.where(y == a, b, y)
        return np.where(y == b, a, found) if word == "swap" else found
    if word == "reverse":
        return np.asarray(num_classes - 1 - y)
    if word == "noise":
        others = (y + rng.integers(1, max(num_classes, 2), size=len(y))) % num_classes
        return np.where(rng.random(len(y)) < numbers[0], others, y)
    if x.ndim != 2 or x.shape[1] < 2 or num_classes < 2:
        raise ConfigError(f"{where} is for rows of two numbers or more, and two classes")
    one, other = x[:, 0], x[:, 1]
    if word == "sine":
        is_second = other <= np.sin(one)
    elif word == "circle":
        first, second, radius = numbers
        is_second = (one - first) ** 2 + (other - second) ** 2 > radius**2
    else:
        is_second = one + other <= numbers[0]
    return np.asarray(is_second, dtype=np.int64)
