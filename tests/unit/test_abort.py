"""The hooks of a rank."""

from __future__ import annotations

import threading

import pytest

from mpikv.transports.abort import Guard


def test_only_the_main_threads_exit_is_remembered():
    guard = Guard(0, 2)

    def leave() -> None:
        with pytest.raises(SystemExit):
            guard._remember_exit(3)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert guard.exit_status == 0
    for status, remembered in ((3, 3), (256 + 4, 4), ("a text", 1), (None, 0), (-1, 255)):
        with pytest.raises(SystemExit):
            guard._remember_exit(status)
        assert guard.exit_status == remembered
