"""`python -m mpikv.server`: a program that makes its ranks servers.

`mpirun -n 4 python train.py : -n 2 python -m mpikv.server` gives 4 workers and 2 servers.
"""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mpikv.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    from mpikv.kv import serve_only  # noqa: PLC0415 - after --help, which needs no MPI

    serve_only()


if __name__ == "__main__":
    main()
