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
