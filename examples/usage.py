"""The command line of a program that many ranks run: what it says about itself is printed once, not by each of them.

MPI is not started for that. Launchers tell their ranks who they are by environment variables, too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import IO, Any, NoReturn

from mpikv import optimizers
from mpikv.runtime.launcher import let_rank_0_speak, said_rank


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that is silent on all ranks but the first. The text of `description` keeps its lines."""

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def print_help(self, file: IO[str] | None = None) -> None:
        """On rank 0."""
        if said_rank(os.environ) == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Status 2 on all ranks, and the message from rank 0, before `mpirun` ends the others or these end the job."""
        if said_rank(os.environ) == 0:
            super().error(message)
        let_rank_0_speak()
        self.exit(2)

    def at_least_1(self, options: argparse.Namespace, *names: str) -> None:
        """End with an error where one of these options, if it is given, is less."""
        for name in names:
            value = getattr(options, name)
            if value is not None and value < 1:
                self.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    def numbers(self, option: str, text: str, kind: type = int) -> list[Any]:
        """The numbers of an option such as 6,9."""
        try:
            return [kind(one) for one in text.split(",") if one]
        except ValueError as error:
            self.error(f"{option} is numbers with commas between them ({error})")

    def add_training(self, what: str, optimizer: str) -> None:
        """The options that trainings share. what: images or examples. optimizer: by default."""
        add, names = self.add_argument, optimizers.names()
        add(
            "--kv-store",
            "--kvstore",
            default="dist_sync",
            metavar="TYPE",
            help="dist_sync, dist_async, ... (dist_sync)",
        )
        add("--num-servers", type=int, help="how many of the ranks are servers (MPIKV_NUM_SERVERS)")
        add("--batch-size", type=int, default=64, help=f"{what} of one worker in a step, shared by its devices (64)")
        add("--max-steps", type=int, help="stop after so many steps")
        add("--num-examples", type=int, help=f"train on the first N {what} only")
        text = f"one of {', '.join(names)} ({optimizer})"
        add("--optimizer", choices=names, default=optimizer, metavar="NAME", help=text)
        add("--seed", type=int, default=0, help=f"of the first weights, the order of the {what} and their changes (0)")
        add("--num-devices", type=int, default=1, help="replicas of the model per worker, on the CPU (1)")
        text = "GPUs of each worker, as in 0,1; alone: the one that the store uses; then --num-devices does not count"
        add("--gpus", nargs="?", const="auto", help=text)
        add("--save", type=Path, metavar="FILE", help="write all that is needed to go on into FILE after every epoch")
        add("--resume", type=Path, metavar="FILE", help="go on from what --save wrote")
