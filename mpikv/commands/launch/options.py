"""The options of `mpikv launch`, those of MXNet's tools/launch.py and some more, and of `mpikv submit`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import Any

from mpikv.commands.bench.start import RankedParser
from mpikv.commands.numbers import at_least, seconds

LAUNCHERS = ("local", "ssh", "mpi")
MOST_RANKS = 1_000_000  # more than any machine has: a typing error
LAUNCH_EXAMPLES = """examples:
  mpikv launch -n 4 -s 0 python train.py               4 workers here, no servers: ring allreduce
  mpikv launch -n 2 -s 2 python train.py --kv-store dist_sync
  mpikv launch -n 8 -H hosts --launcher ssh python train.py
  mpikv launch -n 4 -s 0 --env OMP_NUM_THREADS=2 --timeout 3600 --output-dir logs python train.py
  mpikv launch -n 4 -s 0 --restarts 3 python train.py  goes on from a state of seconds ago where a rank dies
  mpikv launch -n 4 -s 0 --on-failure continue python train.py   the others go on without it
  mpikv launch -n 4 --dry-run python train.py          a line of mpirun that starts the same
  mpikv launch -n 2 "python train.py --lr 0.1"         a command in quotes, as in MXNet's tutorial

exit status: the first failing rank's (128 + N for signal N); 124 after --timeout, 130 after Ctrl-C, 2 for wrong
options, 127 for a command that does not exist; never 0 where a rank failed, was killed, or never reported its end,
unless the others went on without it."""
SUBMIT_EXAMPLES = """examples:
  mpikv submit slurm -n 4 -s 2 --time 1:00:00 -- python train.py
  mpikv submit slurm -n 16 --queue gpu --option "--nodes=4" --option "--account=x" --wait -- python train.py
  mpikv submit sge -n 8 --pe mpi --time 30 --requeue -- python train.py
  mpikv submit slurm -n 4 --restarts 3 --requeue -- python train.py
  mpikv submit slurm -n 4 --dry-run -- python train.py > train.sbatch

