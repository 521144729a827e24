"""Buffers of a module, such as the statistics of a batch normalisation, kept equal to one worker's.

At the start all of them become worker 0's. Those that have changed when the first pass ends travel with the gradients
from then on. The others, such as masks, are compared with a copy in each pass, since PyTorch's own count of changes
misses those of a batch normalisation; if one has changed after all, they are sent in an exchange of their own.
"""

from __future__ import annotations

import numpy as np
import torch

from mpikv.arrays import tensors as tensors_
from mpikv.arrays.as_numpy import HostArray
from mpikv.calls.keyless import CollectiveCalls
from mpikv.torch import arrays, gpu_calls
from mpikv.torch.arrays import array_of


class Buffers:
    """The buffers of a module. calls: send what does not travel with the gradients."""

    def __init__(self, module: torch.nn.Module, calls: CollectiveCalls) -> None:
        self._calls = calls
        self._names = [name for name, _ in module.named_buffers()]
        self._homes = {name: _home(module, name) for name in self._names}
        self._sent: list[str] = []  # those that travel with the gradients
        self._kept: list[HostArray] = []
        self._pointers: list[int] = []  # of the memory that those are in
        self._others = list(self._names)
        self._seen: list[bytes] = []  # the values of the others

    def remember(self) -> None:
        """Keep a copy of the buffers, so that changes count from now on."""
        self._seen = self._values()

    def _values(self) -> list[bytes]:
        return [content.tobytes() for content in _bytes_of(self._now(self._others))]

    def _now(self, names: list[str]) -> list[torch.Tensor]:
        """Return the buffers as they are now: a module may have put others in their places."""
        found = [self._homes[name][0][self._homes[name][1]] for name in names]
        return [buffer for buffer in found if buffer is not None]

    def choose(self) -> int:
        """Agree on the buffers that travel with the gradients, and return their size in bytes. Collective, blocks."""
        changed = np.array([now != then for now, then in zip(self._values(), self._seen, strict=True)], np.uint8)
        if self._names:
            changed = self._calls.allreduce([changed], "max", name="buffers that change")[0]
        self._sent = [name for name, one in zip(self._names, changed, strict=True) if one]
        self._others = [name for name, one in zip(self._names, changed, strict=True) if not one]
        self.remember()
        return sum(view.size for view in self._views())

    def collect(self) -> HostArray:
        """Return the bytes of the buffers that travel with the gradients. Local."""
        return np.concatenate([np.empty(0, np.uint8), *self._views()])

    def deliver(self, content: HostArray) -> None:
        """Write the bytes that `collect` returned on another worker into the buffers. Local."""
        begin = 0
        views = self._views()
        for view in views:
            view[:] = content[begin : begin + view.size]
            begin += view.size
        _write(
            [(buffer, view) for buffer, view in zip(self._now(self._sent), views, strict=True) if not _is_plain(buffer)]
        )

    def _views(self) -> list[HostArray]:
        """Return the bytes of each buffer, as views if possible; these are kept, since making them takes long."""
        buffers = self._now(self._sent)
        pointers = [buffer.data_ptr() for buffer in buffers]
        if pointers != self._pointers or not all(map(_is_plain, buffers)):
            self._kept = _bytes_of(buffers)
            self._pointers = pointers
        return self._kept

    def changed_otherwise(self) -> bool:
        """Return whether buffers that do not travel with the gradients have changed on this worker. Local."""
        return bool(self._others) and self._values() != self._seen

    def send_otherwise(self, root: int) -> None:
        """Bring the buffers that do not travel with the gradients to every worker. Collective, blocks."""
        broadcast(self._calls, self._now(self._others), root, "buffers")
        self.remember()


def _is_plain(buffer: torch.Tensor) -> bool:
    """Return whether a buffer's bytes can be written where they are."""
    return arrays.in_host_memory(buffer) and bool(buffer.is_contiguous())


def _home(module: torch.nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._buffers, leaf


def broadcast(calls: CollectiveCalls, tensors: list[torch.Tensor], root: int, name: str) -> None:
    """Write worker `root`'s values into these tensors on every worker. Collective, blocks."""
    if gpu_calls.everywhere(calls, tensors):
        for tensor, values in zip(tensors, gpu_calls.broadcast(calls, tensors, root, name), strict=True):
            tensor.data.copy_(values)
        return
    found = calls.broadcast([array_of(t) for t in tensors], root, name)
    if calls.store.rank != root:
        contents = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in found)
        _write(list(zip(tensors, contents, strict=True)))


def _bytes_of(tensors: list[torch.Tensor]) -> list[HostArray]:
    """Return the bytes of tensors, as views if possible; those of tensors on a device come in one copy."""
    found: list[HostArray | None] = [
        np.ascontiguousarray(array_of(one)).reshape(-1).view(np.uint8) if arrays.in_host_memory(one) else None
        for one in tensors
    ]
    devices = {tensors_.device_of(one): None for one, content in zip(tensors, found, strict=True) if content is None}
    for device in devices:
        there = [i for i, one in enumerate(tensors) if found[i] is None and tensors_.device_of(one) == device]
        flat = [tensors[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in there]
        together, begin = torch.cat(flat).cpu().numpy(), 0
        for i in there:
            found[i] = together[begin : begin + tensors[i].nbytes]
            begin += tensors[i].nbytes
    return [content for content in found if content is not None]


def _write(pairs: list[tuple[torch.Tensor, HostArray]]) -> None:
    """Set tensors' values from their bytes, without a count of changes for which a backward pass would refuse them.

    What goes to a device goes in one copy.
    """
    there = [content for tensor, content in pairs if not arrays.in_host_memory(tensor)]
    moved, begin = None, 0
    for tensor, content in pairs:
        if not content.size:
            continue
        if arrays.in_host_memory(tensor):
            values = torch.from_numpy(content.copy())
        else:
            if moved is None:
                moved = torch.from_numpy(np.concatenate(there)).to(tensor.device)
            values = moved[begin : begin + content.size].clone()  # which begins where its dtype can
            begin += content.size
        tensor.data.copy_(values.view(tensor.dtype).view(tensor.shape))
