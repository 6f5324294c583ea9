"""Shades of DICOM files with made-up headers, against the equations of the standard (PS3.3)."""

import numpy as np
import pytest

from fedcli.data.dicom import pictures

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
