"""A copy of what a clone of the repository would have, for tests that write where they run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHIVED = ("README.md", "LICENSE", "pyproject.toml", "mpikv", "examples", "scripts", "docs")  # where git is not there


def into(target: Path) -> None:
    """Copy the files that git tracks or would track into `target`."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        names = [str(path.relative_to(ROOT)) for top in ARCHIVED for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
