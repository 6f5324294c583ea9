"""Shades of DICOM files with made-up headers, against the equations of the standard (PS3.3)."""

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from fedcli.data.dicom import pictures
from fedcli.data.image_files import read_image
from fedmodels.config.data import Data
from fedmodels.config.transforms import ImageTransform, parse_transform
from fedmodels.errors import DataError

pydicom = pytest.importorskip("pydicom")
STORED = np.arange(256, dtype=np.uint8).reshape(16, 16)


def save(path, frames=1, **tags):
    found, meta = pydicom.Dataset(), pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = found.SOPClassUID = "1.2.840.10008.5.1.4.1.1.1"
    meta.MediaStorageSOPInstanceUID = found.SOPInstanceUID = pydicom.uid.generate_uid()
    found.file_meta = meta
    found.Rows = found.Columns = 16
    found.SamplesPerPixel, found.PhotometricInterpretation = 1, "MONOCHROME2"
    found.BitsAllocated = found.BitsStored = 8
    found.HighBit, found.PixelRepresentation = 7, 0
    if frames > 1:
        found.NumberOfFrames = frames
    found.PixelData = STORED.tobytes() * frames
    for name, value in tags.items():
        setattr(found, name, value)
    found["PixelData"].VR = "OB"
    found.save_as(path, enforce_file_format=True)
    return path


def item(**tags):
    found = pydicom.Dataset()
    for name, value in tags.items():
        setattr(found, name, value)
    return found


def shades(path, frames="all"):
    with path.open("rb") as file:
        return [np.asarray(one) for one in pictures(file, path, frames)]


def expected(slope, intercept, center, width):
    """Return C.11.2.1.2 after C.11.1: shades of a linear window, from 0 to 255."""
    x = STORED * float(slope) + intercept
    share = np.clip((x - (center - 0.5)) / (width - 1) + 0.5, 0, 1)
    return 255 * share


@pytest.mark.parametrize("seed", range(12))
def test_a_window_keeps_bright_bright_whatever_the_slope(tmp_path, seed):
    rng = np.random.default_rng(seed)
    slope = float(rng.integers(1, 20)) * (-1) ** seed
    more, center, width = (float(v) for v in rng.integers((-500, -2000, 50), (500, 3000, 3000)))
    header = {"RescaleSlope": slope, "RescaleIntercept": more}
    path = save(tmp_path / "a.dcm", WindowCenter=center, WindowWidth=width, **header)
    (found,) = shades(path)
    assert np.abs(found - expected(slope, more, center, width)).max() <= 1


def test_each_frame_has_the_tags_of_its_functional_groups(tmp_path):
    def group(slope, center):
        value = item(RescaleSlope=slope, RescaleIntercept=0, RescaleType="HU")
        window = item(WindowCenter=center, WindowWidth=200)
        return item(
            PixelValueTransformationSequence=pydicom.Sequence([value]),
            FrameVOILUTSequence=pydicom.Sequence([window]),
        )

    path = save(
        tmp_path / "a.dcm", 3, WindowCenter=1, WindowWidth=10,
        SharedFunctionalGroupsSequence=pydicom.Sequence([group(2, 300)]),
        PerFrameFunctionalGroupsSequence=pydicom.Sequence(
            [pydicom.Dataset(), group(1, 100), group(-1, -100)]
        ),
    )  # fmt: skip
    found = shades(path)
    for one, (slope, center) in zip(found, ((2, 300), (1, 100), (-1, -100)), strict=True):
        assert np.abs(one - expected(slope, 0, center, 200)).max() <= 1


@pytest.mark.parametrize(
    "tags",
    [
        {"RescaleSlope": None, "RescaleIntercept": None}, {"VOILUTSequence": pydicom.Sequence([])},
        {"ModalityLUTSequence": pydicom.Sequence([])}, {"WindowCenter": None, "WindowWidth": None},
    ],
)  # fmt: skip
def test_an_empty_tag_is_none(tmp_path, tags):
    (found,) = shades(save(tmp_path / "a.dcm", **tags))
    assert (found == STORED).all()


def test_a_palette_of_16_bits_may_have_entries_of_8(tmp_path):
    table = np.arange(256, dtype="<u2").tobytes()
    names = ("Red", "Green", "Blue")
    tags = {f"{n}PaletteColorLookupTableDescriptor": [256, 0, 16] for n in names}
    tags |= {f"{n}PaletteColorLookupTableData": table for n in names}
    (found,) = shades(save(tmp_path / "a.dcm", PhotometricInterpretation="PALETTE COLOR", **tags))
    assert (found == STORED[..., None]).all()


# --- one window for all files ---------------------------------------------------------------------


@pytest.mark.parametrize("own", [{}, {"WindowCenter": 90, "WindowWidth": 10}])
@pytest.mark.parametrize(("slope", "more"), [(2, -100), (-3, 500)])
def test_a_window_that_is_asked_for_goes_before_the_files(tmp_path, own, slope, more):
    """The same values are the same shades, whatever a file says of how it wants to be shown."""
    path = save(tmp_path / "a.dcm", RescaleSlope=slope, RescaleIntercept=more, **own)
    (found,) = read_image(path, ImageTransform(window=(40.0, 400.0)))
    assert np.abs(found[0] - expected(slope, more, 40, 400)).max() <= 0.51
    if own:
        (plain,) = read_image(path)
        assert np.abs(plain.astype(int) - found).max() > 100


def test_a_window_of_each_frame_and_white_at_the_low_end(tmp_path):
    path = save(tmp_path / "a.dcm", frames=2, PhotometricInterpretation="MONOCHROME1")
    found = read_image(path, ImageTransform(window=(100.0, 50.0), frames="all"))
    for one in found:
        assert np.abs(255 - one[0] - expected(1, 0, 100, 50)).max() <= 0.51


def test_a_window_is_of_grey_scans_alone(tmp_path):
    how = ImageTransform(window=(40.0, 400.0))
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="it is no grey DICOM image, and window is of those"):
        read_image(tmp_path / "a.png", how)


@pytest.mark.parametrize(
    "window", [[40.0], [40.0, 1.0], [40.0, -5.0], [40.0, float("nan")], [1, 2, 3]]
)
def test_a_window_has_a_centre_and_a_width(window):
    with pytest.raises(ValidationError):
        Data(name="directory", window=window)


def test_a_config_without_a_window_is_what_it_was():
    assert "window" not in Data(name="directory").identity()
    assert "window" not in ImageTransform().facts()
    assert Data(name="directory", window=[40, 400]).identity()["window"] == [40.0, 400.0]
    how = ImageTransform(window=(40.0, 400.0))
    assert parse_transform(how.facts(), "a model") == how
