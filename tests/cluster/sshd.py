"""A real sshd on every host of `namespaces.network`, with keys and configuration of its own.

    with network(3) as hosts, sshd(hosts):
        hosts.run(hosts[0], "ssh", "h2", "hostname")

Plain `ssh` works from every host to every other: each has the client's configuration at /etc/ssh/ssh_config, mounted
there for this host alone. Nothing is read from or written to anybody's ~/.ssh; the machine's own sshd is not touched.

Needs the packages openssh-server and openssh-client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import daemons
from namespaces import Network, wait_until

PROGRAMS = ("sshd", "ssh", "ssh-keygen")

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
    return daemons.missing("ssh", PROGRAMS, "openssh-server openssh-client")


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
    dial = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1).close()"
    with contextlib.ExitStack() as stack:
        for i, host in enumerate(hosts.hosts):
            hosts.run(host, "mkdir", "-p", "/run/sshd")  # where it locks itself up before a login
            hosts.run(host, "mount", "--bind", str(folder / "client"), "/etc/ssh/ssh_config")
            log = folder / f"{host.name}.log"
            daemons.start(stack, hosts, i, "sshd", "-D", "-e", "-f", str(folder / "server"), log=log)
        for host in hosts.hosts:
            line = ["python3", "-c", dial, host.address]
            wait_until(
                lambda line=line: hosts.call(hosts[0], *line).returncode == 0,
                lambda host=host: f"no sshd at {host.name}:\n{(folder / f'{host.name}.log').read_text()}",
            )
        yield folder
