"""What a caller of other libraries catches: every error of ours is a RuntimeError and what its name says."""

from __future__ import annotations

import pytest

from mpikv import errors

KINDS = [one for one in vars(errors).values() if isinstance(one, type)]
ALSO = {
    "ConfigError": ValueError,
    "KeyNotInitialized": KeyError,
    "KeyExists": KeyError,
    "ShapeMismatch": ValueError,
    "StatesFileError": ValueError,
    "StallError": TimeoutError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_bases_and_text(kind: type[Exception]) -> None:
    for caught in (errors.MpikvError, RuntimeError, ALSO.get(kind.__name__, Exception)):
        with pytest.raises(caught) as found:
            raise kind("key 'w' of rank 1")
        assert str(found.value) == "key 'w' of rank 1"
