"""A worker for tests of deaths in PyTorch: `continued_torch.py FOLDER CASE VICTIM@STEP[+MS],...`.

CASE: 'model' or 'optimizer', which of DistributedModel and DistributedOptimizer it trains with. Each worker writes
FOLDER/N, N its number at the start: for each step a digest of parameters and buffers, and the mean of a gradient of 1.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

import torch
from continued_program import die, victim_of

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
    with kv.create("dist_sync") as store, (Path(folder) / str(store.rank)).open("w") as log:
        me = store.rank
        torch.manual_seed(me)
        net = Net()
        model = mt.DistributedModel(net, store) if case == "model" else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if case == "optimizer":
            mt.broadcast_parameters(net.state_dict(), store=store)
            optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store=store)
        for step in range(STEPS):
            for who, when, after_s in [victim_of(one) for one in victims.split(",") if one]:
                if (who, when) == (me, step):
                    threading.Thread(target=die, args=(after_s,), daemon=True).start()
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + me))).backward()
            optimizer.step()
            values = [*net.parameters(), *(net.buffers() if case == "model" else ())]
            digest = hashlib.sha1(b"".join(one.detach().numpy().tobytes() for one in values)).hexdigest()
            log.write(f"{step} {digest} {net.one.grad.item() if net.one.grad is not None else None}\n")
            log.flush()
        log.write(f"end {store.num_workers} {store.generation}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
