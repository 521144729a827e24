"""Which of the visible GPUs a worker uses."""

from __future__ import annotations

import pytest

from mpikv import ConfigError
from mpikv.runtime.device_choice import choose, describe


@pytest.mark.parametrize(
    ("setting", "local_rank", "visible", "expected", "says"),
    [
        ("auto", 0, 4, 0, "gpu:0, by local rank 0"),
        ("auto", 3, 4, 3, "gpu:3, by local rank 3"),
        ("auto", 5, 4, 1, "gpu:1, by local rank 5"),  # more ranks than GPUs share them
        ("auto", 3, 1, 0, "gpu:0, the only one that is visible"),  # the scheduler has given each rank its own
        ("auto", 3, 0, None, "none"),
        (2, 0, 4, 2, "gpu:2, by MPIKV_LOCAL_DEVICE"),
        (0, 3, 1, 0, "gpu:0, by MPIKV_LOCAL_DEVICE"),
    ],
)
def test_the_device(setting: int | str, local_rank: int, visible: int, expected: int | None, says: str) -> None:
    assert choose(setting, local_rank, visible) == expected
    assert describe(setting, local_rank, visible) == says


@pytest.mark.parametrize(
    ("setting", "visible", "says"),
    [
        (1, 0, r"MPIKV_LOCAL_DEVICE=1, but this process sees no GPU: unset it"),
        (0, 0, r"MPIKV_LOCAL_DEVICE=0, but this process sees no GPU"),
        (1, 1, r"sees one GPU, number 0: name one of these, or unset it.*CUDA_VISIBLE_DEVICES"),
        (9, 4, r"MPIKV_LOCAL_DEVICE=9, but this process sees 4 GPUs, numbers 0 to 3: "),
    ],
)
def test_a_device_that_is_not_visible(setting: int, visible: int, says: str) -> None:
    for function in (choose, describe):
        with pytest.raises(ConfigError, match=says):
            function(setting, 0, visible)
