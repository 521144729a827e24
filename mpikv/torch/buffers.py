"""Buffers of a module, such as the statistics of a batch normalisation, kept equal to one worker's.

At the start all become worker 0's. Those that have changed when the first pass ends are sent with the gradients from
then on, in the tail (tail.py). The others, such as masks, are compared with a copy in each pass, since PyTorch's
version counters miss changes; if one has changed, all others are sent. Later buffers are each worker's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin

from mpikv.arrays import tensors as tensors_
from mpikv.arrays.as_numpy import HostArray
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import ConfigError, ShapeMismatch, UnsupportedError
from mpikv.torch import arrays
from mpikv.trainer.torch_parameter import distinct


class Buffers:
    """The buffers of a module. calls: for the buffers that are not in the tail."""

    def __init__(self, module: torch.nn.Module, calls: CollectiveCalls) -> None:
        self._calls = calls
        self._names = [name for name, _ in module.named_buffers()]
        self._owners = {name: _owner(module, name) for name in self._names}
        self._first = {name: distinct(buffer).to("meta") for name, buffer in module.named_buffers()}  # their forms
        self.in_tail: list[str] = []  # names of the buffers that are sent with the gradients
        self._tail_views: list[HostArray] = []
        self._pointers: list[int] = []  # the addresses of those buffers
        self._outside_tail = list(self._names)
        self._remembered: list[bytes] = []  # the values of the other buffers

    def remember(self) -> None:
        self._remembered = self._values()

    def _values(self) -> list[bytes]:
        return [content.tobytes() for content in _bytes_of(self._now(self._outside_tail))]

    def _now(self, names: list[str]) -> list[torch.Tensor]:
        """Return the present tensors of these buffers; zeros for one that got another form, as the round fails."""
        found = ((self._usable(name), self._first[name]) for name in names)
        return [torch.zeros_like(first, device="cpu") if now is None else now for now, first in found]

    def _usable(self, name: str) -> torch.Tensor | None:
        owner, leaf = self._owners[name]
        now, first = owner.get(leaf), self._first[name]
        if now is None or now.layout != torch.strided or now.dtype != first.dtype:
            return None
        if not now.is_contiguous():
            now = distinct(now)
        return now if now.shape == first.shape else None

    def tensors(self) -> list[torch.Tensor]:
        return self._now(self._names)

    def check(self) -> None:
        """Raise ConfigError if a buffer has another shape or dtype than at the start. Local."""
        for name, first in self._first.items():
            if self._usable(name) is None:
                owner, leaf = self._owners[name]
                raise ConfigError(
                    f"buffer {name!r} was {_form(first)} when the model was wrapped and is {_form(owner.get(leaf))} "
                    "now, so it cannot be worker 0's: with DistributedModel(..., sync_buffers=False) each worker keeps "
                    "its own"
                )

    def choose(self) -> list[str]:
        """Agree on the buffers that are to be in the tail. Collective, blocks."""
        changed = np.array([now != then for now, then in zip(self._values(), self._remembered, strict=True)], np.uint8)
        if self._names:
            changed = self._calls.allreduce([changed], "max", name="buffers that change")[0]
        return [name for name, one in zip(self._names, changed, strict=True) if one]

    def put_in_tail(self, names: list[str]) -> int:
        """Send these with the gradients from now on. Returns their size in bytes. Local."""
        self.in_tail, self._outside_tail = names, [name for name in self._names if name not in names]
        self.remember()
        return sum(view.size for view in self._views())

    def collect(self) -> HostArray:
        return np.concatenate([np.empty(0, np.uint8), *self._views()])

    def deliver(self, content: HostArray) -> None:
        """Write the bytes that `collect` returned on another worker into the buffers. Local."""
        begin = 0
        views = self._views()
        for view in views:
            view[:] = content[begin : begin + view.size]
            begin += view.size
        pairs = zip(self._now(self.in_tail), views, strict=True)
        _write([(buffer, view) for buffer, view in pairs if not _in_place(buffer)])

    def _views(self) -> list[HostArray]:
        """Return the bytes of each buffer in the tail, as views if possible, which are kept."""
        buffers = self._now(self.in_tail)
        pointers = [buffer.data_ptr() for buffer in buffers]
        if pointers != self._pointers or not all(map(_in_place, buffers)):
            self._tail_views = _bytes_of(buffers)
            self._pointers = pointers
        return self._tail_views

    def others_changed(self) -> bool:
        return bool(self._outside_tail) and self._values() != self._remembered

    def broadcast_others(self, root: int) -> None:
        broadcast(self._calls, self._now(self._outside_tail), root, "buffers")
        self.remember()


def _in_place(buffer: torch.Tensor) -> bool:
    return arrays.in_host_memory(buffer) and bool(buffer.is_contiguous())


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None or isinstance(tensor, UninitializedTensorMixin):
        return "without values"
    return f"{tensor.dtype} " + (f"{tuple(distinct(tensor).shape)}" if tensor.layout == torch.strided else "sparse")


def check(calls: CollectiveCalls, named: Iterable[tuple[str, torch.Tensor]], what: str) -> None:
    """Check that one worker's tensors can be written on the others. Collective, blocks.

    Raises on every worker: ShapeMismatch if forms differ, UnsupportedError for sparse tensors and those without values.
    """
    lines = [f"{name}: {_form(None if tensor.is_meta else tensor)}" for name, tensor in named]
    calls.agree(lines, what, ShapeMismatch)
    for line in lines:
        if line.endswith(("sparse", "without values")):
            raise UnsupportedError(
                f"{what}: {line}. Only dense tensors with values can be sent to other workers; modules that are lazy "
                "need a forward pass first"
            )


def _owner(module: torch.nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._buffers, leaf


def broadcast(calls: CollectiveCalls, tensors: list[torch.Tensor], root: int, name: str) -> None:
    """Write worker `root`'s values into these tensors on every worker. Collective, blocks."""
    tensors = [distinct(tensor) for tensor in tensors]
    session, numbers = calls.store.session, calls.store.session.numbers
    found = calls.broadcast(_bytes_of(tensors), root, name, numbers)
    if session.number != numbers[root]:
        _write(list(zip(tensors, found, strict=True)))


