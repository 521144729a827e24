"""The tail: what travels behind the gradients, in the last bucket, so that it needs no message of its own.

For each worker it says whether its backward pass ended early; for all, whether buffers have changed that do not travel
here; for each parameter, whether it is trained, whether it is frozen, and whether it was used; for each bit of a digest
of the optimizers' settings (steps.py), whether it is 1 and whether it is 0. The buffers of one worker stand at its end.

It consists of float32 numbers, which are added over the workers like gradients. Of a sum of flags only whether it is
zero matters. The buffers' bytes are taken in pairs, as whole numbers below 65536, and the other workers add zero, so
that they arrive exactly, whatever they are.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpikv.arrays.as_numpy import HostArray

Flags = npt.NDArray[np.bool_]
_DIGEST_BYTES = 4


class RoundOutcome(NamedTuple):
    """What all workers know after an exchange."""

    failed: list[int]  # workers whose backward pass ended early
    more_buffers: bool  # somewhere buffers have changed that are not in the tail
    trained: Flags  # (n_params,), somewhere
    frozen: Flags  # (n_params,), somewhere
    used: Flags  # (n_params,), somewhere
    other_settings: bool  # workers brought settings that differ


class GradientTail:
    """How the tail of some gradients is laid out."""

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
        more_buffers: bool,
        buffers: HostArray | None,
        settings: str,
    ) -> None:
        """Write this worker's part. failed: its number, if its pass ended early.

        buffers: bytes; None: they are not wanted. settings: are compared with those of all workers that bring some.
        """
        tail[:] = 0
        if failed is not None:
            tail[failed] = 1
        tail[self._n_workers] = more_buffers
        tail[self._n_workers + 1 : self._digest] = np.concatenate([trained, ~trained, used])
        if settings:
            digest = hashlib.blake2b(settings.encode(), digest_size=_DIGEST_BYTES).digest()
            bits = np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.bool_)
            tail[self._digest : self._flags] = np.concatenate([bits, ~bits])
        if buffers is not None and buffers.size:
            even = buffers if buffers.size % 2 == 0 else np.append(buffers, np.uint8(0))
            tail[self._flags :] = even.view(np.uint16)

    def read(self, tail: HostArray) -> RoundOutcome:
        """Return what the sum over the workers says."""
        n = self._n_workers
        trained, frozen, used = tail[n + 1 : self._digest].reshape(3, self._n_params) > 0
        ones, zeros = tail[self._digest : self._flags].reshape(2, -1) > 0
        differ = bool((ones & zeros).any())
        return RoundOutcome(np.flatnonzero(tail[:n]).tolist(), bool(tail[n] > 0), trained, frozen, used, differ)

    def buffers(self, tail: HostArray) -> HostArray:
        """Return the bytes of the buffers, maybe with one more."""
        return tail[self._flags :].astype(np.uint16).view(np.uint8)
