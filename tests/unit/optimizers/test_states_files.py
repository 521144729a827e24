"""Files of states that an earlier mpikv wrote: tests/fixtures/make_states.py says how they were made."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mpikv import kv, optimizers

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
sys.path.insert(0, str(FIXTURES))
import make_states  # noqa: E402

EXPECTED = json.loads((FIXTURES / "states" / "expected.json").read_text())


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_an_earlier_version_goes_on(name: str, tmp_path: Path) -> None:
    """What the file holds is what a store writes now, and the next update is the one that was made then."""
    expected = EXPECTED[name]
    path = FIXTURES / "states" / f"{name}.states"
    optimizer = optimizers.create(name)
    with kv.create("local") as store:
        for key, (dtype, shape) in make_states.KEYS.items():
            store.init(key, np.asarray(expected["written"][key]).astype(dtype).reshape(shape))
        store.set_optimizer(optimizer)
        store.load_optimizer_states(str(path))
        assert optimizer.attributes() == expected["attributes"]
        store.save_optimizer_states(str(tmp_path / "again"), dump_optimizer=True)
        assert members(tmp_path / "again") == members(path)
        found = make_states.push(store)
    for key, values in expected["next"].items():
        # LARS and LAMB take norms, whose sums NumPy adds up in an order of the processor's.
        np.testing.assert_allclose(found[key], values, rtol=1e-3 if key == "half" else 1e-6, err_msg=key)


def test_there_is_a_file_for_each_optimizer() -> None:
    assert set(EXPECTED) == set(optimizers.names())
