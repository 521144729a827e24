"""`mpikv bench`, on the kind of GPU that the first argument names.

KIND:BYTES: copies that it is compared with are as long as its values, and of BYTES at least.
"""

import sys

import gpus

from mpikv.__main__ import main
from mpikv.commands.bench import device

kind, _, least = sys.argv[1].partition(":")
if least or kind == "fake":
    device.LEAST_BYTES = int(least or 1 << 12)  # of a fake one nobody judges figures
gpus.use(kind)
sys.exit(main(["bench", *sys.argv[2:]]))
