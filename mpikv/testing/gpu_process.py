"""What one process has of fake GPUs: its memory, its streams, and what it has opened of other processes.

Calls are made with the work's lock held (gpu_work.py).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.driver import OutOfDeviceMemory
from mpikv.testing.gpu_memory import (
    POISON,
    AccessError,
    AddressSpace,
    Bytes,
    Device,
    Gone,
    Handle,
    Memory,
    Owned,
    Span,
    handed_out,
    new_array,
    new_file,
)
from mpikv.testing.gpu_work import FakeEvent, Stream, Use, Work, elements

LEGACY, PER_THREAD = 1, 2  # default streams, as `__cuda_array_interface__` numbers them


class Machine:
    """What all GPUs of a test share."""

    def __init__(self, seed: int, eager: float) -> None:
        self.work = Work(seed, eager)
        self.host = Bytes()  # all registered memory: several processes may register the same
        self.owned: dict[int, Owned] = {}  # by inode
        self.foreign: dict[tuple[int, int], Bytes] = {}  # by process and inode: of other processes of the system


class Process:
    """The memory and the streams of one process. gone: memory that was let go, not looked after yet."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.work = machine.work
        self.space = AddressSpace()
        self._streams: dict[int, Stream] = {}
        self._defaults: dict[tuple[int, int], Stream] = {}  # by GPU and thread, 0 for the one of all threads
        self.gone: deque[Gone] = deque()

    # --- memory

    def allocate(self, device: Device, n_bytes: int) -> int:
        """Memory that others can open."""
        _take(device, n_bytes)
        data, fd = new_file(n_bytes)
        data.fill(POISON)
        memory = self.space.add(Memory("allocation", data, device, Bytes()))
        close = weakref.finalize(memory, os.close, fd)
        close.atexit = False
        self.machine.owned[os.fstat(fd).st_ino] = Owned(self.space, memory, fd, close, set())
        return memory.address

    def free(self, address: int) -> None:
        """Give an allocation back."""
        memory = self.space.at(address, "free", "allocation")
        self.work.check_unused(memory, "free")
        inode, owned = self._owned(memory)
        if owned.opened:
            raise AccessError(f"free: {memory} is open in {len(owned.opened)} other processes, which close it first")
        memory.data.fill(POISON)
        del self.machine.owned[inode]
        owned.close()
        self.space.remove(memory, "freed")
        _give(memory)

    def pinned(self, n_bytes: int) -> HostArray:
        """Page-locked memory."""
        data = new_array(n_bytes)
        if n_bytes == 0:
            return data
        memory = self.space.add(Memory("page-locked memory", data, None, Bytes()))
        return handed_out(data, self.gone, (memory, None))

    def register(self, memory: HostArray) -> None:
        """Page-lock memory that is there."""
        address = memory.__array_interface__["data"][0]
        for other in self.space.within(address, address + memory.nbytes):
            raise AccessError(f"register: {memory.nbytes} bytes at {address:#x} are page-locked already: {other}")
        if not memory.flags.c_contiguous or not memory.size:
            raise AccessError("register: the array has no elements, or is not contiguous")
        data = memory.reshape(-1).view(np.uint8)
        self.space.add(Memory("registered memory", data, None, self.machine.host, address))

    def unregister(self, memory: HostArray) -> None:
        """Undo `register`."""
        found = self.space.at(memory.__array_interface__["data"][0], "unregister", "registered")
        self.work.check_unused(found, "unregister", self)
        self.space.remove(found, "unregistered")

    def of_array(self, device: Device, n_bytes: int, home: Stream) -> tuple[Memory, HostArray]:
        """Memory, and what keeps it: when that is let go, later work of the stream `home` may have the memory."""
        _take(device, n_bytes)
        memory = Memory("memory of an array", new_array(n_bytes), device, Bytes())
        if n_bytes == 0:
            return memory, memory.data
        self.space.add(memory)
        return memory, handed_out(memory.data, self.gone, (memory, home))

    def collect(self) -> None:
        """Look after what was let go since the last time: its memory may be another's by now."""
        while self.gone:
            memory, home = self.gone.popleft()
            self.space.remove(memory, "let go")
            if home is None:
                self.work.check_unused(memory, f"{memory} was let go too early")
                continue
            _give(memory)
            reused = Use(memory, memory.whole, True)
            self.work.put(home, f"reuse of {memory}, let go", [reused], partial(memory.data.fill, POISON))

    # --- other processes

    def export(self, address: int, uuid: str) -> bytes:
        """What `open` of another process takes."""
        memory = self.space.at(address, "export", "allocation")
        inode, owned = self._owned(memory)
        return Handle(uuid, os.getpid(), owned.fd, memory.n_bytes, inode).encode()

    def open(self, exported: bytes, device: Device) -> int:
        """See another process's allocation. device: that of the caller, which it may be of or not."""
        handle = Handle.decode(exported)
        here = handle.pid == os.getpid()
        owned = self.machine.owned.get(handle.inode) if here else None
        if here and owned is None:
            raise AccessError("open: that memory was freed, or is of a GPU that has nothing to do with this one")
        if owned is not None and owned.owner is self.space:
            raise AccessError(f"open: {owned.memory} is this process's own; only another one can open it")
        if (handle.pid, handle.inode) in self.space.opened.values():
            raise AccessError(f"open: the allocation of process {handle.pid} is open already")
        data = handle.map(f"/proc/{handle.pid}/fd/{handle.fd}")
        if owned is not None:
            memory = Memory("opened allocation", data, owned.memory.device, owned.memory.bytes)
            owned.opened.add(self.space)
        else:
            shared = self.machine.foreign.setdefault((handle.pid, handle.inode), Bytes())
            of = device if handle.uuid == device.uuid else Device(handle.uuid, 0)
            memory = Memory("opened allocation", data, of, shared)
        self.space.add(memory)
        self.space.opened[memory.address] = handle.pid, handle.inode
        return memory.address

    def close(self, address: int) -> None:
        """Undo `open`."""
        memory = self.space.at(address, "close", "opened")
        self.work.check_unused(memory, "close", self)
        pid, inode = self.space.opened.pop(address)
        owned = self.machine.owned.get(inode)
        if pid == os.getpid() and owned is not None:
            owned.opened.discard(self.space)
        self.space.remove(memory, "closed")

    # --- what a call names

    def new_stream(self, gpu: int) -> int:
        """A stream of this process on one of its GPUs."""
        stream = self.work.stream(gpu, self)
        self._streams[stream.number] = stream
        return stream.number

    def stream(self, number: int, gpu: int) -> Stream:
        """A stream of this process. gpu: whose default stream 1 or 2 is."""
        if number in (LEGACY, PER_THREAD):
            key = gpu, 0 if number == LEGACY else threading.get_ident()
            if key not in self._defaults:
                self._defaults[key] = self.work.stream(gpu, self, number)
            return self._defaults[key]
        if number not in self._streams:
            raise AccessError(f"{number!r} is no stream of this process")
        return self._streams[number]

    def event(self, event: object) -> FakeEvent:
        """Check that it is an event of this process."""
        if not isinstance(event, FakeEvent) or event.stream.process is not self:
            raise AccessError(f"{event!r:.100} is no event of this process")
        return event

    def bytes_at(self, address: int, n_bytes: int, *, writes: bool) -> Use | None:
        """A use of bytes, None where no GPU knows them."""
        span = Span(address, address + n_bytes)
        memory = self.space.find(span) if n_bytes else None
        return None if memory is None else Use(memory, span.moved(memory.offset - memory.address), writes)

    def array(
        self, at: tuple[int, Sequence[int]], shape: Sequence[int], dtype: np.dtype[Any], *, writes: bool
    ) -> tuple[HostArray, Use | None]:
        """An array that work uses, at an address with strides in bytes, and its use; None without elements."""
        address, strides = at
        if len(shape) != len(strides):
            raise AccessError(f"shape {tuple(shape)} and strides {tuple(strides)} are of different lengths")
        span = elements(address, shape, strides, dtype.itemsize)
        if span.begin == span.end:
            return np.empty(tuple(shape), dtype), None
        memory = self.space.find(span)
        if memory is None:
            raise AccessError(
                f"bytes {span.begin:#x} to {span.end:#x} are neither device memory of this process nor page-locked "
                "host memory"
            )
        if any(number % dtype.alignment for number in (address, *strides)):
            raise AccessError(f"{address:#x} with strides {tuple(strides)} is not aligned for {dtype}")
        buffer: Any = memory.data.data
        array: HostArray = np.ndarray(tuple(shape), dtype, buffer, address - memory.address, tuple(strides))
        return array, Use(memory, span.moved(memory.offset - memory.address), writes)

    def _owned(self, memory: Memory) -> tuple[int, Owned]:
        return next(item for item in self.machine.owned.items() if item[1].memory is memory)


def _take(device: Device, n_bytes: int) -> None:
    left = device.memory_bytes - device.used_bytes
    if n_bytes > left:
        raise OutOfDeviceMemory(
            f"GPU {device.uuid} has no room for {n_bytes} bytes: {left} of its {device.memory_bytes} are left"
        )
    device.used_bytes += n_bytes


def _give(memory: Memory) -> None:
    if memory.device is not None:
        memory.device.used_bytes -= memory.n_bytes
