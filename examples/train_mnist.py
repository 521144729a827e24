"""Train LeNet or a perceptron on Fashion-MNIST (or MNIST, or scikit-learn's digits) with any number of workers.

    python examples/train_mnist.py
    mpikv launch -n 4 -s 0 python examples/train_mnist.py
    mpikv launch -n 4 -s 2 python examples/train_mnist.py
    mpikv launch -n 4 -s 0 python examples/train_mnist.py --kv-store dist_async

Batches. All workers put the examples of an epoch into one order and take every W-th of it. So step s of W workers with
batches of B is made from the same examples as step s of one process with a batch of W*B, and the weights agree but for
rounding (1e-5 with float32: where it decides which of two pixels is the larger one, the gradient jumps). Every example
comes once per epoch. In the last step some workers may have fewer examples than others, or none: they take part all the
same (their gradient is smaller, or 0), so that no worker waits for one that has finished.

The gradient of a step is divided by the examples of all workers in it, with `dist_async` too, where each push
then is 1/W of a step.

Batch jobs. With MPIKV_STOP_SIGNALS=TERM,USR1 and MPIKV_STOP_FILE=FILE the trainer saves everything in FILE after the
step in which a scheduler's signal comes, and ends the program with status 0. Started again, it goes on with the next,
also with another number of workers: each example that is left of the epoch comes once.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import compressed
import numpy as np
from image_files import Images, load_images
from networks import NETWORKS, Network
from usage import Parser

from mpikv import KVStore, MpikvError, Parameter, Trainer, kv
from mpikv.arrays.devices import use
from mpikv.common.files import replacing
from mpikv.common.progress import Progress
from mpikv.data import SplitSampler, split_and_load

WITH_MOMENTUM = {"sgd", "nag", "signum", "dcasgd", "lars"}
EVALUATION_BATCH = 500  # images at once: the activations of LeNet then take 30 MB


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_training("examples", "sgd")
    add = parser.add_argument
    add("--network", choices=sorted(NETWORKS), default="lenet", help="(lenet)")
    add(
        "--data-dir",
        help="directory with the four IDX files (what scripts/demo has fetched, else Debian's package, else "
        "scikit-learn's digits)",
    )
    add("--num-epochs", type=int, default=3, help="(3)")
    add("--lr", type=float, help="learning rate (0.05, asynchronous 0.3; optimizers without momentum 0.001)")
    add(
        "--warmup-epochs", type=float, default=0.5, help="the rate grows to --lr over so much of the first epochs (0.5)"
    )
    add("--lr-factor", type=float, default=0.1, help="what --lr-step-epochs multiply the learning rate by (0.1)")
    add("--lr-step-epochs", default="2", help="finished epochs after which that happens, as in 10,15 (2)")
    add("--mom", type=float, help=f"momentum, for {', '.join(sorted(WITH_MOMENTUM))} (0.9, asynchronous 0)")
    add("--wd", type=float, default=1e-4, help="weight decay (0.0001)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="of weights and gradients (float32)")
    add("--dump-weights", type=Path, metavar="FILE", help="write the final weights as .npz")
    compressed.add_options(parser)
    options = parser.parse_args()
    options.compression = compressed.compression_params(parser, options)
    parser.at_least_1(options, "num_examples", "max_steps", "batch_size", "num_devices")
    options.lr_step_epochs = parser.numbers("--lr-step-epochs", options.lr_step_epochs)
    gpus = [] if options.gpus in (None, "auto") else parser.numbers("--gpus", options.gpus)
    if options.gpus is not None and importlib.util.find_spec("cupy") is None:
        parser.error("--gpus needs CuPy: pip install cupy-cuda12x (or cupy-cuda13x for CUDA 13)")
    options.devices = [f"gpu:{gpu}" for gpu in gpus] or [f"cpu:{i}" for i in range(options.num_devices)]
    return options


def optimizer_params(options: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's arguments, with the defaults of its kind and of the store's.

    Asynchronous workers push gradients of weights that W-1 other pushes have changed meanwhile, which works like a
    momentum of 1 - 1/W. With 0.9 on top of it the training of LeNet diverges. Source: I. Mitliagkas, C. Zhang, S.
    Hadjis, C. Re, "Asynchrony begets momentum", Allerton 2016.
    """
    if options.optimizer not in WITH_MOMENTUM:
        return {"learning_rate": 0.001 if options.lr is None else options.lr, "wd": options.wd}
    lr, mom = (0.3, 0.0) if "async" in options.kv_store.lower() else (0.05, 0.9)
    return {
        "learning_rate": lr if options.lr is None else options.lr,
        "momentum": mom if options.mom is None else options.mom,
        "wd": options.wd,
    }


