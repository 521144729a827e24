"""`mpikv bench optimizers`: each optimizer's update on the GPU, beside a copy on it.

A run is several updates of one weight, one behind the other, so that beginning one costs nothing while another is under
way; times are of one of them. The limit is `device_limits.update_limit`: what must be read and written, at the rate at
which the GPU copies, measured in between.

Before that, an update of a short weight is compared with the host's, bit by bit: the weight and all states, after some
steps. An optimizer whose formula no kernel can hold is updated on the host, which its figures show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv import optimizers
from mpikv.arrays import HostArray
from mpikv.bench.device_limits import update_bytes, update_limit
from mpikv.bench.device_probes import DeviceProbes
from mpikv.bench.gpu import Gpu, device_store, open_gpu
from mpikv.bench.measure import Contender, measure
from mpikv.bench.report import microseconds
from mpikv.bench.session import Session
from mpikv.bench.sizes import short
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.step import State
from mpikv.tables import Column, Table

IN_A_ROW = 8
GOAL = 0.8  # of the copy bandwidth
SHORT_ELEMS, STEPS = (1 << 16) + 3, 3  # of the comparison with the host


@dataclass(frozen=True)
class UpdateRow:
    """One optimizer. Times in seconds, of one update. n_bytes: of the weight. moved_bytes: read and written at least.

    wrong: 1 where the bits are not the host's.
    """

    what: str
    n_bytes: int
    moved_bytes: int
    iterations: int
    median_s: float
    p95_s: float
    limit_s: float
    limit_by: str
    limit_percent: float
    copy_bytes_per_s: float
    wrong: int


TABLE = Table(
    Column("bytes", 9),
    Column("optimizer", 12, left=True),
    Column("median us", 10),
    Column("p95 us", 10),
    Column("moved GB/s", 10),
    Column("copy moves", 10),
    Column("limit", 8),
    Column("% of it", 7),
)


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
            session.lines(line, [row])
            session.progress.update(1)


def _one(session: Session, gpu: Gpu, space: Any, name: str) -> UpdateRow:
    """Measure one optimizer. Collective."""
    job, dtype = session.job, session.dtype
    session.progress.update(what=name)
    wrong = job.comm.allreduce(int(not has_bits_of_host(space, name, dtype)))
    n_elems = session.options.bytes // dtype.itemsize
    weight, grad = space.zeros(n_elems, dtype), space.zeros(n_elems, dtype)
    optimizer, state = optimizers.create(name), None

    def update() -> None:
        nonlocal state
        state = optimizer.update(0, weight, grad, state or optimizer.init(weight))

    def updates() -> None:
        for _ in range(IN_A_ROW):
            update()
        gpu.finish(space.stream)

    update()
    gpu.finish(space.stream)
    kept = [weight.nbytes, *(array.nbytes for array in arrays_of(state).values())]
    moved = update_bytes(grad.nbytes, kept)
    probes = DeviceProbes(job, n_elems * dtype.itemsize, dtype, gpu)
    results = {
        one.what: one
        for one in measure(job.comm, [Contender(name, _nothing, updates), *probes.contenders()], session.plan)
    }
    probes.rates(results)
    probes.close()
    times, limit = results[name].summary, update_limit(moved, probes.device_rates)
    median_s = times.median_s / IN_A_ROW
    return UpdateRow(
        what=name,
        n_bytes=weight.nbytes,
        moved_bytes=moved,
        iterations=times.iterations,
        median_s=median_s,
        p95_s=times.p95_s / IN_A_ROW,
        limit_s=limit.time_s,
        limit_by=limit.by,
        limit_percent=100 * limit.time_s / median_s,
        copy_bytes_per_s=probes.device_rates.copy_bytes_per_s,
        wrong=wrong,
    )


def _nothing() -> None:
    pass


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


def same_bits(found: HostArray, expected: HostArray) -> bool:
    """Whether two arrays are equal in every bit."""
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def line(row: UpdateRow) -> str:
    """Return a row of the table; bits that are not the host's are said at its end."""
    return TABLE.line(
        short(row.n_bytes),
        row.what,
        microseconds(row.median_s),
        microseconds(row.p95_s),
        f"{row.moved_bytes / row.median_s / 1e9:.1f}",
        f"{2 * row.copy_bytes_per_s / 1e9:.1f}",
        row.limit_by,
        f"{row.limit_percent:.0f}",
        end="  WRONG: not the bits of the host" if row.wrong else "",
    )
