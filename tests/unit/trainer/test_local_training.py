"""Local training of NumPy's parameters on thread ranks, against a plain loop over the workers (local_workers.py)."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from local_workers import (
    ALONE,
    BY_MESSAGES,
    EVERYWHERE,
    FOUR,
    NESTEROV,
    OUTER,
    PARTS,
    SHAPES,
    STEPS,
    Reference,
    Weights,
    Worker,
    assert_same,
    first_weights,
    mean,
    nesterov,
    reference,
)
from on_workers import on
from store_modes import MESSAGES, ONE_HOST, SERVED, Mode

import mpikv
from mpikv import Parameter, Trainer, kv
from mpikv.errors import MpikvError, StatesFileError
from mpikv.testing.stores import TEST_TIMEOUT_S
from mpikv.trainer.local_updates import divide


@pytest.mark.parametrize(
    ("outer", "every", "options"),
    [
        *((outer, 3, {}) for outer in OUTER),
        ("nesterov", 4, {"parts": 2}),
        ("nesterov", 4, {"parts": 2, "delay": 2}),
        ("nesterov", 5, {"parts": 3, "delay": 1}),
        ("nesterov", 3, {"delay": 2}),
        ("nesterov", 3, {"delay": 3, "mixing": 0.5}),
        ("nesterov", 4, {"parts": 2, "delay": 1, "mixing": 0.0}),
        ("nesterov", 2, {"mixing": 0.25}),
    ],
)
@on(*EVERYWHERE)
def test_parts_are_exchanged_in_turn_and_the_result_comes_later(mode, outer, every, options):
    (given, formula), parts, delay = OUTER[outer], options.get("parts", 1), options.get("delay", 0)
    begun = [turn * every + part * every // parts for turn in range(STEPS) for part in range(1, parts + 1)]

    def body(store: Any) -> Weights:
        worker = Worker(store, every=every, outer=copy.deepcopy(given), **options)
        ended = worker.train()
        assert [i for i, one in enumerate(ended, 1) if one] == [step + delay for step in begun if step + delay <= STEPS]
        assert (worker.local.steps, worker.local.rounds) == (STEPS, len([step for step in begun if step <= STEPS]))
        return worker.weights()

    assert_same(mode.run(body), reference(mode.workers, formula, every, **options))


@on(ALONE, SERVED)
def test_rounds_end_as_a_schedule_says(mode):
    ends = (1, 2, 3, 7, 11)

    def body(store: Any) -> Weights:
        worker = Worker(store, every=lambda step: 1 if step <= 3 else 4)
        assert [i for i, one in enumerate(worker.train(), 1) if one] == list(ends)
        return worker.weights()

    expected = Reference(mode.workers, mean, None)
    for step in range(1, STEPS + 1):
        expected.train(step - 1)
        for name in SHAPES if step in ends else ():
            expected.begin(name, step)
        expected.finish(step)
    assert_same(mode.run(body), expected.own)


@on(ONE_HOST, MESSAGES, SERVED)
def test_who_makes_fewer_steps_has_less_weight(store, W):
    """Rounds by time: the program ends them, on each worker after another number of steps."""
    parameter, steps = Parameter(np.zeros(3)), range(1, W + 1)
    local = mpikv.LocalUpdates({"w": parameter}, store, every=None)
    for round_ in range(1, 4):
        for _ in range(store.rank + 1):
            parameter.data += store.rank + 1
            assert local.step() is False
        local.exchange()
        assert parameter.data.tolist() == pytest.approx([round_ * sum(n**3 for n in steps) / sum(steps)] * 3)
    with pytest.raises(MpikvError, match="this worker has made no step since the last round"):
        local.exchange()


@on(ONE_HOST, BY_MESSAGES, SERVED)
def test_an_exchange_out_of_turn_finishes_what_is_under_way_and_ends_the_rounds_of_all_parts(mode):
    def body(store: Any) -> Weights:
        worker = Worker(store, every=4, parts=2, delay=2, outer=NESTEROV)
        for first, last in ((0, 3), (3, 6), (6, 9)):
            worker.train(first, last)
            rounds = worker.local.rounds
            worker.local.exchange()
            assert worker.local.rounds == rounds + 2
            worker.local.exchange()
            assert worker.local.rounds == rounds + 2
            assert_same([worker.weights()], [{name: one.data for name, one in worker.local.common.items()}])
        return worker.weights()

    expected = Reference(mode.workers, nesterov, None)
    for steps in (range(3), range(3, 6), range(6, 9)):
        for i, step in enumerate(steps, 1):
            expected.train(step)
            if i == 2:
                for name in PARTS[2][0]:
                    expected.begin(name, step)
        expected.finish(STEPS)
        for name in SHAPES:
            expected.begin(name, STEPS)
        expected.finish(STEPS)
    assert_same(mode.run(body), expected.own)


@on(ONE_HOST, BY_MESSAGES, SERVED)
def test_a_part_whose_exchange_is_under_way_is_not_waited_for(mode):
    """Worker 1 begins the exchange when worker 0 has gone on, until its result is due."""
    has_gone_on = threading.Event()

    def body(store: Any) -> None:
        worker = Worker(store, every=4, parts=2, delay=2)
        worker.train(0, 1)
        worker.local.exchange()  # the first one agrees on something
        assert store.rank == 0 or has_gone_on.wait(TEST_TIMEOUT_S)
        assert worker.train(1, 4) == [False, False, False]
        has_gone_on.set()
        assert worker.train(4, 5) == [True]

    mode.run(body)


RESUMED = [
    pytest.param({"every": 3}, 6, id="at a round's end"),
    pytest.param({"every": 3}, 7, id="in the middle of a round"),
    pytest.param({"every": 4, "parts": 2}, 6, id="in the middle of a turn"),
    pytest.param({"every": 4, "parts": 2, "delay": 2}, 7, id="with an exchange under way"),
    pytest.param({"every": 3, "delay": 2, "mixing": 0.5}, 7, id="with one that will be mixed"),
]


@on(ALONE, ONE_HOST, BY_MESSAGES, SERVED)
@pytest.mark.parametrize(("options", "at"), RESUMED)
def test_a_run_that_is_resumed_goes_on_exactly(mode, options, at, tmp_path):
    """With the states of the worker's own Adam, which are as far as its steps; and the run that is saved goes on so."""

    def run(store: Any, first: int, *, saves: bool = False) -> Weights:
        worker = Worker(store, "adam", outer=NESTEROV, **options)
        assert worker.local.resume(tmp_path / "saved") == worker.local.rounds
        assert (worker.local.steps, worker.trainer.steps, worker.local.rounds > 0) == (first, first, first > 0)
        if saves:
            worker.train(0, at)
            worker.local.save(tmp_path / "saved")
        worker.train(at if saves else first, STEPS)
        return worker.weights()

    whole = mode.run(partial(run, first=0))
    assert_same(mode.run(partial(run, first=0, saves=True)), whole)
    assert_same(mode.run(partial(run, first=at)), whole)


