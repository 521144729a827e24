"""A real sshd on every host of `namespaces.network`, with keys and configuration of its own.

    with network(3) as hosts, sshd(hosts):
        hosts.run(hosts[0], "ssh", "h2", "hostname")

Plain `ssh` works from every host to every other: each has the client's configuration at /etc/ssh/ssh_config, mounted
there for this host alone. Nothing is read from or written to anybody's ~/.ssh; the machine's own sshd is not touched.

Needs the packages openssh-server and openssh-client.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from namespaces import READY_S, Network

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
SEARCH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"  # daemons lie in sbin

# ClientAlive: the process that serves a connection ends with a client that has gone without a word, as where it is cut
# off; by default it waits for two hours.
SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
ClientAliveInterval 5
ClientAliveCountMax 3
MaxStartups 100
MaxSessions 100
"""
# BatchMode: never ask. A host that is not there is told within seconds.
CLIENT = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 5
    LogLevel ERROR
"""


def missing() -> str:
    """Why there can be no sshd here; "" where there can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=SEARCH) is None]
    return f"ssh needs {', '.join(absent)} (apt-get install openssh-server openssh-client)" if absent else ""


@contextlib.contextmanager
def sshd(hosts: Network) -> Iterator[Path]:
    """An sshd on every host until the end of the block; the folder of its keys, configuration and logs."""
    folder = hosts.folder / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("key", "host_key"):
        hosts.run(hosts[0], "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"{h.name},{h.address} {host_key}\n" for h in hosts.hosts))
    (folder / "server").write_text(SERVER.format(folder=folder))
    (folder / "client").write_text(CLIENT.format(folder=folder))
    program = shutil.which("sshd", path=SEARCH)
    assert program is not None, missing()
    daemons = []
    for host in hosts.hosts:
        hosts.run(host, "mkdir", "-p", "/run/sshd")  # where it locks itself up before a login
        hosts.run(host, "mount", "--bind", str(folder / "client"), "/etc/ssh/ssh_config")
        log = folder / f"{host.name}.log"
        daemons.append(hosts.start(host, program, "-D", "-e", "-f", str(folder / "server"), log=log))
    try:
        for host in hosts.hosts:
            _answers(hosts, host.address, folder / f"{host.name}.log")
        yield folder
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def _answers(hosts: Network, address: str, log: Path) -> None:
    code = f"import socket; socket.create_connection(({address!r}, 22), 1).close()"
    deadline = time.monotonic() + READY_S
    while hosts.call(hosts[0], "python3", "-c", code).returncode != 0:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no sshd at {address} within {READY_S:g} s:\n{log.read_text()}")
        time.sleep(0.05)
