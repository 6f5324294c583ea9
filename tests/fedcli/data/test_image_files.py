"""Images as viewers show them, by every way in; what has no single right reading is refused."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcli.data.image_files import pixels_of, read_image
from fedcli.data.own.functions import as_array
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.transforms import ImageTransform
from fedmodels.errors import DataError

Saved = Callable[[Path], None]
ORIENTATION = 0x0112
INK = np.array([[0, 255, 0], [0, 0, 0]], dtype=np.uint8)
"""Where a drawing (2, 3) is opaque."""


def turned(path: Path) -> None:
    """Save an image that is stored lying on its side."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # turn by 90 degrees clockwise to see it
    Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).save(path, exif=exif)


def transparent(mode: str) -> Saved:
    """Return what saves black ink on a transparent ground, in one of the ways that files have."""

    def save(path: Path) -> None:
        black = np.zeros((2, 3), dtype=np.uint8)
        if mode == "P":  # index 1 is ink; index 0 is transparent, and black as well
            image = Image.fromarray((INK > 0).astype(np.uint8)).convert("P")
            image.putpalette([0] * 768)
            image.save(path, transparency=0)
            return
        layers = [black] * (1 if mode == "LA" else 3)
        Image.fromarray(np.stack([*layers, INK], axis=2)).save(path)

    return save


def deep(top: int) -> Saved:
    """Return what saves a grey image of 16 bits whose shades go up to ``top``."""
    return lambda path: Image.fromarray(np.array([[0, 1, top]], dtype=np.uint16)).save(path)


def palette(path: Path) -> None:
    """Save colours as places in a palette."""
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    image.putpalette([255, 0, 51, 0, 102, 255] + [0] * 762)
    image.save(path)


def white_is_zero(path: Path) -> None:
    """Save shades 0, 1 and 65535 as a TIFF whose white is 0."""
    stored = np.array([[65535, 65534, 0]], dtype=np.uint16)
    Image.fromarray(stored).save(path, tiffinfo={262: 0})


RIGHT: dict[str, tuple[str, Saved, list[Any]]] = {
    "orientation": ("a.png", turned, [[[3, 0], [4, 1], [5, 2]]]),
    "alpha of colours": ("a.png", transparent("RGBA"), [(255 - INK).tolist()] * 3),
    "alpha of greys": ("a.png", transparent("LA"), [(255 - INK).tolist()]),
    "alpha in a palette": ("a.png", transparent("P"), [(255 - INK).tolist()] * 3),
    "16 bits": ("a.png", deep(65535), [[[0, 1, 65535]]]),
    "12 bits in 16": ("a.tif", deep(4095), [[[0, 1, 4095]]]),
    "8 bits in 16": ("a.tif", deep(255), [[[0, 1, 255]]]),
    "white is 0": ("a.tif", white_is_zero, [[[0, 1, 65535]]]),
    "palette": ("a.png", palette, [[[255, 0]], [[0, 102]], [[51, 255]]]),
    "cmyk": (
        "a.tif",
        lambda path: Image.new("CMYK", (1, 1), (0, 255, 0, 0)).save(path),
        [[[255]], [[0]], [[255]]],
    ),
    "1 bit": (
        "a.png",
        lambda path: Image.fromarray(np.array([[True, False]])).save(path),
        [[[255, 0]]],
    ),
}
"""A file's name, what saves it, and its pixels as a viewer shows them, channels first."""


@pytest.mark.parametrize(("name", "save", "pixels"), RIGHT.values(), ids=RIGHT)
def test_a_picture_is_read_as_viewers_show_it(tmp_path, name, save, pixels):
    save(tmp_path / name)
    (read,) = read_image(tmp_path / name)
    assert read.tolist() == pixels
    with Image.open(tmp_path / name) as picture:  # of a custom function, or Hugging Face
        assert as_array(picture, "a picture").tolist() == pixels


@pytest.mark.parametrize(("name", "save", "pixels"), RIGHT.values(), ids=RIGHT)
def test_every_way_in_reads_alike(tmp_path, name, save, pixels):
    for part in ("train", "test"):
        for place in (tmp_path / "photos" / part, tmp_path / "0" / "task-0" / part):
            (place / "0").mkdir(parents=True)
            save(place / "0" / name)
    shape = list(np.shape(pixels))
    facts = f'{{"input_shape": {shape}, "num_classes": 1}}'
    (tmp_path / "0" / "client.json").write_text(facts)
    (tmp_path / "mine.py").write_text(
        "from PIL import Image\n"
        "def load():\n"
        f"    part = [(Image.open({str(tmp_path / 'photos/train/0' / name)!r}), 0)]\n"
        "    return part, part\n"
    )
    folder = load(Data(name="directory", root=str(tmp_path / "photos")))
    function = load(Data(name=f"{tmp_path / 'mine.py'}:load"))
    client = ClientData(tmp_path / "0")
    for x in (folder.train.x, folder.test.x, function.train.x, client.arrays(0, "train")[0]):
        assert x[0].tolist() == pixels
    scale = 65535 if np.max(pixels) > 255 or "16" in str(folder.train.x.dtype) else 255
    assert folder.scale == function.scale == client.file.scale == scale


