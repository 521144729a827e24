"""The settings: what is read, what is refused, and that a refusal says what is valid."""

from __future__ import annotations

import dataclasses

import pytest

from mpikv import Config, ConfigError, config


def test_defaults():
    assert Config.from_environ({}) == Config()
    assert dataclasses.asdict(Config()) == {
        "num_servers": 0,
        "server_placement": "spread",
        "bigarray_bound_elems": 1_000_000,
        "partition_bytes": 0,
        "servers_take": "auto",
        "link": "auto",
        "algorithm": "auto",
        "test_hosts": 0,
        "shared_memory": "auto",
        "timeout_s": 300.0,
        "stall_warn_s": 2.0,
        "timeline": "",
        "progress": "thread",
        "interface": "auto",
        "local_device": "auto",
        "device_path": "auto",
        "stop_signals": "",
        "stop_file": "",
        "stop_asked": "",
        "metrics": "",
    }


def test_every_variable():
    environ = {
        "MPIKV_NUM_SERVERS": "2",
        "MPIKV_SERVER_PLACEMENT": "LAST",
        "MPIKV_SERVERS_TAKE": "0.25",
        "MPIKV_LINK": "200mbit, 100us",
        "MPIKV_BIGARRAY_BOUND": " 10 ",
        "MPIKV_ALGORITHM": "Ring",
        "MPIKV_TEST_HOSTS": "2",
        "MPIKV_SHARED_MEMORY": "OFF",
        "MPIKV_TIMEOUT_S": "2.5",
        "MPIKV_STALL_WARN_S": "off",
        "MPIKV_TIMELINE": " /scratch/traces ",
        "MPIKV_PROGRESS": "calls",
        "MPIKV_INTERFACE": "eth0, 10.1.2.3/8 ,eth0,fd00::2/64",
        "MPIKV_LOCAL_DEVICE": "3",
        "MPIKV_DEVICE_PATH": "Host",
        "MPIKV_STOP_SIGNALS": "term, SIGUSR1,TERM",
        "MPIKV_STOP_FILE": " /scratch/Job 1 ",
        "MPIKV_STOP_ASKED": "/scratch/asked",
        "MPIKV_METRICS": "/scratch/metrics",
    }
    assert set(environ) == {variable.name for variable in config.ALL if variable.field}
    assert dataclasses.asdict(Config.from_environ(environ)) == {
        "num_servers": 2,
        "server_placement": "last",
        "bigarray_bound_elems": 10,
        "partition_bytes": 0,
        "servers_take": 0.25,
        "link": "200mbit, 100us",
        "algorithm": "ring",
        "test_hosts": 2,
        "shared_memory": "off",
        "timeout_s": 2.5,
        "stall_warn_s": 1e9,
        "timeline": "/scratch/traces",
        "progress": "calls",
        "interface": "eth0,10.0.0.0/8,fd00::/64",
        "local_device": 3,
        "device_path": "host",
        "stop_signals": "TERM,USR1",
        "stop_file": "/scratch/Job 1",
        "stop_asked": "/scratch/asked",
        "metrics": "/scratch/metrics",
    }


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_empty_is_unset(text):
    assert Config.from_environ({"MPIKV_NUM_SERVERS": text, "MPIKV_ALGORITHM": text}) == Config()


