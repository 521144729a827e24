"""A text by which ranks check that they have the same user function, since functions cannot be compared.

It is the function's name with a digest of its code: bytecode, the names and constants in it, default values, and simple
values (numbers, strings) in its closure. So two lambdas on one line differ, and so do two functions with different
learning rates in their closures; memory addresses and file paths make no difference. Global variables, and arrays in
closures, are not compared.
"""

from __future__ import annotations

import functools
import hashlib
from types import CodeType, FunctionType, MethodType
from typing import Any

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def identity(function: object) -> str:
    """Return module:name#digest of any callable; without the digest if it has no Python code. Local."""
    if isinstance(function, functools.partial):
        arguments = [_text(value) for value in (*function.args, *sorted(function.keywords.items()))]
        return f"partial({identity(function.func)}, {', '.join(arguments)})"
    if isinstance(function, MethodType):
        return f"{identity(function.__func__)} of {_text(function.__self__)}"
    if isinstance(function, FunctionType):
        parts = [*_code(function.__code__), *(_text(value) for value in function.__defaults__ or ())]
        parts += [_text(item) for item in sorted((function.__kwdefaults__ or {}).items())]
        parts += [_cell(cell) for cell in function.__closure__ or ()]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return f"{function.__module__}:{function.__qualname__}#{digest}"
    return _text(function)


def _code(code: CodeType) -> list[str]:
    parts = [code.co_code.hex(), *code.co_names]
    for constant in code.co_consts:
        parts += _code(constant) if isinstance(constant, CodeType) else [_text(constant)]
    return parts


def _cell(cell: Any) -> str:
    try:
        return _text(cell.cell_contents)
    except ValueError:  # a variable that is not assigned yet
        return "empty"


def _text(value: Any) -> str:
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_text(item) for item in value)})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(_text(item) for item in value))}}}"
    named = value if isinstance(value, (type, FunctionType)) or hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
