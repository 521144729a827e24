"""Workers train on Fashion-MNIST by themselves, and make their weights one every so many steps.

    mpikv launch -n 4 -s 0 python examples/local_training.py --every 8
    mpikv launch -n 4 -s 0 python examples/local_training.py --every 32 --outer nesterov
    mpikv launch -n 4 -s 0 python examples/local_training.py --every 0  # every step with the gradients of all workers

Printed are the accuracy after each epoch, the seconds that training has taken, and the megabytes that worker 0 has sent
through MPI.
"""

import time

import torch
from image_files import load_images
from torch import nn
from torch.utils.data import DataLoader
from torch_mnist import network, tensors
from usage import Parser

import mpikv.torch as mt
from mpikv import SplitSampler, kv
from mpikv.common.progress import shown

OUTER = ("mean", "nesterov", "slowmo")


def main():
    """Train, and print after each epoch how many of the test images get their label."""
    parser = Parser(__doc__)
    parser.add_argument("--data-dir", help="directory with the four IDX files; else as train_mnist.py")
    parser.add_argument("--epochs", type=int, default=3, help="(3)")
    parser.add_argument("--every", type=int, default=8, help="steps of a round; 0: gradients are added in each (8)")
    parser.add_argument("--outer", choices=OUTER, default="mean", help="what makes the common weights (mean)")
    parser.add_argument("--compression", metavar="CODEC", help="of what is pushed, such as fp16 or topk")
    options = parser.parse_args()
    images = load_images(options.data_dir)
    train, test = tensors(images.train_x, images.train_y), tensors(images.test_x, images.test_y)
    compression = {"type": options.compression} if options.compression else None

    store = kv.create("dist_sync")
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    local = None
    if options.every:
        local = mt.LocalUpdates(net, store, every=options.every, outer=options.outer, compression=compression)
    else:
        net = mt.DistributedModel(net, store, compression=compression)
    sampler = SplitSampler.for_store(len(train), store, last="drop")
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    part = SplitSampler.for_store(len(test), store, shuffle=False)

    trained_s = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        begin_s = time.perf_counter()
        for x, y in shown(loader, f"epoch {epoch + 1}", here=store.rank == 0):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if local is not None:
                local.step()
        if local is not None:
            local.exchange()
        store.barrier()
        trained_s += time.perf_counter() - begin_s
        sent = store.stats()["bytes_sent"] / 1e6
        with torch.no_grad():
            right = sum((net(x).argmax(1) == y).sum() for x, y in DataLoader(test, batch_size=500, sampler=part))
        right = mt.allreduce(right, op=mt.Sum, store=store)
        if store.rank == 0:
            text = f"epoch {epoch + 1}: accuracy {right / len(test):.4f}, {trained_s:.1f} s, {sent:.1f} MB sent"
            print(text, flush=True)


if __name__ == "__main__":
    main()
