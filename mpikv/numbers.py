"""Numbers on the command line: readers for argparse, whose ArgumentTypeError says what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(minimum: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `minimum` on, up to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is less than {minimum}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"{number} is more than {most}")
        return number

    return parse


def seconds(text: str) -> float:
    """A number of seconds, more than 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number
