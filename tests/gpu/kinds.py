"""On what the tests run: a fake GPU, and with the mark `gpu` this machine's."""

import pytest
from report import GPU

_CUDA = pytest.param("cuda", marks=getattr(pytest.mark, GPU))
KINDS = ["fake", _CUDA]
FULL = pytest.mark.parametrize("kind", [pytest.param("fake", marks=pytest.mark.full), _CUDA])
"""Of tests that only `scripts/test --full` makes on a fake GPU."""
