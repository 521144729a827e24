"""Train ResNet-18, VGG-11 or LeNet on CIFAR-10 or Fashion-MNIST with PyTorch and any number of workers.

    scripts/get_cifar10                                           fetches CIFAR-10 into data/cifar10
    python examples/image_classification.py
    mpikv launch -n 2 -s 0 python examples/image_classification.py --epochs 10 --lr-steps 6,9
    mpikv launch -n 4 -s 2 python examples/image_classification.py --optimizer sgd --lr 0.05
    mpikv launch -n 4 -s 0 python examples/image_classification.py --kv-store dist_async --dataset fashion-mnist
    mpikv launch -n 4 -s 0 python examples/image_classification.py --local 8 --outer nesterov
    mpikv launch -n 2 -s 0 --restarts 1 python examples/image_classification.py --kill-at 50
    mpikv launch -n 3 -s 0 --on-failure continue python examples/image_classification.py --kill-at 50

Batches. Each step takes the next --batch-size images of every worker, from one random order of all images; where a
worker has died and the others go on, of what nobody has had. What makes no whole step at an epoch's end is left out,
other images each time. A step's gradient is the mean over the images of all workers, so W workers with batches of B
learn as one with W*B, but for batch normalisation. With dist_async each gradient is applied at once, as 1/W of a step.

Batch normalisation. In training every worker, and every device of it, normalises with the mean and variance of its own
part of the batch: no messages; parts of less than 16 images cost accuracy (Y. Wu, K. He, Group Normalization, ECCV
2018). What evaluations use are running means of these, which are not trained, and differ between workers. Before each
evaluation, and in what --save writes, all workers take those of worker 0's first device. With dist_async, where nobody
waits, worker 0 evaluates alone, with its own.

Seldom. With --local H every worker makes its steps by itself, with an optimizer and batches of its own, and all make
their weights one every H steps and before each evaluation, by --outer (docs/local-training.md). --gc-type compresses
what a worker has moved since then. The last line has accuracy, seconds and megabytes, with --local and without.

Saving. --save writes weights, running means, the optimizer's states and the place in the data into one file after every
epoch, whole or not at all; --resume goes on from there as if nothing had happened, bit for bit with as many workers and
devices (and a synchronous store), and also with others; but what workers keep (--gc-momentum) begins anew, and with
--local the count of epochs, too.
MPIKV_STOP_SIGNALS=TERM makes a signal end the run after the step in which it comes, saved in --save's file, or in
MPIKV_STOP_FILE=FILE, from which the next run goes on by itself.

Devices. --gpus gives every worker the GPU that its store uses, --gpus 0,1 these two, and --num-devices 2 as many
replicas on the CPU. A batch is split over them.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compressed
import image_sets
import numpy as np
import torch
from image_sets import ImageSet
from torch import nn
from torch_networks import NETWORKS
from usage import Parser

from mpikv import Config, KVStore, LocalUpdates, MpikvError, Trainer, kv
from mpikv.common.progress import Progress
from mpikv.data import DataLoader, SplitSampler, split_and_load

DATASETS = {"cifar10": image_sets.cifar10, "fashion-mnist": image_sets.fashion_mnist}
OUTER = ("mean", "nesterov", "slowmo")
WITH_MOMENTUM = {"sgd", "nag", "signum", "dcasgd", "lars"}
EVALUATION_BATCH = 250  # images at once: the activations of resnet18-large then take 0.3 GB


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_training("images", "adam")
    add = parser.add_argument
    add("--dataset", choices=sorted(DATASETS), default="cifar10", help="(cifar10)")
    add("--data-dir", help="where its files are (data/cifar10 of this clone; Debian's or scripts/demo's Fashion-MNIST)")
    add("--model", choices=sorted(NETWORKS), default="resnet18", help="(resnet18)")
    add("--epochs", "--num-epochs", type=int, default=5, help="(5)")
    add("--local", type=int, metavar="H", help="workers train by themselves, and make their weights one every H steps")
    add("--outer", choices=OUTER, default="mean", help="with --local: what makes the common weights (mean)")
    add("--lr", type=float, help="learning rate (0.001; optimizers with momentum 0.05)")
    add("--lr-steps", default="", help="epochs after which --lr-factor multiplies the rate, as in 6,9 or 0.75")
    add("--lr-factor", type=float, default=0.1, help="(0.1)")
    add("--momentum", type=float, default=0.9, help=f"for {', '.join(sorted(WITH_MOMENTUM))} (0.9)")
    add("--wd", type=float, default=0.0, help="weight decay (0)")
    add("--no-augment", action="store_true", help="train on the images as they are, not cut and mirrored at random")
    add("--kill-at", type=int, metavar="STEP", help="in a job's first run the last worker kills itself after this step")
    add("--tensorboard", type=Path, metavar="DIR", help="write loss, accuracy and the store's counts for TensorBoard")
    compressed.add_options(parser)
    options = parser.parse_args(line)
    options.compression = compressed.compression_params(parser, options)
    options.lr_steps = parser.numbers("--lr-steps", options.lr_steps, float)
    gpus = [] if options.gpus in (None, "auto") else parser.numbers("--gpus", options.gpus)
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs TensorBoard: pip install tensorboard")
    if options.local and options.gc_momentum:
        parser.error("--gc-momentum: with --local each worker has an optimizer of its own anyway")
    if options.local and (options.compression or {}).get("type") in {"1bit", "2bit"} and options.gc_threshold is None:
        parser.error("--local pushes what weights have moved: --gc-threshold must say how far, such as 0.01")
    if options.gpus == "auto" and not torch.cuda.is_available():
        parser.error("--gpus: PyTorch sees no GPU here")
    if gpus and max(gpus) >= torch.cuda.device_count():
        parser.error(f"--gpus {options.gpus}: PyTorch sees {torch.cuda.device_count()} GPUs here, from 0")
    parser.at_least_1(options, "batch_size", "epochs", "max_steps", "num_examples", "num_devices", "local")
    options.devices = [torch.device("cuda", gpu) for gpu in gpus] or [torch.device("cpu")] * options.num_devices
    if options.batch_size < len(options.devices):
        parser.error(f"--batch-size {options.batch_size} is less than the number of devices, {len(options.devices)}")
    return options


def optimizer_params(options: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's arguments."""
    found = {"learning_rate": 0.001 if options.lr is None else options.lr, "wd": options.wd}
    if options.optimizer in WITH_MOMENTUM:
        found.update(learning_rate=0.05 if options.lr is None else options.lr, momentum=options.momentum)
    return found


