"""However a weight is cut, the updates of its slices are bitwise the update of the whole; its state likewise."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv import optimizers
from mpikv.optimizers import blocks
from mpikv.optimizers.states import StateRecord, join_states, slice_state
from mpikv.optimizers.states_file import records_from_bytes, records_to_bytes

ELEMENTWISE = [name for name in optimizers.names() if optimizers.create(name).elementwise]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int32]
OWN = {
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "dcasgd": {"momentum": 0.9},
    "rmsprop": {"centered": True, "clip_weights": 1.5},
}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_slices_and_the_whole(name: str, data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    n = data.draw(st.integers(1, 200))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, n], strict=True))
    seed = data.draw(st.integers(0, 2**32 - 1))
    parameters = {
        **data.draw(st.sampled_from([{}, OWN.get(name, {})])),
        "wd": data.draw(st.sampled_from([0.0, 0.01])),
        "rescale_grad": data.draw(st.sampled_from([1.0, 1 / 3])),
        "clip_gradient": data.draw(st.sampled_from([None, 0.7])),
        "multi_precision": data.draw(st.booleans()),
    }
    optimizer = optimizers.create(name, learning_rate=0.1, **parameters)
    rng = np.random.default_rng(seed)
    scale = 1.0 if dtype.kind != "i" else 20.0
    whole = (scale * rng.standard_normal(n)).astype(dtype)
    grad_dtype = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    grads = [(scale * rng.standard_normal(n)).astype(grad_dtype) for _ in range(3)]
    pieces = [whole[begin:end].copy() for begin, end in bounds]
    state, states = optimizer.init(whole), [optimizer.init(piece) for piece in pieces]
    for grad in grads:
        state = optimizer.update("w", whole, grad, state)
        for i, (begin, end) in enumerate(bounds):
            states[i] = optimizer.update("w", pieces[i], grad[begin:end], states[i])
    assert same_bits(np.concatenate(pieces), whole)
    joined = join_states([(begin, end, part) for (begin, end), part in zip(bounds, states, strict=True)], n)
    assert set(joined) == set(state)
    assert joined["t"] == state["t"] == 3
    assert all(same_bits(joined[key], value) for key, value in state.items() if isinstance(value, np.ndarray))
    # Cut anew, sent, and carried on: still the same.
    cut = data.draw(st.integers(0, n))
    sent = records_to_bytes(
        [StateRecord("w", (n,), dtype, b, e, slice_state(joined, b, e, n)) for b, e in ((0, cut), (cut, n))]
    )
    halves = [whole[:cut].copy(), whole[cut:].copy()]
    optimizer.update("w", whole, grads[0], state)
    for half, part in zip(halves, records_from_bytes(sent), strict=True):
        optimizer.check_state(half, part.state)
        optimizer.update("w", half, grads[0][part.begin : part.end], part.state)
    assert same_bits(np.concatenate(halves), whole)


@pytest.mark.parametrize("name", optimizers.names())
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_blocks_do_not_show(name: str, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of several blocks, and the same with blocks of an odd size."""
    rng = np.random.default_rng(5)
    n = 2 * blocks.BLOCK_ELEMS + 77
    start = (20 * rng.standard_normal(n)).astype(dtype)
    grads = [(20 * rng.standard_normal(n)).astype(np.float32 if dtype == np.float16 else dtype) for _ in range(2)]
    results = []
    for block in (blocks.BLOCK_ELEMS, 1001, 10 * n):
        monkeypatch.setattr(blocks, "BLOCK_ELEMS", block)
        optimizer = optimizers.create(name, wd=0.1, multi_precision=True, **OWN.get(name, {}))
        weight = start.copy()
        state = optimizer.init(weight)
        for grad in grads:
            state = optimizer.update("w", weight, grad, state)
        results.append((weight, state))
    for weight, state in results[1:]:
        assert same_bits(weight, results[0][0])
        assert all(
            same_bits(state[key], value) for key, value in results[0][1].items() if isinstance(value, np.ndarray)
        )


@pytest.mark.parametrize("name", optimizers.names())
def test_plain_numbers_do_not_widen_float32(name: str) -> None:
    """Numbers outside float32's range would make NumPy 1 calculate in float64."""
    weight = np.ones(5, np.float32)
    optimizer = optimizers.create(name, learning_rate=1e-60, wd=1e-60, rescale_grad=1e-60)
    state = optimizer.update("w", weight, np.ones(5, np.float32), optimizer.init(weight))
    assert all(value.dtype == np.float32 for value in state.values() if isinstance(value, np.ndarray))
