"""What a worker of local training has for itself: its weights between two rounds, its optimizer, counts of steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpikv.arrays import as_numpy, tensors
from mpikv.common import checks
from mpikv.common.checks import plain, shown
from mpikv.errors import StatesFileError
from mpikv.optimizers.archive import from_bytes, to_bytes
from mpikv.optimizers.states_file import KIND, InMemory
from mpikv.trainer.checkpoint import check_fits
from mpikv.trainer.parameter import data_written, list_data
from mpikv.trainer.torch_parameter import TorchParameter
from mpikv.trainer.trainer import Trainer

COUNTS, OF_TRAINER = "steps", "trainer"
MODEL, BEGUN, STATE, GROUPS = "model/", "begun/", "state/", "groups/"


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
        """Return arrays by name: see `WorkerState`."""
        pending = -1 if self.pending is None else self.pending
        arrays: dict[str, Any] = {COUNTS: np.array([self.steps, self.part, pending, *self.unsent])}
        arrays |= {MODEL + name: list_data(parameter)[0] for name, parameter in self._params.items()}
        arrays |= {BEGUN + name: value for name, value in self.begun.items()}
        return arrays if self._states is None else arrays | self._states.arrays()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` has returned. Raises StatesFileError for what does not fit, and changes nothing."""
        try:
            steps, part, pending, *unsent = (int(count) for count in state[COUNTS])
            parts = range(len(self.unsent))
            if len(unsent) != len(parts):
                raise ValueError(f"saved with parts={len(unsent)}, and this run has parts={len(parts)}")
            if part not in parts or pending not in (-1, *parts) or min(steps, *unsent) < 0:
                raise ValueError(f"counts {shown([steps, part, pending, *unsent])}")
            begun = {name: state[BEGUN + name] for name in self._params if BEGUN + name in state}
            model = {name: state[MODEL + name] for name in self._params}
            ours = {name: list_data(parameter)[0] for name, parameter in self._params.items()}
            check_fits("its weights", model, ours)
            check_fits("its weights", begun, ours)
            if self._states is not None:
                self._states.restore(state)
        except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
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

    def arrays(self) -> dict[str, Any]:
        trainer, states = self._trainer, InMemory(OF_TRAINER)
        trainer._save_states(states, together=False)  # noqa: SLF001 - what `save_states` would write
        content = {**states.content, "steps": trainer.steps, "examples": trainer.examples}
        return {OF_TRAINER: np.frombuffer(to_bytes(KIND, content), np.uint8)}

    def restore(self, state: Mapping[str, Any]) -> None:
        content = from_bytes(np.asarray(state[OF_TRAINER]).tobytes(), KIND, OF_TRAINER)
        steps, examples = checks.whole("steps", content["steps"]), checks.number("examples", content["examples"], 0.0)
        self._trainer._load_states(InMemory(OF_TRAINER, content))  # noqa: SLF001
        self._trainer.steps, self._trainer.examples = steps, examples


class _TorchsStates:
    """Of a torch.optim.Optimizer: the tensors and numbers of its state, and the numbers of its groups."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def arrays(self) -> dict[str, Any]:
        return {name: np.asarray(one) if np.isscalar(one) else one for name, one in self._flat()}

    def _flat(self) -> Iterator[tuple[str, Any]]:
        found, tensor = self._optimizer.state_dict(), sys.modules["torch"].Tensor
        for i, values in found["state"].items():
            for what, value in values.items():
                if isinstance(value, (tensor, bool, int, float)):
                    yield f"{STATE}{i}/{what}", value
        for i, group in enumerate(found["param_groups"]):
            for what, value in group.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield f"{GROUPS}{i}/{what}", value

    def restore(self, state: Mapping[str, Any]) -> None:
        found = self._optimizer.state_dict()
        for name, value in state.items():
            if name.startswith((STATE, GROUPS)):
                _, i, what = name.split("/", 2)
                if name.startswith(STATE):
                    found["state"].setdefault(int(i), {})[what] = tensors.in_memory_of(np.array(value))[0]
                else:
                    found["param_groups"][int(i)][what] = value.item()
        self._optimizer.load_state_dict(found)


def _states_of(optimizer: Any) -> _TrainersStates | _TorchsStates | None:
    torch = sys.modules.get("torch")  # not imported: a program that has one of its optimizers has imported it
    if optimizer is None:
        return None
    if isinstance(optimizer, Trainer):
        return _TrainersStates(optimizer)
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        return _TorchsStates(optimizer)
    raise checks.wrong("LocalUpdates: optimizer", "a torch.optim.Optimizer or None, or a Trainer", optimizer)
