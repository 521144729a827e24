"""What a training run keeps between epochs, so that it can go on as if it had never stopped.

Two files: `FILE`, an .npz archive with the weights and the number of finished epochs, and `FILE.states-E`, the
optimizer's states after epoch E. Each is written beside its place and then renamed, the states first: whenever the run
is killed, `FILE` is whole and the states that belong to it are there.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpikv import Parameter, Trainer
from mpikv.files import replace_file

_EPOCHS = "finished epochs"


def write_weights(file: Path, parameters: Mapping[str, Parameter], **more: object) -> None:
    """Write the weights as an .npz archive, whole or not at all. Local."""
    weights = {name: _on_host(parameter.data) for name, parameter in parameters.items()}
    replace_file(file, lambda stream: np.savez(stream, **weights, **more))


def save(file: Path, parameters: Mapping[str, Parameter], trainer: Trainer, rank: int, epochs: int) -> None:
    """Save after `epochs` finished epochs. Collective over the workers; worker 0 writes."""
    trainer.save_states(_states(file, epochs))
    if rank == 0:
        write_weights(file, parameters, **{_EPOCHS: epochs})
        for old in file.parent.glob(f"{file.name}.states-*"):
            if old != _states(file, epochs):
                old.unlink()


def load_weights(file: Path, parameters: Mapping[str, Parameter]) -> int:
    """Read the weights into the parameters and return the number of finished epochs. Local.

    Raises OSError, or ValueError when the file is damaged or is one of another network.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is no checkpoint, or a damaged one: {error}") from error
    expected = {name: p.shape for name, p in parameters.items()}
    shapes = {name: array.shape for name, array in found.items() if name != _EPOCHS}
    if _EPOCHS not in found or shapes != expected:
        raise ValueError(f"{file} is no checkpoint of this network: it holds {shapes}, the network has {expected}")
    for name, parameter in parameters.items():
        parameter.data = found[name]
    return int(found[_EPOCHS])


def load_states(file: Path, trainer: Trainer, epochs: int) -> None:
    """Read the optimizer's states that belong to the weights. Collective over the workers; worker 0 reads."""
    trainer.load_states(_states(file, epochs))


def _states(file: Path, epochs: int) -> Path:
    return file.with_name(f"{file.name}.states-{epochs}")


def _on_host(array: object) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)
