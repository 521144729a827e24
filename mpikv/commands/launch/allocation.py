"""The hosts that a scheduler has given to the job in which the launcher runs: Slurm's and Grid Engine's.

Slurm says them in two variables, SLURM_JOB_NODELIST (`n[1-3,7],m2`) and SLURM_TASKS_PER_NODE (`4(x3),2`, see
sbatch(1)); Grid Engine in the file PE_HOSTFILE, a host, its slots, a queue and processors a line (sge_pe(5)). So no
tool of the scheduler has to be called. Other schedulers' hosts are left to `mpirun`, which knows several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mpikv.commands.launch.hosts import Host, check_name
from mpikv.errors import ConfigError

OTHERS = ("PBS_NODEFILE", "LSB_HOSTS", "COBALT_NODEFILE")
# Grid Engine's remote shell within a job; the host's name follows. Not -V, which leaves the whole environment, the
# secret of the job with it, in files that every user of that host can read.
QRSH = ("qrsh", "-inherit", "-nostdin", "-v", "PATH,LD_LIBRARY_PATH")
# A step beside those that run, for looking at what is left.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", "--nodelist")


def hosts(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the allocation with their slots; [] outside of one. Raises ConfigError for what cannot be read."""
    if environ.get("SLURM_JOB_NODELIST"):
        names = expand(environ["SLURM_JOB_NODELIST"])
        slots = counts(environ.get("SLURM_TASKS_PER_NODE", ""))
        if len(slots) != len(names):  # without --ntasks it may be missing, or speak of a step
            slots = counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        if len(slots) != len(names):
            return [Host(name) for name in names]
        return [Host(name, n) for name, n in zip(names, slots, strict=True)]
    if environ.get("PE_HOSTFILE"):
        try:
            lines = [line.split() for line in Path(environ["PE_HOSTFILE"]).read_text().splitlines() if line.strip()]
            found: dict[str, int] = {}
            for name, slots_text, *_ in lines:  # a host has a line for each of its queues
                found[check_name(name)] = found.get(name, 0) + int(slots_text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"PE_HOSTFILE={environ['PE_HOSTFILE']} cannot be read: {error}") from None
        return [Host(name, n) for name, n in found.items()]
    return []


def inside(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in an allocation of a scheduler."""
    return any(environ.get(name) for name in ("SLURM_JOB_NODELIST", "PE_HOSTFILE", *OTHERS))


def remote_shell(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What runs a command on another host of the allocation; () where it is ssh."""
    if environ.get("SLURM_JOB_NODELIST"):
        return SRUN
    return QRSH if environ.get("PE_HOSTFILE") else ()


def expand(text: str) -> list[str]:
    """The names in `n[1-3,07],m2`: a number keeps its leading zeros. Raises ConfigError."""
    names: list[str] = []
    # Commas within brackets belong to one name; there may be several brackets.
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            if ranges:
                found = [one + plain + number for one in found for number in _numbers(ranges, text)]
            else:
                found = [one + plain for one in found]
        names += found
    try:
        return [check_name(name) for name in names]
    except ValueError as error:
        raise ConfigError(f"SLURM_JOB_NODELIST={text}: {error}") from None


def _numbers(ranges: str, text: str) -> list[str]:
    numbers = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ConfigError(f"SLURM_JOB_NODELIST={text}: {one!r} is no range of numbers")
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return numbers


def counts(text: str) -> list[int]:
    """The numbers in `4(x3),2`: 4, 4, 4, 2. [] where it is something else."""
    found: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", one)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found
