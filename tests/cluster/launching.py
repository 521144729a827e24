"""Run the `mpikv` command on the first of several hosts, as somebody would who has logged in there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
import training
from namespaces import Host, Network


class Command(jobs.Running):
    """A command under way. `result` is there at the end of the block of `started`."""

    @property
    def pid(self) -> int:
        return self._process.pid


@contextlib.contextmanager
def started(
    hosts: Network,
    mpi: jobs.Mpi,
    words: Sequence[object],
    *,
    cwd: Path | str | None = None,
    timeout_s: float = 60,
    **variables: str,
) -> Iterator[Command]:
    """`mpikv WORDS` on the first host, in `cwd` (default: a folder that all hosts see)."""
    folder = Path(tempfile.mkdtemp(prefix="command-", dir=hosts.folder))
    to_host = hosts.command(hosts[0], mpi.python, "-m", "mpikv", *map(str, words), cwd=cwd or folder)
    running = Command(to_host, training.environment(mpi, folder, **variables), folder, timeout_s)
    try:
        yield running
    except BaseException:
        running.end()
        raise
    running.finish()


def run(hosts: Network, mpi: jobs.Mpi, words: Sequence[object], **more: object) -> jobs.Job:
    with started(hosts, mpi, words, **more) as running:  # type: ignore[arg-type]
        pass
    return running.result


def launched(
    hosts: Network, mpi: jobs.Mpi, options: Sequence[object], command: Sequence[str], **more: object
) -> contextlib.AbstractContextManager[Command]:
    """`mpikv launch OPTIONS COMMAND`; arguments as `started` has them."""
    return started(hosts, mpi, ["launch", *options, *command], **more)  # type: ignore[arg-type]


def launch(
    hosts: Network, mpi: jobs.Mpi, options: Sequence[object], command: Sequence[str], **more: object
) -> jobs.Job:
    return run(hosts, mpi, ["launch", *options, *command], **more)


def host_file(hosts: Network, entry: str = "{name}", only: Sequence[Host] | None = None) -> Path:
    file = hosts.folder / "hostfile"
    file.write_text("".join(entry.format(name=host.name) + "\n" for host in only or hosts.hosts))
    return file
