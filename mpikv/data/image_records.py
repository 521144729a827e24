"""`ImageRecords`: a data set of what MXNet's `im2rec` and `recordio.pack_img` write.

A record is a header and an encoded image. The header is, little-endian and without gaps: flag (uint32), label
(float32), id, id2 (uint64 each); if the flag is not 0, that many float32 follow and are the labels instead. Images are
decoded by Pillow, which is not needed for the rest. Source: MXNet's Python package, recordio.py (IRHeader, pack,
unpack).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.data.record_file import RecordFile
from mpikv.data.recordio import DamagedRecord
from mpikv.errors import UnsupportedError
from mpikv.runtime.abort import tells

_HEADER = struct.Struct("<IfQQ")
# Pillow would also try formats that start another program, such as PostScript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")


class ImageHeader(NamedTuple):
    """What a record says of its image: label, a float or a float32 array of several, and two numbers."""

    label: Any
    id: int
    id2: int


class ImageRecords:
    """A data set of the image records of a RecordFile: `images[i]` is (image, label).

    image: uint8, (height, width, 3), red first, with color=False (height, width, 1), then what `transform(image)` makes
    of it. label: float32, () or (n,). To make batches, `transform` must bring all images to one shape. JPEG, PNG, BMP,
    GIF, PPM, WebP and TIFF are read, and turned as their EXIF data says, as MXNet's `ImageRecordIter` does it;
    transparency is left out, and of 16 bits for each colour the upper 8 are taken.

    Local. Raises a ValueError with the record's `offset` where it is no image record, or its image is damaged, has more
    pixels than `PIL.Image.MAX_IMAGE_PIXELS`, or a single channel of more than 8 bits, such as a depth map;
    UnsupportedError without Pillow.

    >>> import struct
    >>> with data.RecordWriter('images.rec') as writer:
    ...     offset = writer.write(struct.pack('<IfQQ', 0, 3.0, 7, 0) + b'P6 2 1 255 ' + bytes(6))
    >>> images = data.ImageRecords(data.RecordFile('images.rec'))
    >>> image, label = images[0]
    >>> image.shape, float(label), images.header(0).id
    ((1, 2, 3), 3.0, 7)
    """

    @tells
    def __init__(
        self, records: RecordFile, transform: Callable[[NDArray[np.uint8]], Any] | None = None, *, color: bool = True
    ) -> None:
        if not isinstance(records, RecordFile):
            raise checks.wrong("records", "a RecordFile", records)
        self.records = records
        self._transform = transform
        self._color = checks.flag("color", color)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        with self._located(i):
            header, content = unpack(self.records[i])
            image: Any = decode_image(content, color=self._color)
        if self._transform is not None:
            image = self._transform(image)
        return image, np.asarray(header.label, np.float32)

    def header(self, i: int) -> ImageHeader:
        """Return `label`, `id` and `id2` of record `i`, without decoding its image. Raises as `images[i]`. Local."""
        with self._located(i):
            return unpack(self.records[i])[0]

    @contextmanager
    def _located(self, i: int) -> Iterator[None]:
        """Errors of a record say where it begins."""
        try:
            yield
        except DamagedRecord:
            raise
        except ValueError as error:
            raise DamagedRecord(self.records.path, self.records.offset(i), str(error)) from error


def unpack(record: bytes) -> tuple[ImageHeader, bytes]:
    """Return the header and the encoded image of a record. ValueError where it is too short to be one.

    No labels look like one label of 0.0: MXNet writes the same bytes for both.
    """
    if len(record) < _HEADER.size:
        raise ValueError(f"no image record: {len(record)} bytes, the header alone has {_HEADER.size}")
    flag, label, first, second = _HEADER.unpack_from(record)
    start = _HEADER.size + 4 * flag
    if len(record) < start:
        raise ValueError(f"no image record: {len(record)} bytes, but a header of {flag} labels has {start}")
    if flag:
        label = np.frombuffer(record, "<f4", flag, _HEADER.size).astype(np.float32)
    return ImageHeader(label, first, second), record[start:]


def decode_image(content: bytes, *, color: bool = True) -> NDArray[np.uint8]:
    """Decode an image as `ImageRecords` has it. Raises ValueError or UnsupportedError, as said there."""
    image = _turned(content)
    # I, I;16 and the like: whole numbers; F: float32. Pillow would cut them to 255.
    if image.mode[0] in "IF":
        raise ValueError(f"an image of more than 8 bits (Pillow's mode {image.mode}): store it with 8")
    pixels = np.array(image.convert("RGB" if color else "L"))
    return pixels if color else pixels[:, :, None]


def _turned(content: bytes) -> Any:
    """The object of Pillow's, turned as its EXIF data says."""
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError("images are decoded by Pillow, which is missing; pip install pillow") from error
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            # Beyond its limit Pillow only warns, up to twice as many; some KB can become a GB when they are decoded.
            if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
                most = Image.MAX_IMAGE_PIXELS
                raise ValueError(f"{width} x {height} pixels; PIL.Image.MAX_IMAGE_PIXELS allows {most}")
            return ImageOps.exif_transpose(image)
    except Exception as error:  # of a damaged image: many kinds, also SyntaxError
        raise ValueError(f"no image that Pillow can decode ({error}); it begins with {content[:8].hex(' ')}") from error