def test_another_number_of_workers_or_servers_begins_with_the_common_weights(tmp_path, capsys):
    options = {"every": 4, "parts": 2, "delay": 2, "outer": NESTEROV}

    def begin(store: Any) -> Weights:
        worker = Worker(store, **options)
        worker.train(0, 7)
        worker.local.save(tmp_path / "saved")
        return {name: one.data.copy() for name, one in worker.local.common.items()}

    def go_on(store: Any) -> Weights:
        worker = Worker(store, **options)
        assert worker.local.resume(tmp_path / "saved") == 3
        weights = worker.weights()
        worker.train()
        return weights

    (common, *_), found = FOUR.run(begin), SERVED.run(go_on)
    assert_same(found, [common, common])
    assert "begin with none of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (("sgd", 2), ("sgd", 3), "saved with parts=2, and this run has parts=3"),
        (("adam", 1), ("sgd", 1), "key 'trainer0/first' has a state of 'adam' there and sgd here"),
    ],
)
def test_a_file_of_another_run_is_refused(saved, here, text, tmp_path):
    with kv.create("local") as store, kv.create("local") as other:
        Worker(store, saved[0], every=4, parts=saved[1]).local.save(tmp_path / "saved")
        with pytest.raises(StatesFileError, match=text):
            Worker(other, here[0], every=4, parts=here[1]).local.resume(tmp_path / "saved")


