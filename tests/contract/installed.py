"""The installed CuPy: what it takes, and arrays of it without a driver."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import frameworks
import numpy as np

cupy = frameworks.need("cupy")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # where the library is missing this warns, and raises nothing
    nccl = importlib.import_module("cupy.cuda.nccl")  # `import cupy` does not bring it
NO_DRIVER = cupy.cuda.runtime.CUDARuntimeError  # what every call ends with that has come as far as CUDA


def array(shape: Any, dtype: Any) -> Any:
    """An array of CuPy's in host memory: it can be asked and viewed, and nothing can be launched on it."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    host = np.zeros(max(n_bytes, 1), np.uint8)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def parameters(function: Any) -> dict[str, str | None]:
    """The parameters, without self, and their defaults as they are written; None where that is not known.

    Of Python's functions from their signature, of Cython's from the first line of their docstring.
    """
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        found = ()
    told = {one.name: None if one.default is one.empty else repr(one.default) for one in found}
    text = (getattr(function, "__doc__", None) or "").strip().partition("\n")[0]
    in_docstring = re.fullmatch(r"[\w.]+\((.*?)\)(?: ->.*)?", text)
    if set(told) <= {"self", "args", "kwargs", "_obj", "_no_init"} and in_docstring:
        told = {}
        for part in filter(None, re.split(r", (?![^()]*\))", in_docstring[1])):
            name, _, default = part.partition("=")
            if name not in ("*", "/"):
                told[name.split()[-1].lstrip("*")] = default or None
    told.pop("self", None)
    return told


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return type(error)


def literal(text: str | None) -> Any:
    """A default; NotImplemented where it is no number, text or the like."""
    try:
        return ast.literal_eval(text or "")
    except (SyntaxError, ValueError):
        return NotImplemented
