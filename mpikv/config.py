"""The one reader of the `MPIKV_*` variables, by `Config.from_environ()`, which `kv.create` calls, never at import.

Each field of `Config` says which variable sets it and how its text is read; docs/settings.md says what each means, and
which two are of the process rather than of a store (`TRACEBACK`, `LOG`).
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Any, NamedTuple

from mpikv.common import units
from mpikv.common.checks import LARGEST, LONGEST_S, meant, options, path, shown, wrong
from mpikv.errors import ConfigError

PREFIX = "MPIKV_"
TEST_PREFIX = "MPIKV_TEST_"  # of the test runner, but for MPIKV_TEST_HOSTS never read by the library
# Signals that cannot be caught, or that say that the program itself has gone wrong or that its terminal has changed.
NOT_TO_STOP_BY = {"KILL", "STOP", "ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP"} | {
    *("CHLD", "CLD", "CONT", "PIPE", "TTIN", "TTOU", "URG", "WINCH")
}
PLACEMENTS = ("spread", "hosts", "last")  # of the servers among the hosts
AUTO_INTERFACE = "auto"
INTERFACE_NAME_CHARS = 15  # IFNAMSIZ of linux/if.h, less the end
ALGORITHMS = ("auto", "ring", "owners", "native", "nccl")
DEVICE_PATHS = ("auto", "nccl", "mpi", "host")  # of arrays on a GPU between workers
PATHS = ("stop_file", "snapshot_dir", "timeline", "metrics", "link")  # fields that a program may give as a path, too
NUMBER_OR_WORD = ("local_device", "servers_take")  # fields that a program may give as a number, too


def _text_of(setting: Field[Any], value: Any) -> str:
    """The text of a value that was given to `Config` as a value. Raises ValueError with the end of a sentence."""
    kind = type(setting.default)
    if setting.name in PATHS and isinstance(value, os.PathLike):
        value = path("the file", value)
    takes_numbers = kind is not str or setting.name in NUMBER_OR_WORD
    if isinstance(value, str) or (takes_numbers and isinstance(value, Real) and not isinstance(value, bool)):
        return str(value)
    raise ValueError("is not a str" if kind is str else "is not a number")


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("is not a whole number") from None
        if not minimum <= number <= LARGEST:
            raise ValueError(f"must be at least {minimum}" if number < minimum else f"must be at most {LARGEST}")
        return number

    return parse


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if not 0 < number <= LONGEST_S:
        raise ValueError(f"must be more than 0 and finite, at most {LONGEST_S:g}")
    return number


def _seconds_or_off(text: str) -> float:
    return LONGEST_S if text.lower() == "off" else _seconds(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"is none of {', '.join(words)}")
        return text.lower()

    return parse


def _algorithm(text: str) -> str:
    if text.lower() in ("naive", "halving_doubling", "hierarchical"):
        raise ValueError("is gone: auto adds in the memory of a host, short keys at owners and long ones round a ring")
    return _one_of(*ALGORITHMS)(text)


def _device_path(text: str) -> str:
    if text.lower() in ("ipc", "staged"):
        raise ValueError("is gone: nccl adds between GPUs, host copies values through host memory, auto chooses")
    return _one_of(*DEVICE_PATHS)(text)


def _local_device(text: str) -> int | str:
    if text.lower() == "auto":
        return "auto"
    try:
        return _integer(0)(text)
    except ValueError as error:
        raise ValueError(f"{error}; give the number of a GPU, from 0, or auto") from None


def _share(text: str) -> float | str:
    if text.lower() in ("auto", "all"):
        return "auto" if text.lower() == "auto" else 1.0
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError("is neither auto nor all, nor a number from 0 to 1")
    return share


def _link(text: str) -> str:
    if text.lower() == "auto" or "/" in text.removesuffix("/s").partition(",")[0] or text.endswith(".json"):
        return "auto" if text.lower() == "auto" else text
    rate, _, latency = text.partition(",")
    for reader, word in ((units.rate, rate), (units.duration, latency or "1us")):
        try:
            reader(word)
        except ValueError as error:
            raise ValueError(
                f"has {shown(word)}, which {error}; write a rate and a latency, as in 10gbit,50us, a file as "
                "./link.json, or auto"
            ) from None
    return text.lower()


def _signals(text: str) -> str:
    """Names without SIG, each once, in the order given."""
    names = [name.strip().upper().removeprefix("SIG") for name in text.split(",") if name.strip()]
    for name in names:
        if f"SIG{name}" not in signal.Signals.__members__:
            raise ValueError(f"names no signal by {shown(name)}; give names such as TERM,USR1,USR2")
        if name in NOT_TO_STOP_BY:
            raise ValueError(f"has {name}, which cannot be handled or means something else; give TERM or USR1")
    return ",".join(dict.fromkeys(names))


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("has a character of number 0, which no name of a file has")
    return text.strip()


def _interface(text: str) -> str:
    """Names and networks, each once, in the order given; a network as its own address, 10.1.2.3/8 as 10.0.0.0/8."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    entries = []
    for word in words:
        if "/" in word or word.count(".") == 3 or ":" in word:
            try:
                entries.append(str(ipaddress.ip_network(word, strict=False)))
            except ValueError:
                raise ValueError(f"has {shown(word)}, which is no network; write one as 10.0.0.0/8") from None
        elif len(word) > INTERFACE_NAME_CHARS or len(word.split()) > 1:
            raise ValueError(f"has {shown(word)}, which is no name of an interface; write eth0, several as eth0,ib0")
        else:
            entries.append(word)
    if not entries or (AUTO_INTERFACE in (entry.lower() for entry in entries) and len(entries) > 1):
        raise ValueError("is neither auto nor interfaces (eth0) or networks (10.0.0.0/8), separated by commas")
    return AUTO_INTERFACE if entries[0].lower() == AUTO_INTERFACE else ",".join(dict.fromkeys(entries))


