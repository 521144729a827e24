"""Workers that make different numbers of steps are told so in steps."""

from __future__ import annotations

import contextlib
import re
import threading

import numpy as np
import pytest
from store_modes import MESSAGES, ONE_HOST, SERVED, Mode, modes

from mpikv import Parameter, PeerError, StallError, Trainer

MODES = (ONE_HOST, MESSAGES, SERVED)


@pytest.mark.parametrize("wait", [True, False], ids=["wait", "no wait"])
@modes(*MODES)
def test_a_worker_with_fewer_batches_is_named_with_its_steps(mode: Mode, wait: bool) -> None:
    def body(store) -> str | None:
        parameters = [Parameter(np.zeros(3, np.float32), name) for name in "ab"]
        trainer = Trainer(parameters, "sgd", kvstore=store)
        for _ in range(4):
            trainer.step(1, wait=wait)
        if store.rank == 1:
            return None  # closes
        if not wait:
            trainer.step(1, wait=False)  # the next one finds out
        with pytest.raises(PeerError) as caught:
            trainer.step(1, wait=wait)
        with contextlib.suppress(PeerError):
            store.close()
        return str(caught.value)

    text = mode.run(body)[0]
    said = "this worker is in step 5 of its Trainer, and worker 1 on .* has left after step 4: "
    for one in (said, "trainer.join()", "closed its store after 4 pushes"):
        assert re.search(one, text, re.DOTALL)


@modes(*MODES)
def test_a_worker_in_the_evaluation_is_told_of_at_once(mode: Mode) -> None:
    """Not after the time limit: one waits in a step, the others in a call that needs it."""
    all_know = threading.Barrier(mode.workers, timeout=60)

    def body(store) -> str:
        trainer = Trainer([Parameter(np.zeros(3, np.float32))], "sgd", kvstore=store)
        for _ in range(4):
            trainer.step(1)
        calls = [lambda: trainer.step(1), store.barrier]
        if store.rank:
            calls.reverse()
        with pytest.raises(StallError) as caught:
            calls[0]()
        all_know.wait()
        calls[1]()  # which the others' first calls have waited for
        return str(caught.value)

    text, *others = mode.run(body, stall_warn_s=0.4)
    assert re.search(r"step 5 of its Trainer, and worker [12] on \S+ has not come to the next one after step 4", text)
    assert "(pushed it 4 times; in barrier" in text
    for one in (text, *others):
        assert "Deadlock: " in one
        assert re.search(r"worker 0 on \S+ in pushpull of key .*, round 5", one)
