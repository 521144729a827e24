"""PyTorch's tensors and JAX's arrays as NumPy arrays; and new arrays of any library, made of NumPy arrays.

Neither library is imported for that: whoever has one of its objects has imported it.

A tensor in host memory is seen through its address, by NumPy's array interface. Its own `numpy()` marks the memory for
good as one that cannot be resized, which FSDP does. DLPack does not, but NumPy takes what PyTorch 2.2 exports for
read-only. JAX's arrays never change, so that all views of them are read-only.
What either library has on another device is copied to the host, and back.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mpikv.errors import UnsupportedError

HostArray = npt.NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TRACED = (
    "JAX traces this function (jit, grad, vmap, ...), so the array has no values yet: make the call outside of it, or "
    "from a function that jax.experimental.io_callback calls with ordered=True"
)


def is_tensor(array: object) -> bool:
    return isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ()))


def device_of(tensor: Any) -> Any:
    return tensor.device


def on_gpu(array: Any) -> Any:
    """Return a tensor of PyTorch in the memory of an array on a GPU, of CuPy or the like."""
    return sys.modules["torch"].as_tensor(array, device=f"cuda:{array.device.id}")


def address_of(tensor: Any) -> int:
    """Return where the values of a tensor of PyTorch begin; 0 for one without elements, and for a sparse one."""
    return int(tensor.data_ptr()) if tensor.layout == sys.modules["torch"].strided and tensor.numel() else 0


def is_elsewhere(array: Any) -> bool:
    """Return whether it is a tensor of PyTorch, not a sparse one, with values that are not in host memory."""
    if not is_tensor(array) or device_of(array).type in ("cpu", "meta"):
        return False
    return bool(array.layout == sys.modules["torch"].strided)


def shape_and_dtype(array: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and the name of the dtype of an array of either library, without moving its values."""
    return tuple(array.shape), str(array.dtype).rpartition(".")[2]  # "torch.float32"


def write(tensor: Any, values: HostArray) -> None:
    """Copy values, in the tensor's shape, into a tensor wherever it is. Blocks."""
    tensor.detach().copy_(in_memory_of(np.require(values, requirements=["C", "W"]))[0])


def in_memory_of(host: HostArray) -> tuple[Any, weakref.ref[Any]]:
    """Return a tensor in an array's memory, and a reference that is dead when no tensor or view of it is left."""
    torch = sys.modules["torch"]
    if host.dtype == BFLOAT16:  # of which NumPy has none: the same bits
        bits = host.view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16), weakref.ref(bits)
    same = host.view()
    return torch.from_numpy(same), weakref.ref(same)


def is_jax(array: object) -> bool:
    return isinstance(array, getattr(sys.modules.get("jax"), "Array", ()))


def is_traced(array: object) -> bool:
    return is_jax(array) and isinstance(array, sys.modules["jax"].core.Tracer)


def view(array: Any) -> HostArray:
    """See an array with DLPack as NumPy's, of the same memory in the host. Raises also what its library raises."""
    if is_tensor(array):
        return _view_of_tensor(array)
    return _view_of_jax(array) if is_jax(array) else np.from_dlpack(array)


def _view_of_tensor(tensor: Any) -> HostArray:
    """See the tensor's memory, as it is; a copy that is read-only where its values are not there yet (`is_neg`,
    `is_conj`), or in other memory than the host's.

    Raises UnsupportedError where it has no values, and what PyTorch raises for sparse tensors and the like.
    """
    if tensor.device.type == "meta":
        raise UnsupportedError("the tensor is on the device 'meta' and has no values: bring it to a real device first")
    detached = tensor.detach()
    elsewhere = is_elsewhere(detached)
    if elsewhere:
        detached = detached.cpu()
    resolved = detached.resolve_conj().resolve_neg()
    host = memory_of(resolved)
    if elsewhere or detached.is_neg() or detached.is_conj():
        host.flags.writeable = False
    return host