exit status: 0 when the job was submitted; with --wait the job's; 2 for a wrong option or a refused job; 130 after
Ctrl-C, which cancels a job that is waited for."""
ELSEWHERE = {  # options and launchers of MXNet's, and of before, and what to do instead
    "--sync-dst-dir": "share the folder, or copy it first: rsync -a ./ HOST:DIR/ for each host",
    "--env-worker": "use --env, which all ranks get",
    "--env-server": "use --env, which all ranks get",
    "--hosts": "-H takes h1:4,h2 as well",
    "--start-timeout": "ranks have 120 s to start",
    "slurm": "mpikv submit slurm --wait -n ... -- COMMAND",
    "sge": "mpikv submit sge --wait -n ... -- COMMAND",
    "yarn": "neither Open MPI nor MPICH can start its daemons in containers of Hadoop's YARN; they know ssh, Slurm, "
    "PBS, LSF and SGE. Use --launcher ssh with a host file of the cluster's nodes, slurm or sge",
    "kubernetes": "Kubeflow's MPI operator starts sshd in pods and writes a host file: let its launcher's pod run "
    "mpikv launch -H /etc/mpi/hostfile ...",
}
IN_THE_SCRIPT = dict.fromkeys(
    ("--notice", "--stop-file", "--placement", "--distribution", "--python-env", "--launch-option"),
    "it is a line at the top of the script, which --dry-run prints; change it there and submit that",
) | {
    "--nodes": "Slurm has it as --option --nodes=N; in Grid Engine the parallel environment places ranks (--pe)",
    "--tasks-per-node": "Slurm has it as --option --ntasks-per-node=N; in Grid Engine choose a --pe",
}
SCHEDULERS = {  # the name for a reader, and an example of --option
    "slurm": ("Slurm", '--option "--mem=4G"'),
    "sge": ("Grid Engine", '--option "-l h_vmem=4G"'),
}


def add_launch(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="start workers and servers, here, on hosts or through a scheduler, and watch them",
        description="Start a command as workers, and servers beside it, with one mpirun. Every line of output has its "
        "rank in front; when one rank fails, all others are ended, on every host.",
        usage="mpikv launch -n WORKERS [options] COMMAND...",
        epilog=LAUNCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--num-workers", metavar="N", type=at_least(1, MOST_RANKS), required=True, help="workers")
    add("-s", "--num-servers", metavar="N", type=at_least(0, MOST_RANKS),
        help="servers; default: as many as workers; 0: none, the workers own the keys")  # fmt: skip
    add("--env", metavar="NAME[=VALUE]", action="append", default=[],
        help="a variable for all ranks; NAME alone has its value from here")  # fmt: skip
    add("--launcher", choices=LAUNCHERS, default="mpi", help="default mpi: mpirun, here, in an allocation or on the "
        "hosts given; local: here; ssh: hosts are checked first")  # fmt: skip
    add("-H", "--hostfile", metavar="FILE", help="a host a line: host, host:4 or host slots=4; or H1:4,H2 itself")
    add("--ssh", metavar="COMMAND", help="the remote shell, like 'ssh -p 2222' (default ssh)")
    add("--oversubscribe", action="store_true", help="more processes than the hosts have slots")
    add("--dry-run", action="store_true", help="print a line of mpirun that starts the same ranks, and run nothing")
    add("--timeout", metavar="SECONDS", type=seconds, help="end the job after so long, with status 124")
    add(
        "--restarts",
        metavar="N",
        type=at_least(0, MOST_RANKS),
        default=0,
        help="start the job again, up to so often, "
        "where a rank dies, is killed or goes away with its host; it goes on from the last snapshot (default 0)",
    )
    add("--min-workers", metavar="N", type=at_least(1, MOST_RANKS), default=1,
        help="with --restarts: go on with so many, where hosts are lost and slots are too few (default 1)")  # fmt: skip
    add("--on-failure", choices=("abort", "continue"), help="when a rank dies, the others end with it, or go on "
        "without it, under Open MPI alone (default: MPIKV_ON_FAILURE, or abort)")  # fmt: skip
    add("--grace", metavar="SECONDS", type=seconds, help="from SIGTERM to SIGKILL when the job is ended (default 4; "
        "MPIKV_TIMEOUT_S where workers save their state at SIGTERM, see MPIKV_STOP_SIGNALS)")  # fmt: skip
    add("--output-dir", metavar="DIR", help="also write each rank's output to DIR/worker-0.log, ...")
    add("--mpirun-options", metavar="TEXT", type=shlex.split, default=[],
        help="more options for mpirun, like '--map-by numa'")  # fmt: skip
    add("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="the workers' command")
    parser.gone = ELSEWHERE
    parser.set_defaults(run=_launch, parser=parser)


class SubmitParser(RankedParser):
    """The options of one scheduler's jobs. `DASHED` take the word after them even if it begins with a dash.

    argparse would take such a word for an option of its own, and say that the value is missing.
    """

    DASHED = ("options",)

    def _get_nargs_pattern(self, action: argparse.Action) -> str:
        # A for a word, O for one that looks like an option. In argparse since its beginning.
        return "([AO])" if action.dest in self.DASHED else super()._get_nargs_pattern(action)


def add_submit(commands: Any) -> None:
    submit = commands.add_parser(
        "submit",
        help="write a batch script for Slurm or Grid Engine and submit it",
        description="Write a batch script that starts a command as workers and servers, and submit it. The script, and "
        "what it does with signals, is described in docs/clusters.md.",
        epilog=SUBMIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = submit.add_subparsers(metavar="slurm|sge", required=True, dest="scheduler", parser_class=SubmitParser)
    for key, (name, example) in SCHEDULERS.items():
        parser = kinds.add_parser(
            key,
            help=f"submit to {name}",
            usage=f"mpikv submit {key} -n WORKERS [options] -- COMMAND...",
            epilog=SUBMIT_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_submit_options(parser)
        parser.gone = IN_THE_SCRIPT
        parser.hint = f"; what {name} itself understands goes through --option, as in {example}"
        parser.set_defaults(run=_submit, parser=parser)


def _add_submit_options(parser: argparse.ArgumentParser) -> None:
    """The options; each is stored under the name of the field of `BatchJob` that it sets."""
    add = parser.add_argument
    add("-n", "--num-workers", dest="workers", type=int, required=True, metavar="N", help="workers")
    add("-s", "--num-servers", dest="servers", type=int, default=0, metavar="N", help="servers beside them (0)")
    add("-t", "--time", metavar="LIMIT", help="H:MM:SS, M:SS, minutes or D-H; default: the queue's limit")
    add("--restarts", type=int, default=0, metavar="N",
        help="start ranks again, up to so often, from their last snapshot, where one dies or a host (0)")  # fmt: skip
    add("--requeue", action="store_true", help="stopped so, and ended with status 0, the job goes back into the queue")
    add("--queue", "--partition", metavar="NAME", help="the queue or partition; default: the scheduler's choice")
    add("--name", default="train", help="the job's name (train)")
    add("--output-dir", default="", metavar="DIR", help="where NAME-JOB.out is written; default: here")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for all ranks; NAME alone has its value from here")  # fmt: skip
    add("--option", dest="options", action="append", default=[], metavar="TEXT",
        help='a line more for the scheduler, as in --option "--account=x" or --option "-P x"')  # fmt: skip
    add("--dry-run", action="store_true", help="print the script")
    add("--wait", action="store_true", help="show the job's output and state until it ends; exit with its status")
    add("--cpus-per-task", type=int, default=1, metavar="N", help="Slurm: CPUs, and threads of NumPy, of each rank (1)")
    add("--srun", dest="with_srun", action="store_true", help="Slurm: srun starts the ranks, with Open MPI alone")
    add("--pe", dest="parallel_environment", default="", metavar="NAME",
        help="Grid Engine: the parallel environment (mpi); see qconf -spl")  # fmt: skip
    # Last: it takes all words from the first that is no option.
    add("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="what every rank runs")


def _command_words(parser: argparse.ArgumentParser, words: Sequence[str], example: str) -> list[str]:
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


def _launch(options: argparse.Namespace) -> int:
    options.command = _command_words(options.parser, options.command, "mpikv launch -n 2 python train.py")
    from mpikv.commands.launch.job import run  # noqa: PLC0415 - the other commands need none of these

    return run(options)


def _submit(options: argparse.Namespace) -> int:
    options.command = _command_words(options.parser, options.command, "mpikv submit slurm -n 2 -- python train.py")
    from mpikv.commands.launch.submit import submit  # noqa: PLC0415

    return submit(options)
