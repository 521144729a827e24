"""NCCL through the installed CuPy: a communicator, and what is said where its library is missing.

Names, parameters and constants: test_names.py.
"""

from __future__ import annotations

import frameworks
from fake_cupy import Machine
from installed import NO_DRIVER, nccl, outcome, parameters

FAKE = Machine().process().cuda.nccl


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
