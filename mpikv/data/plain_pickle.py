"""Reads pickles that hold plain data and NumPy arrays of bytes, without executing anything and without unpickling.

A pickle is a program for a small stack machine, and `pickle.load` runs it: it imports and calls what the program names.
Here the program is only followed, by code that knows the instructions for dicts, lists, tuples, strings and whole
numbers, and of calls three texts: the ones that NumPy's pickles of an array have. No name is looked up anywhere, and
any other instruction or name is an error. That is enough for the files of CIFAR-10 and CIFAR-100, made by
Python 2 with protocol 2, and for what Python 3 makes of the same contents with protocol 3 or 4.

A string longer than 1 KiB is not read, but left where it is, as a `Span`: the bytes of a batch of images then
can be mapped. Memory: a hundred bytes for each element of a list. Source of the instructions: Python's module
pickletools.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpikv.data.recordio import FileBytes

LONGEST_TEXT = 1024


class Span(NamedTuple):
    """Bytes of the file, from `offset` on."""

    offset: int
    length: int


class Name(NamedTuple):
    """A name that occurs in the pickle; nothing but its text."""

    module: str
    name: str


@dataclass
class PickledArray:
    """An array of bytes. content: where its elements are, or the elements, if it is small; None until then."""

    shape: tuple[int, ...] = ()
    fortran: bool = False
    content: Span | bytes | None = None


_RECONSTRUCT = {Name("numpy.core.multiarray", "_reconstruct"), Name("numpy._core.multiarray", "_reconstruct")}
_NDARRAY, _DTYPE = Name("numpy", "ndarray"), Name("numpy", "dtype")
_BYTE_DTYPE = Name("", "uint8")  # what stands for numpy.dtype('u1')
_KNOWN = {*_RECONSTRUCT, _NDARRAY, _DTYPE}

_MARK = object()
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {ord("K"): "<B", ord("M"): "<H", ord("J"): "<i"}
_STRINGS = {ord("U"): "<B", ord("T"): "<i", ord("C"): "<B", ord("B"): "<I", 0x8E: "<Q", ord("X"): "<I", 0x8C: "<B"}
_PUTS, _GETS = {ord("q"): "<B", ord("r"): "<I"}, {ord("h"): "<B", ord("j"): "<I"}
_TUPLES = {ord(")"): 0, 0x85: 1, 0x86: 2, 0x87: 3}
_IGNORED = {0x80: 1, 0x95: 8}  # the protocol's number; the length of a frame


def read_plain_pickle(file: FileBytes) -> Any:
    """Return what the pickle holds, which is plain data.

    That is dict, list, tuple, bytes (all strings, of either kind), int, bool, None, Span, PickledArray. Raises
    ValueError that names the file and the offset for anything else, and for a damaged or truncated file.
    """
    return _Reader(file).run()


class _Reader:
    """The stack machine."""

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            start = self._at
            try:
                code = self._number("<B")
                if code == ord("."):
                    return self._stack.pop()
                self._step(code)
            except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error):
                raise self._error(start, "its instructions make no sense: damaged or truncated") from None
            except _RefusedError as refused:
                raise self._error(start, str(refused)) from None

    def _error(self, offset: int, problem: str) -> ValueError:
        return ValueError(f"{self._file.path}, offset {offset}: not a pickle of plain data: {problem}")

    def _take(self, count: int) -> bytes:
        found = self._file.read(self._at, count)
        if len(found) < count:
            raise IndexError
        self._at += count
        return found

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return number

    def _line(self) -> str:
        text = self._file.read(self._at, LONGEST_TEXT)
        end = text.index(b"\n") if b"\n" in text else _refuse("a name without an end")
        self._at += end + 1
        return text[:end].decode("ascii")

    def _string(self, form: str) -> bytes | Span:
        length = self._number(form)
        if length <= LONGEST_TEXT:
            return self._take(length) if length >= 0 else _refuse(f"a string of {length} bytes")
        if length > self._file.size - self._at:
            _refuse(f"a string of {length} bytes, where the file ends after {self._file.size - self._at}")
        span = Span(self._at, length)
        self._at += length
        return span

    def _since_mark(self) -> list[Any]:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i] is _MARK:
                found = self._stack[i + 1 :]
                del self._stack[i:]
                return found
        raise IndexError

    def _step(self, code: int) -> None:
        stack = self._stack
        if code in _NUMBERS:
            stack.append(self._number(_NUMBERS[code]))
        elif code in _STRINGS:
            stack.append(self._string(_STRINGS[code]))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _PUTS:
            self._memo[self._number(_PUTS[code])] = stack[-1]
        elif code == 0x94:
            self._memo[len(self._memo)] = stack[-1]
        elif code in _GETS:
            stack.append(self._memo[self._number(_GETS[code])])
        elif code == ord("("):
            stack.append(_MARK)
        elif code in _TUPLES:
            n = _TUPLES[code]
            values = tuple(stack[len(stack) - n :])
            if len(values) < n:
                raise IndexError
            del stack[len(stack) - n :]
            stack.append(values)
        elif code == ord("t"):
            stack.append(tuple(self._since_mark()))
        elif code in (ord("]"), ord("}")):
            stack.append([] if code == ord("]") else {})
        elif code in (ord("a"), ord("e")):
            values_ = [stack.pop()] if code == ord("a") else self._since_mark()
            _of(list, stack[-1]).extend(values_)
        elif code in (ord("s"), ord("u")):
            pairs = self._since_mark() if code == ord("u") else [stack.pop(-2), stack.pop()]
            _of(dict, stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif code in (ord("c"), 0x93):
            names = (self._line(), self._line()) if code == ord("c") else _texts(stack.pop(-2), stack.pop())
            stack.append(_known(Name(*names)))
        elif code == ord("R"):
            arguments = stack.pop()
            stack.append(_called(stack.pop(), arguments))
        elif code == ord("b"):
            state = stack.pop()
            _set_state(stack[-1], state)
        elif code == 0x8A:
            stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))
        elif code in _IGNORED:
            self._take(_IGNORED[code])
        else:
            _refuse(f"instruction 0x{code:02x}, which such files do not have")


class _RefusedError(Exception):
    """The pickle holds something that is not plain data."""


def _refuse(problem: str) -> Any:
    raise _RefusedError(problem)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _texts(module: Any, name: Any) -> tuple[str, str]:
    return _of(bytes, module).decode("ascii"), _of(bytes, name).decode("ascii")


def _known(name: Name) -> Name:
    if name not in _KNOWN:
        _refuse(f"it names {name.module[:80]}.{name.name[:80]}; nothing of it was executed")
    return name


def _called(what: Any, arguments: Any) -> Any:
    """Return, as data, what NumPy's own function would make."""
    if what in _RECONSTRUCT and arguments == (_NDARRAY, (0,), b"b"):
        return PickledArray()
    if what == _DTYPE and _of(tuple, arguments)[0] in (b"u1", b"|u1"):
        return _BYTE_DTYPE
    return _refuse("a call other than those that make an array of uint8")


def _set_state(what: Any, state: Any) -> None:
    if what == _BYTE_DTYPE:
        return  # byte order and alignment, of single bytes
    if type(what) is not PickledArray:
        _refuse("the state of something that is no array")
    _, shape, dtype, fortran, content = _of(tuple, state)
    if dtype != _BYTE_DTYPE or type(content) not in (bytes, Span) or type(fortran) not in (bool, int):
        _refuse("an array that is not of uint8")
    if type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
        _refuse("an array without a shape")
    what.shape, what.fortran, what.content = shape, bool(fortran), content
