"""Whether values travel encoded or as they are: what the times of rounds lead to, and that nothing pushed is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from choice_rounds import EACH, FIRST, SECOND, TWO_BITS, pushed
from codecs_of_tests import Reversed
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv import optimizers
from mpikv.codecs.choice import (
    CHECK_ROUNDS,
    CLEARLY_SLOWER,
    KEPT_ROUNDS,
    LONGEST_INTERVAL_ROUNDS,
    MARGIN,
    SHORT_TRIAL_ROUNDS,
    TRIAL_ROUNDS,
    TRIAL_SHARE,
    Choices,
    CodecChoice,
    RoundTimes,
)
from mpikv.codecs.compression import make
from mpikv.config import Config
from mpikv.placement.algorithms import most_owners
from mpikv.placement.encoding import Wire
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.place import place
from mpikv.strategies.pieces import Pieces
from mpikv.testing.stores import spawn_stores

Times = Callable[[int, bool], float]


def go_on(choices: list[CodecChoice], rounds: int, seconds: Callable[[int, int, bool], float]) -> list[bool]:
    """Let workers have rounds; whether each round travelled as it is. seconds: of a worker, a round and that."""
    found = []
    for round_ in range(rounds):
        plain = choices[0].uncompressed
        assert all(choice.uncompressed == plain for choice in choices)
        found.append(plain)
        for worker, choice in enumerate(choices):
            begun_s = 1e3 * round_ + worker
            choice.begin(begun_s)
            choice.end(begun_s + seconds(worker, round_, plain))
        assert len({choice.exchange_due for choice in choices}) == 1
        if choices[0].exchange_due:
            times = [choice.times for choice in choices]
            for worker, choice in enumerate(choices):
                choice.agree(times[worker:] + times[:worker])
    return found


def constant(encoded_s: float, plain_s: float) -> Callable[[int, int, bool], float]:
    return lambda worker, round_, plain: plain_s if plain else encoded_s


@pytest.mark.parametrize(
    ("encoded_s", "plain_s", "ends_plain"),
    [(1.0, 1.9, False), (9.0, 1.0, True), (1.0, 1.0, True), (0.98, 1.0, True), (0.96, 1.0, False)],
)
def test_the_faster_form_stays(encoded_s: float, plain_s: float, ends_plain: bool) -> None:
    choice = CodecChoice(RoundTimes())
    travelled = go_on([choice], FIRST + 1, constant(encoded_s, plain_s))
    assert travelled == [False] * EACH + [True] * EACH + [ends_plain]
    assert choice.seconds == pytest.approx([encoded_s, plain_s])
    assert choice.comparisons == 1


def test_a_form_that_is_clearly_slower_gets_a_short_trial() -> None:
    """It ends after one measured round, in the first trial and in later ones, whichever form it is."""
    choice = CodecChoice(RoundTimes())
    travelled = go_on([choice], EACH + SHORT_TRIAL_ROUNDS + 1, constant(1.0, 2.1))
    assert travelled == [False] * EACH + [True] * SHORT_TRIAL_ROUNDS + [False]
    assert choice.seconds == pytest.approx([1.0, 2.1])
    choice = CodecChoice(RoundTimes())
    travelled = go_on([choice], 2000, constant(2.1, 1.0))
    begins = np.flatnonzero(np.diff(travelled))
    assert travelled[:FIRST] == [False] * EACH + [True] * EACH
    assert (np.diff(begins)[1::2] == SHORT_TRIAL_ROUNDS).all()
    assert choice.comparisons > 3


@pytest.mark.parametrize("slower", [1.1, 1.5, 4.0, 15.0])
def test_a_form_that_is_no_faster_is_tried_ever_more_seldom(slower: float) -> None:
    """First when a trial costs a small share of the time since the last one; then half as much of it, and so on."""
    rounds = 20_000
    travelled = np.array(go_on([CodecChoice(RoundTimes())], rounds, constant(1.0, slower)))
    changes = np.diff(travelled.astype(int))
    begins, ends = np.flatnonzero(changes > 0), np.flatnonzero(changes < 0)
    each = TRIAL_ROUNDS if slower <= CLEARLY_SLOWER else SHORT_TRIAL_ROUNDS
    assert (ends - begins == each).all()
    first = max(CHECK_ROUNDS, math.ceil(each * (slower - 1) / TRIAL_SHARE))
    intervals = (begins[1:] - ends[:-1]).tolist()
    assert intervals == [math.ceil(first * 2**i / CHECK_ROUNDS) * CHECK_ROUNDS for i in range(len(intervals))]
    assert len(intervals) >= 3
    assert travelled[FIRST:].sum() * (slower - 1) < TRIAL_SHARE * rounds


def test_it_is_tried_again_however_seldom() -> None:
    choice = CodecChoice(RoundTimes())
    for _ in range(40):
        choice.uncompressed = True  # it is what is tried
        choice._decide([1.0, 1.5])
    assert choice._interval == LONGEST_INTERVAL_ROUNDS


def test_a_decision_in_a_noisy_moment_is_soon_looked_at_again() -> None:
    """Rounds as they are seemed slower, and are faster: by the second look they are taken."""
    choice = CodecChoice(RoundTimes())
    noisy = lambda worker, round_, plain: 1.2 if round_ in range(EACH, FIRST) else 0.8 if plain else 1.0  # noqa: E731
    travelled = go_on([choice], FIRST + 3 * CHECK_ROUNDS, noisy)
    assert (choice.uncompressed, choice.comparisons) == (True, 2)
    assert travelled[FIRST : FIRST + 2 * CHECK_ROUNDS] == [False] * 2 * CHECK_ROUNDS
    assert all(travelled[FIRST + 2 * CHECK_ROUNDS :])


@pytest.mark.parametrize("slow_first", [False, True])
def test_a_link_that_changes_is_looked_at_again(slow_first: bool) -> None:
    """Long before the stretch is over: at the next comparison of times."""
    slow, fast = constant(2.0, 3.9), constant(1.5, 0.5)
    choice = CodecChoice(RoundTimes())
    before, after = (slow, fast) if slow_first else (fast, slow)
    go_on([choice], FIRST + 2 * CHECK_ROUNDS, before)
    assert (choice.uncompressed, choice.comparisons) == (not slow_first, 1)
    if slow_first:  # 2 seconds are 1.5 now: not by CHANGED
        after = constant(1.0, 0.5)
    go_on([choice], CHECK_ROUNDS + EACH, after)
    assert (choice.uncompressed, choice.comparisons) == (slow_first, 2)


def test_a_worker_that_waits_for_others_says_nothing_of_the_link() -> None:
    """Each round another worker begins last; it alone sees how long the round itself takes."""
    choices = [CodecChoice(RoundTimes()) for _ in range(3)]
    seconds = constant(1.0, 0.5)
    waits = lambda worker, round_, plain: seconds(worker, round_, plain) + 7.0 * ((worker + round_) % 3)  # noqa: E731
    go_on(choices, FIRST, waits)
    assert all(choice.seconds == pytest.approx([1.0, 0.5]) for choice in choices)
    assert all(choice.uncompressed for choice in choices)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.floats(0.1, 10.0),
    st.floats(0.1, 10.0),
    st.floats(0.0, 1.0),
)
def test_all_workers_decide_alike(workers: int, seed: int, encoded_s: float, plain_s: float, noise: float) -> None:
    """Whatever times they see (`go_on` asserts it); without noise they end with the faster one."""
    rng = np.random.default_rng(seed)
    choices = [CodecChoice(RoundTimes()) for _ in range(workers)]
    rounds = FIRST + 10 * CHECK_ROUNDS
    go_on(choices, rounds, lambda worker, round_, plain: (plain_s if plain else encoded_s) * (1 + noise * rng.random()))
    choices = [CodecChoice(RoundTimes()) for _ in range(workers)]
    go_on(choices, FIRST, constant(encoded_s, plain_s))
    assert choices[0].uncompressed == (plain_s < encoded_s * MARGIN)


# --- keys that are pushed together


def calls(choices: list[CodecChoice], n_calls: int, ends_s: Callable[[bool], list[float]]) -> list[list[bool]]:
    """One worker's calls of all keys; how each key travelled in each. ends_s: of the keys, once they go encoded or not.

    Keys that end later see times of those that have ended: each decides when it ends, before the next call begins.
    """
    found = []
    for call in range(n_calls):
        found.append([choice.uncompressed for choice in choices])
        begun_s, ends = 1e3 * call, ends_s(choices[0].uncompressed)
        for choice in choices:
            choice.begin(begun_s)
        for i in np.argsort(ends):
            choices[i].end(begun_s + ends[i])
            if choices[i].exchange_due:
                choices[i].agree([choices[i].times])
    return found


@pytest.mark.parametrize("ends_plain", [False, True])
def test_keys_decide_by_what_all_of_them_took(ends_plain: bool) -> None:
    """Each key but the last ends sooner in the one form, the whole call in the other: the call counts, for all."""
    few, whole = [0.1, 0.2, 0.3, 5.0], [1.0, 1.1, 1.2, 3.0]
    choices = Choices()
    keys = [choices.of("fp16") for _ in few]
    travelled = calls(keys, FIRST + 1, lambda plain: whole if plain == ends_plain else few)
    assert travelled == [[False] * 4] * EACH + [[True] * 4] * EACH + [[ends_plain] * 4]
    seconds = [3.0, 5.0] if not ends_plain else [5.0, 3.0]
    assert all(choice.seconds == pytest.approx(seconds) for choice in keys)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 1.0]))
def test_keys_of_a_call_always_decide_alike(n_keys: int, seed: int, noise: float) -> None:
    """Whatever the times, in whichever order they end; the last round, which is not over for all, counts for none."""
    rng, choices = np.random.default_rng(seed), Choices()
    keys = [choices.of("fp16") for _ in range(n_keys)]
    base = rng.random((2, n_keys)) + 0.1
    rounds = FIRST + 10 * CHECK_ROUNDS
    travelled = calls(keys, rounds, lambda plain: (base[int(plain)] * (1 + noise * rng.random(n_keys))).tolist())
    assert all(len(set(call)) == 1 for call in travelled)
    assert len({tuple(map(str, choice.seconds)) for choice in keys}) == 1


def test_time_in_which_nothing_is_under_way_belongs_to_no_round() -> None:
    together = RoundTimes()
    first, second = CodecChoice(together), CodecChoice(together)
    first.begin(0.0)
    second.begin(1.0)
    first.end(3.0)
    second.end(4.0)
    second.begin(100.0)
    second.end(102.0)
    assert together.seconds == {0: 4.0, 1: 2.0}


def test_which_keys_are_timed_together() -> None:
    """Those of one codec that begin with the same round; of their rounds few are kept."""
    choices = Choices()
    first, second, other = choices.of("fp16"), choices.of("fp16"), choices.of("2bit")
    assert first._round_times is second._round_times is not other._round_times
    for round_ in range(2 * KEPT_ROUNDS):
        first.begin(round_)
        first.end(round_ + 0.5)
    late = choices.of("fp16")
    assert late._round_times is not first._round_times
    assert choices.of("2bit")._round_times is other._round_times
    assert list(first._round_times.seconds) == list(range(KEPT_ROUNDS, 2 * KEPT_ROUNDS))


def test_keys_of_a_store_decide_together() -> None:
    """Three keys of a call on two workers: small ones end sooner encoded, and the large one later."""

    def body(store: Any) -> Any:
        keys = ["a", "b", "c"]
        store.init(keys, [np.zeros(67, np.float32)] * 3)
        of_keys = [store.strategy.keys.queues[store.session.infos[key].id].paths.codec for key in keys]
        begun, now, travelled = [0], [0.0], []
        for i, codec in enumerate(of_keys):
            codec._clock = OfACall(codec, begun, now, encoded_s=(0.1, 0.1, 9.0)[i], plain_s=1.0)
        for round_ in range(FIRST + 1):
            begun[0] = round_
            values = [pushed(store.rank, round_) for _ in keys]
            store.pushpull(keys, values)
            travelled.append([codec.uncompressed for codec in of_keys])
        return travelled, store.stats()["compressed_keys"]

    config = Config(timeout_s=20.0)
    found = spawn_stores("dist_sync", 2, body, hosts="ab", config=config, compression=make(TWO_BITS))
    for travelled, rows in found:
        assert travelled == [[False] * 3] * EACH + [[True] * 3] * (EACH + 1)
        assert [rows[key]["encoded_s"] for key in "abc"] == pytest.approx([9.0] * 3)
        assert [rows[key]["plain_s"] for key in "abc"] == pytest.approx([1.0] * 3)


class OfACall:
    """The clock of a worker as one key sees it, whose round begins with the call and ends so much later.

    begun: how many calls there were; now: the time, which never goes back, whichever key ends first.
    """

    def __init__(self, codec: Any, begun: list[int], now: list[float], **seconds: float) -> None:
        self._codec, self._begun, self._now, self._seconds, self._under_way = codec, begun, now, seconds, False

    def now_s(self) -> float:
        self._under_way = not self._under_way
        passed_s = 0.0 if self._under_way else self._seconds["plain_s" if self._codec.uncompressed else "encoded_s"]
        self._now[0] = max(self._now[0], 100.0 * self._begun[0] + passed_s)
        return self._now[0]


# --- what is owed


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_values_that_travel_as_they_are_pay_what_is_owed(dtype: Any) -> None:
    info = KeyInfo(0, "w", (10,), np.dtype(dtype), "2bit")
    pieces, values = Pieces(info, make({"type": "2bit", "threshold": 8.0}).push), np.arange(10).astype(dtype)
    assert pieces.with_residual(values) is values
    arrived = np.zeros(10, np.float64)
    for piece in ((0, 6), (6, 10)):
        out = np.empty(piece[1] - piece[0], np.float64 if dtype == np.float64 else np.float32)
        pieces.decode(pieces.encode(values, piece), out)
        arrived[slice(*piece)] += out
    given_ = values.copy()
    arrived += pieces.with_residual(values)
    assert values.tolist() == given_.tolist()
    assert arrived.tolist() == (2 * np.arange(10)).tolist()
    assert all(not state["residual"].any() for state in pieces.states.values())
    assert pieces.with_residual(values) is values


def test_what_half_precision_cannot_say_stays_owed() -> None:
    pieces = Pieces(KeyInfo(0, "w", (3,), np.dtype(np.float16), "2bit"), make({"type": "2bit", "threshold": 8.0}).push)
    pieces.encode(np.array([1, 1, 1], np.float16), (0, 3))
    sent = pieces.with_residual(np.array([2048, np.inf, np.nan], np.float16))
    np.testing.assert_array_equal(sent, np.array([2048, np.inf, np.nan], np.float16))
    assert pieces.states[0, 3]["residual"].tolist() == [1, 0, 0]


# --- in a store


class GivenTimes:
    """A clock that is looked at when a round begins and when it ends. seconds: of the round of a key."""

    def __init__(self, codec: Any, worker: int, seconds: Times) -> None:
        self._codec, self._seconds, self._round = codec, seconds, 0
        self._now_s, self._under_way = 1e6 * worker, False

    def now_s(self) -> float:
        self._under_way = not self._under_way
        if not self._under_way:
            self._now_s += self._seconds(self._round, self._codec.uncompressed)
            self._round += 1
        return self._now_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps by it")


@pytest.mark.parametrize("call", ["in place", "elsewhere", "push"])
def test_rounds_as_they_are_add_where_those_without_compression_do(call: str) -> None:
    """In the result of a caller who waits, else in the copy that the call made. The caller's values stay as they were.

    The first such round adds what is owed, in new memory.
    """

    def body(store: Any) -> Any:
        store.init("w", np.zeros(67, np.float32))
        paths = store.strategy.keys.queues[store.session.infos["w"].id].paths
        paths.codec._clock = GivenTimes(paths.codec, store.rank, lambda _, plain: 1.0 if plain else 2.0)
        pushed_at = watched(paths.codec, "with_residual")
        added_at = watched(paths.uncompressed, "reduce_scatter")
        results = []
        for round_ in range(FIRST + 3):
            grad = np.full(67, store.rank + round_, np.float32)
            out = grad if call == "in place" else np.zeros(67, np.float32)
            if call == "push":
                store.push("w", grad)
                store.pull("w", out)
            else:
                store.pushpull("w", grad, out)
                if round_ > EACH:
                    assert added_at[-1] == out.ctypes.data
            assert call == "in place" or (grad == store.rank + round_).all()
            results.append(out[0])
        assert len(added_at) == EACH + 3
        assert added_at[0] != pushed_at[0]
        assert added_at[1:] == pushed_at[1:]
        return store.stats()["compressed_keys"]["w"]["travels"], results[-2:]

    config = Config(timeout_s=20.0)
    found = spawn_stores("dist_sync", 2, body, hosts="ab", config=config, compression=make(TWO_BITS))
    assert found == [("as it is", [2 * round_ + 1 for round_ in (FIRST + 1, FIRST + 2)])] * 2


def watched(one: Any, name: str) -> list[int]:
    """Where the values are of each call of this method from now on."""
    addresses, method = [], getattr(one, name)

    def watching(values: Any, *args: Any, **options: Any) -> Any:
        addresses.append(values.ctypes.data)
        return method(values, *args, **options)

    setattr(one, name, watching)
    return addresses


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_the_callers_values_stay_as_they_were_when_the_form_changes(hosts: str, waits: bool) -> None:
    """Several rounds wait, so that the form of each is not known yet when it is pushed."""

    def body(store: Any) -> Any:
        store.init("w", np.zeros(67, np.float32))
        codec = store.strategy.keys.queues[store.session.infos["w"].id].paths.codec
        codec._clock = GivenTimes(codec, store.rank, lambda _, plain: 1.0 if plain else 1.5)
        grads = [np.full(67, store.rank + round_, np.float32) for round_ in range(FIRST + 3)]
        outs = [np.zeros(67, np.float32) for _ in grads]
        requests = []
        for grad, out in zip(grads, outs, strict=True):
            requests.append(store.pushpull_async("w", grad, out))
            if waits:
                requests[-1].wait()
        for request in requests:
            request.wait()
        assert all((grad == store.rank + round_).all() for round_, grad in enumerate(grads))
        return [out[0] for out in outs[EACH + 1 :]]

    config = Config(timeout_s=20.0)
    n = len(hosts)
    found = spawn_stores("dist_sync", n, body, hosts=hosts, config=config, compression=make(TWO_BITS))
    assert found == [[n * round_ + n * (n - 1) // 2 for round_ in range(EACH + 1, FIRST + 3)]] * n


def train(compression: Any, seconds: Times, rounds: int, *, hosts: str = "abc", optimizer: bool = False) -> list[Any]:
    """Rounds of whole numbers on workers of several hosts: what a worker had of each, what it owes at last, stats."""

    def body(store: Any) -> Any:
        store.init("w", np.zeros(67, np.float32))
        if optimizer:
            store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, wd=0.0))
        codec = store.strategy.keys.queues[store.session.infos["w"].id].paths.codec
        slower = 1 + 3 * store.rank
        codec._clock = GivenTimes(codec, store.rank, lambda round_, plain: seconds(round_, plain) * slower)
        found, plain = [], []
        for round_ in range(rounds):
            value = pushed(store.rank, round_)
            store.pushpull("w", value)
            found.append(value)
            plain.append(codec.uncompressed)
        owed = np.zeros(67)
        for piece, state in codec.pushed.states.items():
            owed[slice(*piece)] += state.get("residual", np.zeros(1))
        return np.array(found, np.float64), plain, owed, store.stats()

    config = Config(timeout_s=20.0)
    return spawn_stores("dist_sync", len(hosts), body, hosts=hosts, config=config, compression=make(compression))


@pytest.mark.parametrize("optimizer", [False, True], ids=["gather", "owners"])
@pytest.mark.parametrize(
    ("hosts", "link"), [("abc", "slow"), ("abc", "fast"), ("abc", "faster at last"), ("aabb", "faster at last")]
)
def test_all_that_is_pushed_arrives(hosts: str, link: str, optimizer: bool) -> None:
    """What all rounds added, and what is owed, is the sum of all pushes, exactly; all workers go the same ways."""

    def seconds(round_: int, plain: bool) -> float:
        fast = link == "fast" or (link == "faster at last" and round_ >= FIRST)
        return (1.0 if plain else 1.5) if fast else (8.0 if plain else 4.0)

    found = train(TWO_BITS, seconds, SECOND + 1, hosts=hosts, optimizer=optimizer)
    values, travelled, _, stats = found[0]
    assert all(np.array_equal(one[0], values) and one[1] == travelled for one in found)
    arrived = -values[-1] if optimizer else values.sum(axis=0)
    total = sum(
        pushed(worker, round_).astype(np.float64) for worker in range(len(hosts)) for round_ in range(SECOND + 1)
    )
    assert np.array_equal(arrived + sum(owed for _, _, owed, _ in found), total)
    assert travelled[:FIRST] == [False] * EACH + [True] * EACH
    assert travelled[FIRST : FIRST + CHECK_ROUNDS] == [link == "fast"] * CHECK_ROUNDS
    assert travelled[-1] == (link != "slow")
    row = stats["compressed_keys"]["w"]
    assert row["travels"] == ("encoded" if link == "slow" else "as it is")
    assert row["looks"] == (2 if link == "faster at last" else 1)
    assert all(one[3]["compressed_keys"] == stats["compressed_keys"] for one in found)


def test_plain_rounds_have_the_bits_of_no_compression() -> None:
    """Once nothing is owed any more, each round is the sum of what was pushed."""
    values, travelled, _, _ = train(TWO_BITS, lambda _, plain: 1.0 if plain else 2.0, FIRST + 3)[0]
    for round_ in range(EACH + 1, FIRST + 3):
        assert travelled[round_]
        assert np.array_equal(values[round_], sum(pushed(worker, round_) for worker in range(3)))


def test_what_is_forced_is_never_measured() -> None:
    def body(_: int, plain: bool) -> float:
        raise AssertionError("a forced key asks for no time")

    for values, travelled, _, stats in train(TWO_BITS | {"force": True}, body, FIRST + 2):
        assert len(values) == FIRST + 2
        assert not any(travelled)
        assert "compressed_keys" not in stats
        assert stats["encoded_from_bytes"] == (FIRST + 2) * 67 * 4


def test_values_that_come_back_encoded() -> None:
    """In plain rounds the exact values come back, and the owner goes on with them."""
    compression = {"type": Reversed.name, "pull": "fp16"}
    values, travelled, _, _ = train(compression, lambda _, plain: 1.0 if plain else 2.0, FIRST + 2, optimizer=True)[0]
    total = np.zeros(67)
    for round_ in range(FIRST + 2):
        total -= sum(pushed(worker, round_) for worker in range(3))
        expected = total if travelled[round_] else total.astype(np.float16)
        assert np.array_equal(values[round_], expected)
    assert travelled[-1]


# --- the path of rounds as they are


@pytest.mark.parametrize(
    ("hosts", "n", "compression", "algorithm", "expected"),
    [
        ("abc", 1000, "2bit", "auto", ("messages", "naive")),
        ("abc", 20000, "2bit", "auto", ("messages", "ring")),
        ("abc", 1000, {"type": "2bit", "force": True}, "auto", None),
        ("abc", 1000, "2bit", "native", None),
        ("aabb", 1000, "2bit", "auto", ("hosted", "hierarchical")),
        ("abcde", 1000, "2bit", "auto", ("messages", "ring")),  # one of five would own nothing
        ("abcdefgh", 1000, "2bit", "auto", ("messages", "halving_doubling")),
    ],
)
def test_which_way_rounds_go_as_they_are(hosts: str, n: int, compression: Any, algorithm: str, expected: Any) -> None:
    """That of a key without compression, with the bounds that the key has: owners keep their states."""
    travels = make(compression)
    members = Members(tuple(hosts), tuple(range(len(hosts))), config=Config(algorithm=algorithm))
    wire = Wire(n // 4, 4 * n, codec=True, force=travels.force)
    info = KeyInfo("w", 0, (n,), np.dtype(np.float32), travels.text)
    placement = place(members, info, wire=wire)
    assert placement.path == "encoded"
    assert placement.uncompressed_path == expected
    half = place(members, info._replace(dtype=np.dtype(np.float16)), wire=wire, encoded=True)
    assert half.uncompressed_path is None  # it travels as it is on the encoded path anyway
    for whole in (False, True):
        updated = place(members, info, wire=wire, whole=whole, updated=True, encoded=True)
        plain = updated.uncompressed
        assert (plain is None) == (expected is None)
        if plain is not None:
            assert (plain.path, plain.bounds, plain.owners) == (expected[0], updated.bounds, updated.owners)
            assert plain.bounds[most_owners(plain.algorithm, len(hosts))] == n


def whole_numbers(
    hosts: str, n: int, compression: Any, *, optimizer_at: int | None, factor_at: int | None = None
) -> list[Any]:
    """Rounds of values that 2bit sends exactly, with plain ones faster: a worker's values after each, and what it sent.

    optimizer_at: the round before which an optimizer is set; factor_at: from which on workers' factors differ.
    """

    def body(store: Any) -> Any:
        store.init("w", np.zeros(n, np.float32))
        codec = store.strategy.keys.queues[store.session.infos["w"].id].paths.codec
        if compression != "none":
            codec._clock = GivenTimes(codec, store.rank, lambda _, plain: 1.0 if plain else 2.0)
        optimizer = optimizers.create("sgd", learning_rate=0.5, momentum=0.5, wd=0.0)
        values, sent = [], []
        for round_ in range(2 * FIRST + 4):
            if round_ == optimizer_at:
                store.set_optimizer(optimizer)
            factor = 1.0
            if factor_at is not None and round_ >= factor_at:
                factor = 2.0 ** (store.rank - 1)
                optimizer.rescale_grad = 1 / factor
            value = (np.random.default_rng([store.rank, round_]).integers(-1, 2, n) * factor).astype(np.float32)
            before = store.stats()
            store.pushpull("w", value)
            after = store.stats()
            values.append(value.tobytes())
            sent.append([after[name] - before[name] for name in ("messages_sent", "bytes_sent")])
        assert store.stats().get("shared_bytes", 0) == (4 * n if len(set(hosts)) < len(hosts) else 0)
        return values, sent, getattr(codec, "uncompressed", None)

    config = Config(timeout_s=20.0, bucket_bytes=0)
    return spawn_stores("dist_sync", len(hosts), body, hosts=hosts, config=config, compression=make(compression))


@pytest.mark.parametrize(("hosts", "n"), [("abc", 66), ("abc", 9001), ("aabb", 9000), ("aab", 67)])
@pytest.mark.parametrize("optimizer_at", [None, FIRST + 2])
def test_rounds_as_they_are_go_the_way_without_compression(hosts: str, n: int, optimizer_at: int | None) -> None:
    """The same values after every round, whichever path it went, with an optimizer; at last as many messages."""
    found = whole_numbers(hosts, n, TWO_BITS, optimizer_at=optimizer_at)
    plain = whole_numbers(hosts, n, "none", optimizer_at=optimizer_at)
    assert [values for values, _, _ in found] == [values for values, _, _ in plain]
    assert all(travels_plain for _, _, travels_plain in found)
    if hosts != "aab":  # there the owners have other parts: a worker has as much as any other, not a host
        assert [sent[-2:] for _, sent, _ in found] == [sent[-2:] for _, sent, _ in plain]


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
def test_workers_with_different_factors_in_rounds_as_they_are(hosts: str) -> None:
    """Labels are compared on this path, too: powers of two change no bit."""
    found = whole_numbers(hosts, 64, TWO_BITS, optimizer_at=0, factor_at=FIRST + 1)
    alike = whole_numbers(hosts, 64, "none", optimizer_at=0)
    assert [values for values, _, _ in found] == [values for values, _, _ in alike]
