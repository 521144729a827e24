"""What the tests of Slurm's and Grid Engine's batch scripts share: changed scripts, and what their jobs print."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WHEREABOUTS = ["python", str(HERE / "whereabouts.py")]


def looping(case: str) -> list[str]:
    """The command of looping.py."""
    return ["python", str(HERE / "looping.py"), case]


@dataclass
class Ended:
    """A job that has ended. status: of its script."""

    status: int
    output: str

    @property
    def found(self) -> dict[str, object]:
        """What whereabouts.py has printed."""
        line = re.search(r"found (\{.*\})", self.output)
        assert line is not None, self.output
        found: dict[str, object] = json.loads(line[1])
        return found


def changed(script: Path, folder: Path, **settings: str) -> Path:
    """A copy of a script with other values in the lines at its top."""
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


def said(file: Path, pattern: str, times: int = 1, timeout_s: float = 60, running: Callable[[], bool] | None = None):
    """Wait until a file holds so many matches; all of them. running: says whether more can come."""
    deadline = time.monotonic() + timeout_s
    while True:
        more = running is None or running()
        text = file.read_text() if file.exists() else ""
        found = list(re.finditer(pattern, text))
        if len(found) >= times:
            return found
        assert more, f"the job ended without {times} x {pattern!r}:\n{text}"
        assert time.monotonic() < deadline, f"no {times} x {pattern!r} within {timeout_s:g} s:\n{text}"
        time.sleep(0.1)


def stopped_together(output: str, workers: int) -> int:
    """The step after which all workers have stopped, the same for all."""
    steps = dict(re.findall(r"worker (\d+) stops after step (\d+)", output))
    assert sorted(steps) == [str(worker) for worker in range(workers)], output
    assert len(set(steps.values())) == 1, output
    return int(steps["0"])
