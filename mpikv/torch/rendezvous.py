"""How the ranks of `init_process_group("mpikv")` meet without an address or a port: MPI has brought them together.

PyTorch wants a store of keys for it. Ours is one of requests to the first rank, by messages (groups/board.py). It is
offered as `mpikv://`, and to who gives no `init_method` where the variables of PyTorch's own (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) are not all set; where they are, as a launcher of PyTorch sets them, its own is used as ever.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mpikv.groups.world import World, opened
from mpikv.runtime import launcher

SCHEME = "mpikv"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Rendezvous = Iterator[tuple[dist.Store, int, int]]


class BoardStore(dist.Store):
    """The world's board as PyTorch's store. prefix: of all keys. Methods also have the names that C++ looks for."""

    def __init__(self, world: World, prefix: str) -> None:
        super().__init__()
        self._world, self._prefix = world, prefix
        self._limit_s = world.config.timeout_s

    def _ask(self, verb: str, keys: Sequence[str], *values: Any, timeout_s: float | None = None) -> list[bytes]:
        packed = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        limit_s = self._limit_s if timeout_s is None else timeout_s
        return self._world.ask(verb, [self._prefix + key for key in keys], packed, limit_s)

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """A key's value; waits until it is set."""
        return self._ask("get", [key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return int(self._ask("add", [key], b"%d" % amount)[0])

    def append(self, key: str, value: Any) -> None:
        """Append to a value."""
        self._ask("append", [key], value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key where its value is the expected one (or it is not there, and that is empty); returns its value."""
        return self._ask("compare_set", [key], expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are set."""
        return self._ask("check", keys)[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are set."""
        self._ask("get", keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return self._ask("delete", [key])[0] == b"1"

    def num_keys(self) -> int:
        """How many keys there are, those of others included."""
        return int(self._ask("count", [])[0])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until all are set."""
        return self._ask("get", keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set several keys."""
        self._ask("set", keys, *values)

    def has_extended_api(self) -> bool:
        """There are `append`, `multi_get` and `multi_set`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit to waiting."""
        self._limit_s = min(timeout.total_seconds(), self._world.config.timeout_s)

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815


def of_mpi(url: str, **_options: Any) -> Rendezvous:
    """The handler of `mpikv://`: rank and size are MPI's. Collective; blocks until all ranks have come."""
    world = opened()
    store = BoardStore(world, f"{len(world.sessions)}/")
    world.sessions.append(store)  # PyTorch holds what is of C++ in it, and calls the Python object through that
    yield store, world.rank, world.size
    raise RuntimeError("ranks of MPI meet once: call init_process_group again")


def _or_of_mpi(usual: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    """The handler of `env://`: PyTorch's own where its variables are set, or where MPI's launcher is not there."""

    def handler(url: str, **options: Any) -> Rendezvous:
        told = all(os.environ.get(name) or f"{name.lower()}=" in url for name in VARIABLES)
        return usual(url, **options) if told or launcher.find() is None else of_mpi(url, **options)

    handler.of_mpi = True  # type: ignore[attr-defined]
    return handler


def register() -> None:
    """Add the handlers. Idempotent."""
    # The package has a function of this name. A scheme that is there cannot be registered again, but replaced.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers.setdefault(SCHEME, of_mpi)
    usual = handlers["env"]
    if not hasattr(usual, "of_mpi"):
        handlers["env"] = _or_of_mpi(usual)
