"""`mpikv bench`, on the kind of GPU that the first argument names."""

import sys

import gpus

from mpikv.__main__ import main
from mpikv.bench import device_probes

if sys.argv[1] == "fake":
    device_probes.LEAST_BYTES = 1 << 12  # nobody judges figures
gpus.use(sys.argv[1], eager=0.5)
sys.exit(main(["bench", *sys.argv[2:]]))
