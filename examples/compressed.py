"""The options of the examples for gradient compression, what workers push because of it, and what a run says of it.

Codecs that send few values, or coarse ones, and the rest in later pushes, reach a better accuracy where an optimizer
with a memory works before them and not behind them. So each worker keeps the momentum of its own gradients and pushes
that (`WorkerMomentum`), or pushes the steps that Adam makes of its own gradients (`WorkerAdam`), and the store adds
them up by plain SGD.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from mpikv import KVStore
from mpikv.arrays import as_numpy

# of each optimizer whose memory workers can keep, the codecs with which they do: its steps are better before those
LATE = {"sgd": frozenset({"2bit", "topk"}), "adam": frozenset({"1bit", "2bit", "topk"})}
WHOLE_ELEMS = 1000  # pieces of topk up to which all is sent: biases, the last layer; 1 % of a bias is one value


def _listed(optimizer: str) -> str:
    return f"{', '.join(sorted(LATE[optimizer]))} with {optimizer}"


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
        help="of 2bit and 1bit (0.5; of 2bit with sgd half of --batch-size, as pushes are sums over a batch, and with"
        " adam 1)",
    )
    add("--gc-pull", metavar="TYPE", help="of what comes back, such as fp16 (as it is)")
    add(
        "--gc-momentum",
        choices=("worker", "store"),
        help="who keeps sgd's momentum, or adam's means: each worker, of its gradients, and pushes what it makes of"
        f" them, or the optimizer on the store (worker for {' and '.join(map(_listed, LATE))}, else store)",
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
    elif params.get("type") == "2bit" and options.optimizer in LATE:
        params.setdefault("threshold", options.batch_size / 2 if options.optimizer == "sgd" else 1.0)
    elif params.get("type") == "topk":
        params.setdefault("whole_elems", WHOLE_ELEMS)
    if options.gc_pull is not None:
        params["pull"] = options.gc_pull
    if options.gc_force:
        params["force"] = True
    if options.gc_momentum == "worker" and options.optimizer not in LATE:
        parser.error(f"--gc-momentum worker is for --optimizer {' and '.join(LATE)}, not {options.optimizer}")
    return None if params == {"type": "none"} else params


class Memory:
    """Arrays that a worker keeps for its own gradients. A Trainer saves and resumes them: `worker_state`."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}
        self._loaded: dict[str, np.ndarray] = {}  # those that were saved, until they are first used

    def apply(self, name: str, gradient: Any, share: float = 1.0) -> None:
        """Write what is pushed into `gradient`, an array or a tensor. name: of which one it is, on which device.

        share: how many images all workers have in this step, of those in a whole one. The store will divide by the
        images of this step; what is kept is of whole ones.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {**self._loaded, **self._arrays}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._arrays, self._loaded = {}, dict(state)

    def kept(self, name: str, like: Any) -> Any:
        """The array of this name; at first that which was saved, or zeros, where and as `like` is."""
        if name not in self._arrays:
            self._arrays[name] = like * 0
            if name in self._loaded:
                fill(self._arrays[name], self._loaded.pop(name), name)
        return self._arrays[name]


def fill(array: Any, values: np.ndarray, name: str) -> None:
    """Write the values into an array, or a tensor on any device."""
    host = array.cpu() if hasattr(array, "cpu") else array
    as_numpy.write(host, values, name)
    if host is not array:
        array.copy_(host)


class WorkerMomentum(Memory):
    """velocity = momentum * velocity + gradient, of which each worker keeps its own and pushes it as its gradient.

    Without compression that is the same training, but for steps after a change of the learning rate. Weight decay is no
    part of it, and becomes so much larger as a velocity is than one gradient.
    Source: momentum correction in Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def apply(self, name: str, gradient: Any, share: float = 1.0) -> None:
        velocity = self.kept(name, gradient)
        velocity *= self.momentum
        velocity += gradient / share
        gradient[...] = velocity * share


class WorkerAdam(Memory):
    """What Adam subtracts from a weight, without the learning rate: each worker's of its own gradients, and pushed.

    It is about 1 at first and less later, whatever the scale of the gradients is: so the default thresholds fit, and
    +1 and -1 do. Behind a codec Adam divides by the noise that the codec makes. Without compression it is not quite the
    training that Adam makes of all gradients together, whose second moment is that of a larger batch.
    Source: Kingma and Ba, ICLR 2015; that what is compressed must come behind Adam's division: Tang et al., "1-bit
    Adam", ICML 2021, which keeps the second moment as it is after a warm-up where this one lets it go on.
    """

    beta1, beta2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas  # whose steps are added up before they are compressed: their mean is what is wanted

    def apply(self, name: str, gradient: Any, share: float = 1.0) -> None:
        """Computed in float32."""
        whole = (gradient.float() if hasattr(gradient, "float") else gradient.astype("float32")) / share
        mean, var = self.kept(f"{name} mean", whole), self.kept(f"{name} var", whole)
        steps = self.kept(f"{name} steps", np.zeros(1, np.int64))
        steps += 1
        t = int(steps[0])
        mean *= self.beta1
        mean += (1 - self.beta1) * whole
        var *= self.beta2
        var += (1 - self.beta2) * whole * whole
        root = (var / (1 - self.beta2**t)) ** 0.5
        gradient[...] = mean / (1 - self.beta1**t) / (root + self.epsilon) * (share / self._replicas)


def on_workers(options: argparse.Namespace, params: dict[str, Any], replicas: int) -> tuple[str, Memory | None]:
    """The optimizer of the store, and what each worker does before it pushes, if that is anything.

    params: the optimizer's arguments, which are changed to fit. replicas: devices of a worker that have each
    a gradient of their own.
    """
    optimizer: str = options.optimizer
    compression = options.compression or {"type": "none"}
    late = compression["type"] in LATE.get(optimizer, ())
    if (options.gc_momentum or ("worker" if late else "store")) == "store":
        return optimizer, None
    if optimizer == "adam":
        # Trainer.step divides by the images of all workers, but a step is no sum over images.
        params.update(rescale_grad=options.batch_size)
        return "sgd", WorkerAdam(replicas)
    momentum = params.get("momentum", 0.0)
    if not 0 < momentum < 1:
        return optimizer, None
    params.update(momentum=0.0, wd=params["wd"] / (1 - momentum))
    return optimizer, WorkerMomentum(momentum)


def print_saving(store: KVStore) -> None:
    """On worker 0: what compression has saved on the way out, if anything was compressed."""
    stats = store.stats()
    if store.rank == 0 and stats.get("encoded_bytes"):
        before, after = (stats[name] / 1e6 for name in ("encoded_from_bytes", "encoded_bytes"))
        print(f"compression: {before:.1f} MB of gradients travelled as {after:.1f} MB", flush=True)