def num_examples(options: argparse.Namespace, images: ImageSet) -> int:
    """Images to train on."""
    return min(len(images.train_x), options.num_examples or len(images.train_x))


@dataclass
class Run:
    """A training. nets: replicas of the model, one per device; the trainer's is the first. writer: to TensorBoard.

    local: with --local; the trainer is then this worker's own. kill_at: after this step the worker kills itself.
    """

    options: argparse.Namespace
    store: KVStore
    images: ImageSet
    nets: list[nn.Module]
    trainer: Trainer
    local: LocalUpdates | None = None
    memory: compressed.Memory | None = None
    writer: Any = None
    kill_at: int | None = None

    @property
    def asynchronous(self) -> bool:
        return "async" in self.store.type

    @property
    def together(self) -> int:
        """Images of all workers in a step."""
        return int(self.options.batch_size * self.store.num_workers)

    @property
    def shared(self) -> Trainer | LocalUpdates:
        """What exchanges with the other workers, saves and resumes."""
        return self.trainer if self.local is None else self.local

    def split(self, array: np.ndarray) -> list[torch.Tensor]:
        """A part of a batch for each device. Cut on the host, so that PyTorch alone brings it to a GPU."""
        parts = split_and_load(array, ["cpu"] * len(self.nets), even_split=False)
        return [torch.from_numpy(part).to(device) for part, device in zip(parts, self.options.devices, strict=True)]

    def batches(self, epoch: int, start: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """This worker's images and labels, step by step, and how many images of the epoch are done with this step.

        start: how many are done already. Equally many steps on all workers; leaves out what makes no whole step.
        """
        images, options, n = self.images, self.options, num_examples(self.options, self.images)
        sampler = SplitSampler.for_store(n, self.store, seed=options.seed, last="drop")
        drawn = images.train_x[:n], images.train_y[:n], image_sets.draw(n, options.seed, epoch)
        loader = DataLoader(drawn, options.batch_size, sampler=sampler, last="discard", prefetch=0)
        loader.set_epoch(epoch, start)
        for x, y, random in loader:
            state = loader.state()
            then = state["start"] + state["batches"] * options.batch_size * sampler.num_parts
            yield images.scaled(x if options.no_augment else image_sets.changed(x, random)), y, then

    def gradients(self, x: np.ndarray, y: np.ndarray) -> float:
        """Add up the gradients of this batch in the first replica, as sums over the images; the sum of the losses.

        Where workers keep the optimizer's memory, what is pushed becomes what they make of it (compressed.py).
        """
        self.trainer.zero_grad()
        losses = []
        for net, images, labels in zip(self.nets, self.split(x), self.split(y), strict=True):
            if net is not self.nets[0]:
                net.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels, reduction="sum")
            loss.backward()
            losses.append(loss.detach())
        for net in self.nets[1:]:
            for first, other in zip(self.nets[0].parameters(), net.parameters(), strict=True):
                first.grad += other.grad.to(first.device)
        if self.memory is not None:
            for name, parameter in self.nets[0].named_parameters():
                self.memory.apply(name, parameter.grad)
        return sum(float(loss) for loss in losses)  # only now: float() waits for a GPU

    @torch.no_grad()
    def spread(self) -> None:
        """Bring the first replica's weights to the others."""
        for net in self.nets[1:]:
            for first, other in zip(self.nets[0].parameters(), net.parameters(), strict=True):
                other.copy_(first)

    def epoch(self, epoch: int, start: int) -> tuple[float, float]:
        """An epoch without its first `start` images: the mean loss of this worker's images, images/s of all workers."""
        n, options, trainer = num_examples(self.options, self.images), self.options, self.trainer
        rate = optimizer_params(options)["learning_rate"]
        for net in self.nets:
            net.train()
        start_s, loss, seen, done = time.perf_counter(), 0.0, 0, start
        title = f"epoch {epoch + 1}/{options.epochs}"
        with Progress(title, n, "images", done=start, shown=self.store.rank == 0) as progress:
            for x, y, then in self.batches(epoch, start):
                if trainer.steps == options.max_steps:
                    break
                now = epoch + done / n
                trainer.set_learning_rate(rate * options.lr_factor ** sum(end <= now for end in options.lr_steps))
                with self.store.span("forward, backward"):  # shown by `mpikv trace`
                    loss += self.gradients(x, y)
                batch_size = self.together if self.local is None else len(y)
                trainer.examples = epoch * n + then - batch_size  # which `step` adds, of those who are there
                trainer.step(batch_size=batch_size)
                if self.local is not None:
                    self.local.step()
                if trainer.steps == self.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.spread()
                seen += len(y)
                progress.update(then - done, loss=loss / seen)
                done = then
                if self.shared.stop_requested:
                    break
        return loss / max(seen, 1), (done - start) / (time.perf_counter() - start_s)

    def accuracy(self) -> float:
        """The share of test images that get their label; worker 0 knows it.

        Synchronous: every worker takes its part, and the store adds up. Asynchronous: worker 0 does it alone with the
        weights of the moment, as the others have no reason to wait.
        """
        n = len(self.images.test_y)
        if self.local is not None:
            self.local.exchange()
        elif self.asynchronous:
            self.trainer.pull_weights()
        self.spread()
        if self.asynchronous:
            return self.count_correct(np.arange(n)) / n if self.store.rank == 0 else 0.0
        self.shared.sync_buffers()
        part = SplitSampler.for_store(n, self.store, shuffle=False, last="uneven").indices()
        counts = np.array([self.count_correct(part), len(part)])  # what a worker that dies would count is left out
        self.store.pushpull("correct", counts)
        return int(counts[0]) / int(counts[1])

    @torch.no_grad()
    def count_correct(self, part: np.ndarray) -> int:
        """How many of these test images the first replica gets right."""
        net, device = self.nets[0], self.options.devices[0]
        net.eval()
        correct = 0
        for begin in range(0, len(part), EVALUATION_BATCH):
            batch = part[begin : begin + EVALUATION_BATCH]
            x, y = self.images.test_x[batch], self.images.test_y[batch]
            scores = net(torch.from_numpy(self.images.scaled(x)).to(device))
            correct += int((scores.argmax(1).cpu().numpy() == y).sum())
        return correct

    def train(self) -> float | None:
        """All epochs that are left; the last test accuracy, or None where a signal has stopped it."""
        options, trainer, n = self.options, self.trainer, num_examples(self.options, self.images)
        first_epoch, start = divmod(int(trainer.examples), n)
        result = None
        for epoch in range(first_epoch, options.epochs):
            if trainer.steps == options.max_steps:
                break
            loss, speed = self.epoch(epoch, start)
            start = 0
            if self.shared.stop_requested:
                self.save()
                return None
            if trainer.steps != options.max_steps:
                trainer.examples = (epoch + 1) * n  # those that made no whole step are done, too
            result = self.accuracy()
            if self.store.rank == 0:
                title = f"epoch {epoch + 1}/{options.epochs}"
                print(f"{title}: loss {loss:.4f}, test accuracy {result:.4f}, {speed:.0f} images/s", flush=True)
            self.report({"loss": loss, "accuracy": result})
            self.save()
        if self.asynchronous:
            self.store.barrier()  # all pushes are made
        return self.accuracy() if result is None or self.asynchronous else result

    def report(self, results: dict[str, float]) -> None:
        """Write them, and what the store counts, where TensorBoard is asked for."""
        if self.writer is not None:
            for name, value in {**results, **self.store.stats()}.items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(name, value, self.trainer.steps)
            self.writer.flush()

    def save(self) -> None:
        """Collective."""
        if self.options.save:
            self.shared.save(self.options.save)


