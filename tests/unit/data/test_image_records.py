"""Image records: those that MXNet's `pack_img` and `im2rec` wrote, and those that are none."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from mpikv.data import ImageRecords, RecordFile
from mpikv.data.image_records import FORMATS, ImageHeader, decode_image, unpack
from mpikv.data.recordio import DamagedRecord, encoded
from mpikv.errors import UnsupportedError

FILES = Path(__file__).parents[2] / "fixtures" / "records"
EXPECTED = json.loads((FILES / "expected.json").read_text())


def test_labels_ids_and_pixels_of_pack_img() -> None:
    images = ImageRecords(RecordFile(FILES / "labels.rec"))
    assert len(images) == 4
    for i, expected in enumerate(EXPECTED["labels"]):
        header = images.header(i)
        assert (header.id, header.id2) == (expected["id"], expected["id2"])
        pixels, label = images[i]
        assert pixels.dtype == np.uint8
        assert pixels.tolist() == expected["pixels"]
        assert label.dtype == np.float32
        assert label.tolist() == (expected["label"] or 0.0)  # no labels are written as one of 0


def test_files_of_im2rec() -> None:
    """Packed as they are, so the pixels are those that Pillow finds in the file itself."""
    records = RecordFile(FILES / "images.rec", index=True)
    images = ImageRecords(records)
    for i, line in enumerate((FILES / "images.lst").read_text().splitlines()):
        key, label, name = line.split("\t")
        path = FILES / "pictures" / name
        assert records.keys()[i] == int(key)
        assert images.header(i) == ImageHeader(float(label), int(key), 0)
        assert unpack(records[i])[1] == path.read_bytes()
        with Image.open(path) as image:
            assert np.array_equal(images[i][0], np.array(image.convert("RGB")))


def test_grey_and_transform() -> None:
    records = RecordFile(FILES / "images.rec")
    assert ImageRecords(records, color=False)[1][0].shape == (8, 10, 1)
    assert ImageRecords(records, lambda image: image[:2, :3].transpose(2, 0, 1))[3][0].shape == (3, 2, 3)


def test_images_are_turned_as_their_exif_data_says() -> None:
    """By a quarter, clockwise; MXNet's `ImageRecordIter` gives the same rows."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255
    Image.fromarray(pixels).save(file, "jpeg", exif=exif.tobytes())
    assert (decode_image(file.getvalue())[:, :, 0] > 127).tolist() == [[row < 8] * 8 for row in range(16)]


@pytest.mark.parametrize(("form", "dtype"), [("png", np.uint16), ("tiff", np.uint16), ("tiff", np.float32)])
def test_more_than_8_bits_are_refused(form: str, dtype: type, tmp_path: Path) -> None:
    """Pillow would make 255 of nearly all of a depth map."""
    path = tmp_path / f"0.{form}"
    Image.fromarray(np.full((2, 3), 40_000, dtype)).save(path)
    for color in (True, False):
        with pytest.raises(ValueError, match=r"an image of more than 8 bits \(Pillow's mode (I|F)"):
            decode_image(path.read_bytes(), color=color)


def test_no_other_formats_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow decodes PostScript by a program that the record's bytes then control."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\necho 10.0\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(program))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ValueError, match="no image that Pillow can decode"):
        decode_image(postscript)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_formats_without_their_transparency(form: str) -> None:
    file = io.BytesIO()
    if form == "PNG":
        Image.fromarray(np.array([[[1, 2, 3, 0], [4, 5, 6, 255]]], np.uint8)).save(file, form)
        assert decode_image(file.getvalue()).tolist() == [[[1, 2, 3], [4, 5, 6]]]
        return
    Image.fromarray(np.zeros((2, 3, 3), np.uint8)).save(file, form)
    assert decode_image(file.getvalue()).shape == (2, 3, 3)


def test_too_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice Pillow's limit is an error of its own; below that it only warns."""
    file = io.BytesIO()
    Image.new("RGB", (13, 10)).save(file, "png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 129)
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(ValueError, match=r"13 x 10 pixels; PIL\.Image\.MAX_IMAGE_PIXELS allows 129"),
    ):
        decode_image(file.getvalue())
    for limit in (130, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert decode_image(file.getvalue()).shape == (10, 13, 3)


PNG, JPEG = ((FILES / "pictures" / name).read_bytes() for name in ("cat/0.png", "dog/3.jpg"))
ONE, TWO = struct.pack("<IfQQ", 0, 1.0, 7, 0), struct.pack("<IfQQff", 2, 0.0, 7, 0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"", "0 bytes, the header alone has 24"),
        (TWO[:28], "28 bytes, but a header of 2 labels has 32"),
        (ONE + b"GIF or so", "that Pillow can decode .* begins with 47 49 46 20"),
        (ONE + JPEG[:300], "that Pillow can decode .*begins with ff d8"),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, record: bytes, words: str) -> None:
    first = encoded(ONE + PNG)
    (tmp_path / "a.rec").write_bytes(first + encoded(record))
    images = ImageRecords(RecordFile(tmp_path / "a.rec"))
    with pytest.raises(DamagedRecord, match=rf"/a\.rec: damaged record at offset {len(first)}: no image.*{words}"):
        images[1]


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedError, match=r"pip install pillow"):
        decode_image(b"")
    with pytest.raises(TypeError, match="records is a RecordFile, not str"):
        ImageRecords("a.rec")  # type: ignore[arg-type]
