"""Ends what a job has left on this host; run there through the remote shell. Prints what it found, in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mpikv.commands.launch.processes import end_job

TERMINATE_S, KILL_S = 0.5, 3.0  # whoever is still there has had its gentle signal before


def main(arguments: Sequence[str]) -> int:
    """arguments: the job's id. Status 1 where something is still left."""
    (job,) = arguments
    if not re.fullmatch(r"[0-9a-f]{16,}", job):
        raise SystemExit(f"{job!r} is no job's id")
    found, left = end_job(job, TERMINATE_S, KILL_S)
    print(json.dumps({"found": found, "left": left}), flush=True)
    return 1 if left else 0
