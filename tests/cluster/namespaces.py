"""Hosts out of network namespaces, to test and measure what crosses a link on one machine.

    with network(3, rate_mbit=200) as hosts:
        job = jobs.mpirun(6, ["python", "train.py"], mpi=hosts.mpi(jobs.find_mpi()), options=hosts.options(mpi, 2))
        sent_bytes = hosts[0].sent_bytes()

A host has a network, a name, System V memory and mounts of its own: hostname h1, h2, ..., address 10.77.0.1, .2, ...,
/etc/hosts and /dev/shm. Its one interface, eth0, is a virtual cable to a bridge in a namespace that belongs to nobody
else, so nothing reaches the machine's own network. `rate_mbit` shapes both directions of every cable with a token
bucket (tbf). Its burst of 16 KiB is what passes at once after a pause; with a larger one short messages would look
faster than the link. The rest of the file system and the process numbers are shared.

No namespace has a name that could outlive it: a shell that reads from a pipe of ours holds each of them, and the kernel
takes a namespace away with its last process. At the end of the block every process inside is killed, then the shells
end; if this process is killed, the pipes close and the shells end as well.

Needs root, `ip` and `tc` (iproute2), `unshare` and `nsenter` (util-linux). `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import Mpi, have_ended

SUBNET = "10.77.0"
BURST = "16kb"
QUEUE = "20ms"  # of the token bucket: what waits longer is dropped; at any rate more than a sender's window needs
READY_S = 10.0
ENTER = ("nsenter", "--net", "--uts", "--ipc", "--mount", "--target")
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")

# The shell that holds a host's namespaces: it sets them up, says so, and lives until its input ends.
HOLD_HOST = """
hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo ready
read -r _
"""
HOLD_SWITCH = "ip link add bridge type bridge && ip link set bridge up && echo ready; read -r _"
# What mpirun calls in place of ssh: [options] HOST COMMAND. `pids` maps hosts to the processes that hold them.
AGENT = """#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
pid=$(sed -n "s/^$1 //p" {pids}); shift
exec nsenter -t "$pid" -n -u -i -m -- sh -c 'cd "$0" && exec sh -c "$1"' "$PWD" "$*"
"""
LAUNCHER = """#!/bin/sh
exec nsenter -t {pid} -n -u -i -m -- sh -c 'cd "$0" && exec "$@"' "$PWD" {program} "$@"
"""


def missing() -> str:
    """Why there can be no hosts here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"network namespaces need {', '.join(absent)} (apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"the kernel refuses namespaces: {tried.stderr.decode().strip()}"


@dataclass(frozen=True)
class Host:
    """One host. pid: of the process that holds its namespaces."""

    name: str
    address: str
    pid: int

    def sent_bytes(self) -> int:
        """Bytes that its interface has sent since it exists, packet headers included."""
        return self._counters()[8]

    def received_bytes(self) -> int:
        """Bytes that its interface has received."""
        return self._counters()[0]

    def _counters(self) -> list[int]:
        # Linux, Documentation/networking/statistics.rst: bytes, packets and six more received, then the same sent.
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (line,) = (line for line in lines if line.strip().startswith("eth0:"))
        return [int(number) for number in line.split(":")[1].split()]


