"""`mpikv bench optimizers`: each optimizer's update on the GPU, beside a copy on it (device_work.py).

Before that, an update of a short weight is compared with the host's, bit by bit: the weight and all states, after some
steps. An optimizer whose formula no kernel can hold is updated on the host, which its figures show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpikv import optimizers
from mpikv.bench.device_limits import update_bytes
from mpikv.bench.device_work import WorkRow, line, measured, same_bits, table
from mpikv.bench.gpu import Gpu, device_store, open_gpu
from mpikv.bench.session import Session
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.step import State

GOAL = 0.8  # of the copy bandwidth
SHORT_ELEMS, STEPS = (1 << 16) + 3, 3  # of the comparison with the host
TABLE = table("optimizer", 12)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective."""
    job, options = session.job, session.options
    with device_store(job) as store:
        gpu = open_gpu(job, store)
        session.note(f"GPU {gpu.driver.number} of rank 0: {gpu.driver.name}; to reach: {100 * GOAL:.0f} % of the limit")
        space = store.session.spaces.device
        session.titles(TABLE)
        for name in options.optimizers or optimizers.names():
            row = _one(session, gpu, space, name)
            session.rows.append(row)
            session.lines(lambda one: line(TABLE, one), [row])
            session.progress.update(1)


def _one(session: Session, gpu: Gpu, space: Any, name: str) -> WorkRow:
    """Measure one optimizer. Collective."""
    job, dtype = session.job, session.dtype
    session.progress.update(what=name)
    wrong = job.comm.allreduce(int(not has_bits_of_host(space, name, dtype)))
    n_elems = session.options.bytes // dtype.itemsize
    weight, grad = space.zeros(n_elems, dtype), space.zeros(n_elems, dtype)
    optimizer = optimizers.create(name)
    state = optimizer.update(0, weight, grad, optimizer.init(weight))
    moved = update_bytes(grad.nbytes, [weight.nbytes, *(array.nbytes for array in arrays_of(state).values())])

    def update() -> None:
        nonlocal state
        state = optimizer.update(0, weight, grad, state)

    row = measured(session, gpu, space.stream, name, update, n_bytes=weight.nbytes, moved_bytes=moved)
    return replace(row, wrong=wrong)


def arrays_of(state: State | None) -> Mapping[str, Any]:
    """Return the arrays in a state; the rest of it are numbers."""
    return {name: value for name, value in (state or {}).items() if hasattr(value, "nbytes")}


def has_bits_of_host(space: Any, name: str, dtype: np.dtype[np.generic]) -> bool:
    """Whether some updates on the GPU end with the weight and the states of those on the host."""
    generator = np.random.default_rng(0)
    start, *grads = [generator.standard_normal(SHORT_ELEMS).astype(dtype) for _ in range(1 + STEPS)]

    def ends_with(weight: Any, optimizer: Optimizer, gradients: list[Any]) -> dict[str, Any]:
        state = optimizer.init(weight)
        for gradient in gradients:
            state = optimizer.update(0, weight, gradient, state)
        return {"": weight, **arrays_of(state)}

    expected = ends_with(start.copy(), optimizers.create(name), grads)
    found = ends_with(space.from_host(start), optimizers.create(name), [space.from_host(grad) for grad in grads])
    return all(same_bits(space.to_host(found[key]), expected[key]) for key in expected)
