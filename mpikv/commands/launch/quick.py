"""Starts what runs beside every rank without the package's own `__init__`, which imports NumPy.

`python -I -S .../quick.py rank ...` is up after 40 ms, `python -m mpikv.commands.launch.rank` after
350 ms, and every rank of a job needs it. Only the standard library and modules that need nothing else may be imported
this way.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def main() -> int:
    """Run `rank`, `sweep` or `folder` with the arguments that follow the word."""
    package = types.ModuleType("mpikv")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["mpikv"] = package
    status: int = importlib.import_module(f"mpikv.commands.launch.{sys.argv[1]}").main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
