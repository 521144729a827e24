"""Calls that are known by their arguments: found exactly when keys and array objects are the same, given back once."""

from __future__ import annotations

import tracemalloc

import frameworks
import numpy as np
import pytest

from mpikv.calls.prepared import KEPT_LISTS, KEPT_SINGLES, PreparedCalls, may_come_again


class Call:
    """Notes how often it is released."""

    def __init__(self):
        self.valid = True
        self.released = 0

    def run(self):
        return True

    def release(self):
        self.released += 1


def array(n=3):
    return np.zeros(n, np.float32)


def known(*arguments, calls=None):
    """PreparedCalls that have seen these calls, (key, value, out), twice each."""
    prepared = PreparedCalls() if calls is None else calls
    made = []
    for key, value, out in arguments:
        for _ in range(2):
            call = Call()
            prepared.add(key, value, out, call)
        made.append(call)
    return prepared, *made


def test_a_call_is_kept_from_its_second_coming():
    prepared, x = PreparedCalls(), array()
    first, second = Call(), Call()
    assert prepared.find("w", x, None) is None
    prepared.add("w", x, None, first)
    assert first.released == 1
    assert prepared.find("w", x, None) is None
    prepared.add("w", x, None, second)
    assert second.released == 0
    assert prepared.find("w", x, None) is second


def test_a_call_that_is_kept_at_once_takes_the_place_of_one_with_the_same_keys():
    prepared, keys = PreparedCalls(), ["a", "b"]
    first, other, second = Call(), Call(), Call()
    prepared.add(keys, [X, Y], None, first, at_once=True)
    prepared.add(["a"], [X], None, other, at_once=True)
    assert prepared.find(keys, [X, Y], None) is first
    prepared.add(keys, [X, Z], None, second, at_once=True)
    assert prepared.find(keys, [X, Z], None) is second
    assert [call.released for call in (first, other, second)] == [1, 0, 0]


X, Y, Z = array(), array(), array()
AB, XY = ["a", "b"], [X, Y]
CALLS = (  # each in forms that are the same call; all others differ
    *([("w", X, None)], [("v", X, None)], [("w", Y, None)], [("w", X[:], None)], [("w", X, Y)], [(1, X, None)]),
    *([(["w"], [X], None), (("w",), (X,), None)], [([1, 2], XY, None)], [([2, 1], XY, None)]),
    *([(AB, XY, None), (("a", "b"), (X, Y), None)], [(AB, [Y, X], None)], [(AB, XY, XY)], [(AB, XY, [X, Z])]),
    *([(("a", "b"), (X, Y), (Z, Z)), (AB, XY, [Z, Z])], [(["a"], [X], [Y])], [(["a"], [X], [[Y]])]),
    *([(["a"], [[X]], [[Y, Z]])], [(AB, XY, [[X], [Y]])], [(AB, XY, [[X, Y], [Z]])], [(AB, XY, [[X], [Y, Z]])]),
)
NO_CALLS = (
    *((True, X, None), ([True, 2], XY, None), (None, X, None), ([None], [X], None), ([np.zeros(2)], [X], None)),
    *((["a"], XY, None), (AB, {X.nbytes: X}, None), ("w", None, None), (["a"], X, None), (["a"], [X], X)),
    (AB, XY, [[X], None, [Y]]),
)


def test_the_same_call_is_found_and_no_other():
    for same in CALLS:
        for made in same:
            prepared, call = known(made)
            for others in CALLS:
                for other in others:
                    assert prepared.find(*other) is (call if others is same else None), (made, other)
            for other in NO_CALLS:
                assert prepared.find(*other) is None, (made, other)


def test_a_call_of_one_key_with_a_list_is_not_known():
    """The list may be filled anew."""
    for call in (("w", [X], None), ("w", X, [Y, Z]), ("w", [X], [Y])):
        assert known(call)[0].find(*call) is None


def test_an_array_in_another_shape_or_read_only_is_checked_anew():
    value, out = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    prepared, call = known(("w", value, None), ("v", value, out))[:2]
    value.flags.writeable = False
    assert prepared.find("w", value, None) is None
    value.flags.writeable = True
    assert prepared.find("w", value, None) is call
    out.flags.writeable = False
    assert prepared.find("v", value, out) is None
    out.flags.writeable = True
    assert prepared.find("v", value, out) is not None
    value.shape = (3, 2)
    assert prepared.find("w", value, None) is None
    assert prepared.find("v", value, out) is None


