"""`mpikv.LocalUpdates` for a model of PyTorch, with the default store where none is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpikv.common import checks
from mpikv.kvstore import KVStore
from mpikv.torch.default import calls_of
from mpikv.trainer.local_updates import LocalUpdates


class ModelUpdates(LocalUpdates):
    """`mpikv.LocalUpdates` for a torch.nn.Module, where its options and calls stand. Collective, blocks.

    store: None: the default one, as in `mt.init`. Raises TypeError for what is no module, and what the base raises.

    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> local = mt.LocalUpdates(net, kv.create('local'), every=2)
    >>> for _ in range(4):
    ...     optimizer.zero_grad()
    ...     net(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     _ = local.step()
    >>> local.rounds
    2
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: KVStore | None = None,
        *,
        every: int | Callable[[int], int] | None,
        **options: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise checks.wrong("LocalUpdates: model", "a torch.nn.Module", model)
        super().__init__(model, calls_of(None).store if store is None else store, every=every, **options)
