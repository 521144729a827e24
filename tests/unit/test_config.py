"""The settings: what is read, what is refused, and that a refusal says what is valid."""

from __future__ import annotations

import dataclasses

import pytest

from mpikv import Config, ConfigError, config

# Each setting: its default, what a variable may say, and what is read then.
SETTINGS = {
    "num_servers": (0, "2", 2),
    "server_placement": ("spread", "LAST", "last"),
    "bigarray_bound_elems": (1_000_000, " 10 ", 10),
    "partition_bytes": (0, None, 0),
    "servers_take": ("auto", "0.25", 0.25),
    "link": ("auto", "200mbit, 100us", "200mbit, 100us"),
    "algorithm": ("auto", "Ring", "ring"),
    "test_hosts": (0, "2", 2),
    "shared_memory": ("auto", "OFF", "off"),
    "timeout_s": (300.0, "2.5", 2.5),
    "stall_warn_s": (2.0, "off", 1e9),
    "timeline": ("", " /scratch/traces ", "/scratch/traces"),
    "progress": ("thread", "calls", "calls"),
    "interface": ("auto", "eth0, 10.1.2.3/8 ,eth0,fd00::2/64", "eth0,10.0.0.0/8,fd00::/64"),
    "local_device": ("auto", "3", 3),
    "device_path": ("auto", "Host", "host"),
    "stop_signals": ("", "term, SIGUSR1,TERM", "TERM,USR1"),
    "stop_file": ("", " /scratch/Job 1 ", "/scratch/Job 1"),
    "stop_asked": ("", "/scratch/asked", "/scratch/asked"),
    "metrics": ("", "/scratch/metrics", "/scratch/metrics"),
    "snapshot_dir": ("", "/scratch/snapshots", "/scratch/snapshots"),
    "snapshot_s": (30.0, "2.5", 2.5),
    "on_failure": ("abort", "Continue", "continue"),
    "spares": (0, "2", 2),
    "restart": (0, "2", 2),
}


def test_every_setting():
    names = {one.field: one.name for one in config.ALL if one.field}
    assert set(names) == {field for field, (_, text, _) in SETTINGS.items() if text}
    environ = {name: SETTINGS[field][1] for field, name in names.items()}
    assert dataclasses.asdict(Config()) == {field: default for field, (default, _, _) in SETTINGS.items()}
    assert dataclasses.asdict(Config.from_environ(environ)) == {field: read for field, (_, _, read) in SETTINGS.items()}
    assert Config.from_environ({}) == Config()


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_empty_is_unset(text):
    assert Config.from_environ({"MPIKV_NUM_SERVERS": text, "MPIKV_ALGORITHM": text}) == Config()


WRONG = [
    ("MPIKV_NUM_SERVERS", "two", "whole number"),
    ("MPIKV_NUM_SERVERS", "-1", "at least 0"),
    ("MPIKV_BIGARRAY_BOUND", "0", "at least 1"),
    ("MPIKV_BIGARRAY_BOUND", "1e6", "whole number"),
    ("MPIKV_TIMEOUT_S", "soon", "number of seconds"),
    ("MPIKV_STALL_WARN_S", "never", "number of seconds"),
    ("MPIKV_TIMEOUT_S", "0", "more than 0"),
    ("MPIKV_TIMEOUT_S", "inf", "finite"),
    ("MPIKV_TIMEOUT_S", "nan", "more than 0"),
    ("MPIKV_ALGORITHM", "tree", "auto, ring, owners, native, nccl"),
    *(("MPIKV_ALGORITHM", name, "auto adds") for name in ("naive", "halving_doubling", "hierarchical")),
    ("MPIKV_TEST_HOSTS", "-1", "at least 0"),
    ("MPIKV_SHARED_MEMORY", "on", "auto, off"),
    ("MPIKV_SERVER_PLACEMENT", "first", "spread, hosts, last"),
    ("MPIKV_INTERFACE", ",", "neither auto nor interfaces"),
    ("MPIKV_INTERFACE", "eth0,10.0.0.0/33", "which is no network"),
    ("MPIKV_INTERFACE", "10.0.0.256", "'10.0.0.256', which is no network"),
    ("MPIKV_INTERFACE", "eth0 ib0", "several as eth0,ib0"),
    ("MPIKV_INTERFACE", "much_too_long_a_name", "no name of an interface"),
    ("MPIKV_PROGRESS", "yes", "thread, calls"),
    ("MPIKV_LOCAL_DEVICE", "-1", "at least 0; give the number of a GPU, from 0, or auto"),
    ("MPIKV_LOCAL_DEVICE", "gpu:0", "not a whole number; give the number of a GPU"),
    ("MPIKV_DEVICE_PATH", "pcie", "auto, nccl, mpi, host"),
    ("MPIKV_DEVICE_PATH", "staged", "host copies values through host memory"),
    ("MPIKV_STOP_SIGNALS", "TERM,NOSUCH", "no signal by 'NOSUCH'; give names such as TERM"),
    ("MPIKV_STOP_SIGNALS", "KILL", "KILL, which cannot be handled"),
]


