"""The one reader of the `MPIKV_*` variables.

Each variable has one row in `VARIABLES`: its name, the field of `Config` that it sets, how its text is read, and what
it means. `Config.from_environ()` is called by `kv.create`, never at import.

| variable | default | meaning |
|---|---|---|
| `MPIKV_NUM_SERVERS` | 0 | server ranks among the communicator's; 0: the workers own the keys |
| `MPIKV_SERVER_PLACEMENT` | spread | `spread`: every host gets its share of the servers; `last`: the last ranks |
| `MPIKV_BIGARRAY_BOUND` | 1000000 | elements from which on a key is cut evenly over all servers |
| `MPIKV_PARTITION_BYTES` | 1048576 | bytes of the pieces in which a big value travels to a server and back |
| `MPIKV_ALGORITHM` | auto | `auto`, `naive`, `native`, `ring`, `halving_doubling`, `hierarchical` |
| `MPIKV_FAKE_HOSTS` | 0 | pretend that the ranks run on so many hosts, in blocks, to try `hierarchical`; 0: do not |
| `MPIKV_SHARED_MEMORY` | auto | `auto`: workers of one host share memory where they can; `off`: only messages |
| `MPIKV_TIMEOUT_S` | 300 | seconds after which a wait ends in a `StallError` |
| `MPIKV_PROGRESS` | thread | `thread`: transfers move on while Python computes; `calls`: only in calls |
| `MPIKV_MPI` | auto | `auto`: the environment's MPI wheel, else the system's library; `system`: that one |
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from mpikv.errors import ConfigError

PREFIX = "MPIKV_"
TEST_PREFIX = "MPIKV_TEST_"  # belongs to the test runner, never read by the library
ALGORITHMS = ("auto", "naive", "native", "ring", "halving_doubling", "hierarchical")


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("is not a whole number") from None
        if number < minimum:
            raise ValueError(f"must be at least {minimum}")
        return number

    return parse


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if not 0 < number < float("inf"):
        raise ValueError("must be more than 0 and finite")
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"is none of {', '.join(words)}")
        return text.lower()

    return parse


class Variable(NamedTuple):
    """One `MPIKV_*` variable: `parse` reads its text, or raises ValueError with the end of a sentence."""

    name: str
    field: str
    parse: Callable[[str], Any]


VARIABLES = (
    Variable("MPIKV_NUM_SERVERS", "num_servers", _integer(0)),
    Variable("MPIKV_SERVER_PLACEMENT", "server_placement", _one_of("spread", "last")),
    Variable("MPIKV_BIGARRAY_BOUND", "bigarray_bound_elems", _integer(1)),
    Variable("MPIKV_PARTITION_BYTES", "partition_bytes", _integer(1)),
    Variable("MPIKV_ALGORITHM", "algorithm", _one_of(*ALGORITHMS)),
    Variable("MPIKV_FAKE_HOSTS", "fake_hosts", _integer(0)),
    Variable("MPIKV_SHARED_MEMORY", "shared_memory", _one_of("auto", "off")),
    Variable("MPIKV_TIMEOUT_S", "timeout_s", _seconds),
    Variable("MPIKV_PROGRESS", "progress", _one_of("thread", "calls")),
    Variable("MPIKV_MPI", "mpi", _one_of("auto", "system")),
)


@dataclass(frozen=True)
class Config:
    """All settings of one store. The fields and their meaning stand in the table at the top of this file."""

    num_servers: int = 0
    server_placement: str = "spread"
    bigarray_bound_elems: int = 1_000_000
    partition_bytes: int = 1 << 20
    algorithm: str = "auto"
    fake_hosts: int = 0
    shared_memory: str = "auto"
    timeout_s: float = 300.0
    progress: str = "thread"
    mpi: str = "auto"

    def __post_init__(self) -> None:
        for variable in VARIABLES:
            value = getattr(self, variable.field)
            try:
                object.__setattr__(self, variable.field, variable.parse(str(value)))
            except ValueError as error:
                raise ConfigError(f"Config({variable.field}={value!r}): {value!r} {error}") from None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the variables in force. Raises ConfigError that names the variable, its text and what is valid."""
        environ = os.environ if environ is None else environ
        values = {}
        for variable in VARIABLES:
            text = environ.get(variable.name, "").strip()
            if not text:
                continue
            try:
                values[variable.field] = variable.parse(text)
            except ValueError as error:
                raise ConfigError(f"{variable.name}={text!r} {error}; set it to a valid value or unset it") from None
        return cls(**values)

    def with_(self, **changes: Any) -> Config:
        """This configuration with some fields changed."""
        known = {field.name for field in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ConfigError(f"no such setting: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return replace(self, **changes)


def variables_in_force(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every `MPIKV_*` variable that is set, known or not, sorted by name."""
    environ = os.environ if environ is None else environ
    return {
        name: environ[name] for name in sorted(environ) if name.startswith(PREFIX) and not name.startswith(TEST_PREFIX)
    }


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Variables in force that nothing reads, each with the nearest valid name or None: most are typing errors."""
    known = [variable.name for variable in VARIABLES]
    return {
        name: next(iter(difflib.get_close_matches(name, known, n=1)), None)
        for name in variables_in_force(environ)
        if name not in known
    }
