"""What files and other processes say, changed at some place: it is taken, or refused by an error that can be printed.

Only MpikvError and ValueError come out (`mpikv trace` and `mpikv top` print), of bounded length, and nothing that a
terminal would act upon; what was there before stays as it was.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from grids import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from mpikv import LocalUpdates, MpikvError, Parameter, Trainer, kv, optimizers
from mpikv.__main__ import main
from mpikv.commands import top
from mpikv.commands.launch import hosts
from mpikv.config import KNOWN, Config
from mpikv.data import RecordFile
from mpikv.data.image_records import decode_image
from mpikv.data.recordio import encoded, read_index
from mpikv.observe import endpoint
from mpikv.optimizers import archive, states_file
from mpikv.placement import links
from mpikv.trainer import checkpoint

MOST_CHARS = 6000  # of an error, with the names of files
TEXTS = ("", "x" * 100_000, "\x1b[2J\n\r\0", "\u202e\ud800", "worker", "clock", "push", "float32", "w")
NUMBERS = (0, -1, 1, 7, 99, 2**31, 2**63 - 1, 2**63, 10**400, 10**4000, 0.5, 1e308, float("nan"), float("inf"))
plain = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS))
junk = st.one_of(plain, st.lists(plain, max_size=6), st.dictionaries(st.sampled_from(TEXTS), plain, max_size=3))
junk = st.one_of(junk, st.lists(junk, max_size=4), st.integers(1, 70).map(lambda n: [10**18] * n))
RAW = ("", "[" * 100_000, '{"a":' * 100_000, "[]", "5", "null", '"x"', "\ud800", '{"a": 1', "\0" * 100)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with something else at some places, or with something left out or twice."""
    document = {"": copy.deepcopy(document)}
    for _ in range(draw(st.integers(1, 3))):
        inner, place = document, ""
        while isinstance(inner[place], (dict, list)) and inner[place] and draw(st.integers(0, 5)):
            inner = inner[place]
            places = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            place = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["other", "other", "out", "twice"]))
        if what == "other" or not place:
            inner[place] = draw(junk)
        elif what == "out":
            inner.pop(place)
        elif isinstance(inner, list):
            inner.append(copy.deepcopy(inner[place]))
    return document[""]


def texts(document: Any) -> st.SearchStrategy[str]:
    """JSON, or what is none."""
    return st.one_of(changed(document).map(json.dumps), st.sampled_from(RAW))


def fuzz(n: int) -> Callable[[Any], Any]:
    return settings(max_examples=examples(n), suppress_health_check=[HealthCheck.too_slow], deadline=None)


def is_printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and len(max(text.split("\n"), key=len)) < MOST_CHARS


@contextlib.contextmanager
def refused_in_words() -> Iterator[list[str]]:
    """A block that ends well, or by an error that one can print, whose text is in the list then."""
    failed: list[str] = []
    with contextlib.suppress(MpikvError, ValueError):
        try:
            yield failed
        except (MpikvError, ValueError) as error:
            failed.append(str(error))
            raise
    assert all(is_printable(text) and "\n" not in text for text in failed), failed[0][:MOST_CHARS]


LINKS = {"bytes_per_s": 1e9, "latency_s": 5e-5, "hosts": {"a": 1e9, "b": 5e8}}


