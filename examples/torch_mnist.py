"""A small convolutional network on Fashion-MNIST with PyTorch, on any number of workers.

    mpikv launch -n 4 -s 0 python examples/torch_mnist.py

A program for one process becomes this one by the lines that end in `# mpikv`. The images are those of train_mnist.py.
"""

import torch
from image_files import load_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from usage import Parser

import mpikv.torch as mt  # mpikv
from mpikv import SplitSampler, kv  # mpikv
from mpikv.common.progress import shown


def tensors(x, y):
    """Images between -1 and 1, with their labels."""
    return TensorDataset(torch.from_numpy(x).float() / 127.5 - 1, torch.from_numpy(y))


def network():
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))


def main():
    parser = Parser(__doc__)
    parser.add_argument("--data-dir", help="directory with the four IDX files; else as train_mnist.py")
    parser.add_argument("--epochs", type=int, default=3, help="(3)")
    options = parser.parse_args()
    images = load_images(options.data_dir)
    train, test = tensors(images.train_x, images.train_y), tensors(images.test_x, images.test_y)

    store = kv.create("dist_sync")  # mpikv
    net = mt.DistributedModel(network(), store)  # mpikv
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    sampler = SplitSampler.for_store(len(train), store, last="drop")  # mpikv: parts of equal length
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    part = SplitSampler.for_store(len(test), store, shuffle=False)  # mpikv

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # mpikv: another order
        for x, y in shown(loader, f"epoch {epoch + 1}", here=store.rank == 0):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((net(x).argmax(1) == y).sum() for x, y in DataLoader(test, batch_size=500, sampler=part))
        right = mt.allreduce(right, op=mt.Sum, store=store)  # mpikv: of all parts
        if store.rank == 0:  # mpikv
            print(f"epoch {epoch + 1}: accuracy {right / len(test):.4f}", flush=True)


if __name__ == "__main__":
    main()
