"""Which of the GPUs that a worker sees it uses.

MPIKV_LOCAL_DEVICE names it. Otherwise it is the local rank, the worker's number on its host, modulo the number of GPUs
that the worker sees. So ranks that all see every GPU of their host take one each, or share them evenly; a rank that was
given a GPU of its own, by its scheduler or by CUDA_VISIBLE_DEVICES, sees one and takes that.

Numbers count what is visible, as CUDA does: GPU 0 under CUDA_VISIBLE_DEVICES=3 is the machine's fourth. Pure.
"""

from __future__ import annotations

from mpikv.errors import ConfigError

AUTO = "auto"


def choose(setting: int | str, local_rank: int, visible: int) -> int | None:
    """Return the number of the GPU to use, None where none is visible and none was asked for.

    setting: of MPIKV_LOCAL_DEVICE, a number from 0 or `auto`. local_rank: from 0, among the ranks of the host. Raises
    ConfigError where the GPU that was asked for is not among the visible ones.
    """
    if setting == AUTO:
        return local_rank % visible if visible else None
    number = int(setting)
    if number < visible:
        return number
    if visible == 0:
        raise ConfigError(
            f"MPIKV_LOCAL_DEVICE={number}, but this process sees no GPU: unset it to work on the processor, ask the "
            "scheduler for a GPU, or look at CUDA_VISIBLE_DEVICES; `mpikv info` says what is seen"
        )
    seen = "one GPU, number 0" if visible == 1 else f"{visible} GPUs, numbers 0 to {visible - 1}"
    raise ConfigError(
        f"MPIKV_LOCAL_DEVICE={number}, but this process sees {seen}: name one of these, or unset it and each rank "
        "takes one by its local rank. Numbers count the GPUs that are visible, not those of the machine "
        "(CUDA_VISIBLE_DEVICES, --gpus-per-task)"
    )


def describe(setting: int | str, local_rank: int, visible: int) -> str:
    """Say which GPU is used, and why that one. Raises as `choose` does."""
    number = choose(setting, local_rank, visible)
    if number is None:
        return "none"
    if setting != AUTO:
        return f"gpu:{number}, by MPIKV_LOCAL_DEVICE"
    if visible == 1:
        return "gpu:0, the only one that is visible"
    return f"gpu:{number}, by local rank {local_rank}"
