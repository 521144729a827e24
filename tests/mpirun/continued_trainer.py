"""A worker for tests of deaths in a training: `continued_trainer.py FOLDER CASE VICTIM@STEP[+MS],...`.

CASE: 'mean' or 'examples', how gradients are averaged; with '-own' the workers update, with '-rows' a parameter is
row-sparse. Each worker writes FOLDER/N, N its number at the start: a line for each example that it has used, and at the
end weights and steps. A spare writes FOLDER/N-spare, N the number of the worker whose place it takes; a victim -N is a
spare.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
from continued_program import die, victim_of, wait_for_spares

import mpikv
from mpikv import kv
from mpikv.data import DataLoader, SplitSampler

EXAMPLES, BATCH, ROWS = 240, 2, 7


def main(folder: str, case: str, victims: str) -> None:
    store = kv.create("dist_sync")
    session = store.session
    me, is_spare, changes = session.number, session.alone, list[int]()
    mine = [one for one in victims.split(",") if one and one.startswith("-") == is_spare]
    with store, (Path(folder) / f"{me}{'-spare' * is_spare}").open("a") as log:
        store.on_change(lambda: changes.append(store.num_workers))
        rows = case.endswith("-rows")
        weight, bias = mpikv.Parameter(np.zeros((ROWS, 3)), sparse=rows), mpikv.Parameter(np.zeros(1))
        own = False if case.endswith("-own") else None
        trainer = mpikv.Trainer({"w": weight, "b": bias}, "adam", {"learning_rate": 0.1}, store, update_on_kvstore=own)
        trainer.resume()
        loader = DataLoader(np.arange(float(EXAMPLES)), BATCH, sampler=SplitSampler.for_store(EXAMPLES, store, seed=3))
        for batch in loader:
            wait_for_spares(store)
            for who, when, after_s in [victim_of(one.lstrip("-")) for one in mine]:
                if (who, when) == (me, trainer.steps):
                    threading.Thread(target=die, args=(after_s,), daemon=True).start()
            if rows:
                ids = batch.astype(int) % ROWS
                weight.grad = mpikv.RowSparse(ids, batch[:, None] + weight.data[ids], weight.data.shape)
            else:
                weight.grad[...] = batch.mean() + weight.data
            bias.grad[...] = 1.0  # of which the mean is 1, however many workers there are
            trainer.step(examples=len(batch)) if case.startswith("examples") else trainer.step()
            log.writelines(f"example {int(i)}\n" for i in batch)
            log.flush()
        if rows:
            stored = store.row_sparse_pull("trainer0/w", row_ids=np.arange(ROWS)).to_dense()
            assert (weight.data == stored).all(), (weight.data, stored)
        total = store.pushpull_async("trainer0/b", bias.grad) if own is False else None
        if total is not None:
            total.wait()
        log.write(f"end {trainer.steps} {weight.data.tolist()} {bias.data.tolist()} {changes} {store.generation}\n")


main(*sys.argv[1:])
