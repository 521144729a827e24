"""The process group of PyTorch on thread ranks: tensors of all kinds, works and futures, PyTorch's store."""

from __future__ import annotations

from datetime import timedelta

import frameworks
import pytest
from on_workers import taken_of

from mpikv.config import Config
from mpikv.errors import PeerError, ShapeMismatch, StallError, UnsupportedError
from mpikv.groups.collective import barrier
from mpikv.testing.groups import spawn_groups

torch = frameworks.need("torch")

import torch.distributed as dist  # noqa: E402 - where PyTorch is
from torch._C import _distributed_c10d as c10d  # noqa: E402

from mpikv.torch.backend import VARIABLES, BoardStore  # noqa: E402
from mpikv.torch.process_group import MpiProcessGroup  # noqa: E402

WAYS = {"memory": {}, "messages": {"shared_memory": "off"}}


def run(size: int, body, way: str = "memory", timeout_s: float = 20):
    config = Config(timeout_s=timeout_s, **WAYS[way])
    return spawn_groups(size, lambda world, group: body(MpiProcessGroup(world, group)), config=config)


def each_rank(size: int, *ways: str):
    """The test is what each rank of a process group does, in each of these ways."""
    mark = pytest.mark.parametrize("way", ways)
    return lambda test: mark(taken_of(test, lambda body, given: run(size, body, given["way"]), "way"))


def reduced_by(op, **fields):
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def rooted(kind, root: int):
    options = kind()
    options.rootRank = root
    return options


@each_rank(2, *WAYS)
def test_tensors_that_do_not_lie_in_one_piece(group) -> None:
    whole = torch.zeros(4, 6)
    column = whole[:, 1::2]
    column += group.rank() + 1
    group.allreduce([column]).wait()
    assert whole.tolist() == [[0, 3, 0, 3, 0, 3]] * 4
    turned = torch.arange(6.0).reshape(2, 3).t() * (group.rank() == 1)
    group.broadcast([turned], rooted(c10d.BroadcastOptions, 1)).wait()
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    if group.rank() == 0:
        group.send([turned], 1, 3).wait()
    else:
        got = torch.zeros(3, 4)[:, ::2]
        work = group.recv_anysource([got], 3)
        assert work._source_rank() == 0
        assert torch.equal(got, turned)
    channels_last = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    future = group.allreduce([channels_last]).get_future()
    assert future.wait()[0].sum().item() == 240


@each_rank(2, *WAYS)
def test_tensors_of_several_dtypes_empty_scalar_and_with_gradients(group) -> None:
    several = [torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.int64)]
    several += [torch.zeros(0), torch.zeros(3, 0), torch.tensor(2.0), torch.ones(2, requires_grad=True)]
    for tensor in several:
        group.allreduce([tensor]).wait()
        assert tensor.detach().flatten().tolist() in ([], [4], [2, 2])
    lazy = torch.tensor([1 + 1j]).conj()
    group.allreduce([lazy]).wait()
    assert lazy.tolist() == [2 - 2j]
    flags = torch.tensor([True, False])
    group.broadcast([flags], rooted(c10d.BroadcastOptions, 0)).wait()
    bytes_ = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    group.broadcast([bytes_], rooted(c10d.BroadcastOptions, 0)).wait()
    counts = torch.tensor([-3, 4]) * (1 - group.rank())  # such as Lightning averages
    group.allreduce([counts], reduced_by(dist.ReduceOp.AVG)).wait()
    assert counts.tolist() == [-1, 2]


@each_rank(2, "memory")
def test_calls_in_the_short_form(group) -> None:
    me, two = group.rank(), dist.ReduceOp.MAX
    one = torch.full((2,), me + 1.0)
    group.broadcast(first := one.clone(), root=1).wait()
    group.broadcast([second := one.clone()], opts=rooted(c10d.BroadcastOptions, 1)).wait()
    group.allreduce(third := one.clone(), op=two, timeout=timedelta(seconds=10)).wait()
    group.allreduce([fourth := one.clone()], two).wait()
    group.reduce(fifth := one.clone(), 0, two).wait()
    assert [x[0].item() for x in (first, second, third, fourth, fifth)] == [2, 2, 2, 2, 2 if me == 0 else me + 1]
    group.allgather(outs := [torch.zeros(2), torch.zeros(2)], one).wait()
    assert [out[0].item() for out in outs] == [1, 2]
    group.reduce_scatter(first, outs, op=two).wait()
    assert first[0].item() == me + 1
    group.barrier(timedelta(seconds=10)).wait()


