"""The backend "mpikv" of `torch.distributed`: its registration, how ranks find each other, how a process group is made.

Ranks find each other through MPI, without an address or a port: for `mpikv://`, and if no `init_method` is given and
PyTorch's own variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are not all set. PyTorch's key-value store is ours
then, `BoardStore`; if a launcher of PyTorch has set them, PyTorch's own is used.

Every group of ranks has a number, unique in the job, which its first rank gets from a counter and writes into PyTorch's
store.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpikv.errors import ConfigError
from mpikv.groups.world import World, opened
from mpikv.runtime import launcher
from mpikv.torch.process_group import MpiProcessGroup
from mpikv.torch.works import CallWork

NAME = "mpikv"  # of the backend, and of the scheme in `init_method="mpikv://"`
NUMBERS = "groups"  # the key of the rendezvous store that counts them
BUILTIN = "_register_builtin_comm_hook"  # of DDP: a hook by its name
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Rendezvous = Iterator[tuple[dist.Store, int, int]]


def register() -> None:
    """Register the backend, the handlers by which its ranks find each other, and a hook of DDP. Local, idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # Imported by name, since the package has a function `rendezvous`. A registered scheme can only be replaced so.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers.setdefault(NAME, of_mpi)
    usual = handlers["env"]
    if not hasattr(usual, "of_mpi"):
        handlers["env"] = _or_of_mpi(usual)
        setattr(DistributedDataParallel, BUILTIN, _or_in_python(getattr(DistributedDataParallel, BUILTIN)))


def create(options: Any, _backend_options: Any) -> MpiProcessGroup:
    """Make a process group of some ranks. PyTorch calls it on each; blocks until the first rank has called it."""
    world = opened()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    _check(world, ranks, options)
    # PyTorch's own default, half an hour, is replaced by ours.
    timeout_s = options.timeout.total_seconds()
    if options.timeout == dist.distributed_c10d.default_pg_timeout:
        timeout_s = world.config.timeout_s
    if options.group_rank == 0:
        number = int(world.ask("add", [NUMBERS], [b"1"])[0])
        options.store.set(NUMBERS, str(number))
    else:
        number = int(options.store.get(NUMBERS))
    _untraced(CallWork)
    return _untraced(MpiProcessGroup)(world, world.group(ranks, number, timeout_s))


@functools.cache
def _untraced(kind: type) -> type:
    """Keep torch.compile, which is imported for that, out of methods that PyTorch calls in compiled functions."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method):
            setattr(kind, name, torch.compiler.disable(method))
    return kind


def _check(world: World, ranks: list[int], options: Any) -> None:
    if options.group_rank >= len(ranks) or ranks[options.group_rank] != world.rank or max(ranks) >= world.size:
        raise ConfigError(
            f"init_process_group('{NAME}'): PyTorch has rank {options.group_rank} of {options.group_size} (of the "
            f"ranks {ranks}), MPI says {world.rank} of {world.size}: start the program with mpirun, and give neither "
            "rank nor world_size, nor the variables RANK and WORLD_SIZE"
        )


class BoardStore(dist.Store):
    """The rendezvous store (groups/service.py) as PyTorch's key-value store, whose methods also have the names that
    PyTorch's C++ code uses. prefix: of all keys.
    """

    def __init__(self, world: World, prefix: str) -> None:
        super().__init__()
        self._world, self._prefix = world, prefix
        self._limit_s = world.config.timeout_s

    def _ask(self, verb: str, keys: Sequence[str], *values: Any, timeout_s: float | None = None) -> list[bytes]:
        packed = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        limit_s = self._limit_s if timeout_s is None else timeout_s
        return self._world.ask(verb, [self._prefix + key for key in keys], packed, limit_s)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], b"%d" % amount)[0])

    def append(self, key: str, value: Any) -> None:
        self._ask("append", [key], value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask("compare_set", [key], expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys)[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("get", keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", [key])[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask("count", [])[0])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask("get", keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._ask("set", keys, *values)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit_s = min(timeout.total_seconds(), self._world.config.timeout_s)

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815


def of_mpi(url: str, **_options: Any) -> Rendezvous:
    """Handle `mpikv://`: rank and size are MPI's. Collective; blocks until all ranks have called it."""
    world = opened()
    store = BoardStore(world, f"{len(world.sessions)}/")
    world.sessions.append(store)  # keeps the Python object alive, to which PyTorch has only a reference in C++
    yield store, world.rank, world.size
    raise RuntimeError("the rendezvous of MPI's ranks is made once: call init_process_group again")


def _or_of_mpi(usual: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    """Return a handler of `env://`: PyTorch's if its variables are set or no MPI launcher started us, else ours."""

    def handler(url: str, **options: Any) -> Rendezvous:
        are_set = all(os.environ.get(name) or f"{name.lower()}=" in url for name in VARIABLES)
        source = usual if are_set or launcher.find() is None else of_mpi
        try:
            yield from source(url, **options)
        except ValueError as error:
            if are_set or source is of_mpi:
                raise
            raise ValueError(
                f"{error}. With the backend {NAME}, start the program by mpirun: `mpirun -n 4 python train.py`, or "
                "`-n 1` for a single process"
            ) from None

    handler.of_mpi = True  # type: ignore[attr-defined]
    return handler


def _or_in_python(usual: Callable[..., None]) -> Callable[..., None]:
    """Return what adds one of DDP's built-in hooks: FP16_COMPRESS, over a group of ours, as the same hook in Python.

    The one in C++ takes the result out of a future that no code in Python can make.
    """

    def add(model: DistributedDataParallel, kind: Any) -> None:
        if kind != dist.BuiltinCommHookType.FP16_COMPRESS or not isinstance(model.process_group, MpiProcessGroup):
            return usual(model, kind)
        hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
        return model.register_comm_hook(model.process_group, hooks.fp16_compress_hook)

    return add
