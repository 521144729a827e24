"""The tail: flags and buffers after the gradients, in the last bucket, so that they need no message of their own.

It has a number for each worker: its backward pass ended early, or it has joined (uneven.py); one flag for all: buffers
have changed that are not in the tail; three for each parameter: it is trained, it is frozen, it was used; two for each
bit of a digest of the optimizers' settings (steps.py): it is 1, it is 0. The buffers of one worker are at its end.

Its float32 numbers are added over the workers like gradients. A flag is set if its sum is not zero. Two bytes of the
buffers are one whole number below 65536, to which the others add zero, so that all bytes arrive exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpikv.arrays.as_numpy import HostArray

Flags = npt.NDArray[np.bool_]
_DIGEST_BYTES = 4
_FAILED, _JOINED = 1, 2


class RoundOutcome(NamedTuple):
    """The flags of a round, the same on all workers."""

    failed: list[int]  # workers whose backward pass ended early
    all_joined: bool  # whether no worker has any more data
    more_buffers: bool  # whether some worker's buffers have changed that are not in the tail
    trained: Flags  # (n_params,): on some worker
    frozen: Flags  # (n_params,): on some worker
    used: Flags  # (n_params,): on some worker
    other_settings: bool  # whether workers have different settings


class GradientTail:
    """The layout of the tail of some gradients."""

    def __init__(self, n_workers: int, n_params: int, buffers_bytes: int) -> None:
        self._n_workers = n_workers
        self._n_params = n_params
        self._digest = n_workers + 1 + 3 * n_params
        self._flags = self._digest + 2 * 8 * _DIGEST_BYTES
        self.n_elems = self._flags + -(-buffers_bytes // 2)

    def fill(
        self,
        tail: HostArray,
        trained: Flags,
        used: Flags,
        *,
        failed: int | None,
        joined: int | None = None,
        more_buffers: bool,
        buffers: HostArray | None,
        settings: str,
    ) -> None:
        """Write this worker's numbers. failed: its rank, if its pass ended early; joined: if it has joined.

        buffers: their bytes; None: another worker sends them. settings: compared between all workers that have some.
        """
        tail[:] = 0
        if failed is not None:
            tail[failed] = _FAILED
        if joined is not None:
            tail[joined] = _JOINED
        tail[self._n_workers] = more_buffers
        tail[self._n_workers + 1 : self._digest] = np.concatenate([trained, ~trained, used])
        if settings:
            digest = hashlib.blake2b(settings.encode(), digest_size=_DIGEST_BYTES).digest()
            bits = np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.bool_)
            tail[self._digest : self._flags] = np.concatenate([bits, ~bits])
        if buffers is not None and buffers.size:
            even = buffers if buffers.size % 2 == 0 else np.append(buffers, np.uint8(0))
            tail[self._flags :] = even.view(np.uint16)

    def read(self, tail: HostArray, workers: Sequence[int]) -> RoundOutcome:
        """workers: those that are in the sum."""
        n = self._n_workers
        trained, frozen, used = tail[n + 1 : self._digest].reshape(3, self._n_params) > 0
        ones, zeros = tail[self._digest : self._flags].reshape(2, -1) > 0
        differ = bool((ones & zeros).any())
        failed, all_joined = np.flatnonzero(tail[:n] == _FAILED).tolist(), bool((tail[list(workers)] == _JOINED).all())
        return RoundOutcome(failed, all_joined, bool(tail[n] > 0), trained, frozen, used, differ)

    def buffers(self, tail: HostArray) -> HostArray:
        """Return the bytes of the buffers, and a last one of padding if their number is odd."""
        return tail[self._flags :].astype(np.uint16).view(np.uint8)
