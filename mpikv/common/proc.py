"""What the system tells of processes, in /proc (proc(5)).

A process may end at any moment, and another user's tells less: what is not there is empty. All calls are local. Only
the standard library is imported: see commands/launch/quick.py.
"""

from __future__ import annotations

import contextlib
import os


def text(path: str) -> str:
    """Return what stands in a file below /proc, such as `self/maps` or `4711/comm`."""
    with contextlib.suppress(OSError), open(f"/proc/{path}", errors="surrogateescape") as file:
        return file.read()
    return ""


def stat(which: int | str) -> list[str]:
    """Return what proc_pid_stat(5) has of a process, or of a thread (`self/task/7`), from its state on."""
    return text(f"{which}/stat").rpartition(")")[2].split()  # the name before, in parentheses, may hold anything


def program(pid: int) -> str:
    """Return the path of the program that a process runs; its bare name where that is hidden, as another user's is."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return text(f"{pid}/comm").strip()


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def boot_id() -> str:
    """Return what tells this machine, since it was started, from others."""
    return text("sys/kernel/random/boot_id").strip()
