"""What all tests share: the record of outcomes that `scripts/test` counts, Hypothesis without deadlines, and SIGINT."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings
from report import Report

# No deadline: cores are shared with other work, so a single example may take any time.
settings.register_profile("mpikv", deadline=None)
settings.load_profile("mpikv")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the report."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in the background so, and the programs under test would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu: needs a CUDA device and CuPy")
    config.addinivalue_line("markers", "cluster_full: a test on clusters that only scripts/test --cluster runs")
    config.pluginmanager.register(Report(), "mpikv-report")
