"""The end of a rank that never came to MPI_Init, where the others wait for it.

A setting of one host alone, or an interface that it lacks, stops a rank before MPI_Init, and MPI_Abort works only after
MPI_Init. What becomes of the job depends on the launcher:

- hydra (MPICH, Intel MPI) goes on waiting: so it is asked to end the job by the message of its own library (PMI 1:
  `cmd=abort`), through the socket that the rank has for them;
- Open MPI's mpirun ends the job, unless another rank connects to it at that moment: then it may say PMIX_ERR_UNREACH
  and wait for ever (5.0.11: 1 job in 40). So the rank comes to MPI_Init after all, where all ranks have connected
  before one returns, and aborts there.

All calls are local but `end_job`, which waits at most MEET_S for the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
import threading

from mpikv.errors import ConfigError
from mpikv.runtime import launcher, printed
from mpikv.runtime.loaded import function, loaded_path

PASS_ON_S = 1.0  # for what is printed to get from hydra's process here to mpirun, which the end reaches by another way
MEETING = "mpikv-meeting"  # the thread in MPI_Init, which a process comes to once
MEET_S = 10.0  # ranks of one job start together; those that come later will find it ended


def end_job_at_exit() -> None:
    """Let this process's exit end the job, unless it has been in MPI_Init by then."""
    atexit.unregister(_at_exit)  # once is enough
    atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if os.getpid() == pid and not (mpi and mpi.Is_initialized()):
        end_job(1)


def end_job(status: int, *, by_exit: bool = False) -> None:
    """End every process of the job with `status`, this one too. Returns where that could not be done.

    by_exit: the caller ends this process, and so the job, where MPI_Abort would print a box.
    """
    if not tell_hydra(status) and meet() and not by_exit:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(status)


def tell_hydra(status: int) -> bool:
    """Ask hydra, if it has started this process, to end the job with `status`. Returns whether it was asked."""
    words, asked = os.environ.get("PMI_FD", ""), False
    with contextlib.suppress(OSError):
        # A rank's child has its variables, but other descriptors.
        asked = words.isdigit() and stat.S_ISSOCK(os.fstat(int(words)).st_mode)
    if asked:
        printed.wait_until_read(PASS_ON_S)
        with contextlib.suppress(OSError):
            os.write(int(words), f"cmd=abort exitcode={status}\n".encode())
    return asked


def meet() -> bool:
    """Come to MPI_Init under Open MPI, after all. Returns whether all ranks have come there. Blocks, at most MEET_S."""
    if "PMIX_RANK" not in os.environ:  # mpirun of Open MPI 4 and 5, srun --mpi=pmix
        return False
    try:
        import mpi4py  # noqa: PLC0415 - whatever failed before may be what is missing

        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: PLC0415

        launcher.check_before_init(MPI.get_vendor()[0], loaded_path())
    except (ImportError, RuntimeError, ConfigError):
        return False
    init = function("MPI_Init")  # not mpi4py's, which would hold the interpreter until it returns
    if MPI.get_vendor()[0] != launcher.OPEN_MPI or init is None:
        return False
    meeting = next((thread for thread in threading.enumerate() if thread.name == MEETING), None)
    if meeting is None and not MPI.Is_initialized():
        meeting = threading.Thread(target=init, args=(None, None), daemon=True, name=MEETING)
        meeting.start()
    if meeting is not None:
        meeting.join(MEET_S)
        if meeting.is_alive():
            return False
    return bool(MPI.Is_initialized())
