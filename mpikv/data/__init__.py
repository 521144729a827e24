"""Data for the workers: splitting an epoch or a batch, loading batches, and MXNet's record files."""

from typing import NoReturn

from mpikv.data.image_records import ImageRecords
from mpikv.data.loader import DataLoader
from mpikv.data.record_file import RecordFile, RecordWriter
from mpikv.data.split import SplitSampler, split_and_load, split_data

__all__ = ["DataLoader", "ImageRecords", "RecordFile", "RecordWriter", "SplitSampler", "split_and_load", "split_data"]

_READERS = "the examples' readers are in examples/image_files.py"
_PACK = "struct.pack('<IfQQ', 0, label, number, 0) + content is an image record (docs/data.md)"
_GONE = {
    **dict.fromkeys(("Cifar10", "Cifar100", "Images", "Mnist", "load_images", "open_idx", "read_idx"), _READERS),
    **dict.fromkeys(("ImageHeader", "pack"), _PACK),
    **dict.fromkeys(("decode_image", "unpack"), "ImageRecords reads image records"),
    "ArrayDataset": "DataLoader takes an array, or a tuple of arrays",
    "DamagedRecord": "catch ValueError, whose `offset` says where the record is",
    "write_records": "use RecordWriter",
}


def __getattr__(name: str) -> NoReturn:
    hint = f": {_GONE[name]}" if name in _GONE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
