"""Tensors of PyTorch that come again find their prepared call, and never one for memory that they no longer have."""

from __future__ import annotations

import frameworks
import numpy as np
import pytest
from direct_stores import both_ways, numbers

from mpikv import optimizers
from mpikv.calls.prepared import PreparedCalls, may_come_again

torch = frameworks.need("torch")


class Call:
    """A prepared call that does nothing."""

    valid = True

    def run(self, priority=0):
        return True

    def release(self):
        pass


def known(key, value, out=None):
    prepared, call = PreparedCalls(), Call()
    prepared.add(key, value, out, Call())
    prepared.add(key, value, out, call)
    assert prepared.find(key, value, out) is call
    return prepared


CHANGES = {
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(2, 3)),
    "dtype": lambda tensor: setattr(tensor, "data", tensor.data.half()),
    "storage": lambda tensor: tensor.set_(torch.zeros(2, 3)),
    "cut": lambda tensor: tensor.resize_(1, 3),
    "transposed": lambda tensor: tensor.t_(),
}


@pytest.mark.grid
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 1], ids=["value", "out"])
@pytest.mark.parametrize("listed", [False, True])
def test_other_memory_or_another_form_is_another_call(change, place, listed):
    both = value, out = torch.zeros(2, 3), torch.zeros(2, 3)
    arguments = (["a", "b"], [value, torch.ones(4)], [out, np.zeros(4)]) if listed else ("a", value, out)
    prepared = known(*arguments)
    CHANGES[change](both[place])
    assert prepared.find(*arguments) is None


def test_another_tensor_of_the_same_memory_is_another_call():
    value = torch.zeros(3)
    prepared = known("a", value)
    assert prepared.find("a", value.view(3), None) is None
    assert prepared.find("a", value, value) is None
    prepared = known(["a"], [torch.ones(1)])
    assert prepared.find(["a"], [torch.ones(1)], None) is None  # equal, and comparing says so
    out = np.zeros(3, np.float32)
    prepared = known("a", value, out)
    out.flags.writeable = False
    assert prepared.find("a", value, out) is None


def test_which_tensors_may_come_again():
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()  # PyTorch makes its values when somebody reads them
    assert not may_come_again(imaginary)
    for tensor in (torch.zeros(3), torch.zeros(3, requires_grad=True), torch.zeros(2, 2).t()):
        assert may_come_again(tensor)
    assert may_come_again(torch.zeros(3, dtype=torch.bfloat16))
    assert may_come_again(np.zeros(3))


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_tensors_whose_memory_changes_between_calls(optimizer):
    """Ten calls with the same tensor objects, whose memory is replaced now and then, single and in lists."""

    def body(store):
        if optimizer is not None:
            store.set_optimizer(optimizers.SGD(learning_rate=0.5))
        keys = ["a", "b", "c"]
        store.init(keys, [torch.zeros(6), torch.zeros(6), torch.zeros(6)])
        found, values, outs = [], [torch.zeros(6), torch.zeros(6)], [torch.zeros(6), np.zeros(6, np.float32)]
        single = torch.zeros(6, requires_grad=True)
        for step in range(12):
            if step % 4 == 3:
                values[step % 2].data = torch.zeros(6)
                single.data = torch.zeros(6)
            if step % 4 == 2:
                outs[0].set_(torch.zeros(6))
            for i, value in enumerate((*values, single)):
                value.detach()[:] = torch.from_numpy(numbers(store, 6, 3 * step + i))
            store.pushpull(keys[:2], values, outs)
            store.pushpull("c", single)
            found += [outs[0].clone().numpy(), outs[1].copy(), single.detach().clone().numpy()]
        return found

    both_ways(2, body)
