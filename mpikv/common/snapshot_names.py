"""The names of the files of a snapshot: they say which of them belong together, and whether all are there.

A snapshot is the state of a training after a step; every worker writes its share of it (trainer/generations.py). The
launcher, which imports no NumPy beside the ranks, reads the names, too.

Only the standard library is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})-(\d+)-of-(\d+)\.snapshot")


class ShareName(NamedTuple):
    """step: after which it was taken. worker: whose share this is. workers: how many shares there are.

    snapshot: its id, which begins with the number of snapshots of the training, in 8 digits.
    """

    step: int
    snapshot: str
    worker: int
    workers: int

    def __str__(self) -> str:
        return f"step-{self.step:08}-{self.snapshot}-{self.worker}-of-{self.workers}.snapshot"


def parse(name: str) -> ShareName | None:
    """None for the name of another file."""
    found = NAME.fullmatch(name)
    return found and ShareName(int(found[1]), found[2], int(found[3]), int(found[4]))


def in_folder(folder: str) -> list[ShareName]:
    """The shares in a folder; none where there is no such folder."""
    try:
        return sorted(filter(None, map(parse, os.listdir(folder))))
    except OSError:
        return []


def whole(names: Iterable[ShareName]) -> list[ShareName]:
    """The snapshots all of whose shares are among these, the newest first: the share of worker 0 for each."""
    there: dict[ShareName, set[int]] = {}
    for one in names:
        there.setdefault(one._replace(worker=0), set()).add(one.worker)
    return sorted((one for one, workers in there.items() if workers >= {*range(one.workers)}), reverse=True)