@fuzz(60)
@given(texts(LINKS))
def test_rates_of_links(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, refused_in_words():
        file = Path(folder) / "links"
        file.write_text(text, errors="surrogatepass")
        assert is_printable(str(links.given(str(file))))


ROWS = [{"rank": 0, "host": "h", "pid": 12, "seen_s": 0.0, "doing": "in barrier", "alive": True}]
OFFER = {"kind": "store", "store": "a", "type": "dist_sync", "worker": 0, "workers": 2, "servers": 1, "host": "h"}
OFFERS = [{**OFFER, "doing": "in barrier", "asks": True, "rows": ROWS}, {"kind": "create", "doing": "in MPI_Init"}]
SERVER = {"kind": "server", "store": "a", "doing": "server 0 of 1", "workers": 2, "servers": 1}
TOLD = {"pid": 12, "host": "h", "program": "train.py", "offers": [*OFFERS, SERVER, OFFERS[0]]}


@fuzz(200)
@given(texts(TOLD), texts(TOLD))
def test_what_processes_of_other_users_tell(one: str, other: str) -> None:
    documents = {}
    for pid, text in enumerate((one, other)):
        try:
            documents[pid] = endpoint.document_of(text.encode(errors="surrogatepass"))
        except (ValueError, TypeError, KeyError, RecursionError):
            documents[pid] = None
    rows = {offer["store"]: offer["rows"] for offer in top.offers(documents[0], "store") if offer["rows"]}
    for text in (top.shown(documents, rows), top.shown(documents, {}), top.listed(documents, 0)):
        assert all(line.isprintable() for line in text.split("\n"))
        text.encode()


HEADER = {"format": 1, "role": "worker", "number": 0, "workers": 2, "host": "h", "machine": "a", "pid": 1, "store": "s"}
KINDS = {"push": "w", "exchange": "w", "call": "push", "meet": "w", "clock": ["worker", 0, 5], "serve": ["w", 0]}
KINDS |= dict.fromkeys(("add", "encode", "allgather", "wait", "GPU"), "w")
EVENTS = [(kind, i % 4, i % 4 + 6, of, 1, 8) for i, (kind, of) in enumerate(KINDS.items())]
RECORDS = {"thread": "MainThread", "records": EVENTS, "lost": 0}


def timeline(role: str, number: int) -> list[Any]:
    return [{**HEADER, "role": role, "number": number, "type": "dist_sync", "date_s": 1.0, "begun_ns": 0}, RECORDS]


@fuzz(80)
@given(
    st.tuples(*(changed(timeline(*who)) for who in (("worker", 0), ("worker", 1), ("server", 0)))), st.sampled_from(RAW)
)
def test_timelines(timelines: Any, raw: str) -> None:
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        for i, lines in enumerate(timelines):
            text = "\n".join(map(json.dumps, lines if isinstance(lines, list) else [lines]))
            (Path(folder) / f"{i}.jsonl").write_text(f"{text}\n{raw}", errors="surrogatepass")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            drawn = main(["trace", folder, "-o", f"{folder}/out.json"])
            assert drawn == main(["trace", "report", folder])
        if drawn == 0:
            json.loads((Path(folder) / "out.json").read_text())
    assert is_printable(printed.getvalue())
    printed.getvalue().encode()


def archive_of(kind: str, content: Any) -> bytes:
    """An archive with any content."""
    return archive.to_bytes(kind, content if isinstance(content, dict) else {"records": content})


MOMENTUM = {"t": 3, "momentum": np.ones(6, np.float32)}
RECORD = {"key": "w", "shape": [2, 3], "dtype": "float32", "state": MOMENTUM}
CODEC = {**RECORD, "begin": 2, "end": 4, "worker": 0, "state": {"residual": np.ones(2, np.float32)}}
CONFIGS = [["w", {"attributes": {"learning_rate": 0.5}}], ["b", {"attributes": {"momentum": 0.5}}]]
META = {"optimizers": [["w", "sgd"], ["b", "sgd"]], "configs": CONFIGS, "workers": 1, "cuts": [["w", 3]]}
STATES = {"meta": META, "records": [RECORD, CODEC]}


def test_what_is_changed_below_is_right() -> None:
    assert all(load_states(archive_of(states_file.KIND, STATES)))
    assert resume(archive_of(checkpoint.KIND, CHECKPOINT))


def load_states(content: bytes) -> list[bool]:
    """Load them into a store that works on whatever they are. Whether they were taken."""
    with tempfile.TemporaryDirectory() as folder, kv.create("local") as store:
        store.init("w", np.zeros((2, 3), np.float32))
        store.init("b", np.zeros(2, np.float32))
        store.set_optimizer(optimizers.SGD(momentum=0.9))
        (file := Path(folder) / "states").write_bytes(content)
        with refused_in_words() as failed:
            store.load_optimizer_states(file)
        if failed:
            assert store.session.optimizer_of(store.session.infos["w"]).learning_rate == 0.01
        store.pushpull("w", np.ones((2, 3), np.float32))
        return [not failed]


def with_meta(**meta: Any) -> dict[str, Any]:
    return {**STATES, "meta": {**META, **meta}}


@example({**STATES, "records": [RECORD, {**CODEC, "state": {"residual": 5}}]})
@example({**STATES, "records": [{**RECORD, "shape": [10**4000] * 1000}]})
@example(with_meta(configs=[CONFIGS[0], ["b", {"attributes": 5}]]))  # of a key without a state
@example(with_meta(configs=[["w", {}], CONFIGS[0]]))
@fuzz(150)
@given(changed(STATES))
def test_states(content: Any) -> None:
    load_states(archive_of(states_file.KIND, content))


WEIGHTS, KEPT = {"p": np.ones(2, np.float32)}, {"kept": np.zeros(3, np.uint8)}
NO_STATES = {"meta": {"optimizers": [["trainer0/p", "sgd"]], "configs": []}, "records": []}
CHECKPOINT = {**{"steps": 3, "examples": 8, "agreed": [1.0, 1], "weights": WEIGHTS, "workers": [KEPT]}, **NO_STATES}


def resume(content: bytes) -> bool:
    """Go on from it. Whether it was taken."""
    weight = Parameter(np.zeros(2, np.float32))
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "checkpoint").write_bytes(content)
        with refused_in_words() as failed:
            assert Trainer({"p": weight}, "sgd").resume(file) >= 0
    assert weight.data.tolist() == ([0, 0] if failed else [1, 1])
    return not failed


