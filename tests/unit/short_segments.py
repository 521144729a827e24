"""Segments of a few elements, for tests of what a long value does, and a look at what the host touches meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from mpikv.collectives import hierarchical, hosted, one_host, ring
from mpikv.strategies import segments
from mpikv.testing.fake_gpu import AccessError, FakeGpu
from mpikv.transports.threads import Fabric

COPY_BYTES, HOST_BYTES, LINK_BYTES = 256, 128, 64


@contextlib.contextmanager
def short_segments(
    copy_bytes: int = COPY_BYTES, host_bytes: int = HOST_BYTES, link_bytes: int = LINK_BYTES
) -> Iterator[None]:
    """Let copies and segments of all collectives be as short, however short a value is."""
    with (
        mock.patch.object(segments, "SEGMENT_BYTES", copy_bytes),
        mock.patch.object(one_host, "HOST_SEGMENT_BYTES", host_bytes),
        mock.patch.multiple(ring, HOST_SEGMENT_BYTES=host_bytes, LINK_SEGMENT_BYTES=link_bytes),
        mock.patch.object(hosted, "LINK_SEGMENT_BYTES", link_bytes),
        mock.patch.multiple(hierarchical, LINK_SEGMENT_BYTES=link_bytes, SHORT_BYTES=0),
    ):
        yield


class Watch:
    """Asks fake GPUs, where the host reads or writes memory of a collective, whether a copy may be under way in it."""

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self._gpus = gpus
        self.looks = 0

    def reads(self, array: np.ndarray) -> None:
        self._look(array, FakeGpu.host_reads)

    def writes(self, array: np.ndarray) -> None:
        self._look(array, FakeGpu.host_writes)

    def _look(self, array: np.ndarray, look: Callable[[FakeGpu, int, int], None]) -> None:
        self.looks += 1
        for gpu in self._gpus:
            # The host's own memory may lie where an array of the fake GPU was, which has been let go.
            with contextlib.suppress(AccessError):
                look(gpu, array.ctypes.data, array.nbytes)

    def _combining(self, combine: Callable[..., object]) -> Callable[..., object]:
        def combined(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> object:
            self.reads(first)
            self.reads(second)
            self.writes(out)
            return combine(first, second, out=out)

        return combined

    def _in_order(self, out: np.ndarray, sources: Sequence[np.ndarray], combine: Any = np.add) -> None:
        self.writes(out)
        for source in sources:
            self.reads(source)
        before(out, sources, combine)

    @contextlib.contextmanager
    def sums(self) -> Iterator[None]:
        """Look at the sums of the collectives that are begun meanwhile."""
        watch = self

        class Circle(ring.Circle):
            def __init__(self, *args: Any, combine: Any = np.add, **named: Any) -> None:
                super().__init__(*args, combine=watch._combining(combine), **named)

        with (
            mock.patch.object(one_host, "in_order", self._in_order),
            mock.patch.object(hosted, "in_order", self._in_order),
            mock.patch.object(ring, "Circle", Circle),
            mock.patch.object(hosted, "Circle", Circle),
        ):
            yield

    def fabric(self, hosts: str) -> Fabric:
        """Thread ranks whose messages are looked at."""
        return _WatchedFabric(hosts, self)


before = one_host.in_order


class _WatchedFabric(Fabric):
    def __init__(self, hosts: str, watch: Watch) -> None:
        super().__init__(len(hosts), hosts)
        self._watch = watch

    def rank(self, rank: int) -> Any:
        return _Watched(super().rank(rank), self._watch)


class _Watched:
    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, buf: np.ndarray, dest: int, tag: int, room_bytes: int = 0) -> Any:
        self._watch.reads(buf)
        return self._inner.isend(buf, dest, tag, room_bytes)

    def irecv(self, buf: np.ndarray, source: int, tag: int, room_bytes: int = 0) -> Any:
        self._watch.writes(buf)
        return self._inner.irecv(buf, source, tag, room_bytes)
