"""NCCL through the installed CuPy: what a communicator is made of, its calls and its constants.

In the environment without NCCL's library: that it says so, and raises nothing.
"""

from __future__ import annotations

import importlib.util

import frameworks
import pytest
from fake_cupy import Machine
from installed import NO_DRIVER, nccl, outcome, parameters

FAKE = Machine().process().cuda.nccl
ARRAYS = ["count", "datatype"]


def test_it_is_there_or_says_that_it_is_not() -> None:
    if importlib.util.find_spec("nvidia.nccl") is None:
        assert nccl.available is False
        assert not hasattr(nccl, "NcclCommunicator")
        frameworks.need("nvidia.nccl")
    assert nccl.available is True
    assert 22700 <= nccl.get_version() < 30000  # 2.27; major, two digits of minor, two more
    assert nccl.get_build_version() // 10000 == 2


def test_a_communicator() -> None:
    """It comes as far as CUDA with what the ranks are given, and no further with what older CuPys took."""
    frameworks.need("nvidia.nccl")
    found = nccl.get_unique_id()
    assert isinstance(found, bytes)
    assert len(found) == len(FAKE.get_unique_id()) == 128
    assert found != nccl.get_unique_id()
    assert list(parameters(nccl.NcclCommunicator))[:3] == ["ndev", "commId", "rank"]
    assert outcome(lambda: nccl.NcclCommunicator(1, found, 0)) in (nccl.NcclError, NO_DRIVER)
    for wrong, error in ((tuple(found), TypeError), (found[1:], ValueError)):
        assert outcome(lambda wrong=wrong: nccl.NcclCommunicator(1, wrong, 0)) is error
        assert outcome(lambda wrong=wrong: FAKE.NcclCommunicator(1, wrong, 0)) is error


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("allReduce", ["op", "stream"]),
        ("reduceScatter", ["op", "stream"]),
        ("allGather", ["stream"]),
        ("broadcast", ["root", "stream"]),
        ("reduce", ["op", "root", "stream"]),
        ("check_async_error", None),
        ("abort", None),
        ("destroy", None),
    ],
)
def test_calls(name: str, last: list[str] | None) -> None:
    frameworks.need("nvidia.nccl")
    found = list(parameters(getattr(nccl.NcclCommunicator, name)))
    assert len(found) == (0 if last is None else 4 + len(last))
    if last is not None:
        assert [one.replace("buff", "buf") for one in found[:2]] == ["sendbuf", "recvbuf"]
        assert [one.removeprefix("recv") for one in found[2:]] == [*ARRAYS, *last]


def test_groups_and_constants() -> None:
    frameworks.need("nvidia.nccl")
    nccl.groupStart()
    nccl.groupEnd()
    for name, number in vars(FAKE).items():
        if name.startswith("NCCL_"):
            assert getattr(nccl, name) == number, name
    assert nccl.NCCL_BFLOAT16 == 9