@fuzz(100)
@given(changed(CHECKPOINT))
def test_checkpoints(content: Any) -> None:
    resume(archive_of(checkpoint.KIND, content))


@fuzz(150)
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    """Changed, cut, or put twice, or with anything in the library's header."""
    loads = ((load_states, states_file.KIND, STATES), (resume, checkpoint.KIND, CHECKPOINT))
    load, kind, content = data.draw(st.sampled_from(loads))
    whole = bytearray(archive_of(kind, content))
    if data.draw(st.booleans()):
        end = 8 + int.from_bytes(whole[:8], "little")
        header = data.draw(texts(json.loads(whole[8:end]))).encode(errors="surrogatepass")
        whole = bytearray(len(header).to_bytes(8, "little") + header + whole[end:])
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    begin, end = sorted(data.draw(st.tuples(*[st.sampled_from([0, len(whole), len(whole) // 2])] * 2)))
    load(bytes(whole[begin:end]))


LOCAL = {"steps": [4, 1, -1, 2, 2], "model/p": [1.0, 1.0], "begun/p": [1.0, 1.0], "x": []}


@fuzz(100)
@given(changed(LOCAL))
def test_states_of_local_training(content: Any) -> None:
    """Also `part`, which says what is exchanged next: one that there is not would never be."""
    weight = Parameter(np.zeros(2))
    with kv.create("local") as store:
        state = LocalUpdates({"p": weight}, store, every=2, parts=1)._state
        state.unsent = [0, 0]
        arrays = {}
        for name, value in (content if isinstance(content, dict) else {}).items():
            with contextlib.suppress(ValueError, OverflowError, TypeError):
                arrays[name] = np.array(value)
        with refused_in_words() as failed:
            state.load_state_dict(arrays)
        assert failed == [] or weight.data.tolist() == [0, 0]
        assert 0 <= state.part < 2
        assert state.pending in (None, 0, 1)


def image() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (3, 2)).save(out, "png")
    return out.getvalue()


def settings_of(path: str) -> None:
    """Each setting with the text of the file."""
    text = Path(path).read_bytes().decode(errors="surrogateescape").replace("\0", "")
    for name in KNOWN:
        with refused_in_words():
            Config.from_environ({name: text})


READERS: dict[str, tuple[Callable[[str], object], bytes]] = {
    "host file": (hosts.read, b"h1 slots=2\nh2:3 user=a # b\n"),
    "PE_HOSTFILE": (lambda path: hosts.allocated({"PE_HOSTFILE": path}), b"h1 2 q@h1 <NULL>\nh2 3 q@h2 <NULL>\n"),
    "records": (lambda path: [*RecordFile(path, index=None)], encoded(b"one") + encoded(b"two")),
    "index": (lambda path: read_index(path, 100), b"0\t0\n1\t16\n"),
    "image": (lambda path: decode_image(Path(path).read_bytes()), image()),
    "settings": (settings_of, b"10gbit,50us"),
}
BYTES = (
    b"\x1b[2J",
    b"\n",
    b"\xff\xfe",
    b"9" * 5000,
    b"x" * 20_000,
    b"\t",
    b"slots=",
    b":",
    b"0",
    b"-1",
    b"\0" * 9,
    b",",
)


@fuzz(300)
@given(st.data())
def test_files_of_other_bytes(data: st.DataObject) -> None:
    read, content = READERS[data.draw(st.sampled_from(sorted(READERS)))]
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        end = min(len(content), begin + data.draw(st.integers(0, 4)))
        content = content[:begin] + data.draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=4))) + content[end:]
    with tempfile.TemporaryDirectory() as folder, refused_in_words():
        (file := Path(folder) / "file").write_bytes(content)
        read(str(file))
