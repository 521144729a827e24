"""NCCL through the installed CuPy: a communicator, and what is said where its library is missing.

Names, parameters and constants: test_names.py.
"""

from __future__ import annotations

import importlib.util

import frameworks
from fake_cupy import Machine
from installed import NO_DRIVER, nccl, outcome, parameters

FAKE = Machine().process().cuda.nccl


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
