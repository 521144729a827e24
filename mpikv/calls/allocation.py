"""`empty` and `zeros`: arrays for the caller, in memory that the workers of a host share, or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays import devices, shapes
from mpikv.arrays.as_numpy import dtype_named
from mpikv.arrays.devices import Device
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.session.base import Session
from mpikv.strategies.base import Strategy


def make_arrays(
    session: Session, strategy: Strategy, shape: Any, dtype: Any, device: Device | None, *, zero: bool
) -> Any:
    """Return one array, or a list of them for a list of shapes, as `KVStore.empty` describes. Collective, blocks."""
    wanted, found = shapes.parse(shape), dtype_named(dtype)
    n_bytes = shapes.total_bytes(wanted, found)
    if device is None or devices.gpu_number(device) is None:
        memory = strategy.allocate(f"{found} {wanted}", n_bytes)
        if memory is None:
            memory = np.zeros(n_bytes, np.uint8)  # as shared memory is, which is never given out twice
        memory = memory[:n_bytes].view(found)
    else:
        what = f"{found} {wanted} on a GPU"
        memory = _on_gpu(session, strategy, device, n_bytes // found.itemsize, found, what=what, zero=zero)
    arrays = shapes.arrays_in(memory, wanted)
    return arrays if shapes.is_list_of_shapes(shape) else arrays[0]


def _on_gpu(
    session: Session,
    strategy: Strategy,
    device: Device,
    n_elems: int,
    dtype: np.dtype[Any],
    *,
    what: str,
    zero: bool,
) -> Any:
    """Return a flat array of the caller's on the store's GPU. what: what it is for, alike on all workers."""
    spaces, why = session.spaces, ""
    worker = f"worker {session.rank} of {session.num_workers}"
    space = spaces.device
    if space is None:
        why = f"{worker} uses no GPU: {spaces.missing}"
    elif not devices.is_any_gpu(device) and devices.gpu_number(device) != space.device:
        why = f"{worker} uses GPU {space.device}"
    strategy.allocate(f"{what}, but {why}" if why else what, 0)  # all workers learn of one that cannot
    if space is None or why:
        raise UnsupportedError(f"empty or zeros with device={shown(device)}: {why}")
    with space.gpu.current(f"makes {what}"):
        made = (space.cupy.zeros if zero else space.cupy.empty)(n_elems, dtype)
        space.cupy.cuda.get_current_stream().synchronize()  # nobody knows in which stream the caller works
    return made