def learning_rate(options: argparse.Namespace, epochs: float) -> float:
    """The learning rate of the step that ends after so many epochs, whole and part.

    It begins small: the first gradients are large and much alike, and momentum, or asynchronous workers, add them up.
    """
    warmup = min(1.0, epochs / options.warmup_epochs) if options.warmup_epochs > 0 else 1.0
    rate: float = optimizer_params(options)["learning_rate"]
    return rate * warmup * options.lr_factor ** sum(end < epochs for end in options.lr_step_epochs)


def batches(
    num_examples: int, options: argparse.Namespace, store: KVStore, epoch: int, start: int
) -> Iterator[tuple[np.ndarray, int, float]]:
    """The steps of an epoch in which `start` examples are done already, equally many steps on all workers.

    Of each: this worker's indices, the number of examples of all workers, and how many epochs are done after it.
    """
    sampler = SplitSampler.for_store(num_examples, store, last="uneven", seed=options.seed)
    sampler.set_epoch(epoch, start)
    mine, size, together = sampler.indices(), options.batch_size, options.batch_size * store.num_workers
    for step, begin in enumerate(range(start, num_examples, together)):
        end = min(begin + together, num_examples)
        yield mine[step * size : (step + 1) * size], end - begin, epoch + end / num_examples


@dataclass
class Run:
    """What every step of the training needs."""

    options: argparse.Namespace
    store: KVStore
    images: Images
    network: Network
    trainer: Trainer
    memory: compressed.Memory | None = None

    @property
    def asynchronous(self) -> bool:
        return "async" in self.store.type

    def gradients(self, indices: np.ndarray, together: int) -> float:
        """Write the gradients of these examples into the network's parameters; the sum of their losses.

        Each gradient is handed to the trainer as soon as all devices have it, so that it travels meanwhile.
        """
        devices = self.options.devices
        x = split_and_load(self.images.train_x[indices], devices, even_split=False)
        y = split_and_load(self.images.train_y[indices], devices, even_split=False)
        losses = []
        for replica, device in enumerate(devices):
            with use(device):
                last = replica == len(devices) - 1
                ready = partial(self.ready, replica=replica, together=together, last=last)
                losses.append(self.network.loss_and_gradients(x[replica], y[replica], replica, ready))
        return sum(float(loss) for loss in losses)  # only now: float() waits for a GPU

    def ready(self, parameter: Parameter, replica: int, together: int, *, last: bool) -> None:
        """A replica has written the gradient of this parameter; last: all others have, too."""
        if self.memory is not None:
            share = together / (self.options.batch_size * self.store.num_workers)
            self.memory.apply(f"{parameter.name} {replica}", parameter.list_grad()[replica], share)
        if last:
            self.trainer.push_grad(parameter, batch_size=together)

    def epoch(self, epoch: int, start: int, max_steps: int | None) -> tuple[int, float, float]:
        """An epoch without its first `start` examples: steps, mean loss of this worker's examples, images/s of all."""
        options, rank = self.options, self.store.rank
        n, title = len(self.images.train_x), f"epoch {epoch + 1}/{options.num_epochs}"
        start_s, loss, steps, own, of_all = time.perf_counter(), 0.0, 0, 0, 0
        with Progress(title, n, "images", done=start, shown=rank == 0) as progress:
            for indices, together, epochs in batches(n, options, self.store, epoch, start):
                self.trainer.set_learning_rate(learning_rate(options, epochs))
                loss += self.gradients(indices, together)
                self.trainer.step(together)
                steps, own, of_all = steps + 1, own + len(indices), of_all + together
                progress.update(together, loss=loss / max(own, 1))
                if steps == max_steps:
                    break
        return steps, loss / max(own, 1), of_all / (time.perf_counter() - start_s)

    def accuracy(self) -> float:
        """The share of test images that get their label; worker 0 knows it.

        Synchronous: every worker takes its part, and the store adds up. Asynchronous: worker 0 does it alone with the
        weights of the moment, as the others have no reason to wait.
        """
        if self.asynchronous:
            self.trainer.pull_weights()
            correct = self.count_correct(0, 1) if self.store.rank == 0 else 0
        else:
            counts = np.array([self.count_correct(self.store.rank, self.store.num_workers)])
            self.store.pushpull("correct", counts)
            correct = int(counts[0])
        return correct / len(self.images.test_y)

    def count_correct(self, part: int, parts: int) -> int:
        """How many test images of this part the first replica gets right."""
        device = self.options.devices[:1]
        x, y = self.images.test_x[part::parts], self.images.test_y[part::parts]
        correct = 0
        with use(device[0]):
            for i in range(0, len(x), EVALUATION_BATCH):
                batch = (split_and_load(array[i : i + EVALUATION_BATCH], device)[0] for array in (x, y))
                correct += self.network.count_correct(*batch)
        return correct

    def train(self) -> tuple[float, str]:
        """All epochs that are left; the last test accuracy, and after how much of training that is.

        The trainer knows how far the training is: --max-steps counts its steps, and its examples tell the place in the
        epoch, whatever the number of workers was.
        """
        options, result, steps = self.options, None, self.trainer.steps
        first_epoch, start = divmod(int(self.trainer.examples), len(self.images.train_x))
        for epoch in range(first_epoch, options.num_epochs):
            if steps == options.max_steps:
                break
            made, loss, speed = self.epoch(epoch, start, options.max_steps and options.max_steps - steps)
            steps, start = steps + made, 0
            if options.save:
                self.trainer.save(options.save)
            result = self.accuracy()
            if self.store.rank == 0:
                title = f"epoch {epoch + 1}/{options.num_epochs}"
                print(f"{title}: loss {loss:.4f}, test accuracy {result:.4f}, {speed:.0f} images/s", flush=True)
        if self.asynchronous or result is None:
            self.meet()
            result = self.accuracy()
        n, unit = (steps, "step") if steps == options.max_steps else (options.num_epochs, "epoch")
        return result, f"{n} {unit}" if n == 1 else f"{n} {unit}s"

    def meet(self) -> None:
        """Wait until all workers' pushes are in the weights; a synchronous store has seen to that in every step."""
        if self.asynchronous:
            self.store.barrier()
            self.trainer.pull_weights()