@each_rank(2, *WAYS)
def test_wrong_arguments_of_all_ranks(group) -> None:
    """All bring the same, so that no comparison between the ranks finds it; and the group goes on."""
    one, two, mean = torch.ones(1), torch.ones(2), reduced_by(dist.ReduceOp.AVG)
    root, empty = "the root is one of the group's ranks, 0 to 1, not", "a list of tensors is expected, not an empty one"
    for call, error, text in (
        (lambda: group.send([one], 2, 0), ValueError, "one of the group's ranks, 0 to 1, not 2"),
        (lambda: group.recv([one], -1, 0), ValueError, "one of the group's ranks, 0 to 1, not -1"),
        (lambda: group.broadcast([one], rooted(c10d.BroadcastOptions, 2)), ValueError, f"broadcast: {root} 2"),
        (lambda: group.reduce([one], rooted(c10d.ReduceOptions, -1)), ValueError, f"reduce: {root} -1"),
        (lambda: group.gather([], [one], rooted(c10d.GatherOptions, 2)), ValueError, f"gather: {root} 2"),
        (lambda: group.broadcast([], rooted(c10d.BroadcastOptions, 0)), ValueError, f"broadcast: {empty}"),
        (lambda: group.allreduce([]), ValueError, f"allreduce: {empty}"),
        (lambda: group.allgather([], []), ValueError, f"allgather: {empty}"),
        (lambda: group.reduce_scatter([], []), ValueError, f"reduce_scatter: {empty}"),
        (lambda: group.allreduce([two.to(torch.float8_e4m3fn)]), UnsupportedError, "sum of"),
        (lambda: group.allreduce([two > 0], mean), UnsupportedError, "mean of bool"),
        (lambda: group.allreduce([torch.ones(2, device="meta")]), UnsupportedError, "a meta tensor"),
        (lambda: group.allgather([[two] * 3], [two]), ShapeMismatch, "all_gather: 3 tensors for 2 ranks"),
        (lambda: group.reduce_scatter([one], [[two] * 2]), ShapeMismatch, "reduce_scatter: 1 elements do not fit 2"),
        (lambda: group.all_to_all_single(two, two, [1, 1], [2, 1]), ValueError, "splits"),
        (lambda: group.all_to_all_single(one, one, None, None), ValueError, "cannot be split evenly"),
        (lambda: group.alltoall([one] * 2, [one, one.double()]), ValueError, "one dtype"),
    ):
        with pytest.raises(error, match=text):
            call()
    group.barrier().wait()


@each_rank(3, *WAYS)
def test_gather_scatter_and_all_to_all(group) -> None:
    me = group.rank()
    outs = [[torch.zeros(2) for _ in range(3)]] if me == 2 else []
    group.gather(outs, [torch.full((2,), float(me))], rooted(c10d.GatherOptions, 2)).wait()
    assert [out[0].item() for row in outs for out in row] == ([0, 1, 2] if me == 2 else [])
    got = torch.zeros(2)
    parts = [[torch.full((2,), 10.0 + i) for i in range(3)]] if me == 1 else []
    group.scatter([got], parts, rooted(c10d.ScatterOptions, 1)).wait()
    assert got.tolist() == [10 + me] * 2
    sent = torch.arange(6.0).reshape(6, 1) + 10 * me
    got = torch.zeros(3 * (me + 1), 1)
    group.all_to_all_single(got, sent, [me + 1] * 3, [1, 2, 3]).wait()
    begin = sum(range(me + 1))
    assert got[:, 0].tolist() == [10 * rank + begin + i for rank in range(3) for i in range(me + 1)]
    lists = [torch.zeros(2) for _ in range(3)], [torch.full((2,), 3.0 * me + i) for i in range(3)]
    group.alltoall(*lists).wait()
    assert [out[0].item() for out in lists[0]] == [me, 3 + me, 6 + me]


