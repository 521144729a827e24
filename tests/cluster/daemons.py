"""What sshd, Slurm and Grid Engine on the hosts of `namespaces.network` have in common: programs, daemons, commands."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from namespaces import Network

SEARCH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"  # daemons lie in sbin


def missing(what: str, programs: Sequence[str], packages: str) -> str:
    """Why it cannot be here; "" where it can."""
    absent = [program for program in programs if shutil.which(program, path=SEARCH) is None]
    return f"{what} needs {', '.join(absent)} (apt-get install {packages})" if absent else ""


class Cluster:
    """A running cluster. env: what its commands need in their environment."""

    def __init__(self, hosts: Network, folder: Path, env: dict[str, str]) -> None:
        self.hosts = hosts
        self.folder = folder
        self.env = env

    def call(
        self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 60, cwd: Path | str = "/"
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its commands on the first host, whatever its status."""
        return self.hosts.call(self.hosts[0], *command, env={**self.env, **(env or {})}, timeout_s=timeout_s, cwd=cwd)

    def submit_by(self, *command: str, env: Mapping[str, str], folder: Path) -> str:
        """The number that the command prints, of a job whose output lies in the folder."""
        done = self.call(*command, env=env, cwd=folder)
        assert done.stdout.strip().isdigit(), done
        return done.stdout.strip()


def start(
    stack: contextlib.ExitStack,
    hosts: Network,
    host: int,
    program: str,
    *arguments: str,
    log: Path,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a daemon on a host, which is killed at the end of the stack. log: for what it says."""
    path = shutil.which(program, path=SEARCH)
    assert path is not None, f"there is no {program}"
    daemon = hosts.start(hosts[host], path, *arguments, env=env, log=log)
    stack.callback(lambda: (daemon.kill(), daemon.wait()))
    return daemon


def last_lines(files: Sequence[Path]) -> str:
    return "\n".join(f"--- {file}\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)