def test_pictures_of_hugging_face_are_read_alike(tmp_path):
    library = pytest.importorskip("datasets")
    palette(tmp_path / "a.png")
    features = library.Features({"image": library.Image(), "label": library.Value("string")})
    rows = {"image": [str(tmp_path / "a.png")] * 2, "label": ["x", "y"]}
    part = library.Dataset.from_dict(rows, features=features)
    library.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "d"))
    found = load(Data(name="huggingface", root=str(tmp_path / "d"), columns=Columns()))
    assert found.train.x[0].tolist() == RIGHT["palette"][2]


def png(depth: int, kind: int, values: np.ndarray) -> bytes:
    """Return a PNG of any depth and kind of colour, which Pillow does not write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content
            + struct.pack(">I", zlib.crc32(name + content))
        )  # fmt: skip

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*part) for part in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )


def animated(kind: str) -> bytes:
    out = io.BytesIO()
    frames = [Image.new("L", (2, 2), shade) for shade in (0, 200)]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


def saved(shades: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(shades).save(out, "TIFF")
    return out.getvalue()


REFUSED = {
    "gif": (
        animated("GIF"),
        "it holds 2 frames or pages: set frames = 'first' or 'all', or",
    ),
    "apng": (animated("PNG"), "it holds 2 frames or pages"),
    "webp": (animated("WEBP"), "it holds 2 frames or pages"),
    "tiff": (animated("TIFF"), "it holds 2 frames or pages"),
    "fractions": (saved(np.array([[0.1, 0.9]], np.float32)), "its shades are fractions"),
    "large": (saved(np.array([[0, 65536]], np.int32)), "its shades go from 0 to 65536, beyond 0"),
    "negative": (saved(np.array([[-1, 5]], np.int32)), "its shades go from -1 to 5, beyond 0"),
    "16 bits of red": (png(16, 2, np.full((2, 2, 3), 4095)), "its channels have 16 bits"),
    "16 bits and alpha": (png(16, 4, np.full((2, 2, 2), 4095)), "its channels have 16 bits"),
    "another format": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is no image"),
}
"""What has no single right reading, or would lose bits: the file, and why it is refused."""


@pytest.mark.parametrize(("content", "why"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_single_right_reading_is_refused(tmp_path, content, why):
    (tmp_path / "a.png").write_bytes(content)
    for channels in (None, "grey", "rgb"):
        how = ImageTransform(channels=channels)
        with pytest.raises(DataError, match=f"a.png cannot be read: {why}") as caught:
            read_image(tmp_path / "a.png", how)
        assert "\n" not in str(caught.value)


def test_a_photograph_with_a_preview_is_its_first_picture(tmp_path):
    """Phones store a small copy beside the photograph, as MPO; viewers show the photograph."""
    large, small = (Image.new("RGB", (size, size), (200, 0, 0)) for size in (16, 8))
    large.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[small])
    for frames in (None, "first", "all"):
        found = read_image(tmp_path / "a.jpg", ImageTransform(frames=frames))
        assert [image.shape for image in found] == [(3, 16, 16)]


def test_images_of_two_depths_are_named(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
        Image.new("L", (3, 1)).save(tmp_path / part / "cat" / "a.png")
        deep(65535)(tmp_path / part / "cat" / "b.png")
    line = r"b.png is 3 x 1, grey, with 16 bits, and .*a.png is 3 x 1, grey, with 8 bits: give all"
    with pytest.raises(DataError, match=line):
        load(Data(name="directory", root=str(tmp_path)))


def test_images_of_two_depths_may_become_alike(tmp_path):
    for name, kind in (("a", np.uint8), ("b", np.uint16)):
        Image.fromarray(np.array([[0, 1, np.iinfo(kind).max]], dtype=kind)).save(
            tmp_path / f"{name}.png"
        )
    for depth, shades in ((8, [[0, 1, 255], [0, 0, 255]]), (16, [[0, 257, 65535], [0, 1, 65535]])):
        for name, row in zip("ab", shades, strict=True):
            (read,) = read_image(tmp_path / f"{name}.png", ImageTransform(depth=depth))
            assert read.dtype == np.dtype(f"uint{depth}")
            assert read.tolist() == [[row]]


def test_a_deep_grey_in_three_channels_keeps_its_shades():
    shades = np.array([[0, 4095]], dtype=np.uint16)
    how = ImageTransform(channels="rgb")
    assert pixels_of(Image.fromarray(shades), how).tolist() == [shades.tolist()] * 3


# --- what [data] asks for


@pytest.mark.parametrize("mode", ["L", "RGB", "I;16"])
def test_images_are_resized_and_cropped_as_torchvision_does_it(mode):
    rng = np.random.default_rng(0)
    shape = (30, 20, 3) if mode == "RGB" else (30, 20)
    pixels = rng.integers(0, 4096 if mode == "I;16" else 256, shape)
    picture = Image.fromarray(pixels.astype(np.uint16 if mode == "I;16" else np.uint8))
    assert picture.mode == mode
    from torchvision.transforms import v2  # takes seconds to import

    steps = v2.Compose([v2.Resize(16), v2.CenterCrop(12)])
    expected = np.atleast_3d(np.asarray(steps(picture))).transpose(2, 0, 1)
    found = pixels_of(picture, ImageTransform(resize=16, crop=12))
    assert found.tolist() == expected.tolist()
    assert found.shape[1:] == (12, 12)
    assert found.dtype == pixels.astype(found.dtype).dtype
    assert found.max() > 255 or mode != "I;16"
    assert pixels_of(picture, ImageTransform(resize=(7, 9))).shape[1:] == (7, 9)
    assert pixels_of(picture, ImageTransform(resize=10)).shape[1:] == (15, 10)
    with pytest.raises(ValueError, match="it has 10 x 15 pixels to cut 12 x 12 out of: set resiz"):
        pixels_of(picture, ImageTransform(resize=10, crop=12))


def test_a_photograph_is_turned_before_it_is_resized(tmp_path):
    turned(tmp_path / "a.png")
    (read,) = read_image(tmp_path / "a.png", ImageTransform(resize=(6, 4)))
    assert read[0, 0, 0] > read[0, 0, -1]  # the left column has the larger shades


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_the_ground_may_be_black(tmp_path, mode):
    """White ink on a transparent ground is lost on white."""
    transparent(mode)(tmp_path / "a.png")
    (read,) = read_image(tmp_path / "a.png", ImageTransform(ground="black"))
    assert not read.any()
    with Image.open(tmp_path / "a.png") as picture:
        channels = pixels_of(picture, ImageTransform(channels="grey", ground="white"))
    assert channels.tolist() == [(255 - INK).tolist()]


def test_frames_are_read_as_asked(tmp_path):
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        (tmp_path / "a.png").write_bytes(animated(kind))
        first, every = (
            read_image(tmp_path / "a.png", ImageTransform(frames=frames, channels="grey"))
            for frames in ("first", "all")
        )
        assert [image.max() for image in first] == [0]
        assert [round(image.max(), -1) for image in every] == [0, 200]


# --- photos of phones


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("a.heic", "HEIF", (3, 32, 64)),  # its own fields turn it, not EXIF's
        ("a.jpg", "HEIF", (3, 32, 64)),
        ("a.avif", "AVIF", (3, 64, 32)),
        ("a.jfif", "JPEG", (3, 64, 32)),
    ],
)
def test_photos_of_phones_are_read_whatever_they_are_called(tmp_path, name, kind, shape):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.new("RGB", (64, 32), (255, 0, 0)).save(tmp_path / name, format=kind, exif=exif)
    (read,) = read_image(tmp_path / name)
    assert read.shape == shape
    assert read[0].min() > 240
    assert read[1:].max() < 15


def test_without_its_package_a_photo_of_a_phone_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    needs = ["pillow-heif>=1.0; extra == 'heic'"]
    monkeypatch.setattr("fedmodels.errors.requires", lambda _: needs)
    (tmp_path / "a.heic").write_bytes(struct.pack(">I", 24) + b"ftypheic" + b"\0" * 12)
    line = r"HEIC photo, which needs another package: pip install 'pillow-heif>=1.0'; or save such"
    with pytest.raises(DataError, match=line):
        read_image(tmp_path / "a.heic")
    (tmp_path / "a.nef").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a.nef cannot be read: raw photos of a camera have to"):
        read_image(tmp_path / "a.nef")


# --- sizes that a server may ask for


@pytest.mark.parametrize(
    ("size", "resize"), [((8, 8), 10_000), ((8, 8), [10_000, 10_000]), ((4000, 4), 300)]
)
def test_a_size_beyond_what_is_read_is_refused(tmp_path, size, resize):
    """A long, narrow picture becomes far longer than what ``resize`` says."""
    Image.new("L", size).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a.png .*resize makes \d+ million pixels of its"):
        read_image(tmp_path / "a.png", ImageTransform(resize=resize))


def test_images_that_find_no_room_in_memory_are_refused_before_they_take_it(tmp_path, monkeypatch):
    for part in ("train", "test"):
        for name in "0123":
            (tmp_path / part / "cat").mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8)).save(tmp_path / part / f"cat/{name}.png")
    data = Data(name="directory", root=str(tmp_path), resize=1000)
    monkeypatch.setattr("fedcli.data.arrays.free_bytes", lambda: 8_000_000)
    line = "4 images, 1000 x 1000, grey, with 8 bits, take 8 MB of memory, and 7.999 MB are free"
    assert len(load(data).train.y) == 4
    monkeypatch.setattr("fedcli.data.arrays.free_bytes", lambda: 7_999_000)
    with pytest.raises(DataError, match=f"{line}: set resize to a smaller size"):
        load(data)