def memory_of(tensor: Any) -> HostArray:
    """See a tensor's memory in the host; it is neither `is_neg` nor `is_conj`. UnsupportedError without memory."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))  # ml_dtypes adds names to NumPy's
    if tensor.layout != sys.modules["torch"].strided or (dtype.type.__module__ != "numpy" and dtype != BFLOAT16):
        refused: HostArray = tensor.detach().numpy()  # raises
        return refused
    address, n_bytes = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():  # has no address, which NumPy 1.24 refuses
        return np.empty(tuple(tensor.shape), dtype)
    if not address:
        raise UnsupportedError(
            f"a {type(tensor).__name__} without memory: its storage was freed, or it stands for other tensors (of a "
            "DTensor give `to_local()`)"
        )
    interface = {
        "version": 3,
        "data": (address, False),
        "shape": tuple(tensor.shape),
        "strides": tuple([n_bytes * stride for stride in tensor.stride()]),
        "typestr": f"|V{n_bytes}",
    }
    memory = SimpleNamespace(__array_interface__=interface, tensor=tensor)  # keeps the tensor alive
    return np.asarray(memory).view(dtype)


def _view_of_jax(array: Any) -> HostArray:
    """See the values, read-only; a copy of device memory. Raises UnsupportedError where JAX traces a function."""
    if is_traced(array):
        raise UnsupportedError(TRACED)
    return np.asarray(array)


def empty_like(
    shape: tuple[int, ...], dtype: np.dtype[Any], like: Any, on: Callable[[int], AbstractContextManager[object]]
) -> Any:
    """Make an array that can be written to, on the GPU of `like`, from which `adopted` makes one of its library.

    None where there is no way to make one: the result then comes from host memory (`new_like`). on: makes a GPU the
    current one.
    """
    if is_tensor(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=device_of(like))
    cupy = sys.modules.get("cupy")
    if is_jax(like):
        if cupy is None or len(like.devices()) > 1:
            return None
        with on(next(iter(like.devices())).local_hardware_id):
            return cupy.empty(shape, dtype)
    if _is_numbas(like):
        return None if dtype == BFLOAT16 else sys.modules["numba"].cuda.device_array(shape, dtype)
    if hasattr(like, "__array_function__"):  # CuPy's, which takes the shape () for none
        with on(like.device.id):
            return np.empty_like(like, shape=(math.prod(shape),), dtype=dtype).reshape(shape)
    namespace: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else None
    return namespace.empty(shape, dtype=dtype, device=like.device) if hasattr(namespace, "empty") else None


def _is_numbas(array: Any) -> bool:
    return type(array).__module__.startswith("numba.cuda.")


def adopted(array: Any, like: Any) -> Any:
    """Return an array of `empty_like`, in which the result is now, as one of `like`'s library, in the same memory."""
    if not is_jax(like) or is_jax(array):
        return array
    jax = sys.modules["jax"]
    if array.dtype == BFLOAT16:  # of which DLPack of CuPy may know nothing: the same bits, copied once by JAX
        return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(array.view(np.uint16)), jax.numpy.bfloat16)
    return jax.dlpack.from_dlpack(array)


def new_like(host: HostArray, like: Any, what: str) -> Any:
    """Make an array of `like`'s library, on its device, with the values, shape and dtype of `host`.

    It may use the memory of `host`. Raises UnsupportedError where the library has no such dtype, or says no way to make
    one of its arrays.
    """
    found = _new_like(host, like, what)
    name = str(found.dtype).rpartition(".")[2]  # "torch.float32"
    if name != host.dtype.name:
        hint = ": set jax_enable_x64" if is_jax(like) else ""
        raise UnsupportedError(f"{what}: {type(like).__name__} holds no {host.dtype}, it made {name} of it{hint}")
    return found


def _new_like(host: HostArray, like: Any, what: str) -> Any:
    if isinstance(like, (np.ndarray, np.generic)):
        return host
    if is_tensor(like):
        return in_memory_of(host)[0].to(like.device)
    if is_jax(like):
        if is_traced(like):
            raise UnsupportedError(f"{what}: {TRACED}")
        # Where nobody has put `like` on a device, or its placement may not fit this shape, JAX decides.
        placed = getattr(like, "committed", True) and like.shape == host.shape
        return sys.modules["jax"].device_put(host, like.sharding if placed else None)
    if _is_numbas(like):
        return sys.modules["numba"].cuda.to_device(host)
    if hasattr(like, "__array_function__") and hasattr(like, "__cuda_array_interface__"):
        with like.device:
            return np.asarray(host, like=like)
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().asarray(host, device=like.device)
    raise UnsupportedError(
        f"{what}: no way to make a new {type(like).__module__}.{type(like).__name__}; give an array to write into"
    )
