"""For `test_harness.py`: hold hosts with all that can run on them, print the folder, and wait.

hold_everything.py PROGRAM... - of sshd, slurm, grid_engine
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from namespaces import network  # noqa: E402 - lies beside this file

with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(network(2))
    for name in sys.argv[1:]:
        stack.enter_context(getattr(importlib.import_module(name), name)(hosts))
    print("holds", hosts.folder, *(host.pid for host in hosts.hosts), flush=True)
    print(hosts.start(hosts[1], "sleep", "600").pid, flush=True)
    sys.stdin.read()  # until whoever started this has gone
