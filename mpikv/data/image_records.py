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

from mpikv import checks
from mpikv.data.record_file import RecordFile
from mpikv.data.recordio import DamagedRecord
from mpikv.errors import UnsupportedError
from mpikv.runtime.abort import tells

_HEADER = struct.Struct("<IfQQ")
_LARGEST_ID = 2**64 - 1


class ImageHeader(NamedTuple):
    """label: a float (a float32's value), or several as a float32 array, (n,). id, id2: 0 to 2**64 - 1."""

    label: Any
    id: int = 0
    id2: int = 0


def pack(header: ImageHeader, content: bytes) -> bytes:
    """A record of a header and an encoded image (or any other bytes)."""
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
    """The header and the encoded image of a record. Raises ValueError where it is too short to be one.

    No labels at all cannot be told from one label of 0.0: MXNet writes the same bytes for both, and so does `pack`.
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
    """The image in `content` (JPEG, PNG, whatever Pillow reads): uint8, (height, width, 3), red first; grey: 1 channel.

    Turned as its EXIF data says, as MXNet's `ImageRecordIter` does it; transparency is left out. Raises ValueError for
    what is no image or a damaged one, UnsupportedError without Pillow.
    """
    pixels = np.array(turned(content).convert("RGB" if color else "L"))
    return pixels if color else pixels[:, :, None]


def turned(content: bytes) -> Any:
    """The decoded image as an object of Pillow's, turned as its EXIF data says. Raises as `decode_image` does."""

    def turn(image: Any) -> Any:
        from PIL import ImageOps  # noqa: PLC0415 - an extra

        return ImageOps.exif_transpose(image)

    return _with_image(content, turn)


def image_size(content: bytes) -> tuple[int, int]:
    """Width and height of the image as it is stored; only its head is read. Raises as `decode_image` does."""
    size: tuple[int, int] = _with_image(content, lambda image: image.size)
    return size


def _with_image(content: bytes, use: Callable[[Any], Any]) -> Any:
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError("images are decoded by Pillow, which is missing; pip install pillow") from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            return use(image)
    except Exception as error:  # of a damaged image: many kinds, also SyntaxError
        raise ValueError(f"no image that Pillow can decode ({error}); it begins with {content[:8].hex(' ')}") from error


class ImageRecords:
    """A data set of the image records of a RecordFile: `images[i]` is (image, label).

    image: as of `decode_image`, then what `transform(image)` makes of it. label: float32, () or (n,). To make batches,
    `transform` must bring all images to one shape. Local. Raises DamagedRecord with the record's offset where it is no
    image record.
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
        """Labels and ids of record `i`, without decoding its image."""
        return self._unpack(i)[0]

    def _unpack(self, i: int) -> tuple[ImageHeader, bytes]:
        record = self.records[i]
        try:
            return unpack(record)
        except ValueError as error:
            raise DamagedRecord(self.records.path, self.records.offset(i), str(error)) from error
