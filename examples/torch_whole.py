"""A whole training with PyTorch: what a program of some hours has, and not only what a tutorial shows.

    mpikv launch -n 2 -s 0 python examples/torch_whole.py
    mpikv submit slurm -n 8 -s 0 --requeue -- python examples/torch_whole.py

Gradients are accumulated over two passes and clipped, the learning rate follows a schedule, the test uses a moving
average of the weights (EMA), and two processes of each worker load data. Asked to stop, as a batch job is before its
time limit, the workers make their step, worker 0 saves in the file that MPIKV_STOP_FILE names, and the next start goes
on there, with any number of workers: nothing is counted in steps, but in examples.
"""

import math
import os

import torch
from image_files import load_images
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torch_mnist import network, tensors
from usage import Parser

import mpikv.torch as mt
from mpikv import SplitSampler, kv
from mpikv.common.progress import shown


def main():
    """Train, and print after each epoch how many of the test images the averaged weights give their label."""
    parser = Parser(__doc__)
    parser.add_argument("--data-dir", help="directory with the four IDX files; else as train_mnist.py")
    parser.add_argument("--epochs", type=int, default=3, help="(3)")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a worker in a pass; a step has two (32)")
    parser.add_argument("--stop-at", type=int, help="stop at this step or the next, as if a signal had come")
    options = parser.parse_args()
    images = load_images(options.data_dir)
    train, test = tensors(images.train_x, images.train_y), tensors(images.test_x, images.test_y)

    store = kv.create("dist_sync")
    module = network()
    net = mt.DistributedModel(module, store)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.98))  # of the plain module, not of `net`
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    # seen: examples of this epoch that all workers together have had. The rate falls as half a cosine over all epochs.
    epoch, seen = 0, 0
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: 0.5 + 0.5 * math.cos(math.pi * min(1, (epoch + seen / len(train)) / options.epochs))
    )
    parts = {"net": module, "average": average, "optimizer": optimizer, "schedule": schedule}

    state = os.environ.get("MPIKV_STOP_FILE", "torch_whole.state")  # a batch script names it
    # Worker 0 reads it, so that all have the same: hosts may have different disks.
    saved = torch.load(state) if store.rank == 0 and os.path.exists(state) else None
    saved = mt.broadcast_object(saved, store=store)
    if saved is not None:
        epoch, seen = saved["epoch"], saved["seen"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        if store.rank == 0:
            print(f"goes on in epoch {epoch + 1} after {seen} examples", flush=True)

    sampler = SplitSampler.for_store(len(train), store)  # shuffles; equally many examples for each worker
    loader = DataLoader(train, options.batch_size, sampler=sampler, num_workers=2, drop_last=True)
    part = SplitSampler.for_store(len(test), store, shuffle=False)
    step = 0
    for epoch in range(epoch, options.epochs):  # noqa: B020 - from where it goes on
        sampler.set_epoch(epoch, start=seen)
        for i, (x, y) in enumerate(shown(loader, f"epoch {epoch + 1}", here=store.rank == 0)):
            if i % 2 == 0:  # the first of two passes: its gradients stay here, and those of the second are added
                optimizer.zero_grad()
                with net.no_sync():
                    (nn.functional.cross_entropy(net(x), y) / 2).backward()
                continue
            (nn.functional.cross_entropy(net(x), y) / 2).backward()  # now they are the mean over all workers
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            seen += 2 * options.batch_size * store.num_workers
            schedule.step()
            average.update_parameters(module)
            step += 1
            if step == options.stop_at:
                store.request_stop()
            if store.stop_requested:  # the same step on all workers
                if store.rank == 0:
                    now = {"epoch": epoch, "seen": seen} | {name: part.state_dict() for name, part in parts.items()}
                    torch.save(now, state + ".new")
                    os.replace(state + ".new", state)  # whole or not at all
                    print(f"stopped after {seen} examples of epoch {epoch + 1}: all is in {state}", flush=True)
                return
        seen = 0
        with torch.no_grad():
            right = sum((average(x).argmax(1) == y).sum() for x, y in DataLoader(test, batch_size=500, sampler=part))
        right = mt.allreduce(right, op=mt.Sum, store=store)  # of all parts
        if store.rank == 0:
            print(f"epoch {epoch + 1}: accuracy {right / len(test):.4f}", flush=True)


if __name__ == "__main__":
    main()
