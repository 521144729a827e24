"""What a worker of local training has for itself: its model between two rounds, its optimizer, its counts of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

COUNTS = "steps"
MODEL, STATE, GROUPS = "model/", "state/", "groups/"


class LocalState:
    """Of one worker; a `WorkerState` of its trainer. since: steps since the last round. restored: whether it was."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self._optimizer = model, optimizer
        self.steps = self.since = 0
        self.restored = False

    def count(self) -> None:
        """Count a step."""
        self.steps, self.since = self.steps + 1, self.since + 1

    def begin_round(self) -> None:
        """Count from here on."""
        self.since = 0

    def state_dict(self) -> dict[str, Any]:
        """Return arrays by name: see `WorkerState`."""
        arrays: dict[str, Any] = {COUNTS: np.array([self.steps, self.since])}
        arrays |= {MODEL + name: value for name, value in self.model.state_dict().items()}
        if self._optimizer is not None:
            arrays |= {name: _array(value) for name, value in _flat(self._optimizer.state_dict())}
        return arrays

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` has returned."""
        self.steps, self.since = (int(count) for count in state[COUNTS])
        arrays = {name: torch.from_numpy(np.array(value)) for name, value in state.items() if name != COUNTS}
        of_model = {name.removeprefix(MODEL): value for name, value in arrays.items() if name.startswith(MODEL)}
        self.model.load_state_dict(of_model)
        if self._optimizer is not None:
            found = self._optimizer.state_dict()
            for name, value in arrays.items():
                if name.startswith(STATE):
                    _, i, what = name.split("/", 2)
                    found["state"].setdefault(int(i), {})[what] = value
                elif name.startswith(GROUPS):
                    _, i, what = name.split("/", 2)
                    found["param_groups"][int(i)][what] = value.item()
            self._optimizer.load_state_dict(found)
        self.restored = True


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of an optimizer's state, and the numbers of its groups."""
    for i, values in state["state"].items():
        for what, value in values.items():
            if isinstance(value, (torch.Tensor, bool, int, float)):
                yield f"{STATE}{i}/{what}", value
    for i, group in enumerate(state["param_groups"]):
        for what, value in group.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{GROUPS}{i}/{what}", value


def _array(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else np.asarray(value)
