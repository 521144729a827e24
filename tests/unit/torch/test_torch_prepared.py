"""Tensors of PyTorch that come again find their prepared call, and never one for memory that they no longer have."""

from __future__ import annotations

import frameworks
import numpy as np
import pytest
from direct_stores import both_ways, numbers, refused

from mpikv import optimizers
from mpikv.calls.prepared import may_come_again

torch = frameworks.need("torch")

CHANGES = {
    "data": lambda tensor: setattr(tensor, "data", torch.ones(2, 3)),
    "dtype": lambda tensor: setattr(tensor, "data", tensor.data.half()),
    "storage": lambda tensor: tensor.set_(torch.ones(2, 3)),
    "grown": lambda tensor: tensor.set_(torch.ones(200, 300)),
    "cut": lambda tensor: tensor.resize_(1, 3),
    "reshaped": lambda tensor: tensor.resize_(3, 2),
    "transposed": lambda tensor: tensor.set_(torch.ones(3, 2)).t_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["value", "out", "other"])
def test_other_memory_or_another_form_is_another_call(change, place):
    """Single, and in a list beside an array of NumPy; an error where another shape or dtype is one."""

    def body(store):
        found, kept = [], []
        store.init(["a", "b", "c"], [torch.zeros(2, 3), torch.zeros(4), torch.zeros(2, 3)])
        for keys in ("c", ["a", "b"]):
            value, out = torch.from_numpy(numbers(store, 6)).reshape(2, 3).clone(), torch.zeros(2, 3)
            more, behind = numbers(store, 4), torch.zeros(4)

            def call(keys=keys, value=value, out=out, more=more, behind=behind):
                several = isinstance(keys, list)
                store.pushpull(keys, *([[value, more], [out, behind]] if several else [value, out]))

            for _ in range(3):
                call()
            kept += [value.data, out.data]  # so that nobody else gets the memory
            if place == "other":
                value, out = value.view(2, 3), out.view(2, 3)
            CHANGES[change](out if place == "out" else value)
            error = refused(call)
            found += [error, *([] if error[0] else [out.clone().numpy(), behind.numpy()])]
            store.barrier()
        return found

    both_ways(2, body)


def test_arrays_that_become_read_only():
    def body(store):
        store.init("a", np.zeros(3, np.float32))
        value, out = torch.ones(3), np.zeros(3, np.float32)
        for _ in range(3):
            store.pushpull("a", value, out)
        out.flags.writeable = False
        found = refused(store.pushpull, "a", value, out)
        assert "read-only" in found[1]
        store.barrier()
        return found

    both_ways(2, body)


def test_which_tensors_may_come_again():
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()  # PyTorch makes its values when somebody reads them
    assert not may_come_again(imaginary)
    several = torch.zeros(3), torch.zeros(3, requires_grad=True), torch.zeros(2, 2).t(), np.zeros(3)
    assert all(may_come_again(one) for one in (*several, torch.zeros(3, dtype=torch.bfloat16)))


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
