"""Programs that not every machine has, for the tests that start them.

    compiler = programs.need("g++", "clang++")

A test whose programs are missing is skipped, and the last lines of `scripts/test` name them: "skipped: 3 x needs g++".
"""

from __future__ import annotations

import shutil

import pytest


def need(*names: str) -> str:
    """The path of the first of these that is installed."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"needs {' or '.join(names)}")