@pytest.mark.parametrize(("name", "text", "says"), WRONG)
def test_wrong_values(name, text, says):
    with pytest.raises(ConfigError) as caught:
        Config.from_environ({name: text})
    assert isinstance(caught.value, ValueError)
    for part in (name, repr(text), says):
        assert part in str(caught.value)
    (field,) = (variable.field for variable in config.ALL if variable.name == name)
    with pytest.raises(ConfigError, match=says) as caught:
        Config(**{field: text})
    assert field in str(caught.value)
    with pytest.raises(ConfigError, match=says):
        Config().with_(**{field: text})


@pytest.mark.parametrize("name", ["num_servers", "local_device"])
def test_numbers_as_values(name):
    """What was read may be given again."""
    assert getattr(Config(**{name: 2}), name) == 2
    for value in (None, True, 1.5, [2], object()):
        with pytest.raises(ConfigError, match=name):
            Config(**{name: value})


@pytest.mark.parametrize("name", config.GONE)
def test_gone(name):
    with pytest.raises(ConfigError, match=f"^{name}='1' is no longer read: .+; unset it$"):
        Config.from_environ({name: "1"})
    assert name not in config.KNOWN


def test_with():
    assert Config(timeout_s=5).with_(num_servers=3) == Config(num_servers=3, timeout_s=5)
    for call in (Config, Config().with_):
        with pytest.raises(ConfigError, match=r"no such setting: num_server, speed; .* Did you mean 'num_servers'\?"):
            call(speed=1, num_server=2)
    with pytest.raises(TypeError):
        Config(2)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().num_servers = 3  # type: ignore[misc]


def test_variables_in_force():
    in_force = ["MPIKV_ALGORITHM", "MPIKV_TEST_HOSTS", "MPIKV_TIMEOUT", "MPIKV_ZZZZZZZZZ"]
    environ = dict.fromkeys([*reversed(in_force), "HOME", "MPIKV_TEST_X"], "1")
    assert list(config.variables_in_force(environ)) == in_force
    assert config.unknown_variables(environ) == {"MPIKV_TIMEOUT": "MPIKV_TIMEOUT_S", "MPIKV_ZZZZZZZZZ": None}


def test_the_environment_is_read_when_asked_for(monkeypatch):
    monkeypatch.setenv("MPIKV_NUM_SERVERS", "4")
    assert (Config.from_environ().num_servers, Config().num_servers) == (4, 0)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("AUTO", ["auto"]),
        ("ib0", ["ib0"]),
        ("Eth0", ["Eth0"]),  # names of interfaces keep their case
        (" eth0.100 , br-1a2b", ["eth0.100", "br-1a2b"]),
        ("10.1.2.3", ["10.1.2.3/32"]),
        ("10.1.2.3/255.0.0.0", ["10.0.0.0/8"]),
    ],
)
def test_interfaces_and_networks(text, entries):
    value = Config.from_environ({"MPIKV_INTERFACE": text}).interface
    assert config.interface_entries(value) == entries
    assert Config(interface=value).interface == value  # what was read may be given again
