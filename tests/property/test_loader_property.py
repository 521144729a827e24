"""DataLoader against a simple reference: every example in its place, over parts and epochs, resumed anywhere."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpikv.data import DataLoader, SplitSampler

EPOCHS = 3
lasts = st.sampled_from(["keep", "discard", "rollover"])


def expected(sampler: SplitSampler, batch_size: int, last: str) -> list[list[list[int]]]:
    """The batches of each epoch, by taking one example after another."""
    epochs, batch = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches = []
        for i in sampler:
            batch.append(i)
            if len(batch) == batch_size:
                batches.append(batch)
                batch = []
        if last != "rollover":
            batches += [batch] if batch and last == "keep" else []
            batch = []
        epochs.append(batches)
    return epochs


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 20), lasts, st.data())
def test_batches_and_going_on(n: int, num_parts: int, batch_size: int, last: str, data: st.DataObject) -> None:
    prefetch = data.draw(st.sampled_from([0, 2]))
    dataset = np.arange(n)
    for part in range(num_parts):

        def sampler(part: int = part) -> SplitSampler:
            return SplitSampler(n, num_parts, part, last="uneven", seed=n)

        def loader(part: int = part) -> DataLoader:
            return DataLoader(dataset, batch_size, sampler=sampler(part), last=last, prefetch=prefetch)  # type: ignore[arg-type]

        wanted = expected(sampler(), batch_size, last)
        stop_epoch = data.draw(st.integers(0, EPOCHS - 1))
        stop = data.draw(st.integers(0, len(wanted[stop_epoch])))
        through, found, state = loader(), [], None
        for epoch in range(EPOCHS):
            through.set_epoch(epoch)
            assert len(through) == len(wanted[epoch])
            if (epoch, stop) == (stop_epoch, 0):
                state = through.state()
            found.append([])
            for batch in through:
                found[-1].append(batch.tolist())
                if (epoch, len(found[-1])) == (stop_epoch, stop):
                    state = through.state()
        assert found == wanted
        assert state is not None
        again = loader()
        again.load_state(json.loads(json.dumps(state)))
        assert again.state() == state
        rest = []
        for epoch in range(again.epoch, EPOCHS):
            again.set_epoch(epoch)
            rest.append([batch.tolist() for batch in again])
        assert rest == [wanted[stop_epoch][stop:], *wanted[stop_epoch + 1 :]]
