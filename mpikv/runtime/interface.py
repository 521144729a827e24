"""Which network interface the MPI library uses: `MPIKV_INTERFACE`, in the words of each library.

A host with several networks has several addresses, and a library that tries one which its peers cannot reach fails or
waits for ever. The user names interfaces (`eth0`) or, since their names differ between hosts, networks (`10.0.0.0/8`);
several are separated by commas, and each host uses those of them that it has. Every rank looks them up on its own host
and sets, before MPI_Init:

| library | variables | what they take |
|---|---|---|
| Open MPI | `OMPI_MCA_btl_tcp_if_include` | interfaces and IPv4 networks; an unknown one makes ranks fail or hang |
| MPICH, Intel MPI and relatives, over libfabric | `FI_TCP_IFACE`, `FI_SOCKETS_IFACE`, `FI_UDP_IFACE` | one interface |
| all, over UCX | `UCX_NET_DEVICES` | interfaces, and RDMA devices: that behind an interface stays in |

What mpirun's own daemons use is another matter: `mpirun_variables`. A variable of the library that the user has set
counts more than ours. All calls are local; the addresses are those that getifaddrs(3) lists.

Sources: Open MPI 5 `ompi_info --all` and PRRTE's help texts; libfabric's fi_tcp(7) and fi_sockets(7); OpenUCX's FAQ on
UCX_NET_DEVICES; `mpiexec -help` of MPICH 5 and Intel MPI 2021.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpikv.config import AUTO_INTERFACE, interface_entries
from mpikv.errors import ConfigError
from mpikv.runtime.launcher import OPEN_MPI

OPEN_MPI_INCLUDE, OPEN_MPI_EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
LIBFABRIC = ("FI_TCP_IFACE", "FI_SOCKETS_IFACE", "FI_UDP_IFACE")
UCX = "UCX_NET_DEVICES"
# Of mpirun itself: PRRTE (Open MPI 5), Open MPI 4, hydra of MPICH, hydra of Intel MPI.
DAEMONS_OPEN_MPI = ("PRTE_MCA_prte_if_include", "OMPI_MCA_oob_tcp_if_include")
DAEMONS_HYDRA = ("HYDRA_IFACE", "I_MPI_HYDRA_IFACE")
SYSFS = Path("/sys/class/net")
IFF_UP = 1  # linux/if.h


class InterfaceError(ConfigError):
    """No interface of this host is what MPIKV_INTERFACE names."""


class Interface(NamedTuple):
    """addresses: with their prefix lengths, `10.0.0.1/24`. rdma: the RDMA device behind it as UCX calls it, or ""."""

    name: str
    addresses: tuple[str, ...]
    rdma: str = ""
    up: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}{'' if self.up else '; it is down'})"


class InterfaceChoice(NamedTuple):
    """What follows from MPIKV_INTERFACE.

    interfaces: those of this host that it names; variables: what is to be set; own: what the user has set, which counts
    more.
    """

    interfaces: tuple[Interface, ...]
    variables: dict[str, str]
    own: dict[str, str]


def interface_variables(family: str, value: str, interfaces: Sequence[Interface], host: str = "") -> dict[str, str]:
    """Return the variables that a rank sets for the library `family` (by mpi4py's name). Pure.

    value: as MPIKV_INTERFACE has it; interfaces: all of the host. InterfaceError where it has none of those named.
    """
    if value == AUTO_INTERFACE:
        return {}
    found = _found(value, interfaces, host)
    chosen = list(dict.fromkeys(interface for matches in found.values() for interface in matches))
    devices = [interface.rdma for interface in chosen if interface.rdma] + [interface.name for interface in chosen]
    if family != OPEN_MPI:
        return {**dict.fromkeys(LIBFABRIC, chosen[0].name), UCX: ",".join(devices)}
    words: list[str] = []
    for entry, matches in found.items():
        # A network keeps other addresses of the interface out, but Open MPI knows those of IPv4 alone.
        words += [entry] if "/" in entry and ":" not in entry else [interface.name for interface in matches]
    return {OPEN_MPI_INCLUDE: ",".join(dict.fromkeys(words)), UCX: ",".join(devices)}


def choose(family: str, value: str, environ: Mapping[str, str] = os.environ) -> InterfaceChoice:
    """Return what this rank has to set and what the user has set. InterfaceError as `interface_variables`."""
    if value == AUTO_INTERFACE:
        return InterfaceChoice((), {}, {})
    existing = host_interfaces()
    wanted = interface_variables(family, value, existing, socket.gethostname())
    own = {name: environ[name] for name, text in wanted.items() if environ.get(name, text) != text}
    if OPEN_MPI_INCLUDE in wanted and environ.get(OPEN_MPI_EXCLUDE):
        own[OPEN_MPI_EXCLUDE] = environ[OPEN_MPI_EXCLUDE]  # the two exclude each other
        del wanted[OPEN_MPI_INCLUDE]
    chosen = dict.fromkeys(one for matches in _found(value, existing, "").values() for one in matches)
    return InterfaceChoice(tuple(chosen), {name: text for name, text in wanted.items() if name not in own}, own)


def too_late(family: str, value: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return what to do where the library is initialised already; "" where the variables were set in time."""
    missing = {name: text for name, text in choose(family, value, environ).variables.items() if name not in environ}
    if not missing:
        return ""
    return (
        f"MPIKV_INTERFACE={value} comes too late: MPI was initialised before the store, by `from mpi4py import MPI`, "
        "and has chosen its network itself. Make the store first, or give the library its own variables on every rank: "
        + " ".join(f"{name}={text}" for name, text in missing.items())
    )


def mpirun_variables(family: str, value: str) -> dict[str, str]:
    """Return variables for the environment of `mpirun` itself, whose daemons connect the hosts; {} for `auto`.

    Only names that exist on this host are passed on: Open MPI's daemons end at a name that their host does not have,
    and hydra looks the name up where it is started.
    """
    if value == AUTO_INTERFACE:
        return {}
    wanted = interface_variables(family, value, host_interfaces(), socket.gethostname())
    if family == OPEN_MPI:
        return dict.fromkeys(DAEMONS_OPEN_MPI, wanted[OPEN_MPI_INCLUDE])
    return dict.fromkeys(DAEMONS_HYDRA, wanted[LIBFABRIC[0]])


def _found(value: str, interfaces: Sequence[Interface], host: str) -> dict[str, list[Interface]]:
    """Return the interfaces for each entry that names some."""
    found = {}
    for entry in interface_entries(value):
        matches = [interface for interface in interfaces if _matches(entry, interface)]
        if matches:
            found[entry] = matches
    if not found:
        raise InterfaceError(
            f"MPIKV_INTERFACE={value}: {host or 'this host'} has no such interface that is up and has an address; it "
            f"has {', '.join(map(str, interfaces)) or 'none'}. Name one of these, a network such as 10.0.0.0/8 that "
            "holds an address of every host, or several of them separated by commas"
        )
    return found


def _matches(entry: str, interface: Interface) -> bool:
    if not interface.up:
        return False
    if "/" not in entry:
        return entry == interface.name and bool(interface.addresses)
    network = ipaddress.ip_network(entry)
    return any(ipaddress.ip_interface(address).ip in network for address in interface.addresses)


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))  # of Linux; long enough for IPv6


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.POINTER(_SockAddr)),
)


