"""Arrays that lie in memory which the workers of a host share: mpikv launch -n 2 -s 0 python examples/shared.py"""

from mpikv import kv

with kv.create("dist_sync") as store:
    weight, bias = store.zeros([(1000, 1000), (1000,)])  # float32, side by side
    store.init(["weight", "bias"], [weight, bias])
    for _ in range(3):
        weight[...], bias[...] = store.rank + 1, 1
        store.pushpull(["weight", "bias"], [weight, bias])
    if store.rank == 0:
        print(weight[0, 0], bias[0])
