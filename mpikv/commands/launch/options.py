"""The options of `mpikv launch`: those of MXNet's tools/launch.py, with their meaning, and some more."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from mpikv.commands.numbers import at_least, seconds

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "sge", "yarn", "kubernetes")
BAD_INPUT = 2
MOST_RANKS = 1_000_000  # more than any machine has: a typing error
EXAMPLES = """examples:
  mpikv launch -n 4 -s 0 python train.py               4 workers here, no servers: ring allreduce
  mpikv launch -n 2 -s 2 python train.py --kv-store dist_sync
  mpikv launch -n 8 -H hosts --launcher ssh --sync-dst-dir $HOME/job python train.py
  mpikv launch -n 4 -s 0 --env OMP_NUM_THREADS=2 --timeout 3600 --output-dir logs python train.py
  mpikv launch -n 4 --dry-run python train.py          a line of mpirun that starts the same
  mpikv launch -n 2 "python train.py --lr 0.1"         a command in quotes, as in MXNet's tutorial

exit status: the first failing rank's (128 + N for signal N); 124 after --timeout, 130 after Ctrl-C, 2 for wrong
options, 127 for a command that does not exist; never 0 where a rank failed, was killed, or never reported its end."""
ELSEWHERE = {  # launchers of MXNet's that are none of ours, and what to do instead
    "yarn": "neither Open MPI nor MPICH can start its daemons in containers of Hadoop's YARN; they know ssh, Slurm, "
    "PBS, LSF and SGE. Use --launcher ssh with a host file of the cluster's nodes, slurm or sge",
    "kubernetes": "Kubeflow's MPI operator starts sshd in pods and writes a host file: let its launcher's pod run "
    "mpikv launch -H /etc/mpi/hostfile ...",
}


def add_parser(commands: Any) -> None:
    """Add `launch` to the commands of `mpikv`."""
    parser = commands.add_parser(
        "launch",
        help="start workers and servers, here, on hosts or through a scheduler, and watch them",
        description="Start a command as workers, and servers beside it, with one mpirun. Every line of output has its "
        "rank in front; when one rank fails, all others are ended, on every host.",
        usage="mpikv launch -n WORKERS [options] COMMAND...",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--num-workers", metavar="N", type=at_least(1, MOST_RANKS), required=True, help="workers")
    parser.add_argument("-s", "--num-servers", metavar="N", type=at_least(0, MOST_RANKS),
                        help="servers; default: as many as workers; 0: none, the workers own the keys")  # fmt: skip
    for option, who in (("--env", "all"), ("--env-worker", "the workers"), ("--env-server", "the servers")):
        parser.add_argument(option, metavar="NAME[=VALUE]", action="append", default=[],
                            help=f"a variable for {who}; NAME alone has its value from here")  # fmt: skip
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpi", help="default mpi: mpirun, here, in an "
                        "allocation or on the hosts given; local: here; ssh: the hosts are checked first; slurm, sge: "
                        "submitted, and waited for")  # fmt: skip
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="a host a line: host, host:4 or host slots=4")
    parser.add_argument("--hosts", metavar="H1:4,H2", help="the same without a file")
    parser.add_argument("--sync-dst-dir", metavar="DIR", help="copy the current folder to DIR on every host (rsync), "
                        "and run the command there")  # fmt: skip
    parser.add_argument("--ssh", metavar="COMMAND", help="the remote shell, like 'ssh -p 2222' (default ssh)")
    parser.add_argument("--oversubscribe", action="store_true", help="more processes than the hosts have slots")
    parser.add_argument("--dry-run", action="store_true", help="print a line of mpirun that starts the "
                        "same ranks, and run nothing")  # fmt: skip
    parser.add_argument("--timeout", metavar="SECONDS", type=seconds, help="end the job after so long, with status 124")
    parser.add_argument("--start-timeout", metavar="SECONDS", type=seconds, default=120.0,
                        help="for all ranks to start (default 120)")  # fmt: skip
    parser.add_argument("--grace", metavar="SECONDS", type=seconds,
                        help="from SIGTERM to SIGKILL when the job is ended (default 4; MPIKV_TIMEOUT_S where workers "
                        "save their state at SIGTERM, see MPIKV_STOP_SIGNALS)")  # fmt: skip
    parser.add_argument("--output-dir", metavar="DIR", help="also write each rank's output to DIR/worker-0.log, ...")
    parser.add_argument("--mpirun-options", metavar="TEXT", type=shlex.split, default=[],
                        help="more options for mpirun, like '--map-by numa'")  # fmt: skip
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="the workers' command")
    parser.set_defaults(run=_run, parser=parser)


def command_words(parser: argparse.ArgumentParser, words: Sequence[str], example: str) -> list[str]:
    """The words of the command. One word with spaces that is no file is a whole line, as MXNet's launch.py took it.

    Ends the program with the parser's error where there is no command; `example` is shown then.
    """
    words = list(words[1:] if words[:1] == ["--"] else words)
    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.exists(words[0]):
        try:
            words = shlex.split(words[0])
        except ValueError as error:  # a quotation mark without its counterpart
            parser.error(f"COMMAND {words[0]!r}: {error}; write it without quotes around the whole: {example}")
    if not words:
        parser.error(f"no command: {example}")
    return words


def _run(options: argparse.Namespace) -> int:
    options.command = command_words(options.parser, options.command, "mpikv launch -n 2 python train.py")
    if options.launcher in ELSEWHERE:
        print(f"mpikv launch: error: --launcher {options.launcher}: {ELSEWHERE[options.launcher]}", file=sys.stderr)
        return BAD_INPUT
    if options.launcher in ("slurm", "sge"):
        from mpikv.commands.launch import submit  # noqa: PLC0415

        status: int = submit.launch(options)
        return status
    from mpikv.commands.launch import job  # noqa: PLC0415 - the other commands do not need it

    return job.run(options)
