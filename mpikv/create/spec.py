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

    distributed: bool = False
    synchronous: bool = True
    on_device: bool = False


NAMES: dict[str, StoreSpec] = {
    **dict.fromkeys(("local", "local_update_cpu", "local_allreduce_cpu"), StoreSpec()),
    **dict.fromkeys(("device", "local_allreduce_device", "nccl"), StoreSpec(on_device=True)),
    **dict.fromkeys(("dist", "dist_sync"), StoreSpec(distributed=True)),
    "dist_async": StoreSpec(distributed=True, synchronous=False),
    **dict.fromkeys(("dist_sync_device", "dist_device_sync"), StoreSpec(distributed=True, on_device=True)),
    **dict.fromkeys(
        ("dist_async_device", "dist_device_async"), StoreSpec(distributed=True, synchronous=False, on_device=True)
    ),
}


def parse(name: str) -> StoreSpec:
    """Return the meaning of a store's name, in any case. TypeError, or ValueError that lists the valid names."""
    if not isinstance(name, str):
        raise wrong("the type of a store", "a str such as 'dist_sync'", name)
    spec = NAMES.get(name.lower())
    if spec is None:
        raise ValueError(f"unknown type of store {shown(name)}; valid are {', '.join(NAMES)}.{meant(name, NAMES)}")
    return spec
