"""Image records: what MXNet's `im2rec` and `recordio.pack_img` write, and `ImageRecords`, a data set of them.

A record is a header and an encoded image. The header is, little-endian and without gaps: flag (uint32), label
(float32), id, id2 (uint64 each); if the flag is not 0, that many float32 follow and are the labels instead. Images are
decoded by Pillow, which is not needed for the rest. Source: MXNet's Python package, recordio.py (IRHeader, pack,
unpack).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.data.record_file import RecordFile
from mpikv.data.recordio import DamagedRecord
from mpikv.errors import UnsupportedError
from mpikv.runtime.abort import tells

_HEADER = struct.Struct("<IfQQ")
_LARGEST_ID = 2**64 - 1
# Pillow would also try formats that start another program, such as PostScript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")


class ImageHeader(NamedTuple):
    """What a record says of its image.

    label: a float (a float32's value), or several as a float32 array, (n,). id, id2: 0 to 2**64 - 1.

    >>> data.ImageHeader(3.0, id=17)
    ImageHeader(label=3.0, id=17, id2=0)
    """

    label: Any
    id: int = 0
    id2: int = 0


def pack(header: ImageHeader, content: bytes) -> bytes:
    """Make a record of a header and an encoded image (or any other bytes). Local.

    Raises ValueError or TypeError for a label or ids that the header cannot have.

    >>> record = data.pack(data.ImageHeader([1.0, 2.0], id=17), b'JPEG')
    >>> header, content = data.unpack(record)
    >>> header.label.tolist(), header.id, content
    ([1.0, 2.0], 17, b'JPEG')
    """
    numbers = [checks.whole(name, value, 0, _LARGEST_ID) for name, value in (("id", header.id), ("id2", header.id2))]
    try:
        label = np.asarray(header.label, dtype="<f4")
    except (TypeError, ValueError):
        raise checks.wrong("label", "a number or several", header.label) from None
    if label.ndim > 1:
        raise ValueError(f"label is a number or several in a row, not an array of shape {label.shape}")
    if label.ndim == 0:
        return _HEADER.pack(0, float(label), *numbers) + content
    return _HEADER.pack(len(label), 0.0, *numbers) + label.tobytes() + content


def unpack(record: bytes) -> tuple[ImageHeader, bytes]:
    """Return the header and the encoded image of a record. Raises ValueError where it is too short to be one. Local.

    No labels look like one label of 0.0: MXNet writes the same bytes for both, and so does `pack`.

    >>> data.unpack(data.pack(data.ImageHeader(3.0), b'JPEG'))
    (ImageHeader(label=3.0, id=0, id2=0), b'JPEG')
    """
    if len(record) < _HEADER.size:
        raise ValueError(f"no image record: {len(record)} bytes, the header alone has {_HEADER.size}")
    flag, label, first, second = _HEADER.unpack_from(record)
    if flag == 0:
        return ImageHeader(label, first, second), record[_HEADER.size :]
    start = _HEADER.size + 4 * flag
    if len(record) < start:
        raise ValueError(f"no image record: {len(record)} bytes, but a header of {flag} labels has {start}")
    labels = np.frombuffer(record, "<f4", flag, _HEADER.size).astype(np.float32)
    return ImageHeader(labels, first, second), record[start:]


def decode_image(content: bytes, *, color: bool = True) -> NDArray[np.uint8]:
    """Decode an image: uint8, (height, width, 3), red first; color=False: 1 channel.

    JPEG, PNG, BMP, GIF, PPM, WebP and TIFF are read. The image is turned as its EXIF data says, as MXNet's
    `ImageRecordIter` does it; transparency is left out, and of 16 bits for each colour the upper 8 are taken. Local.
    Raises ValueError for what is no such image, a damaged one, one of more pixels than `PIL.Image.MAX_IMAGE_PIXELS`, or
    one of a single channel of more than 8 bits, such as a depth map; UnsupportedError without Pillow.

    >>> data.decode_image(b'P6 2 1 255 ' + bytes(6)).shape  # a PPM file of 2x1 black pixels
    (1, 2, 3)
    """
    image = _turned(content)
    # I, I;16 and the like: whole numbers; F: float32. Pillow would cut them to 255.
    if image.mode[0] in "IF":
        raise ValueError(
            f"an image of more than 8 bits (Pillow's mode {image.mode}): store it with 8, or decode what `unpack` "
            "returns yourself"
        )
    pixels = np.array(image.convert("RGB" if color else "L"))
    return pixels if color else pixels[:, :, None]


def _turned(content: bytes) -> Any:
    """Decode an image into an object of Pillow's, turned as its EXIF data says. Raises as `decode_image` does."""
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


class ImageRecords:
    """A data set of the image records of a RecordFile: `images[i]` is (image, label).

    image: what `decode_image` gives, then what `transform(image)` makes of it. label: float32, () or (n,). To make
    batches, `transform` must bring all images to one shape. Local. Raises DamagedRecord with the record's offset where
    it is no image record.

    >>> record = data.pack(data.ImageHeader(3.0), b'P6 2 1 255 ' + bytes(6))
    >>> n_records = data.write_records('images.rec', [record])
    >>> images = data.ImageRecords(data.RecordFile('images.rec'))
    >>> image, label = images[0]
    >>> image.shape, float(label), images.header(0).id
    ((1, 2, 3), 3.0, 0)
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
        header, content = self._unpack(i)
        try:
            image: Any = decode_image(content, color=self._color)
        except ValueError as error:
            raise DamagedRecord(self.records.path, self.records.offset(i), str(error)) from error
        if self._transform is not None:
            image = self._transform(image)
        return image, np.asarray(header.label, np.float32)

    def header(self, i: int) -> ImageHeader:
        """Return labels and ids of record `i`, without decoding its image. Raises IndexError, DamagedRecord. Local."""
        return self._unpack(i)[0]

    def _unpack(self, i: int) -> tuple[ImageHeader, bytes]:
        record = self.records[i]
        try:
            return unpack(record)
        except ValueError as error:
            raise DamagedRecord(self.records.path, self.records.offset(i), str(error)) from error