class Network:
    """The hosts, and how a job is started on them."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts = tuple(hosts)
        self.folder = folder

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def start(self, host: Host, *command: str) -> subprocess.Popen[str]:
        """Start a command on a host. It is killed at the end of the block, if it still runs."""
        return subprocess.Popen([*ENTER, str(host.pid), "--", *command], stdout=-1, text=True)

    def run(self, host: Host, *command: str) -> str:
        """Run a command on a host; what it printed. Raises CalledProcessError."""
        return subprocess.run([*ENTER, str(host.pid), "--", *command], stdout=-1, text=True, check=True).stdout

    def mpi(self, mpi: Mpi) -> Mpi:
        """The same MPI, with an `mpirun` that runs on the first host."""
        return _MpiOnHost(mpi.kind, mpi.prefix, self.hosts[0].pid, self.folder)

    def options(self, mpi: Mpi, ranks_per_host: int | Sequence[int]) -> list[str]:
        """Options of `mpirun` that put so many ranks on every host, in blocks, and reach the hosts."""
        each = [ranks_per_host] * len(self) if isinstance(ranks_per_host, int) else list(ranks_per_host)
        agent = str(self.folder / "agent")
        if mpi.kind == "mpich":
            hosts = ",".join(f"{host.name}:{n}" for host, n in zip(self.hosts, each, strict=True))
            return ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", hosts]
        file = self.folder / ("hostfile-" + "-".join(map(str, each)))
        file.write_text("".join(f"{host.name} slots={n}\n" for host, n in zip(self.hosts, each, strict=True)))
        return ["--prtemca", "plm_ssh_agent", agent, "--hostfile", str(file), "--mca", "btl_tcp_if_include", "eth0"]


@dataclass(frozen=True)
class _MpiOnHost(Mpi):
    pid: int
    folder: Path

    def program(self, name: str) -> str:
        path = self.folder / name
        _script(path, LAUNCHER.format(pid=self.pid, program=shlex.quote(super().program(name))))
        return str(path)


@contextlib.contextmanager
def network(n_hosts: int, rate_mbit: float | None = None, mtu: int = 1500) -> Iterator[Network]:
    """Hosts with links of `rate_mbit` Mbit/s out and as much in (None: as fast as it goes), until the block ends.

    mtu: bytes of the longest packet. What a packet costs the machine does not depend on its length, so with longer ones
    the pretended network takes less of the processors.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpikv-hosts-")))
        names = [(f"h{i + 1}", f"{SUBNET}.{i + 1}") for i in range(n_hosts)]
        file = folder / "hosts"
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names))
        switch = stack.enter_context(_held(["unshare", "--net", "sh", "-c", HOLD_SWITCH]))
        hosts = []
        for name, address in names:
            hold = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", HOLD_HOST, name, str(file)]
            hosts.append(Host(name, address, stack.enter_context(_held(hold))))
        for i, host in enumerate(hosts):
            port = f"p{i + 1}"
            _inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            _inside(switch, "ip", "link", "set", port, "mtu", str(mtu), "master", "bridge", "up")
            _inside(host.pid, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            _inside(host.pid, "ip", "link", "set", "eth0", "mtu", str(mtu), "up")
            if rate_mbit is not None:
                for pid, device in ((host.pid, "eth0"), (switch, port)):
                    shape = f"root tbf rate {rate_mbit}mbit burst {BURST} latency {QUEUE}"
                    _inside(pid, "tc", "qdisc", "add", "dev", device, *shape.split())
        pids = folder / "pids"
        pids.write_text("".join(f"{host.name} {host.pid}\n{host.address} {host.pid}\n" for host in hosts))
        _script(folder / "agent", AGENT.format(pids=shlex.quote(str(pids))))
        yield Network(hosts, folder)


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _inside(pid: int, *command: str) -> None:
    """Run a command in the network of a held namespace."""
    done = subprocess.run(["nsenter", "-t", str(pid), "-n", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _held(command: list[str]) -> Iterator[int]:
    """Namespaces held by a shell, whose process number is given; at the end everything inside is killed."""
    # A session of its own: Ctrl-C is for us, who then end the shell.
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, start_new_session=True) as shell:
        assert shell.stdout is not None
        assert shell.stderr is not None
        try:
            if shell.stdout.readline() != b"ready\n":
                shell.kill()
                raise RuntimeError(f"{' '.join(command[:5])}: {shell.stderr.read().decode().strip()}")
            yield shell.pid
        finally:
            inside = [pid for pid in _processes_in(shell.pid) if pid != shell.pid]
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shell.kill()
            have_ended(inside)


def _processes_in(pid: int) -> list[int]:
    """All processes in the network namespace of `pid`, if that is not the machine's own."""
    try:
        network_of_shell = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return []
    if network_of_shell == os.readlink("/proc/self/ns/net"):  # `unshare` has failed, or has not come to it
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # it has just ended
            if os.readlink(path) == network_of_shell:
                found.append(int(path.parts[2]))
    return found
