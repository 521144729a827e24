"""Starts what runs beside every rank without the package's own `__init__`, which imports NumPy.

`python -I -S .../quick.py rank ...` is up after 40 ms, `python -m mpikv.commands.launch.rank` after 350 ms, and every
rank of a job needs it. Only the standard library and modules that need nothing else may be imported this way.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

PACKAGE = next(folder for folder in Path(__file__).resolve().parents if folder.name == "mpikv")


def command(what: str, *arguments: str) -> list[str]:
    """The command that runs `rank` or `sweep` with these arguments, here or on another host.

    Isolated and without site: it needs the standard library alone, and no variable of the user's may hinder it.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), what, *arguments]


def main() -> int:
    package = types.ModuleType("mpikv")
    package.__path__ = [str(PACKAGE)]
    sys.modules["mpikv"] = package
    what, *arguments = sys.argv[1:]
    if what == "rank":
        from mpikv.commands.launch.rank import main as run  # noqa: PLC0415 - for each the shortest start
    else:
        from mpikv.commands.launch.processes import sweep as run  # noqa: PLC0415
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
