"""A PyTorch parameter, and a buffer of a module, as a `Trainer` sees them: arrays of weight and gradient.

They are NumPy's, of a tensor in host memory. A tensor on a GPU is handed out itself, where the trainer has a GPU.

PyTorch is not imported here. Whoever has a tensor has imported it, and that is how a tensor is recognised.

Weight: the array is the tensor's own memory, and stays the same object as long as the tensor stays where it is, so that
a store knows it again. Memory that neither NumPy nor the trainer sees is copied to the host and back. Every update
counts the tensor's version on: a backward pass through weights that have changed is then PyTorch's usual error.

Gradient: where the host's workers share memory, the trainer gives each parameter a place there. The backward pass puts
a new tensor into `.grad` after `zero_grad()`, so a hook moves it there as soon as it is complete: one copy, of values
that are still in the cache. From then on `.grad` is that place, and later passes add to it there. If the program has
kept the gradient when the next one is moved, that one goes to other memory. On a GPU the place is in the store's
memory, and gets a copy of the gradient in the step.
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

Tensor = Any  # torch.Tensor


def is_tensor(value: object) -> bool:
    """Return whether `value` is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    """Return whether `value` is a torch.nn.Module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def of_module(module: Any) -> Iterator[tuple[str, TorchParameter | TorchBuffer]]:
    """Yield parameters, those with two names once, and then buffers, with the module's names and in its order."""
    # Layers such as Embedding(sparse=True), whose gradients are some rows of the weight.
    sparse = {id(getattr(part, "weight", None)) for part in module.modules() if getattr(part, "sparse", False) is True}
    for name, tensor in module.named_parameters():
        yield name, TorchParameter(tensor, name, sparse=id(tensor) in sparse)
    for name, _ in module.named_buffers():
        yield name, TorchBuffer(module, name)


def came_later(module: Any, known: Container[int]) -> dict[str, Tensor]:
    """Return by name the parameters whose tensors' ids are not known. Quick where there are none, as in most steps."""
    if all(id(tensor) in known for tensor in module.parameters()):
        return {}
    return {name: tensor for name, tensor in module.named_parameters() if id(tensor) not in known}


