"""The file of the MPI library that this process has loaded, for what mpi4py does not tell and ctypes can ask."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

VERSION_BYTES = 16384  # more than any library's MPI_MAX_LIBRARY_VERSION_STRING (MPICH: 8192)


def loaded_path() -> str:
    """The file of the MPI library that mpi4py uses, or "" where it cannot be told."""
    from mpi4py import MPI  # noqa: PLC0415

    wanted = MPI.Get_library_version()
    for path in _mapped_files():
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


def _mapped_files() -> list[str]:
    """The files mapped into this process, each once, in order of address."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    # address, access, offset, device and inode stand before the path (proc(5)).
    return list(dict.fromkeys(parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6))