def test_a_run_that_a_signal_stops_is_resumed_where_it_was(tmp_path):
    """The checkpoint is written within the exchange, before its result is in the parameters."""
    options = {"every": 4, "parts": 2, "outer": NESTEROV}

    def stopped(store: Any) -> None:
        worker = Worker(store, **options)
        worker.train(0, 5)
        store.request_stop()
        with pytest.raises(SystemExit):
            worker.train(5, STEPS)
        assert worker.local.steps in {6, 8}  # workers agree in one exchange, and stop after the next one

    def go_on(store: Any) -> Weights:
        worker = Worker(store, **options)
        assert worker.local.resume() in {3, 4}
        worker.train(worker.local.steps, STEPS)
        return worker.weights()

    for mode in (ONE_HOST, SERVED):
        (file := tmp_path / "stopped").unlink(missing_ok=True)
        mode.run(stopped, stop_file=str(file))
        assert_same(mode.run(go_on, stop_file=str(file)), reference(mode.workers, nesterov, 4, parts=2))


@on(Mode("dist_async", 2), Mode("dist_async", 2, 1))
def test_workers_of_an_asynchronous_store_wait_for_nobody_and_saving_brings_what_others_have_moved(store, tmp_path):
    params = {"a": Parameter(np.zeros(3)), "b": Parameter(np.zeros(2))}
    local = mpikv.LocalUpdates(params, store, every=2, parts=2, delay=1)

    def step() -> None:
        for parameter in params.values():
            parameter.data += 1.0
        local.step()

    def weights() -> list[list[float]]:
        return [parameter.data.tolist() for parameter in params.values()]

    if store.rank == 0:  # the other one makes no call meanwhile
        for _ in range(3):
            step()
        # Of a 1 was pushed after the first step, of b 2 after the second one, both halved; what came since is added.
        assert weights() == [[2.5] * 3, [2.0] * 2]
    store.barrier()
    local.save(tmp_path / "saved")
    if store.rank == 0:
        assert weights() == [[2.5] * 3, [2.0] * 2]
    else:
        assert weights() == [[1.5] * 3, [1.0] * 2]


@on(ONE_HOST)
def test_elastic_averaging_of_parts(store):
    params = {"a": Parameter(np.zeros(3)), "b": Parameter(np.zeros(2))}
    local = mpikv.LocalUpdates(params, store, every=2, parts=2, outer={"type": "easgd", "moving_rate": 0.5})
    for i in range(2):
        for parameter in params.values():
            parameter.data += 1.0 + store.rank
        assert local.step()
        assert params["a"].data[0] == (1 + store.rank) * (0.75 + i)
        assert local.common["a"].data[0] == 0.75
    assert params["b"].data[0] == 2 * (1 + store.rank) * 0.75
    assert local.common["b"].data[0] == 1.5


@on(Mode("dist_async", 2))
def test_elastic_averaging_of_workers_that_come_one_after_the_other(store):
    """By the paper's formulas, with a rate of 0.8 over two workers."""
    parameter = Parameter(np.ones(2))
    local = mpikv.LocalUpdates({"w": parameter}, store, every=1, outer={"type": "easgd", "moving_rate": 0.8})
    parameter.data += 1.0 + store.rank
    for turn in range(2):
        if store.rank == turn:
            local.step()
        store.barrier()
    moved, before = 2.0 + store.rank, 1.0 + 0.4 * 1.0 * store.rank
    assert parameter.data.tolist() == pytest.approx([moved - 0.4 * (moved - before)] * 2)
    assert local.common["w"].data.tolist() == pytest.approx([before + 0.4 * (moved - before)] * 2)


@on(BY_MESSAGES, SERVED)
def test_what_parts_push_may_be_compressed(mode):
    """All that is pushed here has few digits, which fp16 keeps."""
    options = {"parts": 2, "delay": 1}

    def body(store: Any) -> Weights:
        worker = Worker(store, every=4, compression={"type": "fp16", "force": True}, **options)
        worker.train()
        stats = store.stats()
        assert 4 * stats["encoded_bytes"] == stats["encoded_from_bytes"] > 0
        return worker.weights()

    assert_same(mode.run(body), reference(mode.workers, mean, 4, **options))


def test_parameters_are_dealt_out_by_size():
    for parts, names in PARTS.items():
        assert divide({name: 8 * int(np.prod(shape)) for name, shape in SHAPES.items()}, parts) == names
    layers = {f"layer {i}": 4 for i in range(6)}
    assert divide(layers, 2) == [["layer 0", "layer 2", "layer 4"], ["layer 1", "layer 3", "layer 5"]]
    assert divide({"a": 0, "b": 0}, 2) == [["a"], ["b"]]


