"""`mpikv bench optimizers`: each optimizer's update on the GPU, beside a copy on it (device_work.py).

Before that, some updates of a short weight are compared with the host's: the weight and all states, which may differ by
some units in the last place of the largest number among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import finfo

from mpikv import optimizers
from mpikv.bench.device_limits import update_bytes
from mpikv.bench.device_work import WorkRow, differs, line, measured, table
from mpikv.bench.gpu import device_store, open_space
from mpikv.bench.session import Session
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.step import State
from mpikv.spaces.device import DeviceSpace

SHORT_ELEMS, STEPS, UNITS = (1 << 16) + 3, 3, 64  # of the comparison with the host
TABLE = table("optimizer", 12)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective."""
    job, options = session.job, session.options
    with device_store(job) as store:
        space = open_space(job, store)
        session.note(f"GPU {space.device} of rank 0: {space.gpu.name}")
        session.titles(TABLE)
        for name in options.optimizers or optimizers.names():
            row = _one(session, space, name)
            session.rows.append(row)
            session.lines(lambda one: line(TABLE, one), [row])
            session.progress.update(1)


def _one(session: Session, space: DeviceSpace, name: str) -> WorkRow:
    """Measure one optimizer. Collective."""
    session.progress.update(what=name)
    wrong = session.job.comm.allreduce(int(session.options.check and not is_right(space, name, session.dtype)))
    n_elems = session.options.bytes // session.dtype.itemsize
    weight, grad = (space.zeros(n_elems, session.dtype) for _ in range(2))
    optimizer = optimizers.create(name)
    with space.here():
        state = optimizer.update(0, weight, grad, optimizer.init(weight))
    moved = update_bytes(grad.nbytes, [weight.nbytes, *(array.nbytes for array in arrays_of(state).values())])

    def update() -> None:
        nonlocal state
        state = optimizer.update(0, weight, grad, state)

    row = measured(session, space, name, update, n_bytes=weight.nbytes, moved_bytes=moved)
    return replace(row, wrong=wrong)


def arrays_of(state: State | None) -> Mapping[str, Any]:
    """Return the arrays in a state; the rest of it are numbers."""
    return {name: value for name, value in (state or {}).items() if hasattr(value, "nbytes")}


def is_right(space: DeviceSpace, name: str, dtype: np.dtype[np.generic]) -> bool:
    """Whether some updates on the GPU end near the weight and the states of those on the host."""
    generator = np.random.default_rng(0)
    start, *grads = [generator.standard_normal(SHORT_ELEMS).astype(dtype) for _ in range(1 + STEPS)]

    def ends_with(weight: Any, optimizer: Optimizer, gradients: list[Any]) -> dict[str, Any]:
        state = optimizer.init(weight)
        for gradient in gradients:
            state = optimizer.update(0, weight, gradient, state)
        return {"": weight, **arrays_of(state)}

    expected = ends_with(start.copy(), optimizers.create(name), grads)
    with space.here():
        found = ends_with(space.from_host(start), optimizers.create(name), [space.from_host(grad) for grad in grads])
        near = UNITS * float(finfo(dtype).eps)  # type: ignore[no-untyped-call]
        return all(differs(space.to_host(found[key]), expected[key]) <= near for key in expected)
