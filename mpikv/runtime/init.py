"""MPI_Init, with a limit to the wait for the other ranks.

MPI_Init returns when all ranks have called it; if one never does, the others wait without a word. mpi4py 4.1.2 keeps
the interpreter's lock while it calls MPI_Init, so that no thread could notice. This module makes the same call by
ctypes, which releases the lock; a timer ends the job when the time is over. What mpi4py does after MPI_Init, setting
the error handlers that its `rc.errors` asks for, is done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator

from mpikv.observe.stall import say
from mpikv.runtime import abort, launcher, printed, unmet
from mpikv.runtime.coming import awaited
from mpikv.runtime.loaded import function

TRANSFERS = "OMPI_MCA_btl"  # Open MPI reads it in MPI_Init
SHARED = "/dev/shm"
LEAST_SHARED_BYTES = 16 << 20  # what one rank of Open MPI asks for, and what UCX wants to be left
SEGMENT_BYTES = 5 << 18  # MPICH needs 1.01 MiB for each rank of the host, and dies without
UCX_BYTES = 21 << 18  # with the 4.13 MiB that UCX takes for each
UCX = "UCX_TLS"  # UCX, which MPICH's wheel has inside, reads it in MPI_Init
PASS_ON_S = 0.5
OTHERS_S = 5.0  # ranks begin at different times on a busy machine
STARTING_S = 60.0  # the least limit: interpreters start, and import, at different times on different hosts


def initialise(timeout_s: float, warn_s: float) -> None:
    """Initialise MPI as `mpi4py.rc` says. Blocks until the other ranks of the job, if there are any, do the same.

    Where they have not come after `warn_s`, a table says which of them wait. When they have not come after `timeout_s`,
    or STARTING_S, the job ends with status 1, and a line says why.
    """
    import mpi4py  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    level = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}") if mpi4py.rc.threads else MPI.THREAD_SINGLE
    started_by, init_thread = launcher.find(), function("MPI_Init_thread")
    if started_by is None or started_by.size == 1:
        with _without("sm,tcp"):  # by "sm" Open MPI 5 would make a file of 16 MiB in /dev/shm, and leave it there
            MPI.Init_thread(level)
        return
    if init_thread is None:
        MPI.Init_thread(level)
        return
    _look_at_shared_memory(launcher.said_local_size(os.environ))
    limit_s = max(timeout_s, STARTING_S)
    timer = threading.Timer(limit_s, _give_up, (abort.Guard(launcher.said_rank(os.environ), started_by.size), limit_s))
    timer.daemon = True
    timer.start()
    with awaited("MPI_Init", warn_s), _without("tcp" if _is_on_one_host() else ""):
        status = init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    timer.cancel()
    if status:
        raise MPI.Exception(status)
    handler = {"exception": MPI.ERRORS_RETURN, "abort": MPI.ERRORS_ABORT}.get(mpi4py.rc.errors)
    if handler is not None:
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(handler)


@contextlib.contextmanager
def _without(transfers: str) -> Iterator[None]:
    """Keep Open MPI from these kinds of transfers, unless the user has chosen some; "tcp" listens for whoever comes."""
    chosen = os.environ.get(TRANSFERS)
    if transfers and chosen is None:
        os.environ[TRANSFERS] = f"^{transfers}"
    try:
        yield
    finally:
        if transfers and chosen is None:  # ranks that this program starts may need them
            del os.environ[TRANSFERS]


def _is_on_one_host() -> bool:
    """Whether Open MPI's mpirun says so, and there is room for all messages in memory, else they would go by TCP."""
    size, here = launcher.size(os.environ), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return here == os.environ.get(launcher.OPEN_MPI_SIZE) and _left_bytes() >= size * LEAST_SHARED_BYTES


def _left_bytes() -> int:
    return shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else LEAST_SHARED_BYTES


def _look_at_shared_memory(ranks: int) -> None:
    """Do what a small /dev/shm asks for, where MPI's memory for messages within this host lies. ranks: of this host.

    Where only some of them get a part, UCX crashes in later messages: so it is to do without. Where MPICH has no room
    for its own part, it dies without saying why: so a line is printed. One rank of the host does; the others wait a
    while for it, since their death would end it, too.
    """
    left = _left_bytes()
    if left < LEAST_SHARED_BYTES + ranks * UCX_BYTES:
        os.environ.setdefault(UCX, "^posix")
    if left >= ranks * SEGMENT_BYTES or not os.path.isdir(SHARED):
        return
    if launcher.said_local_rank(os.environ) != 0:
        time.sleep(OTHERS_S)
        return
    text = f"mpikv: {SHARED} has {left / (1 << 20):.1f} MiB left on {socket.gethostname()}, and MPI needs some for"
    say(f"{text} messages within a host: free some, or give a container more (docker run --shm-size=1g)")
    printed.wait_until_read(PASS_ON_S)  # hydra forgets what it has not read when a rank dies


def _give_up(guard: abort.Guard, limit_s: float) -> None:
    text = (
        f"StallError: {guard.label} waited {limit_s:g} s in MPI_Init for the other ranks of the job: every one of them "
        "must make its store. Look for one that has ended, does something else, waits for a file, or never started"
    )
    guard.say(text, 1)
    unmet.tell_hydra(1)  # any other launcher ends the job when a rank ends with an error
    os._exit(1)
