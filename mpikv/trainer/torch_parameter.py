"""A PyTorch parameter, or a buffer of a module, as a `Trainer` uses it: arrays of weight and gradient.

For a tensor in host memory these are NumPy arrays. For one on a GPU they are tensors, if the trainer uses a GPU.
PyTorch is not imported here: a program that has tensors has imported it.

Weight: the array is a view of the tensor's own memory. The same object is returned as long as the tensor does not move,
so that a store recognises it. Memory that neither NumPy nor the trainer can access is copied to the host and back.
Every update increases the tensor's version, so that a backward pass through changed weights raises PyTorch's error.

Gradient: if the host's workers share memory, the trainer gives each parameter a place there. After `zero_grad()` the
backward pass assigns a new tensor to `.grad`. A hook copies it to the place as soon as it is complete, while its values
are still in the cache. From then on `.grad` is a tensor of that place, and later passes add to it. If the program still
has the old gradient when the next one is copied, that one goes to other memory. On a GPU the place is in the store's
memory, and the step copies the gradient to it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, HostArray, host_view
from mpikv.arrays.row_sparse import RowSparse
from mpikv.errors import UnsupportedError
from mpikv.spaces.callers import gpu_of, on_gpu
from mpikv.trainer.hooks import Hooks, add_hooks, remove_hooks

Tensor = Any  # torch.Tensor


def is_module(value: object) -> bool:
    """Return whether `value` is a torch.nn.Module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def of_module(module: Any) -> Iterator[tuple[str, TorchParameter | TorchBuffer]]:
    """Yield parameters, those with two names once, and then buffers, with the module's names and in its order."""
    # Weights of layers such as Embedding(sparse=True), whose gradients are some of the rows.
    layers = [layer for layer in module.modules() if getattr(layer, "sparse", False) is True]
    sparse = {id(getattr(layer, "weight", None)) for layer in layers}
    for name, tensor in module.named_parameters():
        yield name, TorchParameter(tensor, name, sparse=id(tensor) in sparse)
    for name, _ in module.named_buffers():
        yield name, TorchBuffer(module, name)


def added_parameters(module: Any, known: Container[int]) -> dict[str, Tensor]:
    """Return by name the parameters whose tensors' ids are not known. Fast if there are none, as in most steps."""
    if all(id(tensor) in known for tensor in module.parameters()):
        return {}
    return {name: tensor for name, tensor in module.named_parameters() if id(tensor) not in known}


