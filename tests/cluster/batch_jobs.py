"""What the tests of Slurm's and Grid Engine's batch scripts share: changed scripts, and what their jobs print."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jobs
import training
from grid_engine import GridEngine
from namespaces import Host, Network, wait_until
from slurm import Slurm

from mpikv.common.snapshot_names import ShareName, parse, whole

HERE = Path(__file__).parent
WHEREABOUTS = ["python", str(HERE / "whereabouts.py")]


def wait_for_snapshot(hosts: Network, on: Sequence[Host], folder: Path) -> None:
    """Wait until these hosts have a whole snapshot in the folder, each its part."""

    def found() -> list[ShareName]:
        listed = (name for host in on for name in hosts.call(host, "ls", str(folder)).stdout.split())
        return whole(share for share in map(parse, listed) if share is not None)

    wait_until(found, lambda: f"there is no whole snapshot on {on}")


def looping(case: str) -> list[str]:
    return ["python", str(HERE / "looping.py"), case]


@dataclass
class Ended:
    status: int
    output: str

    @property
    def found(self) -> dict[str, object]:
        line = re.search(r"found (\{.*\})", self.output)
        assert line is not None, self.output
        found: dict[str, object] = json.loads(line[1])
        return found


class Batch:
    """A submitted script. options: of the scheduler; variables: beside those of whoever has activated the MPI's
    environment.
    """

    def __init__(  # noqa: PLR0917 - a job has that many parts
        self,
        cluster: Slurm | GridEngine,
        mpi: jobs.Mpi,
        folder: Path,
        options: Sequence[str],
        program: Sequence[str],
        script: Path,
        **variables: str,
    ) -> None:
        self._cluster, self._folder = cluster, folder
        env = training.environment(mpi, folder, **variables)
        self.follow(cluster.submit([*options, str(script), *program], folder, env, [*variables]))

    def follow(self, number: str) -> None:
        self.number, self._out = number, self._folder / f"job-{number}.out"

    @property
    def output(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def said(self, pattern: str, times: int = 1, timeout_s: float = 60) -> list[re.Match[str]]:
        deadline = time.monotonic() + timeout_s
        while True:
            more, text = self._cluster.running(self.number), self.output
            found = list(re.finditer(pattern, text))
            if len(found) >= times:
                return found
            assert more, f"the job ended without {times} x {pattern!r}:\n{text}"
            assert time.monotonic() < deadline, f"no {times} x {pattern!r} within {timeout_s:g} s:\n{text}"
            time.sleep(0.1)

    def workers(self) -> dict[str, re.Match[str]]:
        """Wait until the four workers of looping.py run; of each its host and its process."""
        return {match[1]: match for match in self.said(r"worker (\d) of 4 is (\w+) (\d+)", 4)}

    def ended(self, timeout_s: float = 60) -> Ended:
        try:
            self._cluster.wait_for_end(self.number, timeout_s)
        except AssertionError as error:
            self._cluster.cancel(self.number)
            raise AssertionError(f"{error}\n{self.output}\n{self._cluster.logs()}") from None
        return Ended(self._cluster.status(self.number, self.output), self.output)


def changed(script: Path, folder: Path, **settings: str) -> Path:
    text = script.read_text()
    for name, value in settings.items():
        text, times = re.subn(rf"^{name}=.*$", f"{name}={value}", text, count=1, flags=re.M)
        assert times == 1, name
    copy = folder / script.name
    copy.write_text(text)
    return copy


def check_map(found: dict[str, object], hosts: list[str], of_servers: list[str]) -> None:
    """Every rank on its host, each host's local ranks 0, 1, ... in the order of ranks, servers spread, sums right."""
    assert found["hosts"] == hosts
    assert found["local"] == [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    servers: list[int] = found["servers"]  # type: ignore[assignment]
    assert sorted(hosts[rank] for rank in servers) == sorted(of_servers)
    workers = [rank for rank in range(len(hosts)) if rank not in servers]
    assert found["map"] == [[rank, number, hosts[rank]] for number, rank in enumerate(workers)]
    assert found["sum"] == [sum(range(1, len(workers) + 1))] * 3
    assert 0 in workers


def stopped_together(output: str, workers: int) -> int:
    """The step after which all workers have stopped, the same for all."""
    steps = dict(re.findall(r"worker (\d+) stops after step (\d+)", output))
    assert sorted(steps) == [str(worker) for worker in range(workers)], output
    assert len(set(steps.values())) == 1, output
    return int(steps["0"])
