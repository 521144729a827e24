"""Calls that come again with the same arrays do what calls with new arrays do, whatever has changed since."""

from __future__ import annotations

import numpy as np
from on_workers import on
from store_modes import ADDING, FEW_ON_DEVICE, HYBRID, LOCAL, SERVERS, TWO_HOSTS, Mode

from mpikv import optimizers

MODES = (*LOCAL, *HYBRID, ADDING[0], *SERVERS[:2], Mode("dist_sync", 3), TWO_HOSTS, *FEW_ON_DEVICE[:2])
N = {"long": 100, "short": 3}


@on(*MODES)
def test_calls_with_the_same_arrays(store, tmp_path) -> None:
    """Through optimizers with other owners, and states that are loaded."""
    steps = [
        lambda: None,
        lambda: store.set_optimizer(optimizers.create("lamb")),
        lambda: store.set_optimizer(optimizers.create("sgd", momentum=0.5)),
        lambda: store.save_optimizer_states(tmp_path / "states"),
        lambda: store.load_optimizer_states(tmp_path / "states"),
        lambda: store.set_optimizer(optimizers.create("lars")),
    ]
    held, kept = {}, {}
    for name, n in N.items():
        for key in (f"{name} again", f"{name} new"):
            store.init(key, np.ones(n, np.float32))
        held[name] = np.zeros(n, np.float32)
        kept[name] = np.zeros(n, np.float32)

    def gradient(i: int, name: str) -> np.ndarray:
        return np.arange(N[name], dtype=np.float32) + store.rank + i

    arrays, outs = list(held.values()), list(kept.values())
    again = [f"{name} again" for name in N]
    for i, change in enumerate(steps):
        change()
        for _ in range(3):
            for name in N:
                held[name][:] = gradient(i, name)
            store.pushpull(again, arrays, outs)
            for name in N:
                held[name][:] = gradient(i + 1, name)
                store.pushpull(f"{name} again", held[name])
            found = [np.array(array) for array in (*outs, *arrays)]
            new = [gradient(i, name) for name in N]
            store.pushpull([f"{name} new" for name in N], new, expected := [np.empty_like(one) for one in new])
            for name in N:
                store.pushpull(f"{name} new", value := gradient(i + 1, name))
                expected.append(value)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"after change {i}")
