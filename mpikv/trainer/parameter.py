"""A parameter of a model: a weight and its gradient, one replica of each per device.

For models written with NumPy or CuPy. The backward pass writes the gradient into `grad` (or one of `list_grad()` per
device), and a `Trainer` writes the new weight into `data`. A `torch.nn.Parameter` is given to a trainer directly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from mpikv.arrays import as_numpy, shapes, tensors
from mpikv.arrays.devices import Device, put, several, use
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import ShapeMismatch
from mpikv.trainer.torch_parameter import TorchBuffer, TorchParameter, is_module, of_module

GradReq = Literal["write", "add", "null"]
_GRAD_REQ: tuple[GradReq, ...] = ("write", "add", "null")


class Parameter:
    """A weight with its gradient.

    value: a NumPy or CuPy array, which is used itself and not copied, so that a model that holds it sees every update;
    or anything that `numpy.asarray` accepts. Instead of a value, `shape` with `init`: a number to fill with, or a
    function of the shape that returns the values. name: for errors and files; a Trainer names a parameter without one.
    devices: of the replicas, as in `split_and_load`; None: one replica, on the value's device. grad_req: with 'null' a
    Trainer does not change the weight. 'write' and 'add' are the same here: it is the model's backward pass that
    overwrites its gradient or adds to it (and then calls `zero_grad`). lr_mult, wd_mult: factors of the learning rate
    and the weight decay of this parameter. sparse: `grad` is a `RowSparse`, and a Trainer sends and updates its rows
    alone (docs/row-sparse.md); the model assigns it, or the sparse value of another library, after each backward pass.
    The weight stays a dense NumPy array.

    Local. Raises TypeError for values that are no arrays, ValueError for contradicting arguments or a read-only array.

    >>> weight = mpikv.Parameter(shape=(2, 3), init=0.5, name='weight')
    >>> weight.grad += 1.0
    >>> weight.data.sum().item(), weight.grad.sum().item(), len(weight.list_data()), len(weight.list_grad())
    (3.0, 6.0, 1, 1)
    >>> weight.zero_grad()
    >>> weight, weight.shape, weight.dtype
    (Parameter(weight, shape=(2, 3), dtype=float32), (2, 3), dtype('float32'))
    """

    def __init__(
        self,
        value: Any = None,
        name: str | None = None,
        *,
        shape: Sequence[int] | None = None,
        init: float | Callable[[tuple[int, ...]], Any] = 0.0,
        dtype: Any = None,
        devices: Sequence[Device] | None = None,
        grad_req: GradReq = "write",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
        sparse: bool = False,
    ) -> None:
        checks.one_of("grad_req", grad_req, _GRAD_REQ)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a parameter is a str, got {shown(name)}; the array comes first")
        self.name = name
        self.grad_req: GradReq = grad_req
        self.lr_mult = checks.number("lr_mult", lr_mult, 0.0)
        self.wd_mult = checks.number("wd_mult", wd_mult, 0.0)
        self.sparse = checks.flag("sparse", sparse)
        first = _initial(value, shape, init, dtype)
        if devices is None:
            self._data = [first]
        else:
            # Each is a copy, so that no two replicas on the host, or a replica and the caller's array, share memory.
            self._data = []
            for device in several(devices):
                with use(device):  # CuPy copies to the current device
                    self._data.append(put(first, device).copy())
        for replica in self._data:
            as_numpy.check_writable(replica, f"parameter {name or ''}".strip())
        self._grads: list[Any] | None = None  # made at the first use, since a Trainer may call `place_grad` before

    @property
    def _grad(self) -> list[Any]:
        if self._grads is None:
            self._grads = [
                RowSparse.zeros(self.shape, self.dtype) if self.sparse else _zeros_like(replica)
                for replica in self._data
            ]
        return self._grads

    def place_grad(self, memory: Any) -> None:
        """Keep the gradient in `memory`, unless the gradient was used before, or the weight is in other memory.

        memory: zeros of the shape and dtype of the weight, of NumPy or, on a GPU, of CuPy. A Trainer calls it, so that
        gradients are in memory of the store. Local.

        >>> weight = mpikv.Parameter(np.ones(2))
        >>> weight.place_grad(memory := np.zeros(2))
        >>> weight.grad is memory
        True
        """
        if self._grads is None and not self.sparse and len(self._data) == 1 and _same_memory(self._data[0], memory):
            self._grads = [memory if memory.dtype == self.dtype else memory.view(self.dtype)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, the same on all devices."""
        return tuple(self._data[0].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weight and of its gradient."""
        return np.dtype(self._data[0].dtype)  # type: ignore[no-any-return]

    @property
    def data(self) -> Any:
        """The weight, on the first device. Assigning copies the values into the replicas on all devices."""
        return self._data[0]

    @data.setter
    def data(self, value: Any) -> None:
        for replica in self._data:
            _copy_into(replica, value, f"data of {self!r}")

    @property
    def grad(self) -> Any:
        """The gradient on the first device. Assigning copies the values into it (one device only)."""
        return self._grad[0]

    @grad.setter
    def grad(self, value: Any) -> None:
        if len(self._grad) > 1:
            raise ValueError(f"{self!r} has {len(self._grad)} gradients, one per device: write into list_grad()")
        if self.sparse:
            rows = RowSparse.of(value)
            if (rows.shape, rows.dtype) != (self.shape, self.dtype):
                raise ShapeMismatch(f"grad of {self!r} is {self.dtype} {self.shape}, not {rows.dtype} {rows.shape}")
            self._grad[0].assign(rows.indices, rows.values)
            return
        _copy_into(self._grad[0], value, f"grad of {self!r}")

    def list_data(self) -> list[Any]:
        """The weight on every device."""
        return list(self._data)

    def list_grad(self) -> list[Any]:
        """The gradient on every device."""
        return list(self._grad)

    def zero_grad(self) -> None:
        """Set the gradients on all devices to 0."""
        for replica in self._grad:
            if self.sparse:
                replica.assign([], np.empty((0, *self.shape[1:]), self.dtype))
            else:
                replica[...] = 0

    def __repr__(self) -> str:
        return f"Parameter({self.name or 'unnamed'}, shape={self.shape}, dtype={self.dtype})"


def _initial(value: Any, shape: Sequence[int] | None, init: float | Callable[..., Any], dtype: Any) -> Any:
    if (value is None) == (shape is None):
        raise ValueError("give the array of the weight, or its shape (and init), not both or neither")
    if shape is not None:
        (wanted,) = shapes.parse([tuple(shape)] if isinstance(shape, (list, tuple)) else shape)
        found = as_numpy.dtype_named(np.float32 if dtype is None else dtype)
        shapes.total_bytes([wanted], found)
        filled = init(wanted) if callable(init) else np.full(wanted, init)
        array = as_numpy.as_host("what init returned", filled, found)
        if array.shape != wanted:
            raise ValueError(f"init returned values of shape {array.shape}; the parameter has shape {wanted}")
        # Copied, since init may return the same array each time.
        return array.copy()
    if not isinstance(value, np.ndarray) and not as_numpy.is_device(value):
        if as_numpy.is_array(value) and not isinstance(value, np.generic):
            kind = type(value).__module__.partition(".")[0]
            raise TypeError(
                f"mpikv.Parameter holds a NumPy or CuPy array, got one of {kind}; give a torch.nn.Parameter to the "
                "Trainer itself, and of another array a copy: mpikv.Parameter(numpy.array(value))"
            )
        value = as_numpy.as_host("a parameter", value, dtype)
    if dtype is not None:
        value = value.astype(as_numpy.dtype_named(dtype), copy=False)
    as_numpy.shape_and_dtype(value, "a parameter")  # raises for a dtype that a store cannot hold
    return value


def _same_memory(array: Any, other: Any) -> bool:
    if isinstance(array, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(array, np.ndarray) and isinstance(other, np.ndarray)
    return bool(getattr(array, "device", None) == getattr(other, "device", None))


def _zeros_like(array: Any) -> Any:
    with array.device if as_numpy.is_device(array) and hasattr(array, "device") else nullcontext():
        zeros = array.copy()  # a method that NumPy's and CuPy's arrays both have
        zeros[...] = 0
    return zeros


def _copy_into(replica: Any, value: Any, what: str) -> None:
    if value is replica:  # `p.data -= x` ends by assigning the array to itself
        return
    if not as_numpy.is_array(value):
        value = as_numpy.as_host(what, value)
    shape, _ = as_numpy.shape_and_dtype(value, what)
    if shape != tuple(replica.shape):
        raise ValueError(f"{what} must have shape {tuple(replica.shape)}, got {shape}")
    if as_numpy.is_device(value) and as_numpy.is_device(replica):
        replica[...] = value
    else:
        as_numpy.write(replica, as_numpy.host_view(value, what), what)


def named(params: Any) -> dict[str, Any]:
    """Return the parameters by name, in the order of their keys in the store; tensors as `TorchParameter`.

    params: see `Trainer`. Raises TypeError or ValueError for anything else.
    """
    if is_module(params):
        pairs: list[tuple[Any, Any]] = list(of_module(params))
    elif isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str):
                raise TypeError(f"the name of a parameter is a str, got {shown(name)}")
        pairs = [(name, params[name]) for name in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)) and not as_numpy.is_array(params):
        pairs = [_pair(i, element) for i, element in enumerate(params)]
    else:
        raise TypeError(f"params is a torch.nn.Module, a dict or a list of parameters, not {type(params).__name__}")
    result: dict[str, Any] = {}
    seen: set[int] = set()
    for name, parameter in pairs:
        if isinstance(parameter, Mapping) and "params" in parameter:
            raise TypeError(
                "a Trainer has no groups of parameters, such as torch.optim takes: give all parameters together, and "
                "those that differ a factor, `parameter.lr_mult = 0.1` or `parameter.wd_mult = 0`, before"
            )
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter is a str, got {shown(name)}")
        if tensors.is_tensor(parameter):
            if id(parameter) in seen:
                continue  # tied weights: one parameter with two names
            seen.add(id(parameter))
            parameter = TorchParameter(parameter, name)  # noqa: PLW2901 - the parameter from here on
        # `hasattr(parameter, "grad")` is not called for a Parameter, which would make its gradient before `place_grad`.
        if not isinstance(parameter, (Parameter, TorchParameter, TorchBuffer)) and not (
            hasattr(parameter, "data") and hasattr(parameter, "grad")
        ):
            raise TypeError(
                f"parameter {shown(name)} is {type(parameter).__name__}, which has no data and grad; wrap an array in "
                "mpikv.Parameter(array), and pass a torch.nn.Module itself"
            )
        if name in result:
            raise ValueError(f"two parameters are called {shown(name)}; pass a dict with a name for each")
        if id(parameter) in seen:
            raise ValueError(f"parameter {shown(name)} comes twice; pass each parameter once")
        if isinstance(parameter, Parameter) and parameter.name is None:
            parameter.name = name
        seen.add(id(parameter))
        result[name] = parameter
    if not result:
        raise ValueError("there are no parameters to train (an iterator gives its elements only once)")
    if all(is_frozen(parameter) for parameter in result.values()):
        raise ValueError(
            f"there is nothing to train: all {len(result)} parameters are frozen (requires_grad=False, or "
            "grad_req='null'). A state_dict() holds copies without gradients: give the torch.nn.Module itself, its "
            "named_parameters() or its parameters()"
        )
    return result


def _pair(index: int, element: Any) -> tuple[Any, Any]:
    if isinstance(element, tuple) and len(element) == 2:  # as named_parameters() yields them
        return element
    return getattr(element, "name", None) or str(index), element


def list_data(parameter: Any) -> list[Any]:
    """The weight on every device, of a parameter of any kind."""
    return list(parameter.list_data()) if hasattr(parameter, "list_data") else [parameter.data]


def list_grad(parameter: Any) -> list[Any]:
    """The gradient on every device, of a parameter of any kind."""
    return list(parameter.list_grad()) if hasattr(parameter, "list_grad") else [parameter.grad]


def is_frozen(parameter: Any) -> bool:
    """Whether a parameter of any kind is not trained at present."""
    return getattr(parameter, "grad_req", "write") == "null" or not getattr(parameter, "requires_grad", True)


def zero_grad(parameter: Any, *, set_to_none: bool = False) -> None:
    """Set the gradient of a parameter of any kind to 0, made if there is none yet; or to None if its kind allows it."""
    if isinstance(parameter, TorchParameter):
        parameter.zero_grad(set_to_none=set_to_none)
    elif set_to_none and not isinstance(parameter, Parameter):
        parameter.grad = None
    elif hasattr(parameter, "zero_grad"):
        parameter.zero_grad()
    else:
        if parameter.grad is None:
            parameter.grad = copy.deepcopy(parameter.data)
        parameter.grad[...] = 0


def place_grad(parameter: Any, memory: np.ndarray[Any, Any]) -> None:
    """Keep the gradient in `memory`, zeros of its shape and dtype, if the kind of parameter allows it."""
    if isinstance(parameter, (Parameter, TorchParameter)):
        parameter.place_grad(memory)


def data_written(parameter: Any) -> None:
    """Note that the arrays of `list_data` hold a new weight; to be called after each write."""
    if isinstance(parameter, (TorchParameter, TorchBuffer)):
        parameter.data_written()


def grad_written(parameter: Any) -> None:
    """Note that the arrays of `list_grad` hold a new value; to be called after each write."""
    if isinstance(parameter, TorchParameter):
        parameter.grad_written()


def divide(n_bytes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide parameters into parts of about as many bytes; return the names of each part, in their order.

    n_bytes: of each parameter. Raises ValueError if they are too few.
    """
    if parts > len(n_bytes):
        raise ValueError(f"parts={parts}, and there are {len(n_bytes)} parameters: a parameter is not divided")
    sizes, numbers = [(0, 0)] * parts, {}  # of each part its bytes and its parameters, some of which may have 0 bytes
    for name in sorted(n_bytes, key=lambda name: -n_bytes[name]):  # stable: equal ones in their order
        numbers[name] = part = min(range(parts), key=sizes.__getitem__)
        sizes[part] = sizes[part][0] + n_bytes[name], sizes[part][1] + 1
    return [[name for name in n_bytes if numbers[name] == part] for part in range(parts)]
