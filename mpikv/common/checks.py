"""Arguments: what they have to be, and how errors describe what they are.

A checker takes what the argument is called and its value. It returns the value in one type of Python's (NumPy's numbers
are converted), or raises TypeError for another kind of thing and ValueError for one out of range, which say what was
expected. Errors repeat what users gave by `shown` alone, which is never long.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

LARGEST = 2**63 - 1  # of whole numbers: they become sizes, and cross to other ranks in 64 bits
LONGEST_S = 1e9  # 32 years; Python's waits take up to 292 years, and what is longer ends the thread that waits
PATH_MAX = 4096  # Linux's
_CHARS = 200  # of a value in an error


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _CHARS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8
        self.maxlevel = 3


_SHORT = _Short()


def shown(value: object) -> str:
    """Return `repr(value)`, cut in its middle where it is long. Never raises, whatever the object's own repr does."""
    if type(value) is str and len(value) < _CHARS:  # as keys are, which texts are made of that no error will need
        return repr(value)
    try:
        return _SHORT.repr(value)
    except Exception:  # noqa: BLE001 - an error about an argument must not become another error
        return f"<{type(value).__name__}>"


def plain(given: object) -> str:
    """Return somebody else's text, or what it is of, as one line that can be printed: cut, and with escapes."""
    text = str(given)[: 5 * _CHARS]
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def meant(name: object, known: Iterable[str]) -> str:
    """Return ' Did you mean ...?' for a name that is like a known one (its initials, its beginning, a slip), or ''."""
    if not isinstance(name, str):
        return ""
    text, names = name[:_CHARS].lower(), list(known)

    def initials(name: str) -> str:
        return "".join(word[:1] for word in name.split("_")) if "_" in name else ""

    near = [other for other in names if text and (initials(other) == text or initials(text) == other)]
    near += difflib.get_close_matches(text, names, n=1)
    near += [other for other in names if len(text) > 2 and other.startswith(text)]
    return f" Did you mean {near[0]!r}?" if near else ""


def wrong(what: str, wanted: str, value: object) -> TypeError:
    """Return the error for a value of the wrong kind."""
    return TypeError(f"{what} is {wanted}, not {type(value).__name__} ({shown(value)})")


def whole(what: str, value: Any, least: int | None = 0, most: int | None = LARGEST) -> int:
    """Check a whole number from `least` to `most` (None: any)."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # noqa: BLE001 - `__index__` of anything
        number = None
    if number is None:
        raise wrong(what, "a whole number", value)
    if least is not None and number < least:
        raise ValueError(f"{what} must be at least {least}, not {shown(number)}")
    if most is not None and number > most:
        raise ValueError(f"{what} must be at most {most}, not {shown(number)}")
    return number


def number(
    what: str, value: Any, least: float | None = None, *, below: float | None = None, wanted: str = "a number"
) -> float:
    """Check a finite float of at least `least` and less than `below`."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise wrong(what, wanted, value)
    try:
        result = float(value)
    except OverflowError:
        raise ValueError(f"{what} must be a number that a float can hold, not {shown(value)}") from None
    except Exception as error:
        raise wrong(what, wanted, value) from error
    if not math.isfinite(result):
        raise ValueError(f"{what} must be finite, not {result}")
    if least is not None and result < least:
        raise ValueError(f"{what} must be at least {least:g}, not {result:g}")
    if below is not None and result >= below:
        raise ValueError(f"{what} must be less than {below:g}, not {result:g}")
    return result


def seconds(what: str, value: Any) -> float:
    """Check a time limit: 0 to `LONGEST_S` seconds."""
    result = number(what, value, 0.0)
    if result > LONGEST_S:
        raise ValueError(f"{what} must be at most {LONGEST_S:g} seconds, not {result:g}")
    return result


def flag(what: str, value: Any) -> bool:
    """Check True or False; NumPy's are taken, too."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool_", "bool") and type(value).__module__ == "numpy":
        return bool(value)
    raise wrong(what, "True or False", value)


def one_of(what: str, value: Any, words: Collection[str]) -> str:
    """Check that the value is one of some words."""
    if not isinstance(value, str) or value not in words:
        listed = ", ".join(map(repr, words))
        raise ValueError(f"{what} must be one of {listed}; got {shown(value)}.{meant(value, words)}")
    return value


def options(what: str, value: Any) -> dict[str, Any]:
    """Check a mapping from names to values, and return it as a new dict; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(what, "a dict of names and values", value)
    found = dict(value)
    for name in found:
        if not isinstance(name, str):
            raise wrong(f"a name in {what}", "a str", name)
    return found


def path(what: str, value: Any) -> str:
    """Check the name of a file."""
    try:
        text = os.fsdecode(value)
        encoded = os.fsencode(text)
    except UnicodeError:
        raise ValueError(f"{what} is the name of a file, and {shown(value)} is none") from None
    except Exception:  # noqa: BLE001 - `__fspath__` of anything
        raise wrong(what, "the name of a file (a str, bytes or a Path)", value) from None
    if not text or "\0" in text or len(encoded) >= PATH_MAX:
        raise ValueError(f"{what} is the name of a file, and {shown(text)} is none")
    return text
