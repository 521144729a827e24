"""The MPI library that this process has loaded: its file and its functions, for what mpi4py does not do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable
from typing import Any

from mpikv.common import proc

VERSION_BYTES = 16384  # more than any library's MPI_MAX_LIBRARY_VERSION_STRING (MPICH: 8192)


def loaded_path() -> str:
    """Return the file of the MPI library that mpi4py uses, or "" where it cannot be found out."""
    from mpi4py import MPI  # noqa: PLC0415

    wanted = MPI.Get_library_version()
    for path in mapped_files():
        if re.fullmatch(r"libmpi.*\.so.*", os.path.basename(path)):
            try:
                # Already loaded, so this is the same handle. Other languages' bindings have the name, not the call.
                lib = ctypes.CDLL(path)
                text, length = ctypes.create_string_buffer(VERSION_BYTES), ctypes.c_int()
                lib.MPI_Get_library_version(text, ctypes.byref(length))
            except (OSError, AttributeError):
                continue
            if text.value.decode(errors="replace").strip("\0\n ") == wanted.strip("\0\n "):
                return path
    return ""


def function(name: str) -> Callable[..., Any] | None:
    """Find a C function of MPI as mpi4py's own call finds it; None where that is not possible.

    A profiler that was put before MPI with LD_PRELOAD comes first: it has to see MPI_Init.
    """
    for path in (None, loaded_path()):
        if path != "":
            with contextlib.suppress(AttributeError, OSError):
                return getattr(ctypes.CDLL(path), name)  # type: ignore[no-any-return]
    return None


def mapped_files() -> list[str]:
    """Return the files mapped into this process, each once, in order of address."""
    lines = proc.text("self/maps").splitlines()
    # address, access, offset, device and inode stand before the path (proc(5)).
    return list(dict.fromkeys(parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6))