@on(ONE_HOST)
def test_parameters_come_in_all_forms_and_common_has_the_weights_of_the_last_round(store, W):
    for form in (dict, lambda params: iter(params.items()), lambda params: params.values()):
        params = {name: Parameter(value, name) for name, value in first_weights(store.rank).items()}
        local = mpikv.LocalUpdates(form(params), store, every=2)
        for parameter in params.values():
            np.subtract(parameter.data, 1 + store.rank, out=parameter.data)
        local.step()
        for name, value in first_weights(0).items():
            assert np.array_equal(local.common[name].data, value)
        local.step()
        for name, value in first_weights(0).items():
            assert np.array_equal(local.common[name].data, value - 1.5)
            assert np.array_equal(params[name].data, value - 1.5)
    assert W == 2


@on(ONE_HOST)
def test_row_sparse_parameters_are_exchanged_whole_and_frozen_ones_not_at_all(store):
    table = Parameter(np.zeros((4, 2)) + store.rank, "table", sparse=True)
    frozen = Parameter(np.zeros(3) + store.rank, "frozen", grad_req="null")
    local = mpikv.LocalUpdates([table, frozen], store, every=1)
    assert not table.data.any()
    assert not frozen.data.any()
    table.data[2 * store.rank] += 4.0
    frozen.data[...] += 1.0 + store.rank
    local.step()
    assert table.data[:, 0].tolist() == [2, 0, 2, 0]
    assert frozen.data.tolist() == [1.0 + store.rank] * 3
    assert list(local.common) == ["table"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 1.5}, TypeError, "every is a whole number"),
        ({"every": lambda step: 0}, ValueError, "every: what it returns must be at least 1"),
        ({"every": 2, "outer": "median"}, ValueError, "median"),
        ({"every": 2, "outer": {"type": "adam"}}, ValueError, "outer: type must be one of 'mean', 'nesterov', 'slow"),
        ({"every": 2, "outer": {"type": "mean", "rate": 1}}, TypeError, "rate"),
        ({"every": 2, "outer": {"type": "easgd", "moving_rate": 2}}, ValueError, "moving_rate must be above 0"),
        ({"every": 2, "optimizer": "sgd"}, TypeError, "optimizer is a torch.optim.Optimizer or None, or a Trainer"),
        ({"every": 2, "params": np.zeros(2)}, TypeError, "params is a torch.nn.Module, a dict or a list"),
        ({"every": 2, "params": [Parameter(np.zeros(2), devices=["cpu", "cpu"])]}, ValueError, "on several devices"),
        ({"every": 2, "parts": 0}, ValueError, "parts must be at least 1"),
        ({"every": 2, "parts": 2}, ValueError, "parts=2, and there are 1 parameters"),
        ({"every": 2, "parts": 4}, ValueError, "every=2, parts=4, delay=0: each exchange has"),
        ({"every": 5, "parts": 2, "delay": 3}, ValueError, "every=5, parts=2, delay=3: each exchange has"),
        ({"every": 2, "delay": -1}, ValueError, "delay must be at least 0"),
        ({"every": None, "parts": 2}, ValueError, "parts and delay need `every` to be a number"),
        ({"every": lambda step: 4, "delay": 1}, ValueError, "parts and delay need `every` to be a number"),
        ({"every": 2, "mixing": 1.5}, ValueError, "mixing must be at most 1"),
        ({"every": 2, "mixing": "half"}, TypeError, "mixing is a number"),
        ({"every": 2, "outer": "easgd", "delay": 1}, ValueError, "'easgd' has no delay and no mixing"),
        ({"every": 2, "outer": "easgd", "mixing": 0.5}, ValueError, "'easgd' has no delay and no mixing"),
        ({"every": 2, "store": "local"}, TypeError, "store is a store, as kv.create makes one"),
    ],
)
def test_wrong_arguments_are_named(options, error, text):
    with kv.create("local") as store, pytest.raises(error, match=text):
        mpikv.LocalUpdates(**{"params": [Parameter(np.zeros(2))], "store": store, **options}).step()


def test_a_workers_own_trainer_has_no_store():
    params = {"weight": Parameter(np.zeros(2))}
    with kv.create("local") as store, pytest.raises(ValueError, match="a Trainer with kvstore=None"):
        mpikv.LocalUpdates(params, store, every=1, optimizer=Trainer(params, "sgd", kvstore=store))
