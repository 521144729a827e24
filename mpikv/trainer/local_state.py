"""What a worker of local training has for itself: its weights between two rounds, its optimizer, counts of steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mpikv.arrays import as_numpy
from mpikv.arrays.as_numpy import host_view
from mpikv.common import checks
from mpikv.common.checks import plain, shown
from mpikv.errors import StatesFileError
from mpikv.optimizers.states_file import InMemory
from mpikv.trainer.checkpoint import check_fits
from mpikv.trainer.parameter import data_written, list_data
from mpikv.trainer.torch_parameter import TorchParameter
from mpikv.trainer.trainer import Trainer

OF_TRAINER = "trainer"


class LocalState:
    """Of one worker; a `WorkerState` of its trainer. parts: how many there are. optimizer: see `LocalUpdates`.

    steps: made by this worker. unsent: for each part, those since its last exchange began. part: the next one to be
    exchanged. pending: the one whose exchange has begun and whose common weights are not in the parameters yet; None:
    none. begun: the weights with which it began, by name, if there were steps since. restored: whether all that was.
    """

    def __init__(self, params: Mapping[str, Any], parts: int, optimizer: Any) -> None:
        self._params, self._states = params, _states_of(optimizer)
        self.steps = self.part = 0
        self.unsent = [0] * parts
        self.pending: int | None = None
        self.begun: dict[str, Any] = {}
        self.restored = False

    def count(self) -> None:
        """Count a step."""
        self.steps, self.unsent = self.steps + 1, [steps + 1 for steps in self.unsent]

    def begin(self, part: int) -> None:
        """Note that the exchange of this part begins."""
        self.pending, self.unsent[part] = part, 0
        self.part = (part + 1) % len(self.unsent)

    def state_dict(self) -> dict[str, Any]:
        """See `WorkerState`."""
        return {
            "steps": [self.steps, self.part, -1 if self.pending is None else self.pending, *self.unsent],
            "model": {name: list_data(parameter)[0] for name, parameter in self._params.items()},
            "begun": self.begun,
            "optimizer": None if self._states is None else self._states.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` has returned. Raises StatesFileError for what does not fit, and changes nothing."""
        try:
            steps, part, pending, *unsent = (checks.whole("a count", one, -1) for one in state["steps"])
            parts = range(len(self.unsent))
            if len(unsent) != len(parts):
                raise ValueError(f"saved with parts={len(unsent)}, and this run has parts={len(parts)}")
            if part not in parts or pending not in (-1, *parts) or min(steps, *unsent) < 0:
                raise ValueError(f"counts {shown([steps, part, pending, *unsent])}")
            begun = {name: host_view(state["begun"][name], name) for name in self._params if name in state["begun"]}
            model = {name: host_view(state["model"][name], name) for name in self._params}
            ours = {name: list_data(parameter)[0] for name, parameter in self._params.items()}
            check_fits("its weights", model, ours)
            check_fits("its weights", begun, ours)
            if self._states is not None:
                self._states.load_state_dict(state["optimizer"])
        except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
            text = plain(f"{type(error).__name__}: {error}")
            raise StatesFileError(f"what a worker has of local training does not fit here ({text})") from error
        self.steps, self.part, self.unsent, self.begun = steps, part, unsent, begun
        self.pending = None if pending < 0 else pending
        for name, parameter in self._params.items():
            as_numpy.write(ours[name], model[name], f"parameter {shown(name)}")
            data_written(parameter)
        self.restored = True


def weight_of(parameter: Any) -> Any:
    """Return the array of a weight on its first device, in which it may be changed: of NumPy, CuPy or PyTorch."""
    return parameter.tensor.detach() if isinstance(parameter, TorchParameter) else list_data(parameter)[0]


class _TrainersStates:
    """Of a `Trainer` without a store: its optimizer's states, as in a file, and how far it has come."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if trainer.kvstore is not None:
            raise ValueError("LocalUpdates: optimizer is a Trainer with kvstore=None, whose steps a worker makes alone")

    def state_dict(self) -> dict[str, Any]:
        trainer, states = self._trainer, InMemory(OF_TRAINER)
        trainer._save_states(states, together=False)  # noqa: SLF001 - what `save_states` would write
        return {**states.content, "steps": trainer.steps, "examples": trainer.examples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps, examples = checks.whole("steps", state["steps"]), checks.number("examples", state["examples"], 0.0)
        self._trainer._load_states(InMemory(OF_TRAINER, state))  # noqa: SLF001
        self._trainer.steps, self._trainer.examples = steps, examples


def _states_of(optimizer: Any) -> Any:
    torch = sys.modules.get("torch")  # not imported: a program that has one of its optimizers has imported it
    if optimizer is None:
        return None
    if isinstance(optimizer, Trainer):
        return _TrainersStates(optimizer)
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    raise checks.wrong("LocalUpdates: optimizer", "a torch.optim.Optimizer or None, or a Trainer", optimizer)
