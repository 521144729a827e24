"""Calls without keys that are made of several exchanges: wherever a worker dies, all that are left get the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

from grids import examples  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from store_modes import Mode  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import PeerError  # noqa: E402
from mpikv.transports.faulty import Deaths, Faults  # noqa: E402

MODES = Mode("dist_sync", 4), Mode("dist_sync", 4, memory="off"), Mode("dist_sync", 3, 1, hosts="abca")
ROUNDS, AT = 6, 3


def rows(store: Any) -> Any:
    """As many as this worker's number at the start says, and one: so the rows of each are known by their number."""
    me = store.session.number
    return torch.full((me + 1, 2), float(me), requires_grad=True)


def objects(store: Any) -> list[int]:
    return [one["of"] for one in mt.allgather_object({"of": store.session.number}, store=store)]


def sparse(store: Any) -> list[int]:
    bit = torch.eye(8)[store.session.number].to_sparse()
    found = mt.sparse_allreduce_async(bit, op=mt.Average, store=store)().to_dense()
    there = found.nonzero().flatten().tolist()
    assert found[there].tolist() == [pytest.approx(1 / len(there))] * len(there), "a mean over who is there"
    return there


def gathered(store: Any) -> list[int]:
    """Also backwards, where each worker's part is that of its own rows."""
    mine = rows(store)
    found = mt.allgather(mine, store=store)
    there = sorted({int(one) for one in found[:, 0]})
    assert found[:, 0].tolist() == [float(one) for one in there for _ in range(one + 1)]
    (found * found.detach()).sum().backward()
    assert (mine.grad == float(store.session.number)).all()
    return there


def all_to_all(store: Any) -> list[int]:
    """Worker i gets i + 1 rows of each, with the sender's number and its own."""
    me, numbers = store.session.number, store.session.numbers
    sent = torch.cat([torch.tensor([[float(me), float(to)]]).repeat(to + 1, 1) for to in numbers])
    found, counts = mt.alltoall(sent, [to + 1 for to in numbers], store=store)
    assert found[:, 1].tolist() == [float(me)] * len(found)
    assert counts.tolist() == [me + 1] * (len(found) // (me + 1))
    return [int(one) for one in found[:: me + 1, 0]]


def backwards_of_rows(store: Any) -> list[int]:
    """What belongs to rows of the dead has no gradient."""
    one, found = torch.ones(12, requires_grad=True), []

    def scattered() -> Any:
        return mt.reducescatter(one, op=mt.Sum, store=store)

    def exchanged() -> Any:
        return mt.alltoall(one[: 2 * store.num_workers], store=store)

    for call in (scattered, exchanged):
        result, one.grad = call(), None
        try:
            result.sum().backward()
            found.append(int(one.grad.sum()))
        except PeerError as error:
            assert "and its backward pass" in str(error)  # noqa: PT017 - on all
            found.append(-1)
        store.barrier()
    return found


def of_first(store: Any) -> list[int]:
    found = mt.broadcast(torch.tensor([float(store.session.number)]), 0, store=store)
    tensors = {"w": torch.tensor([float(store.session.number)])}
    mt.broadcast_parameters(tensors, store=store)
    return [int(found.item()), int(tensors["w"].item())]


def object_of_first(store: Any) -> list[int]:
    mine = {"of": store.session.number} if store.rank == 0 else None
    try:
        return [mt.broadcast_object(mine, store=store)["of"]]
    except PeerError as error:
        assert "whose object it is, has died" in str(error)  # noqa: PT017 - on all
        return [-1]


CALLS = objects, sparse, gathered, all_to_all, backwards_of_rows, of_first, object_of_first


@settings(max_examples=examples(60))
@given(st.sampled_from(MODES), st.sampled_from(CALLS), st.integers(0, 3), st.integers(1, 30), st.booleans())
def test_all_that_are_left_get_the_same(
    mode: Mode, call: Callable[[Any], list[int]], victim: int, calls: int, sends: bool
) -> None:
    victim %= mode.workers
    deaths = Deaths()

    def body(store: Any) -> list[list[int]]:
        found = []
        for round_ in range(ROUNDS):
            if round_ == AT and store.session.number == victim:
                deaths.die_in(store.session.members.workers[victim], calls, sends=sends)
            found.append(call(store))
            store.barrier()
        return found

    left = [one for one in mode.run_continued(body, deaths, Faults) if one is not None]
    assert all(one == left[0] for one in left)
    everybody = list(range(mode.workers))
    rest = [one for one in everybody if one != victim]
    for there in left[0]:
        if call in {objects, sparse, gathered, all_to_all}:
            assert there in (everybody, rest)
        elif call is not backwards_of_rows:
            assert set(there) <= ({0, rest[0]} if call is of_first else {0, rest[0], -1})


# --- uneven data


class Net(torch.nn.Module):
    """The gradient of `one` is 1 on each worker, that of `who` the sum of the bits of those whose examples count."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.who = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, bits: Any) -> Any:
        return self.one + (self.who * bits).mean() + 0 * self.norm(bits).sum()


@settings(max_examples=examples(45))
@given(
    st.sampled_from(MODES),
    st.integers(0, 3),
    st.integers(0, 4),
    st.tuples(st.integers(1, 40), st.booleans()),
    st.booleans(),
)
def test_a_worker_that_has_joined_or_not_dies(
    mode: Mode, victim: int, at: int, after: tuple[int, bool], average: bool
) -> None:
    """Worker i has i + 2 batches, of i + 2 examples each: means are over the examples of those that are there."""
    victim %= mode.workers
    deaths = Deaths()

    def body(store: Any) -> Any:
        me, net = store.session.number, Net()
        model = mt.DistributedModel(net, store, average=average)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
        found = []
        with model.join(optimizer):
            for batch in range(me + 2):
                if me == victim and batch == min(at, me + 1):
                    deaths.die_in(store.session.members.workers[victim], after[0], sends=after[1])
                optimizer.zero_grad()
                model(torch.full((me + 2, 1), 2.0**me)).sum().backward()
                found.append((net.one.grad.item(), net.who.grad.item()))
                optimizer.step()
        store.barrier()
        return found, [one.tolist() for one in net.state_dict().values()], str(optimizer.state_dict())

    results = mode.run_continued(body, deaths, Faults)
    left = [worker for worker, one in enumerate(results) if one is not None]
    assert len({str(results[worker][1:]) for worker in left}) == 1
    for step in range(mode.workers + 1):
        seen = [results[worker][0][step] for worker in left if worker + 2 > step]
        assert all(one == seen[0] for one in seen)
        if not seen:
            continue
        have = [worker for worker in range(mode.workers) if worker + 2 > step]
        allowed = []
        for there in (have, [worker for worker in have if worker != victim]):
            total = sum(worker + 2 for worker in there)
            weights = [(worker + 2) / total if average else 1.0 for worker in there]
            bits = [2.0**worker for worker in there]
            allowed.append((sum(weights), sum(w * b for w, b in zip(weights, bits, strict=True))))
        assert any(seen[0] == pytest.approx(one, rel=1e-5) for one in allowed), (step, seen, allowed)
