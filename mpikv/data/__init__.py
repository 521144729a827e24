"""Data for the workers: splitting an epoch, splitting a batch, and reading images."""

from mpikv.data.idx import read_idx
from mpikv.data.images import Images, load_images
from mpikv.data.split import SplitSampler, split_and_load, split_data

__all__ = ["Images", "SplitSampler", "load_images", "read_idx", "split_and_load", "split_data"]