@each_rank(3, *WAYS)
@pytest.mark.parametrize("expected", [3, 1, 0], ids=lambda n: f"{n} for 2")
def test_lengths_that_do_not_fit_are_an_error_of_who_expects_them(group, expected: int) -> None:
    """Rank 1 expects another number of rank 0's elements than come; all hear of it, and nobody else is blamed."""
    me = group.rank()
    outs = [torch.zeros(expected if (me, rank) == (1, 0) else 2) for rank in range(3)]
    text = f"the message of rank 0 of the group has 8 bytes, the tensor to receive it has {4 * expected}"
    kind, match = (ShapeMismatch, f"^{text}$") if me == 1 else (PeerError, f"failed on rank 1 of 3 .*: {text}")
    with pytest.raises(kind, match=match):  # noqa: PT012 - in the first call or, where that was done, in the next
        group.alltoall(outs, [torch.full((2,), float(me))] * 3).wait()
        assert me != 1
        assert [out.tolist() for out in outs] == [[0, 0], [1, 1], [2, 2]]
        group.barrier().wait()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", ["all_to_all", "all_reduce", "gather"])
def test_arguments_that_are_wrong_on_one_rank_are_told_to_the_others(way: str, call: str, monkeypatch) -> None:
    """At once: asking who has made which call would take longer than this test may."""
    monkeypatch.setattr("mpikv.groups.watch.ASK_AFTER_S", 1e9)
    calls = {
        "all_to_all": lambda group, right: group.all_to_all_single(
            torch.ones(6), torch.ones(6), None, [2, 2, 1 + right]
        ),
        "all_reduce": lambda group, right: group.allreduce(
            [torch.ones(2)], None if right else reduced_by(c10d._make_nccl_premul_sum(2.0))
        ),
        "gather": lambda group, right: group.gather(
            [[torch.ones(2)] * (2 + right)] if group.rank() == 1 else [], [torch.ones(2)], rooted(c10d.GatherOptions, 1)
        ),
    }

    def body(group):
        if group.rank() == 1:
            with pytest.raises(ValueError if call != "all_reduce" else UnsupportedError):
                calls[call](group, 0)
        elif call != "gather":  # whose other ranks have nothing to wait for
            with pytest.raises(PeerError, match=r"a call of this process group has failed on rank 1 of 3 on .*Error: "):
                calls[call](group, 1).wait()
        else:
            calls[call](group, 1).wait()

    run(3, body, way, timeout_s=60)


@each_rank(2, *WAYS)
def test_coalesced_calls(group) -> None:
    me = group.rank()
    outs = [torch.zeros(2 * n) for n in (3, 1)]
    group.all_gather_single_coalesced(outs, [torch.full((n,), me + 1.0) for n in (3, 1)]).wait()
    assert [out.tolist() for out in outs] == [[1, 1, 1, 2, 2, 2], [1, 2]]
    outs = [torch.zeros(3), torch.zeros(1)]
    group._reduce_scatter_base(outs[0], torch.arange(6.0)).wait()
    assert outs[0].tolist() == ([0, 2, 4] if me == 0 else [6, 8, 10])
    group.reduce_scatter_tensor_coalesced(outs, [torch.ones(6), torch.ones(2)]).wait()
    assert [out.tolist() for out in outs] == [[2, 2, 2], [2]]
    group._start_coalescing(torch.device("cpu"))
    tensors = [torch.ones(1), torch.ones(2)]
    for tensor in tensors:
        group.allreduce([tensor])
    assert group._end_coalescing(torch.device("cpu")).get_future().wait()[1].tolist() == [2, 2]
    lists = [[torch.zeros(1), torch.zeros(2)] for _ in range(2)]
    group.allgather_coalesced(lists, [torch.full((1,), float(me)), torch.full((2,), me + 5.0)]).wait()
    assert [[out[0].item() for out in row] for row in lists] == [[0, 5], [1, 6]]


@each_rank(2, *WAYS)
def test_what_is_chained_to_a_future_may_wait_for_others(group) -> None:
    gate, tensor, other = torch.zeros(1), torch.ones(2), torch.ones(2)
    if group.rank() == 1:  # rank 0's call is under way when it gets its future
        group.recv([gate], 0, 1).wait()
    work = group.allreduce([tensor])

    def further(future):
        group.allreduce([other]).get_future().wait()
        return future.value()[0] + other

    future = work.get_future().then(further)
    if group.rank() == 0:
        group.send([gate], 1, 1).wait()
    assert future.wait().tolist() == [4, 4]
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is tensor


