"""From a function of NumPy arrays to a program.

`trace` runs a function of NumPy arrays on arrays that only note what is done with them. So the formula of an optimizer,
written for NumPy, becomes a program as it is, and values that nobody needs are left out of it.

Where a function asks for the length of an array (`NotingArray.sum_of_squares`), all elements must be there first: so a
trace has stages (`trace_stages`), each a program, and the sums that were asked for before it as single arguments.

Cost: a trace takes 4 to 8 us for each call of the function, 0.1 to 0.2 ms for Adam, however long the arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpikv.arrays import SUPPORTED_DTYPES
from mpikv.spaces.program import (
    CAST,
    DENSE,
    OPERATIONS,
    ROUND,
    SELECT,
    Argument,
    Layout,
    Numbers,
    Operation,
    Program,
)


class NotAProgram(Exception):  # noqa: N818 - says what was found; caught where the host can do the work instead
    """A function does what no program can say: something else than `OPERATIONS` on whole arrays."""


def trace(
    function: Callable[..., Any], dtypes: Sequence[np.dtype[Any]], layouts: Mapping[int, Layout] = MappingProxyType({})
) -> tuple[Program, Numbers]:
    """The program of a function, and the numbers that it used. The function is called once, and its result not used.

    function: takes one array for each dtype, and changes some of them in place. What it does beside that happens, too.
    layouts: of the arguments, by their places, that do not have one item for each element.
    Raises NotAProgram where it does something else than operations on whole arrays, and what the function raises.
    """
    stages = trace_stages(function, dtypes)
    if len(stages) > 1:
        _refuse("the sum of an array's squares")
    made, numbers = stages[0].program, stages[0].numbers
    arguments = [one._replace(layout=layouts.get(i, DENSE)) for i, one in enumerate(made.arguments)]
    return made._replace(arguments=tuple(arguments)), numbers


class Stage(NamedTuple):
    """One part of a function. squares: the argument whose sum of squares is the next single one; None: the last stage.

    The arguments of its program are those of the function, temporary ones included, and then the sums of the stages
    before it.
    """

    program: Program
    numbers: Numbers
    squares: int | None


def trace_stages(
    function: Callable[..., Any], dtypes: Sequence[np.dtype[Any]], temporaries: Sequence[np.dtype[Any]] = ()
) -> list[Stage]:
    """`trace`, of a function that asks for sums of squares.

    temporaries: dtypes of more arrays, which the function takes behind the others; memory of any content. They are
    written where a later stage reads them.
    """
    notes = Notes()
    notes.arguments = [NotingArray(notes, dtype, Value(dtype, "")) for dtype in dtypes]
    notes.n_lasting = len(dtypes)
    notes.loads = [array.value for array in notes.arguments]
    for dtype in temporaries:
        notes.arguments.append(NotingArray(notes, dtype, None))
        notes.loads.append(Value(dtype, ""))
    function(*notes.arguments)
    notes.end(None)
    return notes.stages()


class Value:
    """A value in a trace. name: of its operation; "" where it is loaded or a number."""

    __slots__ = ("dtype", "inputs", "name", "needed", "number")

    def __init__(self, dtype: np.dtype[Any], name: str, inputs: tuple[Value, ...] = (), number: Any = None) -> None:
        self.dtype, self.name, self.inputs, self.number = dtype, name, inputs, number
        self.needed = False


class _Noted(NamedTuple):
    """A stage as it was noted. stored: what the arguments hold at its end."""

    loads: list[Value]
    sums: list[Value]
    stored: list[Value | None]
    numbers: list[Value]
    operations: list[Value]
    squares: int | None


class Notes:
    """What a function does, as it does it."""

    def __init__(self) -> None:
        self.arguments: list[NotingArray] = []
        self.n_lasting = 0  # how many of them are no temporary memory
        self._noted: list[_Noted] = []
        self.loads: list[Any] = []  # of the stage that is being noted, as are:
        self.sums: list[Value] = []
        self.numbers: list[Value] = []
        self.operations: list[Value] = []
        self._here: dict[Value, Value] = {}  # values of earlier stages that are made of sums and numbers, made again

    def add(self, name: str, dtype: np.dtype[Any], inputs: tuple[Value, ...]) -> Value:
        """One more operation."""
        value = Value(dtype, name, inputs)
        self.operations.append(value)
        return value

    def cast(self, value: Value, dtype: np.dtype[Any]) -> Value:
        """The value in that dtype."""
        return value if value.dtype == dtype else self.add(CAST, dtype, (value,))

    def read(self, source: Any, dtype: np.dtype[Any]) -> Value:
        """What an operation in `dtype` reads: a noting array, or a number, which is converted here."""
        if isinstance(source, NotingArray):
            if source.notes is not self:
                _refuse("an array of another trace")
            value = source.value
            if value is None:
                _refuse("temporary memory is read before it is written")
            value = self._carried(value) if self._noted else value
            return value if value.dtype is dtype else self.cast(value, dtype)
        value = Value(dtype, "", number=source if type(source) is dtype.type else _number(source, dtype))
        self.numbers.append(value)
        return value

    def _carried(self, value: Value) -> Value:
        """The value in this stage: that of an earlier one must be made of sums and numbers alone."""
        found = self._here.get(value)
        if found is None:
            if value in self._mine():
                return value
            if value.number is not None:
                found = Value(value.dtype, "", number=value.number)
                self.numbers.append(found)
            elif value.inputs:
                found = self.add(value.name, value.dtype, tuple(self._carried(one) for one in value.inputs))
            else:
                _refuse("an array of its own that is read behind a sum")
            self._here[value] = found
        return found

    def _mine(self) -> set[Value]:
        return {*self.loads, *self.sums, *self.numbers, *self.operations}

    def end(self, squares: int | None) -> None:
        """End a stage, with the sum of squares of this argument where it is not the last one."""
        stored = [array.value for array in self.arguments]
        self._noted.append(_Noted(self.loads, self.sums, stored, self.numbers, self.operations, squares))
        self.loads = [Value(one.dtype, "") for one in self.loads]
        for array, load in zip(self.arguments, self.loads, strict=True):
            if array.value is not None:
                array.value = load
        sums = [Value(np.dtype(np.float64), "") for _ in range(len(self.sums) + (squares is not None))]
        self._here = {old: sums[i] for noted in self._noted for i, old in enumerate(noted.sums)}
        self.sums, self.numbers, self.operations = sums, [], []

    def stages(self) -> list[Stage]:
        """What is noted. Temporary memory is written where it is read later; so the last stage comes first."""
        found: list[Stage] = []
        read_later: set[int] = set()
        for noted in reversed(self._noted):
            if noted.squares is not None:
                read_later.add(noted.squares)
            lasts = [
                value if value is not load and (k < self.n_lasting or k in read_later) else None
                for k, (load, value) in enumerate(zip(noted.loads, noted.stored, strict=True))
            ]
            program, numbers = _program(noted, lasts)
            found.append(Stage(program, numbers, noted.squares))
            read_later -= {k for k, value in enumerate(lasts) if value is not None}
            read_later |= {k for k, load in enumerate(noted.loads) if load.needed}
        return found[::-1]


def _program(noted: _Noted, lasts: Sequence[Value | None]) -> tuple[Program, Numbers]:
    """The program of a stage, without values that nobody needs. lasts: what is stored in the arguments."""
    for value in lasts:
        if value is not None:
            value.needed = True
    for value in reversed(noted.operations):
        if value.needed:
            for one in value.inputs:
                one.needed = True
    numbers = [value for value in noted.numbers if value.needed]
    operations = [value for value in noted.operations if value.needed]
    read = [value for value in (*noted.loads, *noted.sums) if value.needed]
    index = {value: i for i, value in enumerate([*read, *numbers, *operations])}
    arguments = [
        Argument(load.dtype, index.get(load), None if last is None else index[last])
        for load, last in zip(noted.loads, lasts, strict=True)
    ]
    arguments += [Argument(one.dtype, index.get(one), None, Layout(all=True)) for one in noted.sums]
    made = [Operation(value.name, value.dtype, tuple(index[one] for one in value.inputs)) for value in operations]
    program = Program(tuple(arguments), tuple(value.dtype for value in numbers), tuple(made))
    return program, tuple(value.number for value in numbers)


class NotingArray(NDArrayOperatorsMixin):
    """Looks like a NumPy array (n,) to a function that works on whole arrays, and only notes what is done with it."""

    __slots__ = ("dtype", "notes", "value")

    def __init__(self, notes: Notes, dtype: np.dtype[Any], value: Value | None) -> None:
        self.notes, self.dtype, self.value = notes, dtype, value

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        name = ufunc.__name__
        if ufunc is np.square:
            name, inputs = "multiply", inputs * 2
        elif method != "__call__" or OPERATIONS.get(name) is not ufunc:
            _refuse(f"np.{name}" if method == "__call__" else f"np.{name}.{method}")
        casting, forced = "same_kind", None
        if kwargs:
            casting, forced = kwargs.pop("casting", casting), kwargs.pop("dtype", None)
            if kwargs:
                _refuse(f"np.{name} with {', '.join(sorted(kwargs))}")
        dtype = _dtype_of(ufunc, inputs, forced, casting)
        read = self.notes.read
        value = self.notes.add(name, dtype, tuple([read(one, dtype) for one in inputs]))
        if not out:
            return NotingArray(self.notes, dtype, value)
        (target,) = out
        return _write(target, value, casting)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.copyto:
            _refuse(f"np.{getattr(function, '__name__', function)}")
        _copy(*args, **kwargs)

    def __setitem__(self, index: Any, source: Any) -> None:
        _check_whole(index)
        _copy(self, source, casting="unsafe")

    def __getitem__(self, index: Any) -> NotingArray:
        _check_whole(index)
        return self

    def __pow__(self, exponent: Any) -> Any:
        if type(exponent) in (int, float) and exponent == 2:  # as NumPy's arrays do it
            return np.multiply(self, self)
        return _refuse("a power")

    def sum_of_squares(self) -> NotingArray:
        """One number of float64, as `folded.on_host` finds it."""
        notes = self.notes
        for k, argument in enumerate(notes.arguments):
            if argument is self:
                notes.read(self, self.dtype)
                notes.end(k)
                return NotingArray(notes, np.dtype(np.float64), notes.sums[-1])
        return _refuse("the sum of squares of an array of its own")

    def fill(self, number: Any) -> None:
        """As NumPy's."""
        _copy(self, number, casting="unsafe")

    def copy(self) -> NotingArray:
        """As NumPy's."""
        return NotingArray(self.notes, self.dtype, self.notes.read(self, self.dtype))

    def astype(self, dtype: Any, *, copy: bool = True) -> NotingArray:
        """As NumPy's, without its other arguments."""
        wanted = _checked(np.dtype(dtype))
        if wanted == self.dtype and not copy:
            return self
        return NotingArray(self.notes, wanted, self.notes.read(self, wanted))

    def __getattr__(self, name: str) -> Any:
        _refuse(f"an array's `{name}`")

    def __bool__(self) -> bool:  # noqa: PLE0304 - never returns
        _refuse("the truth of an array")

    def __len__(self) -> int:  # noqa: PLE0303 - never returns
        _refuse("the length of an array")

    def __iter__(self) -> NoReturn:
        _refuse("the elements of an array")

    def __float__(self) -> float:
        _refuse("the value of an array")

    def __int__(self) -> int:
        _refuse("the value of an array")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("the values of an array")

    # Without these a comparison with a number of another library's would be tried the other way round, and be False.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: _refuse("a comparison")
    __hash__ = None  # type: ignore[assignment] # as NumPy's


