"""The ranks of a job that are processes, brought together once before they make something in common.

Whatever they make, a store or a world of process groups, they begin in the same way: duplicate the communicator,
compare everybody's settings, find out the hosts, real or pretended, and open the memory that the ranks of a host share.
Importing this module initialises MPI.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from mpi4py import MPI

from mpikv._version import __version__
from mpikv.config import Config
from mpikv.errors import ConfigError, StallError
from mpikv.hostmemory import segment
from mpikv.hostmemory.segment import HostMemory
from mpikv.placement.topology import labels, pretended
from mpikv.runtime import abort
from mpikv.runtime.coming import awaited
from mpikv.session.agreement import grouped
from mpikv.transports.memory import ranks_here
from mpikv.transports.mpi import MpiTransport, allgather_bytes, open_transport

ONE_KIND = "all ranks of a job make a store or are its servers, or all make a process group, which has no servers"
ONE_KIND += " (mpikv launch -s 0)"


class Processes:
    """One rank of `comm`. Making it is collective and blocks until all ranks do; StallError where they do not come.

    call: what each of them must call, and `advice` what else to say of one that does not. own: see `open_transport`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        config: Config,
        call: str,
        advice: str = "",
        own: Callable[[MpiTransport], None] | None = None,
    ) -> None:
        self._config, self._call, self._advice = config, call, advice
        self._label = f"rank {comm.Get_rank()} of {comm.Get_size()}"
        self.why_no_memory = ""
        world = MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group())
        guard = abort.guard()
        others_know = nullcontext() if guard is None else guard.creating(call, world)
        with awaited(call, config.stall_warn_s, world), others_know:
            self.transport = open_transport(comm, config.timeout_s, self._nobody, own)
        self.threaded = config.progress == "thread" and MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _nobody(self) -> BaseException:
        return StallError(
            f"{self._label} waited {self._config.timeout_s:g} s in {self._call} for the other ranks of its "
            f"communicator: every one of them must call it{self._advice}"
        )

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank brings, in rank order. Collective, blocks."""
        return allgather_bytes(self.transport, data, self._config.timeout_s, self._nobody)

    def gather_here(self, data: bytes) -> list[bytes]:
        """Return what the ranks of this host bring. Collective over the ranks of all hosts, blocks."""
        everybodys = self.gather(data)
        return [everybodys[rank] for rank in ranks_here(self.transport)]

    def compare(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what every rank announced; the `settings` must be the same on all. Collective, blocks.

        mine: JSON. Afterwards the hosts are the pretended ones, where `MPIKV_TEST_HOSTS` says so. Raises ConfigError,
        the same on every rank, where a setting differs between ranks, what they make, or the version of this package.
        """
        name = self._call.partition("(")[0]
        mine = {**mine, "call": name, "version": __version__}
        announced = [json.loads(text) for text in self.gather(json.dumps(mine).encode())]

        def compare(what: str, values: Sequence[Any]) -> None:
            if len(set(values)) > 1:
                raise ConfigError(f"{what}: {grouped(values, labels(self.transport.hosts))}")

        # The version first: all else that they bring may differ with it.
        versions = [entry.get("version", "an older one") for entry in announced]
        compare(f"{name}: the version of mpikv differs between ranks", versions)
        compare(ONE_KIND, [entry["call"] for entry in announced])
        for setting in announced[0]["settings"]:
            compare(f"{name}: {setting} differs between ranks", [entry["settings"][setting] for entry in announced])
        self.transport.hosts = pretended(self.transport.hosts, self._config.test_hosts)
        return announced

    def memory(self) -> HostMemory | None:
        """Open the memory of this host; None where its ranks cannot share any. Collective, blocks.

        It is no error where there is none: messages do the same; `why_no_memory`, and `mpikv info`, say why.
        """
        here = ranks_here(self.transport)
        rank = here.index(self.transport.rank)
        found, self.why_no_memory = segment.open_host_memory(rank, len(here), self.gather_here)
        return found
