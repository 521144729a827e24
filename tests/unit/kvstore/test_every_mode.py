"""Every mode goes through the checks of tests/store_checks.py."""

from __future__ import annotations

import pytest
from on_workers import on
from store_checks import every_check
from store_modes import FEW, FEW_ASYNC, HYBRID, ONE_HOST, THREE_HOSTS, TWO_HOSTS

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix


@on(*FEW, ONE_HOST, TWO_HOSTS, THREE_HOSTS)
def test_every_check(store, mode):
    every_check(store, mode)


@on(TWO_HOSTS, HYBRID[0], FEW_ASYNC[0], late=True, progress="calls")
def test_messages_that_come_late_to_a_store_without_a_thread(store, mode):
    every_check(store, mode)
