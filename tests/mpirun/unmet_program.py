"""A rank of the jobs in which rank 1 does not come to MPI_Init: `unmet_program.py CASE`.

Other ranks print `comes` before they make the store, and `survived` where they get beyond it, which none may.
"""

from __future__ import annotations

import os
import sys
import time

from mpikv import kv
from mpikv.runtime import init, launcher, unmet

case = sys.argv[1]
init.STARTING_S = 3.0 if case == "never comes" else 60.0
rank = launcher.said_rank(os.environ)
name = "dist_sync"
if rank == 1:
    if case == "unknown type":
        name = "dist_asink"
    elif case == "no such interface":
        os.environ["MPIKV_INTERFACE"] = "absent0"
    else:
        os.environ["MPIKV_TIMEOUT_S"] = "ten"
    unmet.MEET_S = 1.0 if case == "others never come" else 20.0
    if case == "never comes":
        time.sleep(600)
elif case == "others never come":
    time.sleep(600)
else:
    time.sleep(1.0)  # rank 1 has long found out
    sys.stdout.write(f"rank {rank} comes\n")
    sys.stdout.flush()
try:
    with kv.create(name) as store:
        store.barrier()
except Exception:
    if case != "caught":
        raise
    sys.exit(0)
print("survived", flush=True)