def _bytes_of(tensors: list[torch.Tensor]) -> list[HostArray]:
    """Return the bytes of tensors, as views if possible; those on a device are copied to the host in one copy."""
    whole = [one.detach().resolve_conj().resolve_neg().contiguous() for one in tensors]
    # `reshape` would keep the stride of a single element of a column, which then has no view as bytes.
    flat = [one.as_strided((one.numel(),), (1,)).view(torch.uint8) for one in whole]
    found = [values.numpy() if arrays.in_host_memory(values) else None for values in flat]
    devices = {tensors_.device_of(one): None for one, content in zip(tensors, found, strict=True) if content is None}
    for device in devices:
        on_device = [i for i, one in enumerate(tensors) if found[i] is None and tensors_.device_of(one) == device]
        joined, begin = torch.cat([flat[i] for i in on_device]).cpu().numpy(), 0
        for i in on_device:
            found[i] = joined[begin : begin + tensors[i].nbytes]
            begin += tensors[i].nbytes
    return [content for content in found if content is not None]


def _write(pairs: list[tuple[torch.Tensor, HostArray]]) -> None:
    """Set tensors' values from their bytes, on a device by one copy, and do not increase their versions."""
    for_device = [content for tensor, content in pairs if not arrays.in_host_memory(tensor)]
    moved, begin = None, 0
    for tensor, content in pairs:
        if not content.size:
            continue
        if arrays.in_host_memory(tensor):
            values = torch.from_numpy(content.copy())
        else:
            if moved is None:
                moved = torch.from_numpy(np.concatenate(for_device)).to(tensor.device)
            values = moved[begin : begin + content.size].clone()  # so that it is aligned for its dtype
            begin += content.size
        tensor.data.copy_(values.view(tensor.dtype).view(tensor.shape))