class TorchParameter:
    """A tensor that is trained, or not (`requires_grad`). Raises ValueError for the result of a computation.

    sparse: its gradient is handed out as a `RowSparse`.
    """

    def __init__(self, tensor: Tensor, name: str, *, sparse: bool = False) -> None:
        if not tensor.is_leaf:
            raise ValueError(f"parameter {name!r} is the result of a computation, and gets no gradient of its own")
        self.tensor = tensor
        self.name = name
        self.sparse = sparse
        self.through_host = False  # whether a tensor on a GPU is handed out as a copy in host memory
        self._address = -1
        self._weight: Any = None
        self._copy: Tensor = None  # of a weight that the host cannot see
        self._placed: Tensor = None  # where the gradient is to lie
        self._memory: Any = None  # the same as it is handed out
        self._lives: weakref.ref[Any] | None = None  # dead if nobody has a tensor there; None: it is never a `.grad`
        self._version: int | None = None  # of the tensor when a weight was written last

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor is trained now."""
        return bool(self.tensor.requires_grad)

    @property
    def lr_mult(self) -> float:
        """The tensor's attribute of this name; 1 where it has none."""
        return float(getattr(self.tensor, "lr_mult", 1.0))

    @property
    def wd_mult(self) -> float:
        """The tensor's attribute of this name; 1 where it has none."""
        return float(getattr(self.tensor, "wd_mult", 1.0))

    # --- the weight

    def _stays(self, tensor: Tensor) -> bool:
        return not self.through_host and on_gpu(tensor)

    def list_data(self) -> list[Any]:
        """Return the weight's array, in a list."""
        tensor = self.tensor
        if self._stays(tensor):
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
    def changed_otherwise(self) -> bool:
        """Whether others have written to the weight since a new one was written into the array."""
        return self._version is not None and self.tensor._version != self._version

    # --- the gradient

    def place_grad(self, memory: Any) -> None:
        """Keep the gradient in `memory`, of its shape and dtype (or as many bits), from now on.

        memory: NumPy's, or an array on a GPU, of CuPy or the like; that must be the GPU that the tensor is on.
        """
        torch = sys.modules["torch"]
        if isinstance(memory, np.ndarray):
            if self._stays(self.tensor):
                return  # the key is in host memory, and the gradient goes there by itself
            self._memory = memory
            self._placed, lives = tensors.in_memory_of(memory)
            self._lives = lives if _together(self.tensor, self._placed) else None
        else:
            if not self._stays(self.tensor) or gpu_of(self.tensor) != memory.device.id:
                return
            self._placed = tensors.on_gpu(memory)
            if self.tensor.dtype == torch.bfloat16:
                self._placed = self._placed.view(torch.bfloat16)
            self._memory = self._placed
        if self.tensor.requires_grad and self._lives is not None:
            myself = weakref.ref(self)

            def accumulated(_: Tensor) -> None:
                parameter = myself()
                if parameter is not None:
                    parameter.list_grad()

            self.tensor.register_post_accumulate_grad_hook(accumulated)

    def list_grad(self) -> list[Any]:
        """Return the gradient's array in a list, in its place where it has one; [None] where there is no gradient."""
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
            if self._stays(grad):
                return [grad.detach()]
            if _on_host(grad):
                return [host_view(grad.detach(), f"the gradient of parameter {self.name!r}")]
            self._placed, self._memory = _host_copy(grad, None, f"the gradient of parameter {self.name!r}")
        elif grad is not self._placed:
            self._take_back()
            self._placed.copy_(grad.detach())
            # A gradient that requires one is of a pass that is itself differentiated.
            if self._lives is not None and _together(grad, self._placed) and not grad.requires_grad:
                self.tensor.grad = self._placed
        return [self._memory]

    def _take_back(self) -> None:
        """Make sure that what is written to the place changes no gradient that the program has kept."""
        if self._lives is not None:
            self._placed = None
            if self._lives() is not None:
                self._memory = np.empty_like(self._memory)
            self._placed, self._lives = tensors.in_memory_of(self._memory)

    def grad_written(self) -> None:
        """Note that another value has been written into the gradient's array."""
        grad = self.tensor.grad
        if grad is not None and self._placed is not None and grad is not self._placed:
            grad.detach().copy_(self._placed)

    def zero_grad(self, *, set_to_none: bool = False) -> None:
        """Set the gradient to None, or make it 0, also where there is none yet."""
        if set_to_none:
            self.tensor.grad = None
            return
        if self.sparse:
            torch = sys.modules["torch"]
            self.tensor.grad = torch.zeros_like(self.tensor, layout=torch.sparse_coo)
            return
        if self.tensor.grad is None:
            self._take_back()
            in_place = self._lives is not None and _together(self.tensor, self._placed)
            self.tensor.grad = self._placed if in_place else sys.modules["torch"].empty_like(self.tensor)
        self.tensor.grad.detach().zero_()

    def __repr__(self) -> str:
        return f"TorchParameter({self.name}, shape={tuple(self.tensor.shape)}, dtype={self.tensor.dtype})"


class TorchBuffer:
    """A buffer of a module, such as the statistics of a batch normalisation: not trained, but worker 0's at the start.

    The module may put another tensor in its place at any time, so it is looked up at each use. Its values are copied in
    host memory.
    Of a dtype that no store holds the bytes are taken.
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
        return getattr(self._owner, self._attribute)

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
        """Write the array's values into the module's tensor, where the array is not in its memory."""
        if self._copy is not None:
            self.tensor.detach().copy_(self._copy)


def _on_host(tensor: Tensor) -> bool:
    return bool(tensors.device_of(tensor).type == "cpu")


def _together(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are on the same device."""
    return bool(tensors.device_of(tensor) == tensors.device_of(other))


def _is_held(tensor: Tensor) -> bool:
    """Whether a store holds the dtype."""
    return str(tensor.dtype).removeprefix("torch.") in {str(dtype) for dtype in SUPPORTED_DTYPES}


def _host_copy(tensor: Tensor, copy: Tensor, what: str) -> tuple[Tensor, HostArray]:
    """Return a tensor in host memory with the same values, and its array; `copy` is used again where there is one."""
    torch = sys.modules["torch"]
    if tensor.device.type == "meta":
        raise UnsupportedError(
            f"{what} is on the device 'meta' and has no values: bring the module to a real one first"
        )
    if copy is None:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy, host_view(copy if _is_held(tensor) else copy.reshape(-1).view(torch.uint8), what)