@each_rank(2, "memory")
def test_a_future_fails_with_its_call(group) -> None:
    if group.rank() == 0:
        work = group.allreduce([torch.ones(1)], reduced_by(dist.ReduceOp.SUM, timeout=timedelta(seconds=0.4)))
        with pytest.raises(StallError):
            work.wait()
        for future in (work.get_future(), torch.futures.collect_all([work.get_future()])):  # which C++ waits for
            with pytest.raises(RuntimeError, match=r"StallError: .* its timeout in all_reduce"):
                future.wait()
        assert isinstance(work.exception(), StallError)
        assert not work.is_success()
        with pytest.raises(StallError, match="in recv from any rank"):
            group.recv_anysource([torch.zeros(1)], 0).wait(timedelta(seconds=0.05))
        group.send([torch.zeros(1)], 1, 0).wait()
    else:
        group.recv([torch.zeros(1)], 0, 0).wait()


@each_rank(3, "memory")
def test_sparse_tensors(group) -> None:
    me = group.rank()
    tensor = torch.sparse_coo_tensor([[0, me, me]], [[1.0, 1], [2, 2], [3, 3]], (4, 2), check_invariants=True)
    group.allreduce([tensor]).wait()
    assert tensor.to_dense()[:, 0].tolist() == [8, 5, 5, 0]
    with pytest.raises(UnsupportedError, match="on the CPU"):
        group.allreduce([tensor], reduced_by(dist.ReduceOp.MAX))
    tensor = torch.sparse_coo_tensor([[0]], [1.0], (3 + me,), check_invariants=True)
    with pytest.raises(ShapeMismatch, match=r"one of shape \([345],\) with 1 sparse dimensions, rank"):
        group.allreduce([tensor])


@each_rank(1, "memory")
def test_a_group_of_one_rank(group) -> None:
    tensor, outs = torch.ones(2), torch.zeros(2)
    group.allreduce([tensor], reduced_by(dist.ReduceOp.AVG)).wait()
    group.all_gather_single(outs, tensor).wait()
    group.barrier().wait()
    group.monitored_barrier(timedelta(seconds=1))
    assert outs.tolist() == tensor.tolist() == [1, 1]
    group.setGroupName("mine")
    assert (group.group_name, group.name(), group.getBackendName(), group.size()) == ("mine", "mpikv", "mpikv", 1)
    group.shutdown()


def test_pytorchs_store() -> None:
    def body(world, group):
        mine = BoardStore(world, "0/")
        store = dist.PrefixStore("a", mine)
        store.set(f"key {group.rank}", "value")
        assert [store.get(f"key {rank}") for rank in range(2)] == [b"value", b"value"]
        store.wait(["key 0", "key 1"], timedelta(seconds=5))
        assert mine.check(["a/key 0"])  # not by the prefix, which has no such method before PyTorch 2.3
        assert not mine.check(["a/none"])
        store.add("number", 2)
        group.start(barrier()).wait()
        assert store.add("number", 0) == 4
        group.start(barrier()).wait()  # both have read it before it changes
        assert store.compare_set("number", "4", "9") in (b"9", b"4")
        assert store.num_keys() == 3
        group.start(barrier()).wait()
        store.delete_key(f"key {group.rank}")
        group.start(barrier()).wait()
        assert not mine.check(["a/key 0"])
        mine.multi_set(["x", "y"], ["1", "2"])
        mine.append("x", "0")
        mine.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(StallError, match=r"waited 0.05 s for another rank to set the keys 0/x, 0/none"):
            mine.multi_get(["x", "none"])

    spawn_groups(2, body, config=Config(timeout_s=20))


def test_the_backend_is_registered_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpikv.torch  # noqa: F401 - registers

    assert dist.is_backend_available("mpikv")
    handler = __import__("importlib").import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"]
    assert handler.of_mpi
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    said = "environment variable RANK expected.* With the backend mpikv, start the program by mpirun: `mpirun -n 4"
    with pytest.raises(ValueError, match=said):
        next(handler("env://"))