WRONG = [
    ("MPIKV_NUM_SERVERS", "two", "whole number"),
    ("MPIKV_NUM_SERVERS", "1.5", "whole number"),
    ("MPIKV_NUM_SERVERS", "-1", "at least 0"),
    ("MPIKV_BIGARRAY_BOUND", "0", "at least 1"),
    ("MPIKV_BIGARRAY_BOUND", "1e6", "whole number"),
    ("MPIKV_TIMEOUT_S", "soon", "number of seconds"),
    ("MPIKV_STALL_WARN_S", "never", "number of seconds"),
    ("MPIKV_TIMEOUT_S", "0", "more than 0"),
    ("MPIKV_TIMEOUT_S", "-3", "more than 0"),
    ("MPIKV_TIMEOUT_S", "inf", "finite"),
    ("MPIKV_TIMEOUT_S", "nan", "more than 0"),
    ("MPIKV_ALGORITHM", "tree", "auto, ring, owners, native, nccl"),
    *(("MPIKV_ALGORITHM", name, "auto adds") for name in ("naive", "halving_doubling", "hierarchical")),
    ("MPIKV_TEST_HOSTS", "two", "whole number"),
    ("MPIKV_TEST_HOSTS", "-1", "at least 0"),
    ("MPIKV_SHARED_MEMORY", "on", "auto, off"),
    ("MPIKV_SERVER_PLACEMENT", "first", "spread, hosts, last"),
    ("MPIKV_INTERFACE", ",", "neither auto nor interfaces"),
    ("MPIKV_INTERFACE", "eth0,10.0.0.0/33", "which is no network"),
    ("MPIKV_INTERFACE", "10.0.0.256", "'10.0.0.256', which is no network"),
    ("MPIKV_INTERFACE", "eth0 ib0", "several as eth0,ib0"),
    ("MPIKV_INTERFACE", "much_too_long_a_name", "no name of an interface"),
    ("MPIKV_INTERFACE", "auto,eth0", "neither auto nor interfaces"),
    ("MPIKV_PROGRESS", "yes", "thread, calls"),
    ("MPIKV_LOCAL_DEVICE", "-1", "at least 0; give the number of a GPU, from 0, or auto"),
    ("MPIKV_LOCAL_DEVICE", "gpu:0", "not a whole number; give the number of a GPU"),
    ("MPIKV_LOCAL_DEVICE", "1.0", "not a whole number"),
    ("MPIKV_DEVICE_PATH", "pcie", "auto, nccl, mpi, host"),
    ("MPIKV_DEVICE_PATH", "staged", "host copies values through host memory"),
    ("MPIKV_STOP_SIGNALS", "TERM,NOSUCH", "no signal by 'NOSUCH'; give names such as TERM"),
    ("MPIKV_STOP_SIGNALS", "15", "no signal by '15'"),
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


@pytest.mark.parametrize("value", [None, True, 1.5, [2], object()])
def test_values_of_other_types(value):
    with pytest.raises(ConfigError, match="num_servers"):
        Config(num_servers=value)


def test_settings_of_devices_as_values():
    """A program has the number of its GPU as an int; what was read may be given again."""
    config = Config(local_device=2)
    assert config.local_device == 2
    assert Config(local_device=config.local_device) == config
    assert Config(local_device="AUTO").local_device == "auto"
    for wrong in ({"local_device": True}, {"local_device": 1.0}, {"local_device": None}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Config(**wrong)


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


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().num_servers = 3  # type: ignore[misc]


def test_variables_in_force():
    environ = {
        "MPIKV_TIMEOUT": "3",
        "MPIKV_ALGORITHM": "ring",
        "HOME": "/",
        "MPIKV_TEST_X": "1",
        "MPIKV_TEST_HOSTS": "2",
        "MPIKV_ZZZZZZZZZ": "1",
    }
    assert list(config.variables_in_force(environ)) == [
        "MPIKV_ALGORITHM",
        "MPIKV_TEST_HOSTS",
        "MPIKV_TIMEOUT",
        "MPIKV_ZZZZZZZZZ",
    ]
    assert config.unknown_variables(environ) == {"MPIKV_TIMEOUT": "MPIKV_TIMEOUT_S", "MPIKV_ZZZZZZZZZ": None}


def test_the_environment_is_read_when_asked_for(monkeypatch):
    monkeypatch.setenv("MPIKV_NUM_SERVERS", "4")
    assert Config.from_environ().num_servers == 4
    assert Config().num_servers == 0


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
