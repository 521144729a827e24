"""What the tests' CuPy without a GPU offers under CuPy's names the installed CuPy has, with the same parameters; and so
has it what mpikv names of it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import fake_cupy
import frameworks
import ml_dtypes
import numpy as np
import pytest
from fake_cupy import FUNCTIONS, UFUNC_KEYWORDS, Machine
from installed import NO_DRIVER, array, cupy, literal, nccl, outcome, parameters
from jobs import ROOT

FAKE = Machine().process()
# What the fake has besides, for the tests alone.
OWN = {
    "cupy": {"machine", "visible", "streams", "contexts", "null", "pool", "local"},
    "Stream": {"machine", "process", "id", "number", "clock", "behind", "shut", "come_behind"},
    "Event": {"machine", "process", "asks", "clock", "behind", "shut", "come_behind"},
    **{name: {"process"} for name in ("Device", "Memory", "MemoryPool", "UnownedMemory", "ndarray")},
}
SPECIAL = {"__cuda_array_interface__", "__array_function__", "__array_ufunc__", "__enter__"}
SPECIAL |= {"__exit__", "__int__", "__len__", "__float__", "__bool__", "__getitem__", "__setitem__"}


def made(name: str) -> tuple[Any, Any]:
    """One of the fake's class, and the installed class or an object of it, which have the same names."""
    memory = FAKE.cuda.Memory(8)
    real = {"Stream": cupy.cuda.Stream.null, "ndarray": array(3, "f4"), "Device": cupy.cuda.Device(0)}
    arguments = {"MemoryPointer": (memory, 0), "UnownedMemory": (memory.ptr, 8, None, 0), "Memory": (8,)}
    fake = FAKE.zeros(3) if name == "ndarray" else getattr(FAKE.cuda, name)(*arguments.get(name, ()))
    return fake, real.get(name, getattr(cupy.cuda, name, None))


def offered() -> Iterator[tuple[str, Any, Any, Any]]:
    """Path, what the fake has there, the installed CuPy's owner of it, and its name."""
    places = {
        "cupy": (FAKE, cupy),
        "cuda": (FAKE.cuda, cupy.cuda),
        "runtime": (FAKE.cuda.runtime, cupy.cuda.runtime),
        "memory": (FAKE.cuda.memory, cupy.cuda.memory),
        "nccl": (FAKE.cuda.nccl, nccl),
    }
    for name in (
        "ndarray",
        *(name for name in dir(FAKE.cuda) if not name.startswith("_") and inspect.isclass(getattr(FAKE.cuda, name))),
    ):
        places[name] = made(name)
    places["NcclCommunicator"] = FAKE.cuda.nccl.NcclCommunicator, getattr(nccl, "NcclCommunicator", None)
    for place, (fake, real) in places.items():
        for name in dir(fake):
            if name in SPECIAL or not (name.startswith("_") or name in OWN.get(place, ())):
                yield f"{place}.{name}", getattr(fake, name, None), real, name


@pytest.mark.parametrize(("path", "fake", "owner", "name"), [pytest.param(*one, id=one[0]) for one in offered()])
def test_a_name_of_the_fake(path: str, fake: Any, owner: Any, name: str) -> None:
    if "ccl" in path and name not in ("nccl", "available"):
        frameworks.need("nvidia.nccl")
    assert name in dir(owner)
    if type(fake) is int and path.startswith("nccl"):
        assert getattr(owner, name) == fake  # a constant
    if not callable(fake):
        return
    real = parameters(getattr(owner, name))
    own = [one for one in inspect.signature(fake).parameters.items() if one[0] != "self"]
    if not any(one.kind is one.VAR_POSITIONAL for _, one in own):  # what must be given
        assert {name for name, default in real.items() if default is None} - {"args", "kwargs"} <= {
            name for name, _ in own
        }
    for i, (parameter, one) in enumerate(own):
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        assert parameter in real, (parameter, real)
        assert one.kind is one.KEYWORD_ONLY or list(real)[i] == parameter, real
        default = literal(real[parameter])
        assert (real[parameter] is None) == (one.default is one.empty)
        assert default is NotImplemented or one.default == default