def end_if_wrong(store: KVStore, what: str, error: Exception | None) -> None:
    """End the job with one line where worker 0, or another one, has an error. Collective; each time another `what`."""
    if error is not None and store.rank == 0:
        print(f"image_classification.py: {error}", file=sys.stderr, flush=True)
    wrong = np.array([error is not None], dtype=np.int64)
    store.broadcast(f"wrong {what}", wrong, out=wrong)
    if wrong[0]:  # all end by themselves, and nobody complains of another's end
        raise SystemExit(1)
    if error is not None:
        raise SystemExit(f"image_classification.py: {error}")


def load(options: argparse.Namespace, store: KVStore) -> ImageSet:
    """The images, or one line that says what is wrong with them."""
    problem: Exception | None = None
    try:
        images = DATASETS[options.dataset](options.data_dir)
        together, n = options.batch_size * store.num_workers, num_examples(options, images)
        if together > n:
            problem = ValueError(f"a step takes {together} images, and there are {n}: lower --batch-size")
    except (OSError, ValueError, MpikvError) as error:
        problem = error
    end_if_wrong(store, "images", problem)
    return images


def summary_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - PyTorch may well be without it

    return SummaryWriter(folder)


def prepare(options: argparse.Namespace, store: KVStore) -> Run:
    """Images, model and trainer, where the training that is resumed had come to. Collective."""
    images = load(options, store)
    torch.manual_seed(options.seed)
    net = NETWORKS[options.model](len(images.mean), 10).to(options.devices[0])
    store.init("correct", np.zeros(2, dtype=np.int64))
    params = optimizer_params(options)
    optimizer, memory, local = options.optimizer, None, None
    if options.local:
        trainer = Trainer(net, optimizer, params, None)
        how = {"every": options.local, "outer": options.outer, "compression": options.compression}
        local = LocalUpdates(net, store, optimizer=trainer, **how)
    else:
        optimizer, memory = compressed.on_workers(options, params, 1)
        trainer = Trainer(net, optimizer, params, store, options.compression, worker_state=memory)
    shared = trainer if local is None else local
    problem: Exception | None = None
    try:
        if options.resume and shared.resume(options.resume) == 0:
            problem = FileNotFoundError(f"--resume {options.resume}: there is no such file")
    except (OSError, MpikvError) as error:
        problem = error
    end_if_wrong(store, "checkpoint", problem)
    shared.resume()  # where a signal has stopped this run before: MPIKV_STOP_FILE
    replicas = [copy.deepcopy(net).to(device) for device in options.devices[1:]]
    writer = summary_writer(options.tensorboard) if options.tensorboard and store.rank == 0 else None
    kill_at = None if Config.from_environ().restart or store.rank < store.num_workers - 1 else options.kill_at
    return Run(options, store, images, [net, *replicas], trainer, local, memory, writer, kill_at)


def main() -> None:
    options = arguments()
    with kv.create(options.kv_store, num_servers=options.num_servers) as store:  # a server rank stays in here
        if options.gpus == "auto":
            if store.device is None:
                raise MpikvError("--gpus: the store uses no GPU; `mpikv info` says why")
            options.devices = [torch.device("cuda", store.device)]
        run = prepare(options, store)
        if store.rank == 0:
            print(f"data: {run.images.source}", flush=True)
        start_s = time.perf_counter()
        result, time_s = run.train(), time.perf_counter() - start_s
        if store.rank == 0:
            what = "stopped" if result is None else f"accuracy {result:.4f}"
            compressed.print_saving(store)
            sent = f"worker 0 has sent {store.stats()['bytes_sent'] / 1e6:.1f} MB"
            print(f"{what} after {run.trainer.steps} steps in {time_s:.1f} s, {sent}", flush=True)


if __name__ == "__main__":
    main()
