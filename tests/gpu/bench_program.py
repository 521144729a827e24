"""`mpikv bench`, on the kind of GPU that the first argument names."""

import sys

import gpus

from mpikv.__main__ import main

gpus.use(sys.argv[1], memory_bytes=4 << 30, eager=0.5)
sys.exit(main(["bench", *sys.argv[2:]]))
