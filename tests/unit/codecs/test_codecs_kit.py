"""The codecs go through `mpikv.testing.codecs`, and codecs that are wrong do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mpikv.codecs import ErrorFeedback, Float16, Int8, PowerSGD, RandomK, State, TopK, TwoBit, names, registry
from mpikv.testing import codecs as kit

OURS = ("none", "fp16", "bf16", "2bit", "1bit", "int8", "topk", "randomk", "powersgd")


def test_all_are_checked() -> None:
    assert set(OURS) <= set(names())


@pytest.mark.parametrize(
    "codec",
    [
        *map(registry.create, OURS),
        Float16(),
        Int8(3),
        TopK(0.3),
        TopK(1.0),
        TopK(0.3, 100),
        RandomK(0.3, seed=7),
        PowerSGD(1),
        ErrorFeedback(PowerSGD(5)),
        TwoBit(1e-3),
    ],
    ids=repr,
)
def test_each_codec_does_what_a_codec_has_to(codec: Any) -> None:
    kit.check_codec(codec)


# --- wrong ones: each makes one mistake, and one check finds it


class NotFrozen(Int8):
    __hash__ = None  # type: ignore[assignment]


class ReprOfAnother(Int8):
    def __repr__(self) -> str:
        return f"Int8(block={self.block})"


class OneByteTooMuch(Int8):
    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        return np.concatenate([super().encode(values, state), np.zeros(1, np.uint8)])


class ChangesItsInput(Int8):
    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        data = super().encode(values, state)
        values *= 0
        return data


class LeavesZerosOut(TopK):
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        positions, values = self.sent(data, out.size)
        out[positions] = values


class AddsTwice(Int8):
    def add(self, data: np.ndarray, out: np.ndarray) -> None:
        super().add(data, out)
        super().add(data, out)


class AddsSparsely(TopK):
    """-0.0 + 0.0 is 0.0."""

    def add(self, data: np.ndarray, out: np.ndarray) -> None:
        positions, values = self.sent(data, out.size)
        out[positions] += values


class SaysItIsExact(Int8):
    exact = True


class WritesBeyond(Int8):
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        super().decode(data, out)
        if out.base is not None and out.base.size > out.size:
            out.base[0] = 0


class ReadsBeyond(Int8):
    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        data = super().encode(values, state)
        if values.base is not None and values.base.size == values.size + 2:
            data[:1] ^= 1
        return data


@dataclass(frozen=True)
class RemembersElsewhere(RandomK):
    """The number of the push is the codec's, not the state's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_pushes", [0])

    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        self._pushes[0] += 1  # type: ignore[attr-defined]
        state["pushes"][0] = self._pushes[0]  # type: ignore[attr-defined]
        return super().encode(values, state)


class HidesItsResidual(TwoBit):
    has_residual = False


class OwesNothing(TwoBit):
    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        data = super().encode(values, state)
        state["residual"][...] = 0
        return data


class OwesALittleLess(ErrorFeedback):
    """By the last bit of some."""

    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        data = super().encode(values, state)
        state["residual"] *= np.float32(1 - 2.0**-20)
        return data


class NeverForgets(TwoBit):
    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        before = state["residual"].copy()
        data = super().encode(values, state)
        broken = ~np.isfinite(before + values.astype(np.float32))
        state["residual"][broken] = np.nan
        return data


class SharesScratch(Int8):
    """As soon as a second thread has used it, it gives other bytes."""

    scratch: dict[str, Any] = {}  # noqa: RUF012

    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        data = super().encode(values, state)
        self.scratch.setdefault("users", set()).add(kit.threading.get_ident())
        if len(self.scratch["users"]) > 1:
            data[:1] ^= 1
        return data


class TakesAnyLength(Int8):
    def check(self, data: np.ndarray, n_elems: int) -> None:
        pass


class SaysItWithAnAssert(Int8):
    def check(self, data: np.ndarray, n_elems: int) -> None:
        assert data.nbytes == self.wire_bytes(n_elems, np.dtype(np.float32))


@pytest.mark.parametrize(
    ("codec", "check", "text"),
    [
        (ReprOfAnother(), kit.check_value, "not equal"),
        (OneByteTooMuch(), kit.check_sizes, "encode gave 1 bytes; wire_bytes says 0"),
        (ChangesItsInput(), kit.check_sizes, "encode changed the values"),
        (LeavesZerosOut(), kit.check_decoding, "where something else was before"),
        (AddsTwice(), kit.check_decoding, "add is not decode and a sum"),
        (AddsSparsely(), kit.check_decoding, "add is not decode and a sum"),
        (SaysItIsExact(), kit.check_decoding, "says that it is exact"),
        (WritesBeyond(), kit.check_decoding, "wrote beside the array"),
        (ReadsBeyond(), kit.check_repeats, "other bytes from other memory"),
        (RemembersElsewhere(), kit.check_states, "a copy of the state gave other bytes"),
        (HidesItsResidual(), kit.check_states, "does not say `has_residual = True`"),
        (OwesNothing(), kit.check_feedback, "the residual is 0.0"),
        (OwesALittleLess(Int8()), kit.check_feedback, "is owed, and the residual is"),
        (NeverForgets(), kit.check_not_finite, "nan stays in the residual"),
        (SharesScratch(), kit.check_threads, "threads at the same time gave other bytes"),
        (TakesAnyLength(), kit.check_damaged, "no error|not MpikvError"),
        (SaysItWithAnAssert(), kit.check_damaged, "AssertionError, not MpikvError"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "encode") else "",
)
def test_mistakes_are_found(codec: Any, check: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check(codec)


def test_what_has_no_hash_is_no_value() -> None:
    with pytest.raises((AssertionError, TypeError)):
        kit.check_value(NotFrozen())
