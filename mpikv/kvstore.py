"""The store: MXNet's calls. Arguments are brought to one form (calls/); a strategy or the session does the rest."""

from __future__ import annotations

import builtins
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, NoReturn, SupportsIndex

import numpy as np

from mpikv import optimizers
from mpikv.arrays.as_numpy import shape_and_dtype
from mpikv.arrays.devices import Device
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_sparse import RowSparse, is_sparse
from mpikv.calls.allocation import make_arrays
from mpikv.calls.forms import CallForms, CallItem, Keys, Targets, Values, finished
from mpikv.calls.prepared import PreparedCalls, may_come_again
from mpikv.calls.request import Request, is_over, not_given, writable
from mpikv.calls.rows import RowCalls
from mpikv.calls.timeline import Timeline
from mpikv.codecs import compression
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import KeyExists, MpikvError, StallError, UnsupportedError
from mpikv.groups.workers import ContinuedGroup, WorkersGroup
from mpikv.observe.program import WorkerStatus
from mpikv.placement.keys import KeyInfo
from mpikv.session.base import NewKey, Pending, Session, Updater
from mpikv.session.continued import ContinuedSession
from mpikv.session.workers import Workers
from mpikv.strategies.base import Entry, PreparedCall, Sink, Strategy
from mpikv.strategies.states import load_file, save_file

SUM_NAME = SUM.name


def _check_priority(priority: int) -> None:
    """Raise TypeError for a priority that is no whole number; any whole number will do."""
    if type(priority) is not int:
        checks.whole("priority", priority, None, None)