def interface_entries(value: str) -> list[str]:
    """Return the names and networks of a valid MPIKV_INTERFACE other than `auto`, else ValueError."""
    return _interface(value).split(",")


class Variable(NamedTuple):
    """One `MPIKV_*` variable: `parse` reads its text, or raises ValueError with the end of a sentence."""

    name: str
    field: str
    parse: Callable[[str], Any]


TRACEBACK = Variable("MPIKV_TRACEBACK", "", _one_of("short", "full"))
LOG = Variable("MPIKV_LOG", "", _one_of("debug", "info", "warning"))
GONE = {
    "MPIKV_PARTITION_BYTES": "nothing is needed: pieces are as long as the links want them, see MPIKV_LINK",
    "MPIKV_BUCKET_BYTES": "nothing is needed: short values of several keys share messages",
    "MPIKV_STOP_MARK": "the batch scripts of `mpikv submit` keep early signals without it; take their present ones",
    "MPIKV_FAKE_HOSTS": "use MPIKV_TEST_HOSTS, for tests and trials",
    "MPIKV_CUDA_AWARE": "a trial decides whether MPI takes device memory; MPIKV_DEVICE_PATH=host never gives it any",
    "MPIKV_MPI": "take MPI's wheel out of this Python environment, or name a library in MPI4PY_LIBMPI",
}


