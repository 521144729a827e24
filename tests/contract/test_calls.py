"""Each of NumPy's functions that the store calls on arrays of a GPU CuPy has, for these dtypes and keywords.

What is called is recorded by the tests' CuPy without a GPU, as optimizers and codecs run on its arrays.
"""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import UFUNC_KEYWORDS, Call, Machine
from installed import cupy, parameters

from mpikv import optimizers
from mpikv.codecs import registry
from mpikv.config import Config
from mpikv.spaces.gpu import Gpu
from mpikv.testing.stores import spawn_stores

N = 1000
DTYPES = [np.dtype(one) for one in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
COPIES = ("getitem", "setitem", "astype", "copyto", "copy", "set", "fill")
WEAK = {"bool": "?", "int": "l", "float": "d"}  # Python's numbers; and what they are in no other's company
SUBJECTS = [
    *(f"optimizer {name}" for name in optimizers.names()),
    *(f"codec {name}" for name in registry.names()),
    *(f"store {path}" for path in ("nccl", "host")),
]


def recorded_calls(subject: str) -> set[Call]:
    """What was called to update weights, to encode, decode, add and subtract, or by stores."""
    kind, name = subject.split()
    if kind == "store":
        return {call for dtype in (*DTYPES, np.dtype(np.int32)) for call in _store(dtype, name)}
    machine = Machine()
    zeros = machine.process().zeros
    for dtype, more in product(DTYPES, ({}, {"wd": 0.1, "clip_gradient": 1.0})):
        values, grad, sums = zeros(N, dtype), zeros(N, dtype), zeros(N, "f8" if dtype == np.float64 else "f4")
        if kind == "codec":
            codec = registry.create(name)
            state = {name: np.asarray(one, like=values) for name, one in codec.init(N).items()}
            data = [codec.encode(values, state) for _ in range(2)][1]
            for act in (codec.decode, codec.add, codec.subtract):
                act(data, sums)
        else:
            optimizer = optimizers.create(name, **more)
            state = optimizer.init(values)
            for _ in range(2):
                state = optimizer.update("key", values, grad, state)
    return machine.calls


def _store(dtype: np.dtype[Any], path: str) -> set[Call]:
    """A store of three workers: pushes of one and of several arrays, other dtypes of results, labels with factors."""
    machine = Machine(3 if path == "nccl" else 1)
    gpus = [Gpu(0, machine.process((rank % machine.n_gpus,)), has_context=bool) for rank in range(3)]

    def body(store: Any) -> None:
        cupy = gpus[store.rank].cupy
        store.init("w", cupy.zeros((10, 10), dtype))
        for op in ("sum", "mean", "max", "min", "prod"):
            if op != "mean" or dtype.kind == "f":
                store.pushpull("w", cupy.zeros((10, 10), dtype).T, op=op)
        store.push("w", [cupy.zeros((10, 10), dtype), np.zeros((10, 10), dtype)])
        store.pull("w", [cupy.zeros((10, 10)), cupy.zeros((10, 10, 2), np.float32)[:, :, 1]])
        if dtype.kind == "f":
            store.set_optimizer(optimizer := optimizers.create("sgd"))
            optimizer.rescale_grad = 1.0 + store.rank
            store.push("w", cupy.zeros((10, 10), dtype))
            store.pull("w", cupy.zeros((10, 10), dtype))

    spawn_stores("dist_sync", 3, body, config=Config(timeout_s=60.0, device_path=path), gpus=gpus)
    return machine.calls


def dtype_of(name: str) -> np.dtype[Any]:
    """By the name that a Call has, or the letter of a loop: E is bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name in ("E", "bfloat16") else name)


def refused(call: Call) -> str:
    """Why CuPy would not take it; "" where it would."""
    name = call.name
    if name in COPIES:
        known = {one.partition("->")[0] for one in cupy._core.elementwise_copy.types}
        used = {dtype_of(one).char for one in (*call.inputs, call.output) if one not in (*WEAK, "tuple", "slice")}
        return "" if used <= known else f"no array has these dtypes: {used - known}"
    real = getattr(cupy, name, None)
    if real is None:
        return "CuPy has no such function"
    if not hasattr(real, "types"):  # no ufunc there, or one of whole matrices
        return "" if {*call.keywords} <= {*parameters(real)} else f"it takes {list(parameters(real))}"
    if not {*call.keywords} <= UFUNC_KEYWORDS:
        return f"it takes {UFUNC_KEYWORDS}"
    return _no_loop(call, real.types)


def _no_loop(call: Call, loops: list[str]) -> str:
    """CuPy takes the first loop that all inputs can be cast to safely; Python's numbers are of any dtype of a kind."""
    kinds = "?bifc"

    def fits(given: str, letter: str) -> bool:
        wanted = dtype_of(letter)
        if given in WEAK:
            kind = "f" if letter == "E" else {"b": "?", "u": "i"}.get(wanted.kind, wanted.kind)
            return kinds.index(kind) >= kinds.index({"?": "?", "l": "i", "d": "f"}[WEAK[given]])
        return np.can_cast(dtype_of(given), wanted)

    for loop in loops:
        inputs, _, outputs = loop.partition("->")
        if all(map(fits, call.inputs[: len(inputs)], inputs)):
            found, wanted = dtype_of(outputs[0]), dtype_of(call.output)
            if np.can_cast(found, wanted, "same_kind") if call.into else found == wanted:
                return ""
            return f"its loop {loop} makes {found}, not {wanted}"
    return f"no loop of {loops}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_calls(subject: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = recorded_calls(subject)
    assert calls
    assert not [(call, why) for call in sorted(calls) if (why := refused(call))]
