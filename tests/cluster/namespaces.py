"""Hosts out of network namespaces, to test and measure what crosses a link on one machine.

    with network(3, rate_mbit=200) as hosts:
        job = jobs.mpirun(6, ["python", "train.py"], mpi=hosts.mpi(jobs.find_mpi()), options=hosts.options(mpi, 2))

A host has a network, a name, System V memory and mounts of its own: hostname h1, h2, ..., address 10.77.0.1, .2, ...,
/etc/hosts, /dev/shm, /run and a disk at `Network.local`. Its one interface, eth0, is a virtual cable to a bridge in a
namespace that belongs to nobody else, so nothing reaches the machine's own network. `rate_mbit` shapes both directions
of every cable with a token bucket (tbf). Its burst of 16 KiB is what passes at once after a pause; with a larger one
short messages would look faster than the link. The rest of the file system and the process numbers are shared.

No namespace has a name that could outlive it or meet another one: a shell that reads from a pipe of ours holds each of
them, and the kernel takes a namespace away with its last process. At the end of the block every process inside is
killed, daemons too, then the shells end. If this process is killed, the pipes close, and the shells kill what is inside
and end as well.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import FOREIGN, MARK, Mpi, have_ended

SUBNET = "10.77.0"
BURST = "16kb"
QUEUE = "latency 20ms"  # of the token bucket: what would wait longer is dropped; enough for a connection's window
READY_S = 60.0
LEFT_S = 10.0  # what a job has started is gone so soon after its end
ENTER = ("nsenter", "--net", "--uts", "--ipc", "--mount", "--target")
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")

# The shell that holds a host's namespaces: it sets them up, says so, and lives until its input ends. /sys shows the
# interfaces of whoever has mounted it: UCX looks there for their speed, and would find those of the machine. Slurm
# wants the control groups that are mounted below it.
# Whoever held the other end may have been killed: then it ends what is inside, several times, since they may fork.
HOLD = """
own=$(readlink /proc/$$/ns/net | tr -dc 0-9)
echo ready; read -r _
for _ in 1 2 3; do
    for pid in $(find /proc -maxdepth 3 -path '/proc/[0-9]*/ns/net' -lname "net:?$own?" 2>/dev/null | cut -d/ -f3); do
        [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
    done
done
"""
HOLD_HOST = """
if mount --rbind /sys/fs/cgroup "$2"; then
    mount -t sysfs sysfs /sys && mount --rbind "$2" /sys/fs/cgroup
    umount --lazy "$2"
fi 2>/dev/null
hostname "$0" && mount --bind "$1" /etc/hosts && for one in /dev/shm /run "$2"; do
    mount -t tmpfs tmpfs "$one" || exit
done && ip link set lo up || exit
"""
HOLD_SWITCH = "ip link add bridge type bridge && ip link set bridge up || exit\n"
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
    name: str
    address: str
    pid: int


class Network:
    """The hosts, and how a job is started on them. folder: all hosts see it; local: each has one of its own there."""

    def __init__(self, hosts: Sequence[Host], folder: Path, switch: int) -> None:
        self.hosts = tuple(hosts)
        self.folder = folder
        self.local = folder / "local"
        self._switch = switch

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def command(self, host: Host, *command: str, cwd: Path | str = "/") -> list[str]:
        return [*ENTER, str(host.pid), "--", "env", "-C", str(cwd), *command]

    def start(
        self, host: Host, *command: str, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host. It is killed at the end of the block, if it still runs.

        env: beside our environment. log: where its outputs go; without it the standard output is a pipe.
        """
        full, to_host = _environment(env), self.command(host, *command)
        if log is None:
            return subprocess.Popen(to_host, env=full, stdin=subprocess.DEVNULL, stdout=-1, text=True)
        with log.open("a") as file:  # a session of its own: Ctrl-C is for us, who then end it
            return subprocess.Popen(
                to_host,
                env=full,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def call(
        self,
        host: Host,
        *command: str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = 60,
        cwd: Path | str = "/",
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(host, *command, cwd=cwd),
            env=_environment(env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(self, host: Host, *command: str, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
        """Run a command on a host; what it printed. Raises RuntimeError with its other output."""
        done = self.call(host, *command, env=env, stdin=stdin)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} on {host.name}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def processes(self, host: Host) -> dict[int, str]:
        """The live processes of a host by number, each with its command line; not the one that holds the host."""
        return {pid: line for pid in _processes_in(host.pid) if pid != host.pid and (line := _command_line(pid))}

    @contextlib.contextmanager
    def nothing_left(self, within_s: float = LEFT_S) -> Iterator[None]:
        """What the block starts on any host has ended `within_s` seconds after it; see `assert_gone`."""
        before = self.snapshot()
        yield
        self.assert_gone(before, within_s)

    def snapshot(self) -> dict[Host, set[int]]:
        return {host: set(self.processes(host)) for host in self.hosts}

    def assert_gone(self, before: Mapping[Host, set[int]], within_s: float = LEFT_S) -> None:
        """Wait until no host has a process that it had not before. Raises AssertionError with those that stay.

        They are killed, so that the next test does not find them.
        """
        deadline = time.monotonic() + within_s
        while left := {host: new for host in self.hosts if (new := self._since(host, before[host]))}:
            if time.monotonic() > deadline:
                for pid in (pid for new in left.values() for pid in new):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                lines = [f"{host.name}: {pid} {line}" for host, new in left.items() for pid, line in new.items()]
                raise AssertionError(f"left {within_s:g} s after the end:\n" + "\n".join(lines))
            time.sleep(0.05)

    def _since(self, host: Host, before: set[int]) -> dict[int, str]:
        return {pid: line for pid, line in self.processes(host).items() if pid not in before}

    def wait_up(self, host: Host, device: str = "eth0") -> None:
        """Wait until an interface says that it is up, for which the kernel may take a second; UCX refuses it before."""

        def shown() -> str:
            return self.run(host, "ip", "-o", "link", "show", "dev", device)

        wait_until(lambda: "state UP" in shown(), lambda: f"{host.name}: {device} is not up: {shown()}")

    def crash(self, host: Host) -> None:
        """Kill all processes of a host, daemons too, as a loss of power does; its link stays up."""
        while pids := list(self.processes(host)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            have_ended(pids)

    def cut(self, host: Host) -> None:
        """Unplug a host's cable at the switch; its own end stays up."""
        _inside(self._switch, "ip", "link", "set", f"p{self.hosts.index(host) + 1}", "down")

    def mend(self, host: Host) -> None:
        _inside(self._switch, "ip", "link", "set", f"p{self.hosts.index(host) + 1}", "up")

    def mpi(self, mpi: Mpi) -> Mpi:
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


def wait_until(reached: Callable[[], object], why: Callable[[], str], limit_s: float = READY_S) -> None:
    """Wait until it is so. why: what is said where it is not within the limit."""
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline, f"after {limit_s:g} s: {why()}"
        time.sleep(0.05)


@dataclass(frozen=True)
class _MpiOnHost(Mpi):
    pid: int
    folder: Path

    def program(self, name: str) -> str:
        path = self.folder / name
        _script(path, LAUNCHER.format(pid=self.pid, program=shlex.quote(super().program(name))))
        return str(path)


@contextlib.contextmanager
def network(
    n_hosts: int,
    rate_mbit: float | None = None,
    mtu: int = 1500,
    rates: Mapping[str, float] | None = None,
    queue: str = QUEUE,
) -> Iterator[Network]:
    """Hosts with links of `rate_mbit` Mbit/s out and as much in (None: as fast as it goes), until the block ends.

    mtu: bytes of the longest packet. What a packet costs the machine does not depend on its length, so with longer ones
    the pretended network takes less of the processors. rates: of the links of single hosts, by name, in Mbit/s.
    queue: what waits before a link at most, as `tc` takes it for tbf, e.g. "limit 1mb".
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpikv-hosts-")))
        names = [(f"h{i + 1}", f"{SUBNET}.{i + 1}") for i in range(n_hosts)]
        (folder / "local").mkdir()
        file = folder / "hosts"
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names))
        switch = stack.enter_context(_held(["unshare", "--net", "sh", "-c", HOLD_SWITCH + HOLD]))
        hosts = []
        for name, address in names:
            hold = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", HOLD_HOST + HOLD]
            hold += [name, str(file), str(folder / "local")]
            hosts.append(Host(name, address, stack.enter_context(_held(hold))))
        for i, host in enumerate(hosts):
            port = f"p{i + 1}"
            _inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            _inside(switch, "ip", "link", "set", port, "mtu", str(mtu), "master", "bridge", "up")
            _inside(host.pid, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            _inside(host.pid, "ip", "link", "set", "eth0", "mtu", str(mtu), "up")
            _inside(host.pid, "ip", "route", "replace", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic")
            rate = (rates or {}).get(host.name, rate_mbit)
            if rate is not None:
                for pid, device in ((host.pid, "eth0"), (switch, port)):
                    shape = f"root tbf rate {rate}mbit burst {BURST} {queue}"
                    _inside(pid, "tc", "qdisc", "add", "dev", device, *shape.split())
        pids = folder / "pids"
        pids.write_text("".join(f"{host.name} {host.pid}\n{host.address} {host.pid}\n" for host in hosts))
        _script(folder / "agent", AGENT.format(pids=shlex.quote(str(pids))))
        made = Network(hosts, folder, switch)
        for host in hosts:
            made.wait_up(host)
        yield made


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """Ours without what belongs to a job or a user's settings, and `more`."""
    kept = {name: value for name, value in os.environ.items() if name == MARK or not name.startswith(FOREIGN)}
    return {**kept, **(more or {})}


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _inside(pid: int, *command: str) -> None:
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


def _command_line(pid: int) -> str:
    """A live process's command line, or its name where it has none; "" of one that has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
        if state.rpartition(")")[2].split()[0] in "ZX":
            return ""
        line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return line or state[state.index("(") : state.rindex(")") + 1]