def where_positive(condition: Any, first: Any, second: Any) -> Any:
    """`first` where the condition is above 0, else `second`: numbers of NumPy, or in a trace.

    In a trace all three are of the dtype of the first of them that is an array, or converted to it.
    """
    noting = next((one for one in (condition, first, second) if isinstance(one, NotingArray)), None)
    if noting is None:
        return np.where(condition > 0, first, second)[()]
    notes, dtype = noting.notes, noting.dtype
    value = notes.add(SELECT, dtype, tuple([notes.read(one, dtype) for one in (condition, first, second)]))
    return NotingArray(notes, dtype, value)


def rounded(values: Any, dtype: np.dtype[Any]) -> Any:
    """Floating point numbers of a trace as whole numbers, as `host.round_into` makes them."""
    value = values.notes.add(ROUND, dtype, (values.notes.read(values, values.dtype),))
    return NotingArray(values.notes, dtype, value)


_FLOATS = frozenset(dtype for dtype in SUPPORTED_DTYPES if dtype.kind not in "iu")


def _refuse(what: str) -> NoReturn:
    raise NotAProgram(f"{what} is nothing that a program can say")


def _number(source: Any, dtype: np.dtype[Any]) -> Any:
    """A number in that dtype, as NumPy casts it."""
    if not (isinstance(source, (int, float, np.generic)) or (isinstance(source, np.ndarray) and source.ndim == 0)):
        _refuse(f"an operand of type {type(source).__name__}")
    try:
        with np.errstate(all="ignore"):
            return np.asarray(source).astype(dtype)[()]
    except Exception as error:
        raise NotAProgram(f"{source!r} as {dtype}: {error}") from error