def resume(trainer: Trainer, file: Path, store: KVStore) -> None:
    """Go on from a checkpoint, or end the job with one line where there is none. Collective; worker 0 reads."""
    try:
        problem = "" if trainer.resume(file) else f"{file}: there is no such file"
    except (OSError, MpikvError) as error:
        problem = str(error)
    if problem:  # for all workers the same
        raise SystemExit(f"train_mnist.py: --resume {problem}" if store.rank == 0 else 1)


def write_weights(file: Path, network: Network) -> None:
    """Write the weights as an .npz archive, whole or not at all. Local."""
    weights = {name: parameter.data for name, parameter in network.parameters.items()}
    on_host = {name: data.get() if hasattr(data, "get") else data for name, data in weights.items()}
    with replacing(file) as stream:
        np.savez(stream, **on_host)


def main() -> None:
    options = arguments()
    if options.gpus:
        importlib.import_module("cupy")  # so that the store looks for a GPU
    with kv.create(options.kv_store, num_servers=options.num_servers) as store:  # a server rank stays in here
        if options.gpus == "auto":
            if store.device is None:
                raise MpikvError("--gpus: this worker has no GPU; `mpikv info` says why")
            options.devices = [f"gpu:{store.device}"]
        images = load_images(options.data_dir)
        if options.num_examples is not None:
            images = images.first(options.num_examples)
        if store.rank == 0:
            print(f"data: {images.source}", flush=True)
        network = NETWORKS[options.network](options.devices, options.seed, getattr(np, options.dtype))

        store.init("correct", np.zeros(1, dtype=np.int64))
        params = optimizer_params(options)
        optimizer, memory = compressed.on_workers(options, params, len(options.devices))
        trainer = Trainer(network.parameters, optimizer, params, store, options.compression, worker_state=memory)
        if options.resume:
            resume(trainer, options.resume, store)
        trainer.resume()  # where a signal has stopped this run before

        start_s = time.perf_counter()
        result, after = Run(options, store, images, network, trainer, memory).train()
        if store.rank == 0:
            if options.dump_weights:
                write_weights(options.dump_weights, network)
            compressed.print_saving(store)
            print(f"accuracy {result:.4f} after {after} in {time.perf_counter() - start_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
