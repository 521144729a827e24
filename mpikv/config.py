"""The one reader of the `MPIKV_*` variables.

Each variable has one row in `VARIABLES`: its name, the field of `Config` that it sets, how its text is read, and what
it means. `Config.from_environ()` is called by `kv.create`, never at import.

| variable | default | meaning |
|---|---|---|
| `MPIKV_NUM_SERVERS` | 0 | server ranks among the communicator's; 0: the workers own the keys |
| `MPIKV_SERVER_PLACEMENT` | spread | servers: `spread`, on every host; `hosts`, whole hosts; `last`, the last ranks |
| `MPIKV_SERVERS_TAKE` | auto | the share of a key that goes to servers, 0.0 to 1.0 or `all`; see settings.md |
| `MPIKV_LINK` | auto | links between hosts: `10gbit,50us`, or a file of `mpikv bench link --save`; `auto`: measured |
| `MPIKV_BIGARRAY_BOUND` | 1000000 | elements from which on a key is cut evenly over all servers |
| `MPIKV_ALGORITHM` | auto | `auto`, `naive`, `native`, `ring`, `halving_doubling`, `hierarchical`; `nccl`: on GPUs |
| `MPIKV_SHARED_MEMORY` | auto | `auto`: ranks of one host share memory where they can; `off`: only messages |
| `MPIKV_TIMEOUT_S` | 300 | seconds after which a wait ends in a `StallError`; at most 1e9 |
| `MPIKV_STALL_WARN_S` | 2 | seconds of a wait until a table says who waits for whom; `off`: never; see errors.md |
| `MPIKV_TIMELINE` | | folder that each rank writes what it does to, for `mpikv trace`; see observing.md |
| `MPIKV_PROGRESS` | thread | `thread`: transfers move on while Python computes; `calls`: only in calls |
| `MPIKV_MPI` | auto | `auto`: the environment's MPI wheel, else the system's library; `system`: that one |
| `MPIKV_INTERFACE` | auto | interfaces or networks for MPI, `eth0`, `10.0.0.0/8`; `auto`: its own choice |
| `MPIKV_LOCAL_DEVICE` | auto | the GPU of this worker, a number among those that it sees; `auto`: by its local rank |
| `MPIKV_DEVICE_PATH` | auto | how arrays on a GPU travel: `auto`, `ipc`, `mpi`, `nccl`, `staged`, `host` |
| `MPIKV_CUDA_AWARE` | auto | whether MPI takes device memory: `0`: no; `1`: yes; `auto`: a child process tries it |
| `MPIKV_STOP_SIGNALS` | | signals after which all workers stop together after their step, as in `TERM,USR1` |
| `MPIKV_STOP_FILE` | | file in which a `Trainer` saves everything when it stops so, and from which it resumes |
| `MPIKV_METRICS` | | folder in which each rank writes its metrics for Prometheus, a file every 15 s and at the end |

Two more are not for users:

| variable | default | meaning |
|---|---|---|
| `MPIKV_TEST_HOSTS` | 0 | of tests and trials: pretend that the ranks run on so many hosts, in blocks; 0: do not |
| `MPIKV_STOP_ASKED` | | of batch scripts: file that is there when the job was asked to stop, perhaps too early for it |

`partition_bytes` (of a piece of a value on its way to a server and back; 0: by the links) and `bucket_bytes` (of a
message in which short values of several keys travel) are fields for tests, without a variable.

Two are of the process rather than of a store, and no fields of `Config`:

| variable | default | meaning |
|---|---|---|
| `MPIKV_TRACEBACK` | short | `short`: a mistake in a call is one line of one rank; `full`: all frames of every rank |
| `MPIKV_LOG` | | print what stores decide to stderr: `debug`, also of each key; `info`; `warning` |
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
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
ALGORITHMS = ("auto", "naive", "native", "ring", "halving_doubling", "hierarchical", "nccl")
DEVICE_PATHS = ("auto", "ipc", "mpi", "nccl", "staged", "host")  # of arrays on a GPU between workers
PATHS = ("stop_file", "timeline", "metrics", "link")  # fields that a program may give as a path, too
NUMBER_OR_WORD = ("local_device", "cuda_aware", "servers_take")  # fields that a program may give as a number, too


def _text_of(variable: Variable, value: Any) -> str:
    """The text of a value that was given to `Config` as a value. Raises ValueError with the end of a sentence."""
    kind = type(getattr(Config, variable.field))
    if variable.field in PATHS and isinstance(value, os.PathLike):
        value = path("the file", value)
    takes_numbers = kind is not str or variable.field in NUMBER_OR_WORD
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
    """Return the names and networks of a valid MPIKV_INTERFACE other than `auto`.

    ValueError with the end of a sentence.

    >>> mpikv.config.interface_entries('eth0, 10.1.2.3/8')
    ['eth0', '10.0.0.0/8']
    """
    return _interface(value).split(",")


class Variable(NamedTuple):
    """One `MPIKV_*` variable: `parse` reads its text, or raises ValueError with the end of a sentence.

    >>> mpikv.config.VARIABLES[0].parse('2')
    2
    """

    name: str
    field: str
    parse: Callable[[str], Any]


VARIABLES = (
    Variable("MPIKV_NUM_SERVERS", "num_servers", _integer(0)),
    Variable("MPIKV_SERVER_PLACEMENT", "server_placement", _one_of(*PLACEMENTS)),
    Variable("MPIKV_SERVERS_TAKE", "servers_take", _share),
    Variable("MPIKV_LINK", "link", _link),
    Variable("MPIKV_BIGARRAY_BOUND", "bigarray_bound_elems", _integer(1)),
    Variable("MPIKV_ALGORITHM", "algorithm", _one_of(*ALGORITHMS)),
    Variable("MPIKV_SHARED_MEMORY", "shared_memory", _one_of("auto", "off")),
    Variable("MPIKV_TIMEOUT_S", "timeout_s", _seconds),
    Variable("MPIKV_STALL_WARN_S", "stall_warn_s", _seconds_or_off),
    Variable("MPIKV_TIMELINE", "timeline", _text),
    Variable("MPIKV_PROGRESS", "progress", _one_of("thread", "calls")),
    Variable("MPIKV_MPI", "mpi", _one_of("auto", "system")),
    Variable("MPIKV_INTERFACE", "interface", _interface),
    Variable("MPIKV_LOCAL_DEVICE", "local_device", _local_device),
    Variable("MPIKV_DEVICE_PATH", "device_path", _one_of(*DEVICE_PATHS)),
    Variable("MPIKV_CUDA_AWARE", "cuda_aware", _one_of("0", "1", "auto")),
    Variable("MPIKV_STOP_SIGNALS", "stop_signals", _signals),
    Variable("MPIKV_STOP_FILE", "stop_file", _text),
    Variable("MPIKV_METRICS", "metrics", _text),
)
NOT_FOR_USERS = (
    Variable("MPIKV_TEST_HOSTS", "test_hosts", _integer(0)),
    Variable("MPIKV_STOP_ASKED", "stop_asked", _text),
    Variable("", "partition_bytes", _integer(0)),
    Variable("", "bucket_bytes", _integer(0)),
)
GONE = {
    "MPIKV_PARTITION_BYTES": "nothing is needed: pieces are as long as the links want them, see MPIKV_LINK",
    "MPIKV_BUCKET_BYTES": "nothing is needed: short values of several keys share messages of 60 KiB",
    "MPIKV_STOP_MARK": "the batch scripts of `mpikv submit` keep early signals without it; take their present ones",
    "MPIKV_FAKE_HOSTS": "use MPIKV_TEST_HOSTS, for tests and trials",
}

TRACEBACK = Variable("MPIKV_TRACEBACK", "", _one_of("short", "full"))
LOG = Variable("MPIKV_LOG", "", _one_of("debug", "info", "warning"))
ALL = (*VARIABLES, *NOT_FOR_USERS[:2], TRACEBACK, LOG)
KNOWN = tuple(variable.name for variable in ALL)


@dataclass(frozen=True)
class Config:
    """All settings of one store. The fields and their meaning stand in the table at the top of this file.

    >>> mpikv.Config(timeout_s=60).with_(num_servers=2).num_servers
    2
    """

    num_servers: int = 0
    server_placement: str = "spread"
    servers_take: float | str = "auto"
    link: str = "auto"
    bigarray_bound_elems: int = 1_000_000
    partition_bytes: int = 0
    bucket_bytes: int = 60 << 10
    algorithm: str = "auto"
    test_hosts: int = 0
    shared_memory: str = "auto"
    timeout_s: float = 300.0
    stall_warn_s: float = 2.0
    timeline: str = ""
    progress: str = "thread"
    mpi: str = "auto"
    interface: str = AUTO_INTERFACE
    local_device: int | str = "auto"
    device_path: str = "auto"
    cuda_aware: str = "auto"
    stop_signals: str = ""
    stop_file: str = ""
    stop_asked: str = ""
    metrics: str = ""

    def __post_init__(self) -> None:
        for variable in (*VARIABLES, *NOT_FOR_USERS):
            value = getattr(self, variable.field)
            try:
                object.__setattr__(self, variable.field, variable.parse(_text_of(variable, value)))
            except ValueError as error:
                raise ConfigError(f"Config({variable.field}={shown(value)}): {shown(value)} {error}") from None

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
        values = {}
        for variable in ALL:
            value = _read(variable, environ)
            if value is not None and variable.field:
                values[variable.field] = value
        return cls(**values)

    def with_(self, **changes: Any) -> Config:
        """Return this configuration with some fields changed. Raises ConfigError for a field that does not exist.

        >>> mpikv.Config().with_(algorithm='ring').algorithm
        'ring'
        """
        known = {field.name for field in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            near = meant(unknown[0], known)
            raise ConfigError(f"no such setting: {', '.join(unknown)}; known are {', '.join(sorted(known))}.{near}")
        return replace(self, **changes)


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
    """Return from which level on MPIKV_LOG asks for what stores decide, "" where it does not. Raises ConfigError.

    >>> mpikv.config.log_level({'MPIKV_LOG': 'INFO'})
    'info'
    """
    return _read(LOG, os.environ if environ is None else environ) or ""


def variables_in_force(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every `MPIKV_*` variable that is set, known or not, sorted by name.

    >>> mpikv.config.variables_in_force({'MPIKV_TIMEOUT_S': '60', 'HOME': '/root'})
    {'MPIKV_TIMEOUT_S': '60'}
    """
    environ = os.environ if environ is None else environ
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in KNOWN or (name.startswith(PREFIX) and not name.startswith(TEST_PREFIX))
    }


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the variables in force that nothing reads, each with the nearest valid name or None.

    >>> mpikv.config.unknown_variables({'MPIKV_TIMEOUT': '60'})
    {'MPIKV_TIMEOUT': 'MPIKV_TIMEOUT_S'}
    """
    return {
        name: next(iter(difflib.get_close_matches(name, KNOWN, n=1)), None)
        for name in variables_in_force(environ)
        if name not in KNOWN
    }


def wants_full_tracebacks(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether MPIKV_TRACEBACK asks for all frames of every rank.

    It is read when an error is reported, which may itself be an error in the settings: any other text counts as
    `short`.

    >>> mpikv.config.wants_full_tracebacks({'MPIKV_TRACEBACK': 'full'})
    True
    """
    environ = os.environ if environ is None else environ
    return environ.get(TRACEBACK.name, "").strip().lower() == "full"