def distinct(tensor: Tensor) -> Tensor:
    """Return a view without the elements that `expand` has made, which have the memory of others."""
    for dim, step in enumerate(tensor.stride() if tensor.layout == sys.modules["torch"].strided else ()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class TorchParameter:
    """A tensor that is trained, or not. sparse: `list_grad` returns a `RowSparse`. ValueError for a computed tensor."""

    def __init__(self, tensor: Tensor, name: str, *, sparse: bool = False) -> None:
        if not tensor.is_leaf:
            raise ValueError(f"parameter {name!r} is the result of a computation, and gets no gradient of its own")
        self.tensor = tensor
        self.name = name
        self.sparse = sparse
        self.through_host = False  # whether a tensor on a GPU is returned as a copy in host memory
        self._address = -1
        self._weight: Any = None
        self._copy: Tensor = None  # on the host, of a weight that the host cannot access
        self._placed: Tensor = None  # a tensor of the gradient's place
        self._memory: Any = None  # the array that `list_grad` returns for it
        # Dead if no tensor of the gradient's place is referred to; None: the place never becomes `.grad`.
        self._place_in_use: weakref.ref[Any] | None = None
        self._version: int | None = None  # of the tensor after a weight was last written
        self._hooks: Hooks = []

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor is trained at present."""
        return bool(self.tensor.requires_grad)

    @property
    def lr_mult(self) -> float:
        """The tensor's attribute of this name; 1 if it has none."""
        return float(getattr(self.tensor, "lr_mult", 1.0))

    @property
    def wd_mult(self) -> float:
        """The tensor's attribute of this name; 1 if it has none."""
        return float(getattr(self.tensor, "wd_mult", 1.0))

    def _stays_on_gpu(self, tensor: Tensor) -> bool:
        return not self.through_host and on_gpu(tensor)

    def list_data(self) -> list[Any]:
        """Return the weight's array, in a list."""
        tensor = self.tensor
        if self._stays_on_gpu(tensor):
            self._copy, self._weight = None, tensor.detach()
        elif not _on_host(tensor):
            self._copy, self._weight = _host_copy(tensor, self._copy, f"parameter {self.name!r}")
        elif self._weight is None or tensor.data_ptr() != self._address:
            self._copy, self._weight = None, host_view(tensor.detach(), f"parameter {self.name!r}")
            self._address = tensor.data_ptr()
        assert self._weight is not None
        return [self._weight]

    def data_written(self) -> None:
        """Note that a new weight has been written into the array."""
        if self._copy is not None:
            self.tensor.detach().copy_(self._copy)
        else:
            sys.modules["torch"].autograd.graph.increment_version(self.tensor)
        self._version = self.tensor._version

    @property
    def changed_by_others(self) -> bool:
        """Whether the program has written to the weight since the trainer last wrote a new one."""
        return self._version is not None and self.tensor._version != self._version

    def place_grad(self, memory: Any) -> None:
        """Keep the gradient in `memory`, of its shape and dtype (or as many bits), from now on.

        memory: a NumPy array, or an array on the tensor's GPU, of CuPy or the like; one on another GPU is ignored.
        """
        torch = sys.modules["torch"]
        if isinstance(memory, np.ndarray):
            if self._stays_on_gpu(self.tensor):
                return  # the key is in host memory, to which the store copies the gradient
            self._memory = memory
            self._placed, in_use = tensors.in_memory_of(memory)
            self._place_in_use = in_use if _same_device(self.tensor, self._placed) else None
        else:
            if not self._stays_on_gpu(self.tensor) or gpu_of(self.tensor) != memory.device.id:
                return
            self._placed = tensors.on_gpu(memory)
            if self.tensor.dtype == torch.bfloat16:
                self._placed = self._placed.view(torch.bfloat16)
            self._memory = self._placed
        if self.tensor.requires_grad and self._place_in_use is not None:
            self._hooks = add_hooks(self, TorchParameter, [self.tensor])

    def on_gradient(self, _i: int) -> None:
        """Copy the gradient, which is complete, to its place."""
        self.list_grad()

    def detach(self) -> None:
        """Copy the gradient in the step only, from now on."""
        remove_hooks(self._hooks)

    def list_grad(self) -> list[Any]:
        """Return the gradient's array in a list, in its place if it has one; [None] if there is no gradient."""
        grad = self.tensor.grad
        if grad is None:
            return [None]
        if self.sparse:
            return [RowSparse.of(grad.detach())]
        if grad.layout != sys.modules["torch"].strided:
            raise UnsupportedError(
                f"the gradient of parameter {self.name!r} is sparse; the layer takes sparse=False, or give the Trainer "
                "the torch.nn.Module itself, and not its parameters"
            )
        if self._placed is None:
            if self._stays_on_gpu(grad):
                return [grad.detach()]
            if _on_host(grad):
                return [host_view(grad.detach(), f"the gradient of parameter {self.name!r}")]
            self._placed, self._memory = _host_copy(grad, None, f"the gradient of parameter {self.name!r}")
        elif grad is not self._placed:
            self._free_place()
            self._placed.copy_(grad.detach())
            # A gradient that requires a gradient belongs to a pass that is itself differentiated.
            if self._place_in_use is not None and _same_device(grad, self._placed) and not grad.requires_grad:
                self.tensor.grad = self._placed
        return [self._memory]

    def _free_place(self) -> None:
        """Take other memory if the program still has a gradient in the place, which must not change then."""
        if self._place_in_use is not None:
            self._placed = None
            if self._place_in_use() is not None:
                self._memory = np.empty_like(self._memory)
            self._placed, self._place_in_use = tensors.in_memory_of(self._memory)

    def grad_written(self) -> None:
        """Note that a new value has been written into the gradient's array."""
        grad = self.tensor.grad
        if grad is not None and self._placed is not None and grad is not self._placed:
            grad.detach().copy_(self._placed)

    def zero_grad(self, *, set_to_none: bool = False) -> None:
        """Set the gradient to None or to 0; make it if there is none yet."""
        if set_to_none:
            self.tensor.grad = None
            return
        if self.sparse:
            torch = sys.modules["torch"]
            self.tensor.grad = torch.zeros_like(self.tensor, layout=torch.sparse_coo)
            return
        if self.tensor.grad is None:
            self._free_place()
            in_place = self._place_in_use is not None and _same_device(self.tensor, self._placed)
            self.tensor.grad = self._placed if in_place else sys.modules["torch"].empty_like(self.tensor)
        self.tensor.grad.detach().zero_()

    def __repr__(self) -> str:
        return f"TorchParameter({self.name}, shape={tuple(self.tensor.shape)}, dtype={self.tensor.dtype})"


class TorchBuffer:
    """A buffer of a module, such as the statistics of a batch normalisation: not trained, but worker 0's at the start.

    The module may replace the tensor at any time, so it is looked up at each use. On the host its array is a copy. If
    no store holds its dtype, the array is its bytes.
    """

    requires_grad = False
    grad = None

    def __init__(self, module: Any, name: str) -> None:
        owner, _, self._attribute = name.rpartition(".")
        self._owner = module.get_submodule(owner)
        self.name = name
        self.through_host = False
        self._copy: Tensor = None

    @property
    def tensor(self) -> Tensor:
        """The tensor that the module has now."""
        return distinct(getattr(self._owner, self._attribute))

    def list_data(self) -> list[Any]:
        """Return an array of the values, in a list."""
        tensor = self.tensor
        if not self.through_host and on_gpu(tensor):
            self._copy = None if tensor.is_contiguous() else tensor.detach().contiguous()
            array = tensor.detach() if self._copy is None else self._copy
            return [array if _is_held(tensor) else array.reshape(-1).view(sys.modules["torch"].uint8)]
        self._copy, array = _host_copy(tensor, None, f"buffer {self.name!r}")
        return [array]

    def data_written(self) -> None:
        """Write the array's values into the module's tensor, if the array is a copy."""
        if self._copy is not None:
            self.tensor.detach().copy_(self._copy)


def _on_host(tensor: Tensor) -> bool:
    return bool(tensors.device_of(tensor).type == "cpu")


def _same_device(tensor: Tensor, other: Tensor) -> bool:
    return bool(tensors.device_of(tensor) == tensors.device_of(other))


def _is_held(tensor: Tensor) -> bool:
    return str(tensor.dtype).removeprefix("torch.") in {str(dtype) for dtype in SUPPORTED_DTYPES}


def _host_copy(tensor: Tensor, copy: Tensor, what: str) -> tuple[Tensor, HostArray]:
    """Return a tensor in host memory with the same values, and its array. copy: an earlier one to reuse, or None."""
    torch = sys.modules["torch"]
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{what} is on the device {tensor.device.type!r}, of layout {tensor.layout}: only dense tensors that have "
            "values can be sent to other workers"
        )
    if copy is None:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy, host_view(copy if _is_held(tensor) else copy.reshape(-1).view(torch.uint8), what)