class KVStore:
    """A key-value store over devices and workers; `kv.create` makes one.

    `rank` and `num_workers` count workers. They differ from MPI's rank and size when some ranks are servers.

    >>> store = kv.create('local')
    >>> store.init('w', np.zeros(2))
    >>> store.push('w', [np.ones(2), np.ones(2)])  # one array for each device of this worker
    >>> store.pull('w')
    array([2., 2.])
    >>> store.type, store.rank, store.num_workers, 'w' in store
    ('local', 0, 1, True)
    >>> store.close()
    """

    def __init__(self, session: Session, strategy: Strategy, *, on_device: bool) -> None:
        # For what is built on a store, as trainers are; users do not need them.
        self.session, self.strategy = session, strategy
        self.workers_group: WorkersGroup | ContinuedGroup | None = None
        if isinstance(session, Workers):
            self.workers_group = WorkersGroup(session, strategy.reserve)
        elif isinstance(session, ContinuedSession):
            self.workers_group = ContinuedGroup(session)
        self._pid = session.pid
        self._forms = CallForms(session, strategy, on_device=on_device)
        self._rows = RowCalls(session, strategy, self._forms)
        self._outstanding: list[Request] = []
        self._optimizer: optimizers.Optimizer | None = None
        self._has_optimizer = False
        self._prepared = defaultdict[str, PreparedCalls](PreparedCalls)  # by the name of the reduction

    # --- what it is

    @property
    def type(self) -> str:
        """The name it was created with, in lower case."""
        return self.session.name

    @property
    def rank(self) -> int:
        """This worker's number, 0 to num_workers - 1. Not MPI's rank where some ranks are servers."""
        return self.session.rank

    @property
    def num_workers(self) -> int:
        """How many workers share the store; servers are not counted."""
        return self.session.num_workers

    @property
    def generation(self) -> int:
        """How often the workers have come together after a death, or for a spare: see docs/failures.md. 0 at the start.

        >>> kv.create('local').generation
        0
        """
        return self.session.generation

    def on_change(self, call: Callable[[], None]) -> None:
        """Call a function each time the workers have gone on without some that had died, or with spares. Local.

        It is called in the call of the store in which this worker has learned of it, on every worker that is there;
        rank and num_workers are the new ones. It makes no call of the store itself.

        >>> kv.create('local').on_change(lambda: print('other workers'))
        """
        if not callable(call):
            raise checks.wrong("on_change: call", "a function without arguments", call)
        self.session.on_change.append(call)

    @property
    def device(self) -> int | None:
        """The number of the GPU that the store uses, among those that this process sees; None: host memory alone.

        >>> kv.create('local').device is None
        True
        """
        space = self.session.spaces.device
        return None if space is None else space.device

    def is_capable(self, capability: str) -> bool:
        """Return True for 'optimizer': the store can run one. Raises ValueError for any other word. Local.

        >>> kv.create('local').is_capable('optimizer')
        True
        """
        if not isinstance(capability, str) or capability.lower() != "optimizer":
            raise ValueError(f"unknown capability {shown(capability)}; known is 'optimizer'")
        return True

    @property
    def has_optimizer(self) -> bool:
        """Whether `set_optimizer` or `set_updater` was called, so that `pushpull` gives weights and not sums. Local.

        >>> kv.create('local').has_optimizer
        False
        """
        return self._has_optimizer

    def __contains__(self, key: object) -> bool:
        """Whether `init` was called for this key. Raises TypeError for what cannot be a key of this store. Local."""
        self._check_open("in")
        return self.session.lookup(self._forms.key(key)) is not None

    # --- stopping together

    @property
    def stop_requested(self) -> bool:
        """Whether all workers stop here. Every worker reads it once per step, at the same place of its program.

        `request_stop`, or one of the signals of `MPIKV_STOP_SIGNALS`, asks at any rank for a stop. The workers then
        agree on the read from which on this is True, and after it every worker makes the same last calls (saving,
        `close`). In a synchronous store that is the same read, counted from the start, on every worker; in an
        asynchronous store it is each worker's next read, at which it waits for the others. Reading it sends nothing
        until somebody has asked; then it blocks while the workers agree, and raises StallError where one of them cannot
        be reached.

        >>> store = kv.create('local')
        >>> store.stop_requested
        False
        >>> store.request_stop()
        >>> store.stop_requested
        True
        """
        self._check_open("stop_requested")
        return self.session.stop_requested()

    def request_stop(self) -> None:
        """Ask all workers to stop together, as a signal would; they see it in `stop_requested`. Local.

        >>> store = kv.create('local')
        >>> store.request_stop()
        >>> store.stop_requested
        True
        """
        self._check_open("request_stop")
        self.session.request_stop("request_stop()")

    def __repr__(self) -> str:
        state = ", closed" if self.session.closed else ""
        return f"<KVStore {self.type}: worker {self.rank} of {self.num_workers}{state}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy would share the host's memory, and close the same store again."""
        raise TypeError(f"{self!r} belongs to its process: it cannot be copied or pickled, nor what holds it")

    # --- call forms

    def _check_open(self, call: str) -> None:
        if self.session.closed or (self._pid and self._pid != os.getpid()):
            self.session.check_open(call)

    # --- init

    def init(self, key: Keys, value: Values) -> None:
        """Give one or several keys their first values, an array each. Once for each key, before any push or pull of it.

        The store keeps a copy. A RowSparse (or a sparse value of SciPy, PyTorch or JAX) makes a row-sparse key, of
        which only the rows that exist take memory. Collective over the workers, which may initialise their keys in any
        order; blocks until all have come. Worker 0's values are kept. Raises KeyExists (a KeyError) when a key is there
        already, and ShapeMismatch on every worker when workers bring different shapes or dtypes, or dense values and
        row-sparse ones.

        >>> store = kv.create('local')
        >>> store.init(['w', 'b'], [np.ones((2, 3)), np.zeros(3)])
        >>> store.pull('w').shape
        (2, 3)
        """
        self._check_open("init")
        items = self._forms.items("init", key, value)
        spaces, values = self.session.spaces, list[NewKey]()
        for item in items:
            if len(item.arrays) != 1:
                raise ValueError(
                    f"init: key {shown(item.key)} has {len(item.arrays)} arrays; it is initialised with one"
                )
            if self.session.lookup(item.key) is not None:
                raise KeyExists(
                    f"init: key {shown(item.key)} is there already ({self._forms.where()}); nothing was changed. "
                    "Push to change its value."
                )
        dense = []
        for item in items:
            if type(item.arrays[0]) is not np.ndarray and is_sparse(item.arrays[0]):
                values.append(self._rows.new_key(item))
            else:
                dense.append(item)
        for item, caller in zip(dense, spaces.callers_arrays([item.arrays[0] for item in dense]), strict=True):
            what = f"init: the value of key {shown(item.key)}"
            shape, _ = shape_and_dtype(item.arrays[0], what)
            space = spaces.of_new_key(caller, as_given=item.key in self.session.own_keys)
            value = spaces.total(space, [caller], what, on_device=False)
            values.append(NewKey(item.key, shape, value, space))
        if len({type(new.key) for new in values}) > 1:
            raise TypeError("init: some keys are int and some are str; a store does not mix them")
        if values:
            self.strategy.init(values)
            self._forms.key_type = type(values[0].key)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """`init`, then `pull`: worker 0's value comes into every worker's `out`. Collective, blocks.

        >>> store = kv.create('local')
        >>> store.broadcast('w', np.ones(2), out=(out := np.empty(2)))
        >>> out
        array([1., 1.])
        """
        self._check_open("broadcast")
        _check_priority(priority)
        for item in self._forms.items("broadcast", key, out):
            for array in item.arrays:
                if type(array) is not np.ndarray and is_sparse(array):
                    raise UnsupportedError(
                        f"broadcast: `out` of key {shown(item.key)} is row-sparse: a dense array, or row_sparse_pull"
                    )
        self.init(key, value)
        self.pull(key, out, priority, ignore_sparse=False)

    # --- arrays in shared memory

    def empty(self, shape: Any, dtype: Any = "float32", *, device: Device | None = None) -> Any:
        """Make NumPy arrays in memory that the workers of a host share, so that `pushpull` adds them where they are.

        shape: an int or a tuple, or a list of tuples for a list of arrays that lie side by side. Their values are
        undefined (`zeros` sets them). Such an array belongs to this worker, like any other array; but a `pushpull` of
        it in place, without an optimizer, needs no copy. With all workers on one host the array then *is* the store's
        value of the key until the next push: what is written into it, a later `pull` of the key returns. The memory is
        given back at the end of the process. Where workers cannot share memory the arrays are ordinary ones. Collective
        over the workers, with the same arguments on each (else ShapeMismatch on all); blocks.

        device: 'gpu', or the number or name of the GPU that this store uses (`store.device`): arrays in its memory.
        None or 'cpu': NumPy arrays. Raises UnsupportedError where the store uses no GPU, or another one.

        >>> weight, bias = kv.create('local').empty([(2, 3), (3,)], 'float32')
        >>> weight.shape, bias.shape
        ((2, 3), (3,))
        """
        return self._arrays(shape, dtype, device, zero=False)

    def zeros(self, shape: Any, dtype: Any = "float32", *, device: Device | None = None) -> Any:
        """Make arrays as `empty` does, filled with zeros. Collective, blocks.

        >>> kv.create('local').zeros(3)
        array([0., 0., 0.], dtype=float32)
        """
        return self._arrays(shape, dtype, device, zero=True)

    def _arrays(self, shape: Any, dtype: Any, device: Device | None, *, zero: bool) -> Any:
        self._check_open("empty")
        return make_arrays(self.session, self.strategy, shape, dtype, device, zero=zero)

    @property
    def workers(self) -> list[WorkerStatus]:
        """What each worker does: `rank`, `host`, `pid`, `alive`, `seen_s` (since it has answered), `doing`, `name`.

        Every worker is asked, and answers while its program computes. Not collective; blocks while one does not answer,
        4 s at most. Of one that does not, the system of its host tells whether it is alive, where a worker of this host
        answers.

        >>> [(worker.rank, worker.alive) for worker in kv.create('local').workers]
        [(0, True)]
        """
        self._check_open("workers")
        return self.session.workers()

    @property
    def dead_workers(self) -> list[WorkerStatus]:
        """Those of `workers` that are not alive, or of which nobody knows. What MXNet counts as dead nodes.

        >>> kv.create('local').dead_workers
        []
        """
        return [worker for worker in self.workers if not worker.alive]

    def timeline(self, directory: str | os.PathLike[str]) -> Timeline:
        """Write what this worker does, from now on, into a file in `directory`: see docs/observing.md.

        Local; blocks for a few hundredths of a second where there are several hosts, whose clocks are compared.

        Ends with a `with` block, its `end()`, or the store. Worker 0's covers servers that are ranks of their own, too.
        `mpikv trace DIRECTORY` puts the files of all ranks together. `MPIKV_TIMELINE=DIRECTORY` does this for a whole
        job. Raises OSError where nothing can be written there, MpikvError where a timeline is being written already.

        >>> store = kv.create('local')
        >>> with store.timeline('traces'):
        ...     store.init('w', np.zeros(2))
        """
        self._check_open("timeline")
        return Timeline(self, self.session, self.strategy, checks.path("directory", directory))

    def span(self, name: str) -> AbstractContextManager[None]:
        """Show a block of the program, such as its forward pass, in the timeline. Nothing where none is written. Local.

        >>> with kv.create('local').span('forward'):
        ...     pass
        """
        if not isinstance(name, str):
            raise checks.wrong("span: name", "a str", name)
        recorder = self.session.recorder
        return recorder.span("span", name) if recorder.on else nullcontext()

    def stats(self, *, by_key: bool = False) -> dict[str, Any]:
        """Return counters since the store was made: what this worker sent, and what went through shared memory. Local.

        waits, waited_s: how often calls have waited, and how many seconds; failed_looks: how often looking at what
        threads and ranks do has ended by an error, which does no harm. Only in a store over several processes.
        direct_calls: blocking calls that all workers of the host made together, through shared memory; declined_calls:
        those for which that was possible, but workers were in different calls. Both only where workers share memory.
        Where there are row-sparse keys: row_bytes, the memory of the rows that this process owns and of their states (a
        server rank's are not counted). Where a GPU is used: copies_down (to the host), copies_up, copies_device and
        their bytes; device_bytes, the memory that the store holds there; with several workers device_path, how keys in
        device memory travel, and device_path_reasons, why not by each of the better paths.

        Where keys are divided between workers and servers: servers_take, for each key by its name the servers' share.

        Where keys have a codec that is not forced: compressed_keys, a dict for each key by its name:
        codec; travels, 'encoded' or 'as it is'; encoded_s and plain_s, the seconds of a round in both forms, by the
        cost model. It is the same on every worker.

        by_key: adds the entry by_key, the bytes of this worker's messages for each key, and under None those of no key:
        agreements, calls without keys, optimizer states, and what short messages that leave together need besides. A
        worker counts what it sends and what servers answer it, these servers do not: so each byte is counted once among
        all workers. Keys that travel as one share its bytes by their lengths. Not counted are, as in bytes_sent, what
        workers of a host add in shared memory (bytes_copied), and what NCCL or MPI's own reductions send. Raises
        TypeError where by_key is no bool.

        >>> kv.create('local').stats()
        {'messages_sent': 0, 'bytes_sent': 0, 'control_messages_sent': 0}
        >>> kv.create('local').stats(by_key=True)['by_key']
        {}
        """
        counted = {**self.session.stats(), **self.strategy.stats(), **self.session.spaces.stats()}
        return counted | {"by_key": self.session.by_key()} if checks.flag("by_key", by_key) else counted

    # --- push and pull

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum arrays over this worker's devices, then over the workers.

        Without an optimizer the stored value becomes the sum; with one it is updated once per round. value: one array
        per key, or a list with one per device, in the key's shape and dtype; it may be changed as soon as `push`
        returns. Does not wait for other workers. Raises KeyNotInitialized or ShapeMismatch; then nothing was sent.

        >>> store = kv.create('local')
        >>> store.init('w', np.zeros(2))
        >>> store.push('w', np.array([1.0, 2.0]))
        >>> store.pull('w')
        array([1., 2.])
        """
        self._check_open("push")
        _check_priority(priority)
        entries, rows = self._totals(key, value)
        self.strategy.prepare(entries).start(priority)
        for info, total in rows:
            self.strategy.rows.push(info, total, priority)

    def _totals(self, key: Keys, value: Values) -> tuple[list[Entry], list[tuple[KeyInfo, RowSparse]]]:
        """What a push has for dense keys, and for row-sparse ones."""
        items, rows = self._rows.split("push", self._forms.items("push", key, value))
        return [Entry(info, total, None) for info, total in self._forms.totals("push", items)], rows

    def pull(
        self, key: Keys, out: Values = None, priority: int = 0, ignore_sparse: bool = True, *, like: Values = None
    ) -> Any:
        """Write stored values into `out`: one array per key or a list of them, in the key's shape, of any dtype.

        Blocks until they are filled. A synchronous store gives the value after the round of this worker's last push of
        the key. out=None: returns a new array (a list of them for a list of keys) in the key's shape and dtype, a NumPy
        array, or one of the library of `like` and on its device. like: one array for all keys, or arrays in the form of
        `out`, where a list of them for a key gives a list of new ones. ignore_sparse: row-sparse keys are left out (in
        what is returned, None stands in their place), and a RowSparse in `out` stays as it is; False: row-sparse keys
        are pulled whole, as dense arrays, and a RowSparse in `out` holds the rows that are not zero afterwards. Raises
        KeyNotInitialized, ShapeMismatch, PeerError, StallError; UnsupportedError where the library of `like` has no
        such dtype.

        >>> store = kv.create('local')
        >>> store.init('w', np.ones(2))
        >>> store.pull('w', out=(out := np.empty(2, 'float32')))
        >>> out
        array([1., 1.], dtype=float32)
        """
        self._check_open("pull")
        checks.flag("ignore_sparse", ignore_sparse)
        rows_out: list[tuple[RowSparse, Any]] = []
        out = self._rows.whole(out, rows_out)
        if rows_out:
            self.pull(key, out, priority, ignore_sparse)
            return None if ignore_sparse else self._rows.fill(rows_out)
        several = isinstance(key, (list, tuple))
        looks = ignore_sparse and self.session.any_sparse
        if not looks or not any(map(self._rows.is_sparse, key if several else [key])):  # type: ignore[arg-type]
            call, rows, form = self._pulls(key, out, priority, like)
            return Request(self.session, [*call.start(priority), *rows], form).wait()
        kept, keys, out, like = self._rows.without(key, out, like)
        results: Any = []
        if keys:
            call, rows, form = self._pulls(keys, out, priority, like)
            results = Request(self.session, [*call.start(priority), *rows], form).wait()
        if results is None or not several:
            return None
        found: list[Any] = [None] * len(key)  # type: ignore[arg-type]
        for place, result in zip(kept, results, strict=True):
            found[place] = result
        return found

    def _pulls(self, key: Keys, out: Values, priority: int, like: Values) -> tuple[PreparedCall, list[Pending], Any]:
        """Return the call of dense keys, what has begun of row-sparse ones, and the form of what is returned."""
        self._check_open("pull")
        _check_priority(priority)
        targets, form = self._forms.outs("pull", key, out, like)
        dense, pending = self._rows.dense_entries(targets, priority)
        entries = [Entry(info, None, Sink(info, arrays, self.session.spaces)) for info, arrays in dense]
        return self.strategy.prepare(entries), pending, form

    def pushpull(self, key: Keys, value: Values, out: Values = None, priority: int = 0, *, op: str = SUM_NAME) -> Any:
        """Push, then pull, in one exchange. Without an optimizer this is allreduce. Blocks until `out` is filled.

        out=None writes back into `value`, and returns None. Some arrays cannot be written to: those of JAX, and
        read-only ones of NumPy. Where there is one in `value`, all results are returned in the form of `value`: a new
        array of the same library in place of each that cannot be written to, and the others themselves, which were
        written to.

        op: what the workers' arrays become, for keys without an optimizer: 'sum', 'mean', 'min', 'max', 'prod' or
        'adasum'; the same on all workers. The arrays of one worker's devices are reduced likewise, but for a mean they
        are added, and the sum of all is divided by the number of workers. float16 and bfloat16 are reduced in float32,
        whole numbers wrap around and have no mean. 'adasum' adds what the workers' arrays do not have in common and
        averages what they have (Maleki et al. 2020, arXiv:2006.02924), each key by itself, of float32 and float64 and
        without servers; devices are added before. Raises what `push` and `pull` raise, UnsupportedError, and ValueError
        for an unknown op.

        >>> store = kv.create('local')
        >>> store.init('g', np.zeros(2))
        >>> store.pushpull('g', grad := np.ones(2))
        >>> grad
        array([1., 1.])
        """
        self._check_open("pushpull")
        if type(priority) is not int:
            _check_priority(priority)
        # An equal string takes the longer path.
        reduction = SUM if op is SUM_NAME else self._forms.reduction("pushpull", key, op)
        prepared = self._prepared[reduction.name]
        call = prepared.find(key, value, out)
        if call is not None:
            if pending := call.start(priority):
                call.wait(pending)
            return None
        self._rows.refuse("pushpull", key)
        items, targets, form = self._forms.pushpull_arguments(key, value, out)
        lent = self._forms.lent(items, targets, in_place=False)
        entries = self._copied(items, targets, reduction) if lent is None else lent
        call = self.strategy.prepare(entries, reduction, waits=True)
        if pending := call.start(priority):
            call.wait(pending)
        if lent is not None:
            arrays = (array for entries in (items, targets) for _, arrays in entries for array in arrays)
            if form is None and all(map(may_come_again, arrays)):
                own = self.session.own_keys.issuperset(item.key for item in items)
                prepared.add(key, value, out, call, at_once=own)
            else:
                call.release()
        return finished(form)

    def _copied(self, items: list[CallItem], targets: Targets, op: Reduction) -> list[Entry]:
        """The entries of a `pushpull` of which the arrays are copied before anything is sent."""
        sinks = {info.id: Sink(info, arrays, self.session.spaces) for info, arrays in targets}
        return [Entry(info, total, sinks[info.id]) for info, total in self._forms.totals("pushpull", items, op)]

    def push_async(self, key: Keys, value: Values, priority: int = 0) -> Request:
        """Do what `push` does, and return a `Request` at once; `value` must not be touched until it is done.

        >>> store = kv.create('local')
        >>> store.init('w', np.zeros(2))
        >>> store.push_async('w', np.ones(2)).wait()
        """
        self._check_open("push")
        _check_priority(priority)
        entries, rows = self._totals(key, value)
        pending = self.strategy.prepare(entries).start(priority)
        for info, total in rows:
            self.strategy.rows.push(info, total, priority)
        return self._remember(Request(self.session, pending))

    def pull_async(self, key: Keys, out: Values = None, priority: int = 0, *, like: Values = None) -> Request:
        """Do what `pull` does, and return a `Request` at once; its `wait` returns what `pull` returns.

        >>> store = kv.create('local')
        >>> store.init('w', np.ones(2))
        >>> store.pull_async('w').wait()
        array([1., 1.])
        """
        call, rows, form = self._pulls(key, out, priority, like)
        return self._remember(Request(self.session, [*call.start(priority), *rows], form))

    def pushpull_async(
        self, key: Keys, value: Values, out: Values = None, priority: int = 0, *, op: str = SUM_NAME
    ) -> Request:
        """Do what `pushpull` does, and return a `Request` at once; its `wait` returns what `pushpull` returns.

        Fastest where the result comes to the place of the value, in host memory and in the key's dtype: nothing is
        copied before this returns. An array that results come to belongs to one call until that is done, since the
        calls run at the same time: ValueError, with nothing sent, where an earlier `pushpull_async` that is under way
        brings its result to the same array, or to a view that begins where it does.

        >>> store = kv.create('local')
        >>> store.init('w', np.zeros(2))
        >>> store.pushpull_async('w', np.ones(2), out=np.empty(2)).wait()
        """
        self._check_open("pushpull")
        results, given = writable(value if out is None else out), self.session.given
        if any(not results.keys().isdisjoint(other.held) and not is_over(other, given) for other in self._outstanding):
            raise ValueError(
                f"pushpull_async of key {shown(key)}: the result of an earlier call is still to come to its array: "
                "wait for it first, or give each call an array of its own"
            )
        reduction = self._forms.reduction("pushpull", key, op)
        _check_priority(priority)
        self._rows.refuse("pushpull", key)
        items, targets, form = self._forms.pushpull_arguments(key, value, out)
        entries = self._forms.lent(items, targets, in_place=True)
        if entries is None:
            entries = self._copied(items, targets, reduction)
        request = Request(self.session, self.strategy.prepare(entries, reduction).start(priority), form)
        request.held = results
        return self._remember(request)

    def _remember(self, request: Request) -> Request:
        self._outstanding = [other for other in self._outstanding if not is_over(other, self.session.given)]
        self._outstanding.append(request)
        return request

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Block until every `_async` call is done. timeout_s: seconds, for each of them.

        Raises the first error among them.

        >>> store = kv.create('local')
        >>> store.init('w', np.zeros(2))
        >>> request = store.push_async('w', np.ones(2))
        >>> store.wait_all()
        """
        self._check_open("wait_all")
        if timeout_s is not None:
            timeout_s = checks.seconds("timeout_s", timeout_s)
        while self._outstanding:
            self._outstanding[0].wait(timeout_s)
            self._outstanding.pop(0)

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Get some rows of row-sparse keys, as `RowSparse` values. Blocks until they are there.

        row_ids: the numbers of the rows, an array or a list in any order, repeats allowed; rows that are not asked for
        read as zero. out: a RowSparse of the key's shape, which holds these rows afterwards, in its own dtype; None:
        returns a new one. A list of keys takes lists of `out` and `row_ids`, or one `row_ids` for all; a list of `out`
        for a key (one for each device) takes a list of `row_ids` or one for all. The rows are those after the round of
        this worker's last push of the key. Raises IndexError for a row out of range, ShapeMismatch, TypeError,
        ValueError without row_ids, UnsupportedError for a dense key; nothing was sent then. PeerError, StallError.

        >>> store = kv.create('local')
        >>> store.init('w', mpikv.RowSparse([1], np.ones((1, 2)), (10000000, 2)))
        >>> store.row_sparse_pull('w', row_ids=[5, 1, 1]).values.tolist()
        [[1.0, 1.0], [0.0, 0.0]]
        """
        self._check_open("row_sparse_pull")
        _check_priority(priority)
        return self._rows.pull(key, out, row_ids, priority)

    # --- optimizers

    def set_optimizer(self, optimizer: Any) -> None:
        """Let the owner of a key apply `optimizer` to its value, once per round (asynchronous: at every push).

        optimizer: one of `mpikv.optimizers`, a name, a callable `(weight, grad, state) -> state` or a torch.optim
        class. Collective, blocks; all workers bring equal optimizers, else ConfigError on all. Attributes that are
        changed later, `learning_rate` above all, reach the owners before their next update. In a synchronous store a
        round in which workers differ in one is a ConfigError on all of them, and nothing is updated; `rescale_grad`
        alone may differ, and each worker's gradient is multiplied by its own.

        >>> store = kv.create('local')
        >>> store.init('w', np.ones(2))
        >>> store.set_optimizer(optimizers.SGD(learning_rate=0.5))
        >>> store.push('w', np.ones(2))
        >>> store.pull('w')
        array([0.5, 0.5])
        """
        self._check_open("set_optimizer")
        self._optimizer = optimizers.create(optimizer)
        self.strategy.set_optimizer(self._optimizer, None)
        self._has_optimizer = True

    def set_updater(self, updater: Updater) -> None:
        """Let `updater(key, pushed_sum, stored)` change `stored` in place at every push. Local stores only.

        An exception inside it reaches the caller of push.

        >>> store = kv.create('local')
        >>> store.init('w', np.ones(2))
        >>> store.set_updater(lambda key, total, stored: np.add(stored, total, out=stored))
        >>> store.push('w', np.ones(2))
        >>> store.pull('w')
        array([2., 2.])
        """
        self._check_open("set_updater")
        if not callable(updater):
            raise checks.wrong("set_updater: updater", "a function (key, pushed_sum, stored)", updater)
        self.session.set_updater(updater)
        self._has_optimizer = True

    def set_gradient_compression(self, compression_params: Mapping[str, Any] | None, keys: Keys | None = None) -> None:
        """Let pushes travel in fewer bytes: of `keys`, or of all others (None), which are initialised after this call.

        compression_params: 'type', the name of a codec (docs/compression.md lists them), and its parameters, such as
        'threshold'; 'pull', a codec in the same form for what comes back, which is not compressed by default; and
        'force', True to compress also where it saves no time. None or 'none' switches it off. Local; `init` compares,
        and a key of workers that differ is a ShapeMismatch on all of them. Integers are never compressed, and nothing
        is where nothing travels over a link: in a store of one process, or of one host without 'force'.

        ValueError for an unknown type, which lists those that there are, or for a value that it does not take;
        TypeError for parameters that it does not have; MpikvError for keys that are initialised already.

        >>> store = kv.create('local')
        >>> store.set_gradient_compression({'type': 'fp16'})
        >>> store.set_gradient_compression({'type': 'zip'})
        Traceback (most recent call last):
        ValueError: unknown compression type 'zip'...
        """
        self._check_open("set_gradient_compression")
        found = compression.make(checks.options("compression_params", compression_params) or None)
        named = (
            None
            if keys is None
            else [self._forms.key(key) for key in (keys if isinstance(keys, (list, tuple)) else [keys])]
        )
        late = self.session.compressions.set(found, named, self.session.infos)
        if late is not None:
            raise MpikvError(
                f"set_gradient_compression after init of key {shown(late)}: all workers have agreed on how it "
                "travels. Call it before, or name other keys"
            )

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states of all keys into one file, whole or not at all.

        Collective, blocks; worker 0 writes. dump_optimizer: write the optimizer's attributes, too. Raises MpikvError
        without an optimizer, or OSError, on every worker.

        >>> store = kv.create('local')
        >>> store.init('w', np.zeros(2))
        >>> store.set_optimizer('adam')
        >>> store.save_optimizer_states('states')
        >>> store.load_optimizer_states('states')
        """
        self._check_open("save_optimizer_states")
        checks.flag("dump_optimizer", dump_optimizer)
        save_file(self.session, self.strategy, checks.path("fname", fname), dump_optimizer=dump_optimizer)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote, with any number of workers and servers.

        Collective, blocks; worker 0 reads. Nothing in the file is executed. Raises MpikvError without an optimizer,
        StatesFileError or OSError, on every worker; nothing is changed then.

        >>> store = kv.create('local')
        >>> store.init('w', np.zeros(2))
        >>> store.set_optimizer('adam')
        >>> store.save_optimizer_states('states')
        >>> store.load_optimizer_states('states')
        """
        self._check_open("load_optimizer_states")
        load_file(self.session, self.strategy, checks.path("fname", fname))

    # --- barrier and end

    def barrier(self) -> None:
        """Wait until all workers have called it. Collective, blocks.

        In an asynchronous store, everything that any worker pushed before has then been applied.

        >>> kv.create('local').barrier()
        """
        self._check_open("barrier")
        self.session.barrier()

    _barrier = barrier

    def close(self) -> None:
        """End the store, and wait until all workers do the same. Collective, blocks. A second call does nothing.

        Raises PeerError when workers of a synchronous store have pushed a key unequally often, ConfigError when a push
        was refused, and the error of a push or an `_async` call that nobody waited for; but none that a call has raised
        before. Does nothing in a process that was forked from the worker.

        >>> store = kv.create('local')
        >>> store.close()
        """
        session = self.session
        if session.closed or (self._pid and self._pid != os.getpid()):
            return
        for wait in session.before_close:
            wait()
        session.closed = session.given.closing = True
        for prepared in self._prepared.values():
            prepared.clear()
        try:
            self.strategy.close()
        except BaseException as error:
            session.abandon()
            earlier = next(self._not_given(), None)
            if isinstance(error, StallError) and earlier is not None:
                raise earlier from error  # it may well be why the others did not come
            if not session.given.has(error):
                raise
        finally:
            for call in session.after_close:
                call()
            for calls in (session.before_close, session.after_close):
                calls.clear()  # which refer to this store
        for earlier in self._not_given():
            raise earlier

    def _not_given(self) -> Iterator[BaseException]:
        """Errors of calls made before `close`, of which no caller knows."""
        yield from self.session.not_given()
        for request in self._outstanding:
            yield from not_given(request, self.session.given)

    def __enter__(self) -> KVStore:
        self._check_open("with")
        return self

    def __exit__(
        self, kind: builtins.type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        """Close the store, but leave it open when an exception passes.

        The other workers may never come to close theirs then. The exception then ends the job, or, if somebody catches
        it, the interpreter's exit closes the store.
        """
        if kind is None:
            self.close()
        return False
