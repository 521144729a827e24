"""The options of the examples for gradient compression, momentum that goes with it, and what a run says of it.

Codecs that send few values, or coarse ones, and the rest in later pushes, reach a better accuracy where each worker
keeps the momentum of its own gradients and pushes that, and the optimizer has none (`WorkerMomentum`). Without
compression both are the same training, but for steps after a change of the learning rate.
Source: momentum correction in Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from mpikv import KVStore

LATE = frozenset({"2bit", "topk"})  # codecs that send most of a gradient in later pushes
WHOLE_ELEMS = 1000  # pieces of topk up to which all is sent: biases, the last layer; 1 % of a bias is one value


def add_options(parser: argparse.ArgumentParser) -> None:
    """MXNet's two, and what else the store knows."""
    add = parser.add_argument_group("gradient compression (docs/compression.md)").add_argument
    add(
        "--gc-type",
        default="none",
        metavar="TYPE",
        help='none, fp16, 2bit, int8, topk, ...; or with further parameters, as in \'{"type": "topk", "ratio": 0.05}\'',
    )
    add(
        "--gc-threshold",
        type=float,
        metavar="T",
        help="of 2bit and 1bit (0.5; of 2bit with sgd half of --batch-size, as pushes are sums over a batch)",
    )
    add("--gc-pull", metavar="TYPE", help="of what comes back, such as fp16 (as it is)")
    add(
        "--gc-momentum",
        choices=("worker", "store"),
        help="who keeps sgd's momentum: each worker, of its gradients, and pushes that, or the optimizer on the store"
        f" (worker for {', '.join(sorted(LATE))}, else store)",
    )
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
    elif params.get("type") == "2bit" and options.optimizer == "sgd":
        params.setdefault("threshold", options.batch_size / 2)
    elif params.get("type") == "topk":
        params.setdefault("whole_elems", WHOLE_ELEMS)
    if options.gc_pull is not None:
        params["pull"] = options.gc_pull
    if options.gc_force:
        params["force"] = True
    if options.gc_momentum == "worker" and options.optimizer != "sgd":
        parser.error(f"--gc-momentum worker is for --optimizer sgd, not {options.optimizer}")
    return None if params == {"type": "none"} else params


class WorkerMomentum:
    """velocity = momentum * velocity + gradient, of which each worker keeps its own and pushes it as its gradient.

    Weight decay is no part of it, and becomes so much larger as a velocity is than one gradient. Velocities are not
    saved: a run that is resumed begins with none, and is not the same one bit for bit.
    """

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self._velocities: dict[Any, Any] = {}

    def apply(self, name: Any, gradient: Any, share: float = 1.0) -> None:
        """Write the velocity into `gradient`, an array or a tensor. name: of which one it is, on which device.

        share: how many images all workers have in this step, of those in a whole one. The store will divide by the
        images of this step; the velocity is that of whole ones.
        """
        velocity = self._velocities.get(name)
        if velocity is None:
            velocity = self._velocities[name] = gradient * 0
        velocity *= self.momentum
        velocity += gradient / share
        gradient[...] = velocity * share


def worker_momentum(options: argparse.Namespace, optimizer_params: dict[str, Any]) -> WorkerMomentum | None:
    """The momentum that workers keep, if they do; then it is taken from the optimizer's arguments."""
    momentum = optimizer_params.get("momentum", 0.0)
    compression = options.compression or {"type": "none"}
    where = options.gc_momentum or ("worker" if compression["type"] in LATE else "store")
    if where == "store" or options.optimizer != "sgd" or not 0 < momentum < 1:
        return None
    optimizer_params.update(momentum=0.0, wd=optimizer_params["wd"] / (1 - momentum))
    return WorkerMomentum(momentum)


def print_saving(store: KVStore) -> None:
    """On worker 0: what compression has saved on the way out, if anything was compressed."""
    stats = store.stats()
    if store.rank == 0 and stats.get("encoded_bytes"):
        before, after = (stats[name] / 1e6 for name in ("encoded_from_bytes", "encoded_bytes"))
        print(f"compression: {before:.1f} MB of gradients travelled as {after:.1f} MB", flush=True)