def test_an_array_that_is_made() -> None:
    """CuPy's own way to make one of memory, which the others come from."""
    assert list(inspect.signature(FAKE.ndarray).parameters) == list(parameters(cupy.ndarray))
    assert array((2, 3), ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    flags = array(3, "f4").flags
    assert all(getattr(flags, name) for name in FAKE.zeros(3).flags._fields)
    with pytest.raises(AttributeError):
        array(3, "f4").nothing  # noqa: B018 - so that its classes are no traps


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_of_functions(name: str) -> None:
    assert set(FUNCTIONS[name]) == set(parameters(getattr(cupy, name))) - {"kwargs"}


def test_keywords_of_ufuncs() -> None:
    one = array(3, "f4")
    values = {"out": one, "where": array(3, "?"), "dtype": "f4", "casting": "same_kind"}
    for name in UFUNC_KEYWORDS:
        assert outcome(lambda name=name: np.add(one, one, **{name: values[name]})) is NO_DRIVER
    for wrong in ({"order": "K"}, {"subok": True}):
        assert outcome(lambda wrong=wrong: np.add(one, one, **wrong)) is TypeError
        assert outcome(lambda wrong=wrong: np.add(FAKE.zeros(3), 1, **wrong)) is TypeError


def test_errors() -> None:
    for fake, real in (
        (FAKE.cuda.memory.OutOfMemoryError, cupy.cuda.memory.OutOfMemoryError),
        (FAKE.cuda.runtime.CUDARuntimeError, cupy.cuda.runtime.CUDARuntimeError),
        (FAKE.cuda.nccl.NcclError, nccl.NcclError if nccl.available else None),
    ):
        if real is not None:
            assert fake.__bases__ == real.__bases__
            assert list(parameters(fake)) == list(parameters(real))
    assert str(fake_cupy.OutOfMemoryError(8192, 4096)) == str(cupy.cuda.memory.OutOfMemoryError(8192, 4096))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as raised:
        cupy.cuda.runtime.getDevice()
    assert raised.value.status > 0
    host = np.zeros(3, "f4")
    for act in (
        np.asarray,
        lambda one: one.set(np.zeros(3)),
        lambda one: one.set(np.zeros(2, "f4")),
        lambda one: one[::2].set(np.zeros(2, "f4")),
        lambda one: one.set([1.0, 2.0, 3.0]),
        lambda one: one.__setitem__(slice(None), host),
        lambda one: one.__setitem__(slice(None), [1.0, 2.0, 3.0]),
        lambda one: np.max(one, initial=0),
        lambda one: np.unpackbits(one.view("u1"), count=3),
        lambda one: np.sum(one, where=one),
    ):
        found = [outcome(lambda one=one, act=act: act(one)) for one in (FAKE.zeros(3, "f4"), array(3, "f4"))]
        assert found[0] is found[1] is not NO_DRIVER


def test_memory_may_be_a_subclass() -> None:
    class Lease(cupy.cuda.UnownedMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.more = [1]

    host = np.zeros(64, np.uint8)
    memory = Lease(host.ctypes.data, 64, host, 0)
    found = cupy.ndarray(8, "f4", cupy.cuda.MemoryPointer(memory, 8))
    assert found[2:].data.mem is memory
    assert found[2:].data.ptr == host.ctypes.data + 16
    assert (memory.more, memory.size, memory.device_id) == ([1], 64, 0)


VIEWS = {
    "a slice": lambda one: one[1:3],
    "from behind, in steps": lambda one: one[::-1, ::2],
    "one": lambda one: one[0, 1],
    "none": lambda one: one[4:],
    "a new axis": lambda one: one[:, None],
    "transposed": lambda one: one.T,
    "bytes": lambda one: one.view(np.uint8),
    "bytes of a row's part": lambda one: one[:, 2:4].view(np.uint8),
    "bytes of steps": lambda one: one[:, ::2].view(np.uint8),
    "bytes of columns": lambda one: one.T.view(np.uint8),
    "bytes of one": lambda one: one[0, 0].view(np.uint8),
    "wider": lambda one: one.view(np.float64),
    "wider, of a row's part": lambda one: one[:, 1:3].view(np.float64),
    "wider than there is": lambda one: one[:, :3].view(np.float64),
    "wider, of none": lambda one: one[:, :0].view(np.float64),
    "bfloat16": lambda one: one.view(ml_dtypes.bfloat16),
    "another shape": lambda one: one.reshape(8, 4),
    "one axis of steps": lambda one: one[::2, 0].reshape(2, -1),
    "a wrong shape": lambda one: one.reshape(5, 5),
    "no such index": lambda one: one[9],
    "the same dtype": lambda one: one.astype(np.float32, copy=False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    def told(one: Any) -> Any:
        found = outcome(lambda: VIEWS[view](one))
        if inspect.isclass(found):
            return found
        where = (found.strides, found.data.ptr - one.data.ptr) if found.size else ()
        return found.shape, found.dtype, where, found.flags.c_contiguous, found.flags.f_contiguous

    assert told(FAKE.zeros((4, 8), np.float32)) == told(array((4, 8), np.float32))


def test_what_mpikv_names() -> None:
    """In its sources: `cupy.cuda.Stream`."""
    named = set()
    for text in (path.read_text() for path in (ROOT / "mpikv").rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "cupy." in text else ():
            if isinstance(node, ast.Attribute):
                found = re.fullmatch(r"(?:\w+\.)*?_?cupy\.([\w.]+)", ast.unparse(node))
                named.update(found.groups() if found else ())
    assert named
    for chain in named:
        owner = cupy
        for name in chain.split(".") if not chain.startswith("cuda.nccl") else ():  # that is imported by itself
            assert name in dir(owner) or hasattr(owner, name), chain
            owner = getattr(owner, name, None)


def test_a_communicator_of_nccl() -> None:
    """It comes as far as CUDA with what the ranks are given, and no further with what older CuPys took."""
    frameworks.need("nvidia.nccl")
    found = nccl.get_unique_id()
    assert isinstance(found, bytes)
    assert len(found) == len(FAKE.cuda.nccl.get_unique_id()) == 128
    assert found != nccl.get_unique_id()
    assert list(parameters(nccl.NcclCommunicator))[:3] == ["ndev", "commId", "rank"]
    assert outcome(lambda: nccl.NcclCommunicator(1, found, 0)) in (nccl.NcclError, NO_DRIVER)
    for wrong, error in ((tuple(found), TypeError), (found[1:], ValueError)):
        assert outcome(lambda wrong=wrong: nccl.NcclCommunicator(1, wrong, 0)) is error
        assert outcome(lambda wrong=wrong: FAKE.cuda.nccl.NcclCommunicator(1, wrong, 0)) is error
