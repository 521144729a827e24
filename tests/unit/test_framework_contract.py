"""What mpikv calls of PyTorch and JAX for their arrays on a GPU is there, by name and signature, in any build.

Values of it can be seen on a GPU alone (tests/gpu).
"""

from __future__ import annotations

import ctypes
import inspect
from types import SimpleNamespace
from typing import Any

import frameworks
import numpy as np
import pytest


def test_streams_of_pytorch() -> None:
    """The current one, by device; its number; and one of ours as theirs."""
    torch = frameworks.need("torch")
    assert next(iter(inspect.signature(torch.cuda.current_stream).parameters)) == "device"
    for name in ("wait_event", "wait_stream", "synchronize"):
        assert hasattr(torch.cuda.Stream, name), name
    assert "self.cuda_stream" in inspect.getsource(torch.cuda.Stream)  # of a base that only builds with CUDA have
    assert "stream_ptr" in inspect.signature(torch.cuda.ExternalStream.__new__).parameters
    assert issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)


def test_pytorch_reads_the_interface_of_arrays_on_a_gpu() -> None:
    """`as_tensor` comes as far as CUDA, which is not there; and takes no copy of host memory instead."""
    torch = frameworks.need("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and no array is at this address")
    host, asked = np.zeros(3, np.float32), []

    class Array:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            asked.append(True)
            return {"shape": (3,), "typestr": "<f4", "data": (host.ctypes.data, False), "strides": None, "version": 3}

    with pytest.raises((RuntimeError, AssertionError, TypeError), match=r"CUDA|cuda|NVIDIA"):
        torch.as_tensor(Array(), device="cuda:0")
    assert asked


def test_arrays_of_jax() -> None:
    jax = frameworks.need("jax")
    array = jax.numpy.arange(3.0)
    (device,) = array.devices()
    assert (device.local_hardware_id is None or device.local_hardware_id >= 0, device.platform) == (True, "cpu")
    assert array.block_until_ready() is array
    assert list((ctypes.c_float * 3).from_address(array.unsafe_buffer_pointer())) == [0, 1, 2]
    assert array.committed in (True, False)
    # An object that has the two methods, as CuPy's have: no capsule.
    host = np.arange(3.0, dtype=np.float32)
    shown = SimpleNamespace(__dlpack__=host.__dlpack__, __dlpack_device__=host.__dlpack_device__)
    assert jax.dlpack.from_dlpack(shown).tolist() == [0, 1, 2]