def _checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype not in SUPPORTED_DTYPES:
        _refuse(f"the dtype {dtype}")
    return dtype


def _dtype_of(ufunc: np.ufunc, inputs: Sequence[Any], forced: Any, casting: str) -> np.dtype[Any]:
    """The dtype that NumPy calculates in, which is that of the result: all of `OPERATIONS` have one for both."""
    first = getattr(inputs[0], "dtype", None)
    # Two float32 make a float32, and the like. Anything else is for NumPy to say.
    if forced is None and first in _FLOATS and first is getattr(inputs[-1], "dtype", None):
        return first  # type: ignore[return-value]
    try:
        with np.errstate(all="ignore"):
            probes = [np.empty(1, one.dtype) if isinstance(one, NotingArray) else one for one in inputs]
            result: Any = ufunc(*probes, dtype=forced, casting=casting)
            return _checked(result.dtype)
    except NotAProgram:
        raise
    except Exception as error:
        raise NotAProgram(f"np.{ufunc.__name__}: {error}") from error


def _write(target: Any, value: Value, casting: str) -> NotingArray:
    if not isinstance(target, NotingArray):
        _refuse(f"a result in a {type(target).__name__}")
    if value.dtype is target.dtype:
        target.value = value
        return target
    if not np.can_cast(value.dtype, target.dtype, casting):  # type: ignore[arg-type]
        _refuse(f"{value.dtype} cast to {target.dtype} by the rule {casting}")
    target.value = target.notes.cast(value, target.dtype)
    return target


def _copy(dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    if where is not True:
        _refuse("a copy of some elements")
    if not isinstance(dst, NotingArray):
        _refuse(f"a copy to a {type(dst).__name__}")
    if isinstance(src, NotingArray):
        _write(dst, dst.notes.read(src, src.dtype), casting)
    elif casting == "unsafe" or np.can_cast(np.asarray(src).dtype, dst.dtype, casting):  # type: ignore[arg-type]
        dst.value = dst.notes.read(src, dst.dtype)
    else:
        _refuse(f"{src!r} cast to {dst.dtype} by the rule {casting}")


def _check_whole(index: Any) -> None:
    if index is not Ellipsis and index != slice(None):
        _refuse("a part of an array")