def host_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this host, in the kernel's order. InterfaceError where the system does not list them."""
    lib = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if lib.getifaddrs(ctypes.byref(first)) != 0:
        raise InterfaceError(f"MPIKV_INTERFACE: getifaddrs failed: {os.strerror(ctypes.get_errno())}")
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    up = set()
    try:
        entry = first
        while entry:
            one = entry.contents
            text = _address(one)
            name = one.name.decode().partition(":")[0]  # an address with a label of its own, `eth0:1`, belongs to eth0
            if one.flags & IFF_UP:
                up.add(name)
            if text:
                addresses.setdefault(name, []).append(text)
            entry = one.next
    finally:
        lib.freeifaddrs(first)
    return tuple(Interface(name, tuple(texts), _rdma(name), name in up) for name, texts in addresses.items())


def _address(entry: _IfAddrs) -> str:
    # sockaddr_in: port, then the address; sockaddr_in6: port and flow information, then the address (netinet/in.h).
    places = {socket.AF_INET: slice(2, 6), socket.AF_INET6: slice(6, 22)}
    if not entry.address or not entry.netmask or entry.address.contents.family not in places:
        return ""
    place = places[entry.address.contents.family]
    address = ipaddress.ip_address(bytes(entry.address.contents.data[place]))
    return f"{address}/{int.from_bytes(bytes(entry.netmask.contents.data[place]), 'big').bit_count()}"


def _rdma(name: str, sysfs: Path = SYSFS) -> str:
    """Return the RDMA device and port that an interface belongs to, as in `mlx5_0:1`, or ""."""
    try:
        device = min(path.name for path in (sysfs / name / "device" / "infiniband").iterdir())
        return f"{device}:{int((sysfs / name / 'dev_port').read_text(), 0) + 1}"
    except (OSError, ValueError):
        return ""
