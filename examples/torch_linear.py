"""A linear model with PyTorch on any number of workers: mpikv launch -n 2 -s 0 python examples/torch_linear.py"""

import torch
from torch import nn

import mpikv.torch

x = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x @ torch.tensor([[2.0], [-3.0]]) + 1)

store = mpikv.kv.create("dist_sync")
net = nn.Linear(2, 1)
net = mpikv.torch.DistributedModel(net, store)  # worker 0's weights are everybody's from here on
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
sampler = mpikv.SplitSampler.for_store(len(data), store, last="drop")  # this worker's part of the data
loader = torch.utils.data.DataLoader(data, batch_size=20, sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()  # gradients are the mean over the workers now
        optimizer.step()
if store.rank == 0:
    print(f"{store.num_workers} workers: {net.weight[0, 0]:.2f} {net.weight[0, 1]:.2f} {net.bias[0]:.2f}")