def _setting(default: Any, parse: Callable[[str], Any], variable: str = "") -> Any:
    return field(default=default, metadata={"parse": parse, "variable": variable})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one store; docs/settings.md has their meanings. ConfigError for a wrong or an unknown one.

    >>> mpikv.Config(timeout_s=60).with_(num_servers=2).num_servers
    2
    """

    num_servers: int = _setting(0, _integer(0), "MPIKV_NUM_SERVERS")
    server_placement: str = _setting("spread", _one_of(*PLACEMENTS), "MPIKV_SERVER_PLACEMENT")
    servers_take: float | str = _setting("auto", _share, "MPIKV_SERVERS_TAKE")
    link: str = _setting("auto", _link, "MPIKV_LINK")
    bigarray_bound_elems: int = _setting(1_000_000, _integer(1), "MPIKV_BIGARRAY_BOUND")
    algorithm: str = _setting("auto", _algorithm, "MPIKV_ALGORITHM")
    shared_memory: str = _setting("auto", _one_of("auto", "off"), "MPIKV_SHARED_MEMORY")
    timeout_s: float = _setting(300.0, _seconds, "MPIKV_TIMEOUT_S")
    stall_warn_s: float = _setting(2.0, _seconds_or_off, "MPIKV_STALL_WARN_S")
    timeline: str = _setting("", _text, "MPIKV_TIMELINE")
    progress: str = _setting("thread", _one_of("thread", "calls"), "MPIKV_PROGRESS")
    interface: str = _setting(AUTO_INTERFACE, _interface, "MPIKV_INTERFACE")
    local_device: int | str = _setting("auto", _local_device, "MPIKV_LOCAL_DEVICE")
    device_path: str = _setting("auto", _device_path, "MPIKV_DEVICE_PATH")
    stop_signals: str = _setting("", _signals, "MPIKV_STOP_SIGNALS")
    stop_file: str = _setting("", _text, "MPIKV_STOP_FILE")
    snapshot_dir: str = _setting("", _text, "MPIKV_SNAPSHOT_DIR")
    snapshot_s: float = _setting(30.0, _seconds, "MPIKV_SNAPSHOT_S")
    metrics: str = _setting("", _text, "MPIKV_METRICS")
    on_failure: str = _setting("abort", _one_of("abort", "continue"), "MPIKV_ON_FAILURE")
    spares: int = _setting(0, _integer(0), "MPIKV_SPARES")
    # Not for users. Tests and trials: pretended hosts, in blocks of ranks; bytes of a piece of a value on its way to a
    # server and back (0: by the links), and of a message in which short values of several keys travel (0: none do).
    # Batch scripts: a file that is there once the job was asked to stop, perhaps before a rank could hear it.
    test_hosts: int = _setting(0, _integer(0), "MPIKV_TEST_HOSTS")
    partition_bytes: int = _setting(0, _integer(0))
    stop_asked: str = _setting("", _text, "MPIKV_STOP_ASKED")
    # Of `mpikv launch --restarts`: how often the job was started again.
    restart: int = _setting(0, _integer(0), "MPIKV_RESTART")

    def __new__(cls, **given: Any) -> Config:
        """Answer an unknown name with the nearest."""
        known = [one.name for one in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            near = meant(unknown[0], known)
            raise ConfigError(f"no such setting: {', '.join(unknown)}; known are {', '.join(sorted(known))}.{near}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            try:
                object.__setattr__(self, one.name, one.metadata["parse"](_text_of(one, value)))
            except ValueError as error:
                raise ConfigError(f"Config({one.name}={shown(value)}): {shown(value)} {error}") from None

    @property
    def host_algorithm(self) -> str:
        """That of arrays in host memory, which NCCL does not add: `auto` where `algorithm` is `nccl`.

        >>> mpikv.Config(algorithm='nccl').host_algorithm
        'auto'
        """
        return "auto" if self.algorithm == "nccl" else self.algorithm

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the variables that are set, by default those of this process.

        Raises ConfigError that names the variable, its text and what is valid, or what to use in place of one that is
        gone.

        >>> mpikv.Config.from_environ({'MPIKV_TIMEOUT_S': '60'}).timeout_s
        60.0
        """
        environ = dict(os.environ) if environ is None else options("environ", environ)
        for name, instead in GONE.items():
            if environ.get(name):
                raise ConfigError(f"{name}={shown(environ[name])} is no longer read: {instead}; unset it")
        read = {variable.field: _read(variable, environ) for variable in ALL}
        return cls(**{name: value for name, value in read.items() if name and value is not None})

    def with_(self, **changes: Any) -> Config:
        """Return this configuration with some fields changed. Raises ConfigError for a field that does not exist.

        >>> mpikv.Config().with_(algorithm='ring').algorithm
        'ring'
        """
        return type(self)(**{**{one.name: getattr(self, one.name) for one in fields(self)}, **changes})


VARIABLES = tuple(
    Variable(one.metadata["variable"], one.name, one.metadata["parse"])
    for one in fields(Config)
    if one.metadata["variable"]
)
ALL = (*VARIABLES, TRACEBACK, LOG)
KNOWN = tuple(variable.name for variable in ALL)


def _read(variable: Variable, environ: Mapping[str, str]) -> Any:
    """Return the value of a variable, None where it is not set. Raises ConfigError."""
    text = environ.get(variable.name, "")
    if not isinstance(text, str):
        raise wrong(variable.name, "a str", text)
    text = text.strip()
    if not text:
        return None
    try:
        return variable.parse(text)
    except ValueError as error:
        what = f"{variable.name}={shown(text)}"
        raise ConfigError(f"{what} {error}; set it to a valid value or unset it") from None


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """Return from which level on MPIKV_LOG asks for what stores decide, "" where it does not. Raises ConfigError."""
    return _read(LOG, os.environ if environ is None else environ) or ""


def variables_in_force(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every `MPIKV_*` variable that is set, known or not, sorted by name."""
    environ = os.environ if environ is None else environ
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in KNOWN or (name.startswith(PREFIX) and not name.startswith(TEST_PREFIX))
    }


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the variables in force that nothing reads, each with the nearest valid name or None."""
    return {
        name: next(iter(difflib.get_close_matches(name, KNOWN, n=1)), None)
        for name in variables_in_force(environ)
        if name not in KNOWN
    }


def wants_full_tracebacks(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether MPIKV_TRACEBACK asks for all frames of every rank.

    It is read when an error is reported, which may itself be an error in the settings: any other text counts as
    `short`.
    """
    environ = os.environ if environ is None else environ
    return environ.get(TRACEBACK.name, "").strip().lower() == "full"
