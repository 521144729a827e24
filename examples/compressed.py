"""The options of the examples for gradient compression, and what a run says of it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mpikv import KVStore


def add_options(parser: argparse.ArgumentParser) -> None:
    """MXNet's two, and what else the store knows."""
    add = parser.add_argument_group("gradient compression (docs/compression.md)").add_argument
    add(
        "--gc-type",
        default="none",
        metavar="TYPE",
        help='none, fp16, 2bit, int8, topk, ...; or with further parameters, as in \'{"type": "topk", "ratio": 0.05}\'',
    )
    add("--gc-threshold", type=float, metavar="T", help="of 2bit (0.5)")
    add("--gc-pull", metavar="TYPE", help="of what comes back, such as fp16 (as it is)")
    add("--gc-force", action="store_true", help="also where it saves no time, as on one host")


def compression_params(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any] | None:
    """What `Trainer` and `set_gradient_compression` take."""
    text: str = options.gc_type
    try:
        params = json.loads(text) if text.startswith("{") else {"type": text}
    except ValueError as error:
        parser.error(f"--gc-type {text}: {error}")
    if options.gc_threshold is not None:
        params["threshold"] = options.gc_threshold
    if options.gc_pull is not None:
        params["pull"] = options.gc_pull
    if options.gc_force:
        params["force"] = True
    return None if params == {"type": "none"} else params


def print_saving(store: KVStore) -> None:
    """On worker 0: what compression has saved on the way out, if anything was compressed."""
    stats = store.stats()
    if store.rank == 0 and stats.get("encoded_bytes"):
        before, after = (stats[name] / 1e6 for name in ("encoded_from_bytes", "encoded_bytes"))
        print(f"compression: {before:.1f} MB of gradients travelled as {after:.1f} MB", flush=True)
