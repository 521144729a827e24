"""MPIKV_INTERFACE: which interfaces of a host it names, and what each MPI library is told."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import fresh
import pytest
from jobs import BACKING, find_mpi

from mpikv import ConfigError
from mpikv.runtime import interface
from mpikv.runtime.interface import (
    Interface,
    choose,
    host_interfaces,
    interface_variables,
    mpirun_variables,
    too_late,
)

LO = Interface("lo", ("127.0.0.1/8", "::1/128"))
ETH0 = Interface("eth0", ("10.1.2.3/16", "192.168.7.3/24", "fe80::1/64"))
ETH1 = Interface("eth1", ("10.2.2.3/16",))
IB0 = Interface("ib0", ("172.16.0.3/16", "fd00:5::3/64"), "mlx5_0:1")
BARE = Interface("bare0", ())
DOWN = Interface("down0", ("10.4.0.3/16",), up=False)
HOST = (LO, ETH0, ETH1, IB0, BARE, DOWN)
FABRIC = ("FI_TCP_IFACE", "FI_SOCKETS_IFACE", "FI_UDP_IFACE")


@pytest.mark.parametrize(
    ("value", "open_mpi", "ucx"),
    [
        ("auto", None, None),
        ("eth0", "eth0", "eth0"),
        ("10.1.0.0/16", "10.1.0.0/16", "eth0"),
        ("10.0.0.0/8", "10.0.0.0/8", "eth0,eth1"),
        ("192.168.7.3", "192.168.7.3/32", "eth0"),
        ("eth1,eth0", "eth1,eth0", "eth1,eth0"),
        ("eth0,10.1.0.0/16", "eth0,10.1.0.0/16", "eth0"),
        ("ib0", "ib0", "mlx5_0:1,ib0"),
        ("eth1,172.16.0.0/12", "eth1,172.16.0.0/12", "mlx5_0:1,eth1,ib0"),
        ("fd00:5::/64", "ib0", "mlx5_0:1,ib0"),  # Open MPI takes no networks of IPv6
        ("ens3,eth1,10.9.0.0/16", "eth1", "eth1"),  # what other hosts have is left out
    ],
)
def test_what_each_library_is_told(value: str, open_mpi: str | None, ucx: str | None) -> None:
    if open_mpi is None or ucx is None:
        assert interface_variables("Open MPI", value, HOST) == interface_variables("MPICH", value, HOST) == {}
        return
    assert interface_variables("Open MPI", value, HOST) == {
        "OMPI_MCA_btl_tcp_if_include": open_mpi,
        "UCX_NET_DEVICES": ucx,
    }
    first = next(name for name in ucx.split(",") if ":" not in name)  # libfabric takes one
    for family in ("MPICH", "Intel MPI", "MVAPICH", "a relative"):
        assert interface_variables(family, value, HOST) == {**dict.fromkeys(FABRIC, first), "UCX_NET_DEVICES": ucx}


@pytest.mark.parametrize(
    "value", ["eth9", "10.3.0.0/16", "eth", "ETH0", "bare0", "down0", "10.4.0.0/16", "eth9,fd00:6::/64"]
)
@pytest.mark.parametrize("family", ["Open MPI", "MPICH"])
def test_no_such_interface(value: str, family: str) -> None:
    with pytest.raises(ConfigError) as caught:
        interface_variables(family, value, HOST, "node7")
    for part in (f"MPIKV_INTERFACE={value}: node7 has no such", "eth1 (10.2.2.3/16)", "lo (127.0.0.1/8, ::1/128)"):
        assert part in str(caught.value)
    assert "bare0 (no address), down0 (10.4.0.3/16; it is down)" in str(caught.value)


def test_mpirun_is_told_what_its_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpirun_variables("Intel MPI", "lo")["I_MPI_HYDRA_IFACE"] == "lo"
    monkeypatch.setattr(interface, "host_interfaces", lambda: HOST)
    assert mpirun_variables("Open MPI", "auto") == {}
    assert mpirun_variables("Open MPI", "ens3,eth1") == {
        "PRTE_MCA_prte_if_include": "eth1",
        "OMPI_MCA_oob_tcp_if_include": "eth1",
    }
    assert mpirun_variables("Open MPI", "10.0.0.0/8")["PRTE_MCA_prte_if_include"] == "10.0.0.0/8"
    assert mpirun_variables("MPICH", "172.16.0.0/12") == {"HYDRA_IFACE": "ib0", "I_MPI_HYDRA_IFACE": "ib0"}
    with pytest.raises(ConfigError, match=f"{socket.gethostname()} has no such"):
        mpirun_variables("MPICH", "eth9")


def test_this_host() -> None:
    """Against the addresses that sockets have and the names that the kernel lists."""
    found = {one.name: one for one in host_interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1/8" in found["lo"].addresses
    for one in found.values():  # Linux, Documentation/ABI/testing/sysfs-class-net
        path = Path(f"/sys/class/net/{one.name}/flags")
        assert not path.exists() or one.up == bool(int(path.read_text(), 0) & 1)
    for one in found.values():
        for address in one.addresses:
            ip = ipaddress.ip_interface(address).ip
            family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
            scope = (0, socket.if_nametoindex(one.name)) if ip.version == 6 and ip.is_link_local else ()
            with socket.socket(family, socket.SOCK_DGRAM) as bound:
                bound.bind((str(ip), 0, *scope))  # EADDRNOTAVAIL for an address that this host does not have


def test_rdma_device_behind_an_interface(tmp_path) -> None:
    device = tmp_path / "ib1" / "device" / "infiniband" / "mlx5_1"
    device.mkdir(parents=True)
    (tmp_path / "ib1" / "dev_port").write_text("1\n")  # the kernel counts ports of a device from 0, UCX from 1
    (tmp_path / "eth0" / "device").mkdir(parents=True)
    assert interface._rdma("ib1", tmp_path) == "mlx5_1:2"
    assert interface._rdma("eth0", tmp_path) == interface._rdma("none", tmp_path) == ""


def test_the_users_own_variables_count() -> None:
    ours = choose("Open MPI", "lo", {})
    assert ours.variables == {"OMPI_MCA_btl_tcp_if_include": "lo", "UCX_NET_DEVICES": "lo"}
    assert (ours.own, [one.name for one in ours.interfaces]) == ({}, ["lo"])
    set_by_us = dict(ours.variables)
    assert choose("Open MPI", "lo", set_by_us) == ours  # asked again

    theirs = choose("Open MPI", "lo", {"OMPI_MCA_btl_tcp_if_include": "eth7"})
    assert theirs.own == {"OMPI_MCA_btl_tcp_if_include": "eth7"}
    assert theirs.variables == {"UCX_NET_DEVICES": "lo"}
    excluded = choose("Open MPI", "lo", {"OMPI_MCA_btl_tcp_if_exclude": "eth7"})
    assert excluded.own == {"OMPI_MCA_btl_tcp_if_exclude": "eth7"}
    assert excluded.variables == {"UCX_NET_DEVICES": "lo"}  # both at once would be an error of the library
    assert choose("MPICH", "lo", {"FI_TCP_IFACE": "eth7"}).own == {"FI_TCP_IFACE": "eth7"}

    found = choose("MPICH", "lo", {"UCX_NET_DEVICES": "mlx5_3:1", "HOME": "/"})
    assert found.variables == dict.fromkeys(FABRIC, "lo")


def test_too_late() -> None:
    assert too_late("MPICH", "auto", {}) == ""
    text = too_late("Open MPI", "lo", {})
    for part in ("MPIKV_INTERFACE=lo comes too late", "OMPI_MCA_btl_tcp_if_include=lo", "UCX_NET_DEVICES=lo"):
        assert part in text
    assert too_late("Open MPI", "lo", choose("Open MPI", "lo", {}).variables) == ""
    own = {"OMPI_MCA_btl_tcp_if_include": "eth7", "UCX_NET_DEVICES": "all"}
    assert too_late("Open MPI", "lo", own) == ""  # the user has chosen


needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="no mpirun in this environment")
CREATE = "from mpikv import kv; kv.create('dist_sync').close(); kv.create('dist_sync').close()\n"
SHOW = "import os; print(os.environ.get('UCX_NET_DEVICES'))"


@needs_mpi
def test_a_store_sets_them_before_mpi() -> None:
    done = fresh.python(CREATE + SHOW, MPIKV_INTERFACE="127.0.0.0/8")
    assert (done.returncode, done.stdout) == (0, "lo\n"), done.stderr
    assert "too late" not in done.stderr


@needs_mpi
def test_a_program_that_has_initialised_mpi_is_warned_once(tmp_path: Path) -> None:
    # Open MPI leaves a process's segment where that process has started MPI before mpikv.
    done = fresh.python("from mpi4py import MPI\n" + CREATE + SHOW, MPIKV_INTERFACE="lo", **{BACKING: str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert done.stderr.count("comes too late") == 1
    assert "RuntimeWarning" in done.stderr


@needs_mpi
def test_a_store_on_a_host_without_it() -> None:
    done = fresh.python(CREATE, MPIKV_INTERFACE="eth99")
    assert done.returncode == 2
    assert f"InterfaceError: MPIKV_INTERFACE=eth99: {socket.gethostname()} has no such interface " in done.stderr
    assert "127.0.0.1/8" in done.stderr
