"""Data for the workers: reading files of it, splitting an epoch or a batch, and loading batches."""

from mpikv.data.cifar import Cifar10, Cifar100
from mpikv.data.datasets import ArrayDataset
from mpikv.data.image_records import ImageHeader, ImageRecords, decode_image, pack, unpack
from mpikv.data.loader import DataLoader
from mpikv.data.mnist import Images, Mnist, load_images, open_idx, read_idx
from mpikv.data.record_file import RecordFile, RecordWriter, write_records
from mpikv.data.recordio import DamagedRecord
from mpikv.data.split import SplitSampler, split_and_load, split_data

__all__ = [
    "ArrayDataset",
    "Cifar10",
    "Cifar100",
    "DamagedRecord",
    "DataLoader",
    "ImageHeader",
    "ImageRecords",
    "Images",
    "Mnist",
    "RecordFile",
    "RecordWriter",
    "SplitSampler",
    "decode_image",
    "load_images",
    "open_idx",
    "pack",
    "read_idx",
    "split_and_load",
    "split_data",
    "unpack",
    "write_records",
]
