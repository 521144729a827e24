"""A worker for tests of deaths in PyTorch: `continued_torch.py FOLDER CASE VICTIM@STEP[+MS],...`.

CASE: 'model' or 'optimizer', which of DistributedModel and DistributedOptimizer it trains with. Each worker writes
FOLDER/N, N its number at the start: for each step a digest of parameters and buffers, and the mean of a gradient of 1.
A spare writes FOLDER/N-spare, N the number of the worker whose place it takes; a victim -N is a spare.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

import torch
from continued_program import die, victim_of, wait_for_spares

import mpikv
import mpikv.torch as mt
from mpikv import kv

STEPS = 30


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(5, 70000),
            torch.nn.BatchNorm1d(70000),
            torch.nn.Linear(70000, 1),
        )
        self.one = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).mean() + self.one  # so that the gradient of `one` is 1


def main(folder: str, case: str, victims: str) -> None:
    torch.set_num_threads(1)
    store = kv.create("dist_sync")
    me, is_spare = store.session.number, store.session.alone
    mine = [victim_of(one.lstrip("-")) for one in victims.split(",") if one and one.startswith("-") == is_spare]
    with store, (Path(folder) / f"{me}{'-spare' * is_spare}").open("a") as log:
        torch.manual_seed(me)
        net = Net()
        model = mt.DistributedModel(net, store) if case == "model" else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if case == "optimizer":
            mt.broadcast_parameters(net.state_dict(), store=store)
            optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store=store)
        snapshots = mpikv.Snapshots(store, {"net": net, "optimizer": optimizer})
        for step in range(snapshots.resume(), STEPS):
            wait_for_spares(store)
            for who, when, after_s in mine:
                if (who, when) == (me, step):
                    threading.Thread(target=die, args=(after_s,), daemon=True).start()
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + me))).backward()
            optimizer.step()
            values = [*net.parameters(), *(net.buffers() if case == "model" else ())]
            digest = hashlib.sha1(b"".join(one.detach().numpy().tobytes() for one in values)).hexdigest()
            log.write(f"{step} {digest} {net.one.grad.item() if net.one.grad is not None else None}\n")
            log.flush()
            snapshots.step()
        log.write(f"end {store.num_workers} {store.generation}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
