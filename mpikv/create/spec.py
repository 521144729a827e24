"""The name of a store, read once into a value.

MXNet's names are matched there by substring, so that any text is accepted and a typing error gives another store. Here
the table below is all there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpikv.common.checks import meant, shown, wrong


@dataclass(frozen=True)
class StoreSpec:
    """What a store's name means: over several processes or not, synchronous or not, on the device or in host memory."""

    distributed: bool
    synchronous: bool
    on_device: bool


_LOCAL = StoreSpec(distributed=False, synchronous=True, on_device=False)
_DEVICE = StoreSpec(distributed=False, synchronous=True, on_device=True)
_SYNC = StoreSpec(distributed=True, synchronous=True, on_device=False)
_ASYNC = StoreSpec(distributed=True, synchronous=False, on_device=False)
_SYNC_DEVICE = StoreSpec(distributed=True, synchronous=True, on_device=True)
_ASYNC_DEVICE = StoreSpec(distributed=True, synchronous=False, on_device=True)

NAMES: dict[str, StoreSpec] = {
    "local": _LOCAL,
    "local_update_cpu": _LOCAL,
    "local_allreduce_cpu": _LOCAL,
    "device": _DEVICE,
    "local_allreduce_device": _DEVICE,
    "nccl": _DEVICE,
    "dist": _SYNC,
    "dist_sync": _SYNC,
    "dist_async": _ASYNC,
    "dist_sync_device": _SYNC_DEVICE,
    "dist_device_sync": _SYNC_DEVICE,
    "dist_async_device": _ASYNC_DEVICE,
    "dist_device_async": _ASYNC_DEVICE,
}


def parse(name: str) -> StoreSpec:
    """Return the meaning of a store's name, in any case. TypeError, or ValueError that lists the valid names."""
    if not isinstance(name, str):
        raise wrong("the type of a store", "a str such as 'dist_sync'", name)
    spec = NAMES.get(name.lower())
    if spec is None:
        raise ValueError(f"unknown type of store {shown(name)}; valid are {', '.join(NAMES)}.{meant(name, NAMES)}")
    return spec
