"""A second space for tests: its arrays lie in host memory, but in boxes that NumPy cannot look into.

Whatever takes them for NumPy's arrays fails: a box refuses `np.asarray`, operations with NumPy's arrays, and operations
without `out`. The space counts what crosses between it and the host, and takes arrays of the caller's in its memory
(`ForeignArray`) only as `callers` has seen them.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import numpy as np
from foreign_arrays import ForeignArray, ForeignDevice

from mpikv.arrays import sum_devices
from mpikv.spaces.host import HostSpace


class Box(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a `BoxedSpace`."""

    def __init__(self, space: BoxedSpace, memory: np.ndarray) -> None:
        self.space, self._memory = space, memory

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "size", "nbytes", "itemsize", "ndim", "flags"):
            return getattr(self._memory, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self._memory)

    def reshape(self, *shape: Any) -> Box:
        memory = self._memory.reshape(*shape)
        assert np.may_share_memory(memory, self._memory) or not memory.size
        return Box(self.space, memory)

    def view(self, dtype: Any) -> Box:
        return Box(self.space, self._memory.view(dtype))

    def __getitem__(self, part: Any) -> Box:
        assert isinstance(part, slice), part
        assert self.ndim == 1
        return Box(self.space, self._memory[part])

    def __setitem__(self, part: Any, value: Any) -> None:
        self._memory[part] = self._bare(value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("an array in another memory is no NumPy array")

    def _bare(self, value: Any) -> Any:
        if isinstance(value, Box):
            assert value.space is self.space
            return value._memory
        if isinstance(value, np.ndarray):
            raise TypeError("an operation of arrays in different memory")
        return value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        if method != "__call__" or len(out) != 1:
            raise TypeError(f"{ufunc.__name__}.{method} without out")
        ufunc(*map(self._bare, inputs), out=self._bare(out[0]), **kwargs)
        return out[0]


class Seen(NamedTuple):
    """An array of the caller's, and the thread that it was seen in."""

    memory: np.ndarray
    thread: int


class BoxedSpace:
    """The space. to_hosts, from_hosts: how many arrays have crossed. seen: how many of the caller's it was shown."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.fake = ForeignDevice()  # where the caller's arrays are
        self.to_hosts = self.from_hosts = self.seen = 0
        self._host = HostSpace()

    def crossings(self) -> tuple[int, int]:
        """To the host and from it, since the last time."""
        found = self.to_hosts, self.from_hosts
        self.to_hosts = self.from_hosts = 0
        return found

    def array(self, values: Any) -> ForeignArray:
        """An array of the caller's, in this memory."""
        return self.fake.asarray(values)

    def _box(self, memory: np.ndarray) -> Box:
        return Box(self, memory)

    def _open(self, array: Any) -> np.ndarray:
        assert isinstance(array, Box), type(array)
        assert array.space is self
        return array._memory

    def settle(self) -> None:
        pass

    def together(self) -> Any:
        return contextlib.nullcontext()

    def lend(self, arrays: Any) -> Any:
        return contextlib.nullcontext(list(arrays))

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass

    # --- the caller's

    def callers(self, arrays: Any) -> list[Any]:
        found: list[Any] = []
        for array in arrays:
            if isinstance(array, (Box, ForeignArray)):
                self.seen += 1
                memory = array._memory if isinstance(array, Box) else array.memory
                found.append(Seen(memory, threading.get_ident()))
            else:
                found.append(array)
        return found

    def _here(self, array: Any) -> Any:
        """The memory of one of the caller's, which has come here."""
        assert not isinstance(array, (Box, ForeignArray)), "not seen in the call"
        if isinstance(array, Seen):
            return array.memory
        self.from_hosts += 1
        return array

    def total(self, arrays: Any, what: str, *, on_device: bool, combine: Any = np.add) -> Box:
        assert all(one.thread == threading.get_ident() for one in arrays if isinstance(one, Seen))
        return self._box(sum_devices([self._here(one) for one in arrays], what, on_device=on_device, combine=combine))

    def write(self, out: Any, values: Any, what: str) -> None:
        assert not isinstance(out, (Box, ForeignArray)), "not seen in the call"
        memory = self._open(values)
        if isinstance(out, Seen):
            np.copyto(out.memory, memory.reshape(out.memory.shape), casting="unsafe")
        else:
            self.to_hosts += 1
            self._host.write(out, memory, what)

    def empty_for_caller(self, shape: tuple[int, ...], dtype: Any) -> Box:
        return self._box(np.full(shape, 77, dtype))

    def in_place(self, array: Any, what: str) -> None:
        """Nothing of the caller's is in a box."""

    def lies_in(self, held: Any, array: Any) -> bool:
        return False

    def hand_back(self, arrays: Any) -> None:
        """Nothing to wait for."""

    # --- the host

    def to_host(self, array: Any) -> np.ndarray:
        self.to_hosts += 1
        return self._open(array).copy()

    def from_host(self, values: Any) -> Box:
        assert type(values) is np.ndarray
        assert values.ndim == 1
        self.from_hosts += 1
        return self._box(values.copy())

    # --- within

    def empty(self, n_elems: int, dtype: Any) -> Box:
        return self._box(np.full(n_elems, 77, dtype))

    def zeros(self, n_elems: int, dtype: Any) -> Box:
        return self._box(np.zeros(n_elems, dtype))

    def copy(self, out: Any, values: Any) -> None:
        self._host.copy(self._open(out), values if isinstance(values, int) else self._open(values))

    def cast(self, values: Any, dtype: Any) -> Box:
        return values if values.dtype == dtype else self._box(self._open(values).astype(dtype))

    def combine(self, first: Any, second: Any, out: Any, how: Any) -> None:
        self._host.combine(self._open(first), self._open(second), self._open(out), how)

    def scale(self, values: Any, factor: float, out: Any) -> None:
        self._host.scale(self._open(values), factor, self._open(out))

    def update(self, formula: Any, weight: Any, terms: Any, arrays: Any, *, master: Any, **how: Any) -> None:
        self._host.update(
            formula,
            self._open(weight),
            [self._open(term) for term in terms],
            {name: self._open(array) for name, array in arrays.items()},
            master=None if master is None else self._open(master),
            **how,
        )
