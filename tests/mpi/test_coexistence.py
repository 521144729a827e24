"""Several stores at once, on sub-communicators too, beside a user's own MPI traffic with the same ranks and tags."""

from __future__ import annotations

import numpy as np
import pytest
from mpi_stores import full, on_workers, uniform

from mpikv import Config, kv, optimizers
from mpikv.transports import wire

SETTINGS = Config(timeout_s=30)
TAGS = [wire.TAG_CONTROL, wire.TAG_REQUEST, wire.TAG_STATES, wire.TAG_REPLY, wire.TAG_REPLY + 1]
TAGS += [wire.key_tag(key, use) for key in range(2) for use in range(wire.TAGS_PER_KEY)]


@pytest.mark.mpi
def test_stores_on_sub_communicators_and_across(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    half = comm.Split(rank % 2, -rank)  # numbered backwards
    across = kv.create("dist_sync", comm=comm, config=SETTINGS)
    inner = kv.create("dist_sync", comm=half, config=SETTINGS)
    members = len(range(rank % 2, size, 2))
    assert (inner.num_workers, inner.rank) == (members, half.Get_rank())
    # A key of the same name, of another shape in each half, initialised at different times.
    inner.init("w", full(0, 5 + rank % 2))
    across.init("w", full(0, 7))
    for i in range(3):
        inner.push("w", full(1 + rank % 2, 5 + rank % 2))
        across.push("w", full(i, 7))
    assert uniform(across.pull("w")) == 2.0 * size
    assert uniform(inner.pull("w")) == (1 + rank % 2) * members
    if rank % 2:
        inner.close()
        across.close()
    else:
        across.close()
        inner.close()
    half.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_the_users_own_traffic(comm, name):
    """Messages under way on the user's communicator with the tags of the store, wildcards, collectives in between."""
    from mpi4py import MPI

    W, rank = comm.Get_size(), comm.Get_rank()
    after, before = (rank + 1) % W, (rank - 1) % W
    user = comm.Dup()
    with kv.create(name, comm=user, config=SETTINGS) as store:
        if name == "dist_async":
            store.set_optimizer(optimizers.create("test"))
        received = {tag: np.zeros(40, np.int64) for tag in TAGS}
        sent = {tag: np.full(40, 1000 * rank + tag, np.int64) for tag in TAGS}
        requests = [user.Irecv(received[tag], before, tag) for tag in TAGS[::2]]
        store.init([0, 1], [full(0, 50), full(0, 5000)])
        requests += [user.Isend(sent[tag], after, tag) for tag in TAGS]
        store.push([0, 1], [full(1, 50), full(2, 5000)])
        reduced = user.allreduce(rank)
        pulls = [store.pull_async(key) for key in (0, 1)]
        gathering = user.Iallgather(np.array([rank], np.int64), gathered := np.empty(W, np.int64))
        requests += [user.Irecv(received[tag], before, tag) for tag in TAGS[1::2]]
        values = [uniform(pull.wait()) for pull in pulls]
        gathering.Wait()
        MPI.Request.Waitall(requests)
        store.barrier()
        # Nothing of the store's is to be seen here, though it may be talking at the moment.
        store.push([0, 1], [full(1, 50), full(2, 5000)])
        assert not user.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        user.Barrier()
        assert not user.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        store.barrier()
        if name == "dist_sync":
            assert values == [1.0 * W, 2.0 * W]
        else:
            assert [uniform(store.pull(key)) for key in (0, 1)] == [2.0 * W, 4.0 * W]
    assert reduced == W * (W - 1) // 2
    assert gathered.tolist() == list(range(W))
    for tag in TAGS:
        assert received[tag].tolist() == [1000 * before + tag] * 40
    user.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_two_stores_at_once(comm, algorithm):
    """Native, each key has a communicator. Keys are initialised and pushed in orders that differ by rank."""
    W, rank = comm.Get_size(), comm.Get_rank()
    settings = SETTINGS.with_(algorithm=algorithm)
    stores = [kv.create("dist_sync", comm=comm, config=settings) for _ in range(2)]
    for store in stores:
        for key in ("abc", "cab", "bca")[rank % 3]:
            store.init(key, full(0, 500))
    order = [(i, key) for i in range(2) for key in "abc"]
    for round_ in range(3):
        for at in np.random.default_rng([rank, round_]).permutation(len(order)):
            i, key = order[at]
            stores[i].push(key, full((i + 1) * ord(key) + round_, 500))
    for i, key in reversed(order):
        assert uniform(stores[i].pull(key)) == W * ((i + 1) * ord(key) + 2)
    for store in stores:
        store.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("test_hosts", [0, 3])
def test_the_workers_part_of_divided_keys_goes_native(comm, test_hosts):
    """The servers make no collective call of MPI with them."""
    W, values = comm.Get_size() - 1, np.arange(500, dtype=np.float32)

    def body(store):
        assert store.strategy.ring.communicators is not None
        store.init("w", np.zeros_like(values))
        found = []
        for round_ in range(2):
            store.pushpull("w", total := values * (store.rank + 1) + round_)
            found.append(total.tolist())
        return found

    expected = [(values * (W * (W + 1) // 2) + W * round_).tolist() for round_ in range(2)]
    take = {"servers_take": 0.37, "server_placement": "last", "bigarray_bound_elems": 100, "test_hosts": test_hosts}
    assert on_workers(comm, "dist_sync", body, num_servers=1, algorithm="native", **take) == [expected] * W


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", pytest.param("native", marks=pytest.mark.full)])
def test_many_stores_one_after_another(comm, algorithm):
    """Communicators are given back: more stores times keys than MPICH has communicators for native."""
    keys = list(range(60))
    for turn in range(40 if algorithm == "native" else 10):
        with kv.create("dist_sync", comm=comm, config=Config(timeout_s=30, algorithm=algorithm)) as store:
            store.init(keys, [full(turn, 2)] * len(keys))
            store.pushpull(59, value := full(1, 2))
            assert uniform(value) == comm.Get_size()
