"""The backend "mpikv" of `torch.distributed`: its registration, and how a process group of it is made.

Every group of ranks gets a number, unique in the job, which its first rank draws and tells the others.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mpikv.errors import ConfigError
from mpikv.groups.world import World, opened
from mpikv.torch import rendezvous
from mpikv.torch.process_group import MpiProcessGroup

NAME = "mpikv"
NUMBERS = "groups"  # the key of the board that counts them


def register() -> None:
    """Make the backend known. Idempotent, local; MPI is initialised by `init_process_group`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    rendezvous.register()


def create(options: Any, _backend_options: Any) -> MpiProcessGroup:
    """Make a process group of some ranks.

    PyTorch calls it on each of them; it blocks until the group's first rank has come.
    """
    world = opened()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    _check(world, ranks, options)
    # PyTorch's own default for a backend that it does not know is half an hour.
    timeout_s = options.timeout.total_seconds()
    if options.timeout == dist.distributed_c10d.default_pg_timeout:
        timeout_s = world.config.timeout_s
    if options.group_rank == 0:
        number = int(world.ask("add", [NUMBERS], [b"1"])[0])
        options.store.set(NUMBERS, str(number))
    else:
        number = int(options.store.get(NUMBERS))
    return MpiProcessGroup(world, world.group(ranks, number, timeout_s))


def _check(world: World, ranks: list[int], options: Any) -> None:
    if options.group_rank >= len(ranks) or ranks[options.group_rank] != world.rank or max(ranks) >= world.size:
        raise ConfigError(
            f"init_process_group('{NAME}'): PyTorch was told rank {options.group_rank} of {options.group_size} (of the "
            f"ranks {ranks}), MPI says {world.rank} of {world.size}: start the program with mpirun, and give neither "
            "rank nor world_size, nor the variables RANK and WORLD_SIZE"
        )