def test_what_is_not_valid_any_more_is_not_found_and_given_back_once():
    lists = [([f"k{i}"], [array()], None) for i in range(KEPT_LISTS)]
    single = ("w", X, None)
    prepared, *calls = known(*lists, single)
    for call in calls:
        call.valid = False
    assert prepared.find(*single) is None
    assert all(prepared.find(*one) is None for one in lists)
    known((["new"], [X], None), ("w", Y, None), calls=prepared)
    assert [call.released for call in calls] == [1] * len(calls)


def test_the_lists_used_last_are_kept():
    lists = [([f"k{i}"], [array()], None) for i in range(KEPT_LISTS)]
    prepared, *calls = known(*lists)
    assert prepared.find(*lists[0]) is calls[0]
    known((["new"], [X], None), calls=prepared)
    assert prepared.find(*lists[0]) is calls[0]
    assert prepared.find(*lists[1]) is None
    assert [call.released for call in calls] == [0, 1] + [0] * (KEPT_LISTS - 2)


def test_single_keys_beyond_the_limit_are_given_back():
    n = KEPT_SINGLES + 3
    prepared, *calls = known(*((key, X, None) for key in range(n)))
    assert sum(call.released for call in calls) == 3
    assert prepared.find(n - 1, X, None) is calls[-1]


def test_other_arrays_with_equal_values_are_other_arrays():
    for n in (0, 1, 2, 5):
        arrays = [np.ones(n), np.ones(n), np.ones(n)]
        prepared, call = known((["a", "b", "c"], arrays, None))
        assert prepared.find(["a", "b", "c"], list(arrays), None) is call
        for i in range(3):
            for other in (np.ones(n), np.ones(n + 1), np.ones((n, 1)), None, 1.0):
                changed = [*arrays]
                changed[i] = other
                assert prepared.find(["a", "b", "c"], changed, None) is None, (n, i, other)


def test_clear_gives_everything_back_once():
    prepared, *calls = known(("w", X, None), (["a"], [X], None))
    for _ in range(2):
        prepared.clear()
        assert [call.released for call in calls] == [1, 1]
        assert prepared.find("w", X, None) is None


# --- tensors of PyTorch, which may get other memory


CHANGES = {
    "data": lambda tensor, zeros: setattr(tensor, "data", zeros),
    "dtype": lambda tensor, zeros: setattr(tensor, "data", tensor.data.half()),
    "storage": lambda tensor, zeros: tensor.set_(zeros),
    "cut": lambda tensor, zeros: tensor.resize_(1, 3),
    "transposed": lambda tensor, zeros: tensor.t_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 1], ids=["value", "out"])
@pytest.mark.parametrize("listed", [False, True])
def test_other_memory_or_another_form_is_another_call(change, place, listed):
    torch = frameworks.need("torch")
    both = value, out = torch.zeros(2, 3), torch.zeros(2, 3)
    arguments = (["a", "b"], [value, torch.ones(4)], [out, np.zeros(4)]) if listed else ("a", value, out)
    prepared, call = known(arguments)
    assert prepared.find(*arguments) is call
    CHANGES[change](both[place], torch.zeros(2, 3))
    assert prepared.find(*arguments) is None


def test_another_tensor_of_the_same_memory_is_another_call():
    torch = frameworks.need("torch")
    value, out = torch.zeros(3), np.zeros(3, np.float32)
    prepared, _ = known(("a", value, None))
    assert prepared.find("a", value.view(3), None) is None
    assert prepared.find("a", value, value) is None
    prepared, _ = known((["a"], [torch.ones(1)], None), ("a", value, out))[:2]
    assert prepared.find(["a"], [torch.ones(1)], None) is None  # equal, and comparing says so
    out.flags.writeable = False
    assert prepared.find("a", value, out) is None


def test_which_tensors_may_come_again():
    torch = frameworks.need("torch")
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()  # PyTorch makes its values when somebody reads them
    assert not may_come_again(imaginary)
    for array in (torch.zeros(3, requires_grad=True), torch.zeros(2, 2).t(), torch.zeros(3, dtype=torch.bfloat16), X):
        assert may_come_again(array)


def test_lists_that_never_come_again_take_little_memory():
    """As of a program that pushes other keys in every step."""
    prepared, arrays = PreparedCalls(), [array() for _ in range(101)]
    tracemalloc.start()
    for step in range(KEPT_SINGLES):
        prepared.add([f"{step} {i}" for i in range(len(arrays))], arrays, None, Call())
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 300 * KEPT_SINGLES
